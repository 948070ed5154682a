"""Text embeddings: the output of the embedding head, or the last hidden states, pooled and L2-normalized.

For a model without embedding head, the checkpoint's sentence-transformers config sets the pooling mode. The default is
the mean over tokens.
"""

import base64
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from cutaway.bounded_files import read_json_object
from cutaway.config.head import EmbeddingHead
from cutaway.errors import ConfigError
from cutaway.model import DecoderOnly, EncoderDecoder, EncoderOnly, Transformer

MAX_BATCH_TOKENS = 4096
"""Maximum number of tokens per forward pass, padding included."""
POOLING_MODES = {
    "pooling_mode_cls_token": "first",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
}


def read_pooling_mode(directory: Path) -> str | None:
    """Read the pooling mode of a sentence-transformers checkpoint.

    Return None if `1_Pooling/config.json` does not exist or sets none of `POOLING_MODES`.
    """
    path = directory / "1_Pooling" / "config.json"
    if not path.is_file():
        return None
    data = read_json_object(path, ConfigError)
    return next((mode for key, mode in POOLING_MODES.items() if data.get(key) is True), None)


def compute_embeddings(
    model: Transformer, token_ids: Sequence[Sequence[int]], pooling: str | None, should_continue: Callable[[], bool]
) -> list[list[float]]:
    """Compute one embedding per row of `token_ids`, in batches of rows of similar length.

    `should_continue` is called before each batch. If it returns False, the result is an empty list.
    """
    order = sorted(range(len(token_ids)), key=lambda index: len(token_ids[index]))
    embeddings: dict[int, list[float]] = {}
    while order and should_continue():
        width = len(token_ids[order[0]])
        batch: list[int] = []
        while order and len(token_ids[order[0]]) * (len(batch) + 1) <= max(MAX_BATCH_TOKENS, width):
            width = len(token_ids[order[0]])
            batch.append(order.pop(0))
        # (B, T), right-padded with 0
        tokens = torch.tensor([[*token_ids[index], *[0] * (width - len(token_ids[index]))] for index in batch])
        mask = torch.tensor([[i < len(token_ids[index]) for i in range(width)] for index in batch])
        with torch.no_grad():
            vectors = _embed(model, tokens.to(model.device), mask.to(model.device), pooling).float().cpu()
        embeddings |= dict(zip(batch, vectors.tolist(), strict=True))
    return [embeddings[index] for index in range(len(token_ids))] if len(embeddings) == len(token_ids) else []


def _embed(model: Transformer, tokens: Tensor, mask: Tensor, pooling: str | None) -> Tensor:
    """Output of the embedding head: (B, d). Without such a head, the pooled hidden states, divided by their norm."""
    if isinstance(model.config.head, EmbeddingHead):
        return model(tokens, mask)
    return torch.nn.functional.normalize(_pool_hidden_states(model, tokens, mask, pooling), dim=-1)


def _pool_hidden_states(model: Transformer, tokens: Tensor, mask: Tensor, pooling: str | None) -> Tensor:
    """Pool the last hidden states of an encoder or decoder over the tokens that are not padding: (B, d)."""
    if isinstance(model, DecoderOnly):
        x = model.hidden_states(tokens, mask).float()  # (B, T, d)
    else:
        assert isinstance(model, EncoderOnly | EncoderDecoder)
        x = model.encode(tokens, mask).float()
    if pooling == "first":
        return x[:, 0]
    if pooling == "max":
        return x.masked_fill(~mask[..., None], -torch.inf).amax(1)
    return (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def encode_float32_base64(vector: list[float]) -> str:
    """Encode a vector in base64, as little-endian float32 bytes."""
    import numpy as np

    return base64.b64encode(np.asarray(vector, dtype="<f4").tobytes()).decode("ascii")
