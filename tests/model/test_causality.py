"""Causality by perturbation and by Jacobian, for each kernel; no leaks from padding and packed documents."""

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.config_strategies import build_randomized_model, compute_logits, configs, random_tokens

from cutaway import config as c

IS_NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
LENGTHS = range(1, 71) if IS_NIGHTLY else (1, 2, 3, 4, 7, 8, 9, 10, 11, 16, 17, 18, 33, 64, 70)
"""Sequence lengths; by default those around the window, its double and powers of two."""
MODELS = {
    "rope": {"attention": {"heads": 4, "kv_heads": 2}},
    "window": {"attention": {"heads": 2, "window": 9}},
    "alibi": {"attention": {"heads": 2, "position": {"kind": "alibi"}}},
    "relative bias": {"attention": {"heads": 2, "position": {"kind": "relative-bias"}}},
}


def build_model(name: str, kernel: str) -> torch.nn.Module:
    config = c.config(
        {"form": "decoder", "vocab_size": 17, "d_model": 16, "decoder": {"layers": 2, "block": MODELS[name]}}
    )
    return build_randomized_model(config, torch.float64).use_kernel(kernel)


def padding_mask(side: str | None, batch: int, length: int) -> torch.Tensor | None:
    if side is None:
        return None
    order = torch.arange(length).expand(batch, length)
    return order >= length // 4 if side == "left" else order < length - length // 4


@pytest.mark.sample(5)
@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("kernel", ["explicit", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_causality_by_perturbation(name: str, kernel: str, side: str | None) -> None:
    """Row p has token p changed: logits before p are equal, the logits at p change."""
    model = build_model(name, kernel)
    for length in LENGTHS:
        tokens = random_tokens(model.config, 1, length, length)
        changed = tokens.repeat(length, 1)
        changed.diagonal().add_(1).remainder_(17)
        mask = padding_mask(side, length, length)
        row_mask = None if mask is None else mask[:1]
        before = model(tokens, row_mask)
        after = model(changed, mask)
        change = (after - before).abs().amax(-1)  # (changed token, position)
        assert change.tril(-1).max() <= 1e-12, f"length {length}"
        is_real = torch.ones(length, dtype=torch.bool) if mask is None else mask[0]
        assert (change.diagonal()[is_real] > 1e-9).all(), f"length {length}"


@pytest.mark.sample(4)
@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("kernel", ["explicit", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_causality_by_jacobian(name: str, kernel: str, side: str | None) -> None:
    """∂ logits at position t / ∂ embedding at position s is zero for s > t."""
    model = build_model(name, kernel)
    embed = model.decoder.embed
    for length in LENGTHS:
        tokens = random_tokens(model.config, 1, length, length)
        mask = padding_mask(side, 1, length)
        embeddings: list[torch.Tensor] = []
        hook = embed.register_forward_hook(
            lambda m, i, o, embeddings=embeddings: embeddings.append(o.requires_grad_()) or o
        )
        out = model(tokens, mask)
        hook.remove()
        direction = torch.randn(out.shape[-1], dtype=out.dtype)
        projections = (out[0] @ direction).unbind()
        for t in {0, length // 3, length // 2, length - 1}:
            (grad,) = torch.autograd.grad(projections[t], embeddings[0], retain_graph=True)
            assert grad[0, t + 1 :].abs().sum() == 0, f"length {length}, position {t}"
            if mask is None or mask[0, t]:
                assert grad[0, t].abs().sum() > 0


@given(config=configs(("decoder", "encoder-decoder")), seed=st.integers(0, 999), position=st.integers(0, 11))
@torch.no_grad()
def test_causality_of_random_configs(config: c.Config, seed: int, position: int) -> None:
    model = build_randomized_model(config, torch.float64, seed)
    tokens = random_tokens(config, 2, 12, seed)
    changed = tokens.clone()
    changed[:, position] = (changed[:, position] + 1) % config.vocab_size
    difference = (compute_logits(model, config, tokens) - compute_logits(model, config, changed)).abs()
    assert difference[:, :position].sum() <= 1e-12


@pytest.mark.parametrize("kernel", ["explicit", "sdpa"])
@torch.no_grad()
def test_padding_does_not_leak(kernel: str) -> None:
    """Tokens where the mask is False change no logit of a real token."""
    for name in ("tiny-gpt", "tiny-llama", "tiny-bert", "tiny-t5"):
        config = c.config(name)
        model = build_randomized_model(config, torch.float64).use_kernel(kernel if name != "tiny-t5" else "explicit")
        mask = torch.ones(2, 10, dtype=torch.bool)
        mask[0, :3] = mask[1, 7:] = False
        tokens = random_tokens(config, 2, 10, 0)
        other_padding = torch.where(mask, tokens, (tokens + 1) % config.vocab_size)
        if config.form == "encoder-decoder":
            before, after = (model(t, t, mask, mask) for t in (tokens, other_padding))
        else:
            forward = model if model.head is not None else model.encode
            before, after = (forward(t, mask) for t in (tokens, other_padding))
        assert torch.equal(before[mask], after[mask])


@torch.no_grad()
def test_repeated_document_id_is_a_new_document() -> None:
    model = build_randomized_model(c.config("tiny-llama"), torch.float64)
    tokens = random_tokens(model.config, 1, 9, 0)
    documents = torch.tensor([[1, 1, 1, 2, 2, 2, 1, 1, 1]])
    packed = model(tokens, document_ids=documents)
    for part in (slice(0, 3), slice(3, 6), slice(6, 9)):
        assert (packed[:, part] - model(tokens[:, part])).abs().max() <= 1e-10
