"""No future token changes an earlier logit: by perturbation and by Jacobian, at every length, in each kernel."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.config_strategies import build_randomized_model, compute_logits, configs, random_tokens

from cutaway import config as c

LONGEST = 70
MODELS = {
    "rope": {"attention": {"heads": 4, "kv_heads": 2}},
    "window": {"attention": {"heads": 2, "window": 9}},
    "alibi": {"attention": {"heads": 2, "position": {"kind": "alibi"}}},
    "relative bias": {"attention": {"heads": 2, "position": {"kind": "relative-bias"}}},
}


def model_of(name: str, kernel: str) -> torch.nn.Module:
    config = c.config(
        {"form": "decoder", "vocab_size": 17, "d_model": 16, "decoder": {"layers": 2, "block": MODELS[name]}}
    )
    return build_randomized_model(config, torch.float64).use_kernel(kernel)


def mask_of(side: str | None, batch: int, length: int) -> torch.Tensor | None:
    if side is None:
        return None
    order = torch.arange(length).expand(batch, length)
    return order >= length // 4 if side == "left" else order < length - length // 4


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("kernel", ["explicit", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_by_perturbation(name: str, kernel: str, side: str | None) -> None:
    """Row p of the batch has token p changed: logits before p stay, bit for bit; the one at p moves."""
    model = model_of(name, kernel)
    for length in range(1, LONGEST + 1):
        tokens = random_tokens(model.config, 1, length, length)
        changed = tokens.repeat(length, 1)
        changed.diagonal().add_(1).remainder_(17)
        mask = mask_of(side, length, length)
        one = None if mask is None else mask[:1]
        before = model(tokens, one)
        after = model(changed, mask)
        moved = (after - before).abs().amax(-1)  # (changed token, position)
        assert moved.tril(-1).max() <= 1e-12, f"length {length}"
        real = torch.ones(length, dtype=torch.bool) if mask is None else mask[0]
        assert (moved.diagonal()[real] > 1e-9).all(), f"length {length}"


@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("kernel", ["explicit", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_by_jacobian(name: str, kernel: str, side: str | None) -> None:
    """∂ logits at position t / ∂ embedding at position s is zero for s > t."""
    model = model_of(name, kernel)
    embed = model.decoder.embed
    for length in range(1, LONGEST + 1, 1):
        tokens = random_tokens(model.config, 1, length, length)
        mask = mask_of(side, 1, length)
        seen: list[torch.Tensor] = []
        hook = embed.register_forward_hook(lambda m, i, o, seen=seen: seen.append(o.requires_grad_()) or o)
        out = model(tokens, mask)
        hook.remove()
        probe = torch.randn(out.shape[-1], dtype=out.dtype)
        rows = (out[0] @ probe).unbind()
        for t in {0, length // 3, length // 2, length - 1}:
            (grad,) = torch.autograd.grad(rows[t], seen[0], retain_graph=True)
            assert grad[0, t + 1 :].abs().sum() == 0, f"length {length}, position {t}"
            if mask is None or mask[0, t]:
                assert grad[0, t].abs().sum() > 0


@given(config=configs(("decoder", "encoder-decoder")), seed=st.integers(0, 999), place=st.integers(0, 11))
@torch.no_grad()
def test_in_any_configuration(config: c.Config, seed: int, place: int) -> None:
    model = build_randomized_model(config, torch.float64, seed)
    tokens = random_tokens(config, 2, 12, seed)
    changed = tokens.clone()
    changed[:, place] = (changed[:, place] + 1) % config.vocab_size
    difference = (compute_logits(model, config, tokens) - compute_logits(model, config, changed)).abs()
    assert difference[:, :place].sum() <= 1e-12


@pytest.mark.parametrize("kernel", ["explicit", "sdpa"])
@torch.no_grad()
def test_padding_leaks_nothing(kernel: str) -> None:
    """Whatever stands where the mask is False changes no logit of a real token."""
    for name in ("tiny-gpt", "tiny-llama", "tiny-bert", "tiny-t5"):
        config = c.config(name)
        model = build_randomized_model(config, torch.float64).use_kernel(kernel if name != "tiny-t5" else "explicit")
        mask = torch.ones(2, 10, dtype=torch.bool)
        mask[0, :3] = mask[1, 7:] = False
        tokens = random_tokens(config, 2, 10, 0)
        other = torch.where(mask, tokens, (tokens + 1) % config.vocab_size)
        if config.form == "encoder-decoder":
            before, after = (model(t, t, mask, mask) for t in (tokens, other))
        else:
            run = model if model.head is not None else model.encode
            before, after = (run(t, mask) for t in (tokens, other))
        assert torch.equal(before[mask], after[mask])


@torch.no_grad()
def test_documents_whose_number_comes_again_do_not_meet() -> None:
    model = build_randomized_model(c.config("tiny-llama"), torch.float64)
    tokens = random_tokens(model.config, 1, 9, 0)
    documents = torch.tensor([[1, 1, 1, 2, 2, 2, 1, 1, 1]])
    packed = model(tokens, document_ids=documents)
    for part in (slice(0, 3), slice(3, 6), slice(6, 9)):
        assert (packed[:, part] - model(tokens[:, part])).abs().max() <= 1e-10
