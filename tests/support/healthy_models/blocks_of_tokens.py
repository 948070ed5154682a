"""Models whose sequence lengths must be a multiple of the block size of their attention."""

from typing import Any

import torch
from support.healthy_models.registry import D_MODEL, HEADS, MAX_LEN, VOCAB_SIZE, initialize
from torch import Tensor, nn
from torch.nn import functional as F

BLOCK_SIZE = 8


class BlockAttention(nn.Module):
    """Each query attends to its own block and to the previous one, as in block-sparse attention.

    If not `causal`, it also attends to the later tokens of its own block.
    """

    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.qkv, self.out = nn.Linear(D_MODEL, 3 * D_MODEL), nn.Linear(D_MODEL, D_MODEL)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        batch, length, _ = x.shape
        if length % BLOCK_SIZE:
            raise ValueError(f"the length {length} is not a multiple of the block size {BLOCK_SIZE}")
        q, k, v = (y.view(batch, -1, BLOCK_SIZE, HEADS, D_MODEL // HEADS) for y in self.qkv(x).chunk(3, -1))
        q, k, v = (y.transpose(2, 3) for y in (q, k, v))  # (B, blocks, H, 8, D)
        k, v = (torch.cat((F.pad(y, (0, 0) * 3 + (1, -1) + (0, 0))[:, : y.shape[1]], y), 3) for y in (k, v))
        index = torch.arange(BLOCK_SIZE)
        distance = index[:, None] + BLOCK_SIZE - torch.arange(2 * BLOCK_SIZE)[None]
        visible = (distance >= 0) if self.causal else torch.ones_like(distance).bool()
        is_real = torch.ones(batch, length).bool() if mask is None else mask.bool()
        blocks = is_real.view(batch, -1, BLOCK_SIZE)
        keys = torch.cat((F.pad(blocks, (0, 0, 1, -1)), blocks), -1)  # (B, blocks, 16)
        allowed = visible & keys[:, :, None, None]
        pattern = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~allowed, -1e9).softmax(-1)
        return self.out((pattern @ v).transpose(2, 3).reshape(batch, length, D_MODEL))  # type: ignore[no-any-return]


class _BlockTransformer(nn.Module):
    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.position = nn.Embedding(VOCAB_SIZE, D_MODEL), nn.Embedding(MAX_LEN, D_MODEL)
        self.norms = nn.ModuleList(nn.LayerNorm(D_MODEL) for _ in range(2))
        self.layers = nn.ModuleList(BlockAttention(causal=causal) for _ in range(2))
        self.head = nn.Linear(D_MODEL, VOCAB_SIZE)
        initialize(self)

    def run(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x), mask)
        return self.head(x)  # type: ignore[no-any-return]


class BlockDecoder(_BlockTransformer):
    def forward(self, tokens: Tensor) -> Tensor:
        return self.run(tokens)


class BlockEncoder(_BlockTransformer):
    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.run(tokens, attention_mask)


class BlockLoss(_BlockTransformer):
    """Returns (logits, loss) for shifted targets, as in nanoGPT."""

    def __init__(self) -> None:
        super().__init__(causal=True)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Any:
        logits = self.run(tokens)
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build_block_model(*, causal: bool = True, masked: bool = False) -> nn.Module:
    """A decoder, or an encoder with the argument attention_mask."""
    return BlockEncoder(causal=causal) if masked else BlockDecoder(causal=causal)
