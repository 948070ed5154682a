"""Compiled ≡ eager, in one graph without breaks; and flex attention, which is always traced by the compiler."""

import shutil

import pytest
import torch
from hypothesis import given, settings
from strategies import DTYPES, LENGTH, SEEDS, bound, configs, lively, logits, ragged, tokens_for

from cutaway import config as c
from cutaway.config import presets
from cutaway.errors import KernelError
from cutaway.model import build

pytestmark = [
    pytest.mark.unchecked,
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]
TINY = [name for name in presets() if name.startswith("tiny-")]


@given(config=configs(), dtype=DTYPES, seed=SEEDS)
@settings(max_examples=settings.default.max_examples // 3)
@torch.no_grad()
def test_flex_is_explicit(config: c.Config, dtype: torch.dtype, seed: int) -> None:
    torch._dynamo.reset()
    model = lively(config, dtype, seed)
    tokens = tokens_for(config, 3, LENGTH, seed)
    side = (None, "left", "right")[seed % 3]
    mask = None if side is None else ragged(3, LENGTH, side)
    real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
    reference = logits(model.use_kernel("explicit"), config, tokens, mask)
    flex = logits(model.use_kernel("flex"), config, tokens, mask)
    assert (flex - reference)[real].abs().max() <= bound(dtype, reference)


@pytest.mark.parametrize("kind", ["packed", "prefix"])
@torch.no_grad()
def test_flex_with_packed_texts_and_prefixes(kind: str) -> None:
    model = lively(c.config("tiny-llama"), torch.float64)
    tokens = tokens_for(model.config, 2, LENGTH, 0)
    documents = torch.tensor([[0] * 5 + [1] * 7, [3] * 9 + [1] * 3])
    how = {"documents": documents} if kind == "packed" else {"prefix": torch.tensor([0, 5])}
    reference = model.use_kernel("explicit")(tokens, **how)
    assert (model.use_kernel("flex")(tokens, **how) - reference).abs().max() <= bound(torch.float64, reference)


@pytest.mark.parametrize("by", ["perturbation", "jacobian"])
@torch.no_grad()
def test_no_future_in_flex(by: str) -> None:
    """At lengths up to 70, with and without padding: a change moves its own logits and later ones only.

    Flex attention has no backward pass on the CPU, so its Jacobian is taken by differences: a small step of one token's
    embedding instead of another token.
    """
    model = lively(c.config("tiny-llama")).use_kernel("flex")
    step = torch.randn(model.config.d_model) * 1e-2
    for length in (1, 2, 3, 7, 15, 16, 17, 31, 33, 63, 64, 65, 70):
        tokens = tokens_for(model.config, 1, length, length)
        for left in {0, length // 4}:
            mask = (torch.arange(length) >= left).unsqueeze(0)
            place = (left + length) // 2
            before = model(tokens, mask)
            if by == "perturbation":
                changed = tokens.clone()
                changed[:, place] = (changed[:, place] + 1) % model.config.vocab_size
                after = model(changed, mask)
            else:
                nudge = torch.zeros(1, length, model.config.d_model)
                nudge[:, place] = step
                hook = model.decoder.embed.register_forward_hook(lambda m, i, o, nudge=nudge: o + nudge)
                after = model(tokens, mask)
                hook.remove()
            moved = (after - before).abs().sum(-1)[0]
            assert moved[left:place].sum() == 0, length
            assert moved[place] > 0, length


def test_flex_says_what_it_cannot_do_on_the_cpu() -> None:
    model = build("tiny-llama", seed=0).use_kernel("flex")
    with pytest.raises(KernelError, match="no backward pass on the CPU"):
        model(torch.zeros(1, 4, dtype=torch.long))


@given(config=configs(), seed=SEEDS)
@settings(max_examples=max(2, settings.default.max_examples // 10))
def test_one_graph_without_breaks(config: c.Config, seed: int) -> None:
    """Forward and backward, traced whole, whatever the configuration."""
    torch._dynamo.reset()
    model = lively(config, torch.float64, seed)
    tokens = tokens_for(config, 2, LENGTH, seed)
    mask = ragged(2, LENGTH, "left")
    eager = logits(model, config, tokens, mask)
    eager[mask].square().sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    compiled = logits(torch.compile(model, fullgraph=True, backend="aot_eager"), config, tokens, mask)
    assert (compiled - eager)[mask].abs().max() <= bound(torch.float64, eager)
    compiled[mask].square().sum().backward()
    for ours, theirs in zip((p.grad for p in model.parameters() if p.grad is not None), gradients, strict=True):
        assert (ours - theirs).abs().max() <= 1e-9 * max(1.0, float(theirs.abs().max()))


@pytest.mark.parametrize("name", TINY)
@torch.no_grad()
def test_a_cached_step_is_one_graph(name: str) -> None:
    torch._dynamo.reset()
    config = c.config(name)
    if config.form == "encoder":
        return
    model = lively(config)
    tokens = tokens_for(config, 2, 6, 0)
    full = logits(model, config, tokens)
    cache = model.new_cache(2, 8)
    cache.fixed = True
    logits(model, config, tokens[:, :4], cache=cache)
    step = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
    for i in (4, 5):
        out = logits(step, config, tokens[:, i : i + 1], cache=cache)
        assert (out[:, 0] - full[:, i]).abs().max() <= bound(torch.float32, full)


@pytest.mark.nightly
@pytest.mark.parametrize("name", TINY if shutil.which("g++") else [])
def test_inductor_is_eager(name: str) -> None:
    torch._dynamo.reset()
    config = c.config(name)
    model = lively(config)
    tokens = tokens_for(config, 2, LENGTH, 0)
    if config.form == "encoder" and model.head is None:
        eager, compiled = model.encode(tokens), torch.compile(model.encode, fullgraph=True)(tokens)
    else:
        eager, compiled = logits(model, config, tokens), logits(torch.compile(model, fullgraph=True), config, tokens)
    assert (eager - compiled).abs().max() <= bound(torch.float32, eager)
