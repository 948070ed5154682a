"""Vectors for texts: the mean of a text's last hidden states, or what the checkpoint's own files say, of length one."""

import base64
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cutaway.errors import ConfigError
from cutaway.families.safetensors_reader import read_json_file
from cutaway.model import Transformer

MAX_BATCH_TOKENS = 4096
"""Tokens that are read at once, padding included."""
POOLING_MODES = {
    "pooling_mode_cls_token": "first",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
}


def read_pooling_mode(directory: Path) -> str | None:
    """How the makers of a sentence encoder pool its vectors, where a file beside the weights says so."""
    beside = directory / "1_Pooling" / "config.json"
    if not beside.is_file():
        return None
    told = read_json_file(beside, ConfigError)
    return next((way for key, way in POOLING_MODES.items() if told.get(key) is True), None)


def compute_embeddings(
    model: Transformer, token_ids: Sequence[Sequence[int]], pooling: str | None, should_continue: Callable[[], bool]
) -> list[list[float]]:
    """A vector for each text. Texts of like length are read together; `should_continue` is asked before each batch."""
    order = sorted(range(len(token_ids)), key=lambda place: len(token_ids[place]))
    found: dict[int, list[float]] = {}
    while order and should_continue():
        width = len(token_ids[order[0]])
        batch: list[int] = []
        while order and len(token_ids[order[0]]) * (len(batch) + 1) <= max(MAX_BATCH_TOKENS, width):
            width = len(token_ids[order[0]])
            batch.append(order.pop(0))
        tokens = torch.tensor([[*token_ids[place], *[0] * (width - len(token_ids[place]))] for place in batch])
        mask = torch.tensor([[i < len(token_ids[place]) for i in range(width)] for place in batch])
        with torch.no_grad():
            vectors = pool_hidden_states(model, tokens.to(model.device), mask.to(model.device), pooling).float().cpu()
        found |= dict(zip(batch, torch.nn.functional.normalize(vectors, dim=-1).tolist(), strict=True))
    return [found[place] for place in range(len(token_ids))] if len(found) == len(token_ids) else []


def pool_hidden_states(model: Any, tokens: Tensor, mask: Tensor, pooling: str | None) -> Tensor:
    """(B, d): an encoder's vectors, or the stream that a decoder's head would read, over real tokens only."""
    x = (model.encode if "encoder" in model.stacks else model.hidden_states)(tokens, mask).float()
    if pooling == "first":
        return x[:, 0]
    if pooling == "max":
        return x.masked_fill(~mask[..., None], -torch.inf).amax(1)
    return (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def encode_float32_base64(vector: list[float]) -> str:
    """As 32-bit numbers in base64, least byte first."""
    import numpy as np

    return base64.b64encode(np.asarray(vector, dtype="<f4").tobytes()).decode("ascii")
