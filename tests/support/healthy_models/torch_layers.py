"""Models of PyTorch's own layers: nn.TransformerEncoder, nn.TransformerDecoder and nn.MultiheadAttention."""

import math
from typing import Any

import torch
from support.healthy_models.registry import D_MODEL, HEADS, MAX_LEN, VOCAB_SIZE, healthy_model
from torch import Tensor, nn


class SinusoidalPositions(nn.Module):
    """Sinusoidal position encoding of "Attention Is All You Need", as a buffer."""

    def __init__(self, d_model: int, max_len: int) -> None:
        super().__init__()
        position = torch.arange(max_len)[:, None]
        frequency = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10_000.0) / d_model))
        table = torch.zeros(max_len, d_model)
        table[:, 0::2], table[:, 1::2] = torch.sin(position * frequency), torch.cos(position * frequency)
        self.register_buffer("table", table)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[: x.shape[1]]  # type: ignore[index]


class TorchEncoderLM(nn.Module):
    """nn.TransformerEncoder with a causal mask and sinusoidal positions, as in the PyTorch tutorial."""

    def __init__(self, *, norm_first: bool) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCAB_SIZE, D_MODEL), SinusoidalPositions(D_MODEL, MAX_LEN)
        layer = nn.TransformerEncoderLayer(
            D_MODEL, HEADS, 4 * D_MODEL, dropout=0.1, batch_first=True, norm_first=norm_first
        )
        norm = nn.LayerNorm(D_MODEL) if norm_first else None
        self.encoder = nn.TransformerEncoder(layer, 2, norm, enable_nested_tensor=False)
        self.head = nn.Linear(D_MODEL, VOCAB_SIZE)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.positions(self.embed(tokens) * math.sqrt(D_MODEL))
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.encoder(x, mask=mask, is_causal=True))  # type: ignore[no-any-return]


@healthy_model()
def torch_encoder_post_norm() -> Any:
    return TorchEncoderLM(norm_first=False)


@healthy_model()
def torch_encoder_pre_norm() -> Any:
    return TorchEncoderLM(norm_first=True)


class MultiheadAttentionLM(nn.Module):
    """Blocks of nn.MultiheadAttention with learned positions; sequence-first if not `batch_first`."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.embed, self.position = nn.Embedding(VOCAB_SIZE, D_MODEL), nn.Embedding(MAX_LEN, D_MODEL)
        self.norms = nn.ModuleList(nn.LayerNorm(D_MODEL) for _ in range(2))
        self.layers = nn.ModuleList(
            nn.MultiheadAttention(D_MODEL, HEADS, dropout=0.1, batch_first=batch_first) for _ in range(2)
        )
        self.head = nn.Linear(D_MODEL, VOCAB_SIZE)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.embed(tokens) + self.position(torch.arange(length))
        x = x if self.batch_first else x.transpose(0, 1)
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        for norm, attention in zip(self.norms, self.layers, strict=True):
            y = norm(x)
            x = x + attention(y, y, y, attn_mask=mask, need_weights=not self.batch_first)[0]
        return self.head(x if self.batch_first else x.transpose(0, 1))  # type: ignore[no-any-return]


@healthy_model()
def multihead_attention_batch_first() -> Any:
    return MultiheadAttentionLM(batch_first=True)


@healthy_model()
def multihead_attention_sequence_first() -> Any:
    return MultiheadAttentionLM(batch_first=False)


@healthy_model()
def encoder_decoder_function() -> Any:
    """A function of the target tokens: nn.Transformer with a fixed source sequence."""
    embed, position = nn.Embedding(VOCAB_SIZE, D_MODEL), nn.Embedding(MAX_LEN, D_MODEL)
    model = nn.Transformer(D_MODEL, HEADS, 2, 2, 4 * D_MODEL, batch_first=True).eval()
    head, source = nn.Linear(D_MODEL, VOCAB_SIZE), torch.randn(1, 7, D_MODEL)

    def decode(tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        target = embed(tokens) + position(torch.arange(length))
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        return head(model(source.expand(len(tokens), -1, -1), target, tgt_mask=mask))  # type: ignore[no-any-return]

    return decode
