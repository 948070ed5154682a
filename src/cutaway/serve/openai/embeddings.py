"""Vectors for texts: the mean of a text's last hidden states, or what the checkpoint's own files say, of length one."""

import base64
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cutaway.errors import ConfigError
from cutaway.families.store import read_json
from cutaway.model import Transformer

TOGETHER = 4096
"""Tokens that are read at once, padding included."""
WAYS = {"pooling_mode_cls_token": "first", "pooling_mode_max_tokens": "max", "pooling_mode_mean_tokens": "mean"}


def own_pooling(directory: Path) -> str | None:
    """How the makers of a sentence encoder pool its vectors, where a file beside the weights says so."""
    beside = directory / "1_Pooling" / "config.json"
    if not beside.is_file():
        return None
    told = read_json(beside, ConfigError)
    return next((way for key, way in WAYS.items() if told.get(key) is True), None)


def embed(
    model: Transformer, rows: Sequence[Sequence[int]], way: str | None, go_on: Callable[[], bool]
) -> list[list[float]]:
    """A vector for each text. Texts of like length are read together; `go_on` is asked before each batch."""
    order = sorted(range(len(rows)), key=lambda place: len(rows[place]))
    found: dict[int, list[float]] = {}
    while order and go_on():
        width = len(rows[order[0]])
        batch: list[int] = []
        while order and len(rows[order[0]]) * (len(batch) + 1) <= max(TOGETHER, width):
            width = len(rows[order[0]])
            batch.append(order.pop(0))
        tokens = torch.tensor([[*rows[place], *[0] * (width - len(rows[place]))] for place in batch])
        mask = torch.tensor([[i < len(rows[place]) for i in range(width)] for place in batch])
        with torch.no_grad():
            vectors = pooled(model, tokens.to(model.device), mask.to(model.device), way).float().cpu()
        found |= dict(zip(batch, torch.nn.functional.normalize(vectors, dim=-1).tolist(), strict=True))
    return [found[place] for place in range(len(rows))] if len(found) == len(rows) else []


def pooled(model: Any, tokens: Tensor, mask: Tensor, way: str | None) -> Tensor:
    """(B, d): an encoder's vectors, or the stream that a decoder's head would read, over real tokens only."""
    x = (model.encode if "encoder" in model.stacks else model.hidden)(tokens, mask).float()
    if way == "first":
        return x[:, 0]
    if way == "max":
        return x.masked_fill(~mask[..., None], -torch.inf).amax(1)
    return (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def packed(vector: list[float]) -> str:
    """As 32-bit numbers in base64, least byte first."""
    import numpy as np

    return base64.b64encode(np.asarray(vector, dtype="<f4").tobytes()).decode("ascii")
