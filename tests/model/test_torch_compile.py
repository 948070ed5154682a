"""torch.compile equals eager, without graph breaks; FlexAttention equals the explicit kernel."""

import shutil

import pytest
import torch
from hypothesis import given, settings
from support.config_strategies import (
    DTYPES,
    SEEDS,
    SEQ_LEN,
    build_randomized_model,
    compute_logits,
    configs,
    ragged_padding_mask,
    random_tokens,
    tolerance,
)
from support.nightly import nightly_except
from torch.nn.attention.flex_attention import create_block_mask

from cutaway import config as c
from cutaway.config import presets
from cutaway.errors import KernelError
from cutaway.model import build, kernels
from cutaway.model.masks import MaskSpec

pytestmark = [
    pytest.mark.unchecked,
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]
TINY = [name for name in presets() if name.startswith("tiny-")]


@given(config=configs(), dtype=DTYPES, seed=SEEDS)
@settings(max_examples=settings.default.max_examples // 3)
@torch.no_grad()
def test_flex_equals_explicit(config: c.Config, dtype: torch.dtype, seed: int) -> None:
    torch._dynamo.reset()
    model = build_randomized_model(config, dtype, seed)
    tokens = random_tokens(config, 3, SEQ_LEN, seed)
    side = (None, "left", "right")[seed % 3]
    mask = None if side is None else ragged_padding_mask(3, SEQ_LEN, side)
    is_real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
    reference = compute_logits(model.use_kernel("explicit"), config, tokens, mask)
    flex = compute_logits(model.use_kernel("flex"), config, tokens, mask)
    assert (flex - reference)[is_real].abs().max() <= tolerance(dtype, reference)


@pytest.mark.parametrize("kind", ["packed", "prefix"])
@torch.no_grad()
def test_flex_with_packed_documents_and_prefixes(kind: str) -> None:
    model = build_randomized_model(c.config("tiny-llama"), torch.float64)
    tokens = random_tokens(model.config, 2, SEQ_LEN, 0)
    documents = torch.tensor([[0] * 5 + [1] * 7, [3] * 9 + [1] * 3])
    kwargs = {"document_ids": documents} if kind == "packed" else {"prefix_lengths": torch.tensor([0, 5])}
    reference = model.use_kernel("explicit")(tokens, **kwargs)
    assert (model.use_kernel("flex")(tokens, **kwargs) - reference).abs().max() <= tolerance(torch.float64, reference)


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["perturbation", "jacobian"])
@torch.no_grad()
def test_flex_is_causal(method: str) -> None:
    """For lengths up to 70, with and without padding: a changed token changes no earlier logits.

    FlexAttention has no backward pass on the CPU, so the Jacobian is taken by finite differences of one embedding.
    """
    model = build_randomized_model(c.config("tiny-llama")).use_kernel("flex")
    step = torch.randn(model.config.d_model) * 1e-2
    for length in (1, 2, 3, 7, 15, 16, 17, 31, 33, 63, 64, 65, 70):
        tokens = random_tokens(model.config, 1, length, length)
        for num_padding in {0, length // 4}:
            mask = (torch.arange(length) >= num_padding).unsqueeze(0)
            position = (num_padding + length) // 2
            before = model(tokens, mask)
            if method == "perturbation":
                changed = tokens.clone()
                changed[:, position] = (changed[:, position] + 1) % model.config.vocab_size
                after = model(changed, mask)
            else:
                perturbation = torch.zeros(1, length, model.config.d_model)
                perturbation[:, position] = step
                hook = model.decoder.embed.register_forward_hook(
                    lambda m, i, o, perturbation=perturbation: o + perturbation
                )
                after = model(tokens, mask)
                hook.remove()
            change = (after - before).abs().sum(-1)[0]
            assert change[num_padding:position].sum() == 0, length
            assert change[position] > 0, length


@torch.no_grad()
def test_flex_never_materializes_the_dense_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with fully masked queries (padding on the left), whose output is zero."""
    model = build_randomized_model(c.config("tiny-llama")).use_kernel("explicit")
    tokens = torch.randint(0, 97, (2, 12))
    mask = torch.arange(12) >= torch.tensor([[0], [5]])
    reference = model(tokens, mask)

    def fail(self: MaskSpec) -> None:
        raise AssertionError("the dense mask was built")

    monkeypatch.setattr(MaskSpec, "to_dense", fail)
    assert (model.use_kernel("flex")(tokens, mask) - reference).abs().max() <= tolerance(torch.float32, reference)


@torch.no_grad()
def test_flex_builds_the_block_mask_of_a_shape_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_randomized_model(c.config("tiny-llama")).use_kernel("flex")
    calls = []

    def count(*args: object, **kwargs: object) -> object:
        calls.append(args)
        return create_block_mask(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(kernels, "create_block_mask", count)
    for _ in range(3):
        model(torch.randint(0, 97, (2, 29)))
    assert len(calls) == 1


@given(config=configs(), dtype=DTYPES, seed=SEEDS)
@settings(max_examples=settings.default.max_examples // 3)
@torch.no_grad()
def test_auto_equals_explicit_where_it_uses_flex(config: c.Config, dtype: torch.dtype, seed: int) -> None:
    """With thresholds of the size and the device that hold for these inputs on the CPU."""
    torch._dynamo.reset()
    model = build_randomized_model(config, dtype, seed)
    tokens = random_tokens(config, 3, SEQ_LEN, seed)
    mask = (None, ragged_padding_mask(3, SEQ_LEN, "left"), ragged_padding_mask(3, SEQ_LEN, "right"))[seed % 3]
    is_real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
    reference = compute_logits(model.use_kernel("explicit"), config, tokens, mask)
    with pytest.MonkeyPatch.context() as patch:
        use_flex_for_any_size(patch)
        auto = compute_logits(model.use_kernel("auto"), config, tokens, mask)
    assert (auto - reference)[is_real].abs().max() <= tolerance(dtype, reference)


def use_flex_for_any_size(patch: pytest.MonkeyPatch) -> None:
    for name in ("MAX_EXPLICIT_PAIRS", "MIN_FLEX_QUERIES", "MIN_FLEX_HEAD_DIM"):
        patch.setattr(kernels, name, 0)
    patch.setattr(kernels, "_can_compile", lambda device: True)


@pytest.mark.parametrize(("feature", "value"), [("softcap", 30.0), ("sink", True)])
def test_auto_uses_flex_for_long_sequences_without_gradients(
    feature: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With soft-cap or sinks, and only on a GPU. Scores are then not materialized."""
    calls = []

    def count(*args: object, **kwargs: object) -> object:
        calls.append(args)
        return create_block_mask(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(kernels, "create_block_mask", count)
    kernels._sequential_block_mask.cache_clear()
    model = build(c.config("tiny-llama").replace({f"decoder.block.attention.{feature}": value}))
    tokens = torch.zeros(1, 24, dtype=torch.long)

    def uses_flex() -> bool:
        calls.clear()
        model(tokens)
        return bool(calls)

    with torch.no_grad():
        assert not uses_flex()
    monkeypatch.setattr(kernels, "_can_compile", lambda device: True)
    monkeypatch.setattr(kernels, "MIN_FLEX_QUERIES", 24)
    with torch.no_grad():
        assert not uses_flex()  # short
        monkeypatch.setattr(kernels, "MAX_EXPLICIT_PAIRS", 24 * 24 - 1)
        assert uses_flex()
        tokens = tokens[:, :23]
        assert not uses_flex()  # few queries, as in a decode step
        tokens = torch.zeros(1, 24, dtype=torch.long)
    assert not uses_flex()  # gradients


def test_flex_has_no_backward_on_the_cpu() -> None:
    model = build("tiny-llama", seed=0).use_kernel("flex")
    with pytest.raises(KernelError, match="no backward pass on the CPU"):
        model(torch.zeros(1, 4, dtype=torch.long))


@pytest.mark.nightly
@given(config=configs(), seed=SEEDS)
@settings(max_examples=max(2, settings.default.max_examples // 10))
def test_compiles_without_graph_breaks(config: c.Config, seed: int) -> None:
    """Forward and backward pass of random configurations with fullgraph=True."""
    torch._dynamo.reset()
    model = build_randomized_model(config, torch.float64, seed)
    tokens = random_tokens(config, 2, SEQ_LEN, seed)
    mask = ragged_padding_mask(2, SEQ_LEN, "left")
    eager = compute_logits(model, config, tokens, mask)
    eager[mask].square().sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    compiled = compute_logits(torch.compile(model, fullgraph=True, backend="aot_eager"), config, tokens, mask)
    assert (compiled - eager)[mask].abs().max() <= tolerance(torch.float64, eager)
    compiled[mask].square().sum().backward()
    for grad, eager_grad in zip((p.grad for p in model.parameters() if p.grad is not None), gradients, strict=True):
        assert (grad - eager_grad).abs().max() <= 1e-9 * max(1.0, float(eager_grad.abs().max()))


@pytest.mark.parametrize("name", nightly_except(("tiny-t5",), TINY))
@torch.no_grad()
def test_cached_step_compiles_without_graph_breaks(name: str) -> None:
    torch._dynamo.reset()
    config = c.config(name)
    if config.form == "encoder":
        return
    model = build_randomized_model(config)
    tokens = random_tokens(config, 2, 6, 0)
    full = compute_logits(model, config, tokens)
    cache = model.new_cache(2, 8)
    cache.static_shapes = True
    compute_logits(model, config, tokens[:, :4], cache=cache)
    step = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
    for i in (4, 5):
        out = compute_logits(step, config, tokens[:, i : i + 1], cache=cache)
        assert (out[:, 0] - full[:, i]).abs().max() <= tolerance(torch.float32, full)


@pytest.mark.nightly
@pytest.mark.parametrize("name", TINY if shutil.which("g++") else [])
def test_inductor_equals_eager(name: str) -> None:
    torch._dynamo.reset()
    config = c.config(name)
    model = build_randomized_model(config)
    tokens = random_tokens(config, 2, SEQ_LEN, 0)
    if config.form == "encoder" and model.head is None:
        eager, compiled = model.encode(tokens), torch.compile(model.encode, fullgraph=True)(tokens)
    else:
        eager, compiled = (
            compute_logits(model, config, tokens),
            compute_logits(torch.compile(model, fullgraph=True), config, tokens),
        )
    assert (eager - compiled).abs().max() <= tolerance(torch.float32, eager)
