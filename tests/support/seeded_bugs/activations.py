"""Seeded bugs in activations: uniform attention, overflow, residual growth, dead heads and neurons."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from support.seeded_bugs.reference_gpt import Block, ReferenceGPT
from support.seeded_bugs.registry import seeded_bug
from torch import Tensor
from torch.nn import functional as F


@seeded_bug("attention-entropy")
def zero_keys() -> ReferenceGPT:
    model = ReferenceGPT()
    torch.nn.init.zeros_(model.blocks[1].attention.k.weight)
    return model


@seeded_bug("attention-entropy", also_caught_by=("attention-scale",))
def zero_scale() -> ReferenceGPT:
    model = ReferenceGPT()
    model.blocks[0].attention.scale = lambda: 0.0
    return model


@seeded_bug("attention-logits", also_caught_by=("attention-entropy", "update-ratio"))
def large_queries() -> ReferenceGPT:
    model = ReferenceGPT()
    model.blocks[0].attention.q.weight.data.mul_(1000.0)
    return model


def scale_ffn_hidden(factor: float) -> ReferenceGPT:
    """Large activations only between the two matrices of an FFN."""
    model = ReferenceGPT()
    model.blocks[0].up.weight.data.mul_(factor)
    model.blocks[0].down.weight.data.div_(factor)
    return model.half()


@seeded_bug("fp16-overflow", also_caught_by=("low-precision", "update-ratio"))
def fp16_overflow() -> ReferenceGPT:
    return scale_ffn_hidden(3e4)


@seeded_bug("fp16-overflow", also_caught_by=("update-ratio",))
def near_fp16_max() -> ReferenceGPT:
    return scale_ffn_hidden(8e3)


@seeded_bug("residual-growth")
def exploding_branch() -> ReferenceGPT:
    model = ReferenceGPT()
    original = model.blocks[0].down.forward
    model.blocks[0].down.forward = lambda x: original(x) * 1e4  # type: ignore[method-assign]
    return model


@seeded_bug("dead-heads")
def head_unused_by_output_projection() -> ReferenceGPT:
    model = ReferenceGPT()
    model.blocks[1].attention.o.weight.data[:, 8:16] = 0.0
    return model


@seeded_bug("dead-heads")
def zero_values() -> ReferenceGPT:
    model = ReferenceGPT()
    model.blocks[0].attention.v.weight.data[:8] = 0.0
    return model


@seeded_bug("dead-neurons")
def large_negative_biases() -> ReferenceGPT:
    model = ReferenceGPT()
    model.blocks[0].up.bias.data[:64] = -100.0
    return model


@seeded_bug("dead-neurons")
def negated_pre_activation() -> ReferenceGPT:
    model = ReferenceGPT()
    up = model.blocks[1].up
    up.forward = lambda x: -F.linear(x, up.weight, up.bias).abs() - 40.0  # type: ignore[method-assign]
    return model


@seeded_bug("dead-neurons")
def pruned_columns() -> ReferenceGPT:
    model = ReferenceGPT()
    model.blocks[1].down.weight.data[:, ::4] = 0.0
    return model


class NoAttentionResidual(Block):
    """The attention output replaces the residual stream instead of being added to it."""

    def forward(self, x: Tensor, positions: Tensor, documents: Tensor | None, cache: Any) -> tuple[Tensor, Any]:
        x, cache = self.attention(self.norm1(x), positions, documents, cache)
        return x + self.down(F.gelu(self.up(self.norm2(x)))), cache


class NoFFNResidual(Block):
    def forward(self, x: Tensor, positions: Tensor, documents: Tensor | None, cache: Any) -> tuple[Tensor, Any]:
        out, cache = self.attention(self.norm1(x), positions, documents, cache)
        return self.down(F.gelu(self.up(self.norm2(x + out)))), cache


class NoNorm(Block):
    """The input of the FFN is not normalized, so that its output grows with the residual stream."""

    def forward(self, x: Tensor, positions: Tensor, documents: Tensor | None, cache: Any) -> tuple[Tensor, Any]:
        out, cache = self.attention(self.norm1(x), positions, documents, cache)
        x = x + out
        return x + self.down(F.gelu(self.up(x))), cache


def replace_blocks(block_class: type[Block], layers: Iterable[int] | None = None, num_layers: int = 4) -> ReferenceGPT:
    model = ReferenceGPT(num_layers=num_layers)
    for layer in range(num_layers) if layers is None else layers:
        model.blocks[layer].__class__ = block_class
    return model


@seeded_bug("residual-connection")
def no_residual_around_attention() -> ReferenceGPT:
    return replace_blocks(NoAttentionResidual)


@seeded_bug("residual-connection")
def no_residual_around_ffn() -> ReferenceGPT:
    return replace_blocks(NoFFNResidual)


@seeded_bug("residual-connection")
def no_residual_in_one_block() -> ReferenceGPT:
    return replace_blocks(NoAttentionResidual, [2])


@seeded_bug("residual-growth")
def ffn_without_norm() -> ReferenceGPT:
    """The residual stream doubles in each of 12 blocks."""
    model = replace_blocks(NoNorm, num_layers=12)
    for block in model.blocks:
        block.norm2 = torch.nn.Identity()
        block.up.weight.data.mul_(2.0)
    return model


def run_without_pytorch(tokens: Tensor, pattern_scale: float = 1.0) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Logits, hidden states and attention patterns of a small model in NumPy, as of a JAX model."""
    rng = np.random.default_rng(0)
    embedding, query, key = rng.normal(size=(50, 16)), rng.normal(size=(4, 16, 4)), rng.normal(size=(4, 16, 4))
    x = embedding[tokens.numpy()]
    scores = np.einsum("btd,hde,bsf,hfe->bhts", x, query, x, key) * pattern_scale / 8
    scores = np.where(np.tri(x.shape[1], dtype=bool), scores, -np.inf)
    pattern = np.exp(scores - scores.max(-1, keepdims=True))
    pattern /= pattern.sum(-1, keepdims=True)
    hidden = [x, x + np.einsum("bhts,bsd->btd", pattern, x)]
    hidden.append(hidden[1] + np.tanh(hidden[1]))
    logits, *others = (torch.from_numpy(y.astype("float32")) for y in (hidden[-1] @ embedding.T, pattern, *hidden))
    return logits, others[1:], others[:1]


def build_without_pytorch(**overrides: Any) -> tuple[Any, dict[str, Any]]:
    """The model of `run_without_pytorch` as functions for `ct.check`."""
    functions = {
        "hidden_states": lambda tokens: run_without_pytorch(tokens)[1],
        "attentions": lambda tokens: run_without_pytorch(tokens)[2],
        "has_positions": False,
    }
    return lambda tokens: run_without_pytorch(tokens)[0], functions | overrides


@seeded_bug("attention-entropy")
def uniform_patterns_of_a_function() -> tuple[Any, dict[str, Any]]:
    return build_without_pytorch(attentions=lambda tokens: run_without_pytorch(tokens, pattern_scale=0.0)[2])


@seeded_bug("residual-growth")
def exploding_hidden_states_of_a_function() -> tuple[Any, dict[str, Any]]:
    def hidden_states(tokens: Tensor) -> list[Tensor]:
        first, *others = run_without_pytorch(tokens)[1]
        return [first, *(x * 1e4 for x in others)]

    return build_without_pytorch(hidden_states=hidden_states)


@seeded_bug("dead-heads")
def zero_pattern_of_a_function() -> tuple[Any, dict[str, Any]]:
    def attentions(tokens: Tensor) -> list[Tensor]:
        return [x * torch.tensor([1.0, 0.0, 1.0, 1.0])[:, None, None] for x in run_without_pytorch(tokens)[2]]

    return build_without_pytorch(attentions=attentions)
