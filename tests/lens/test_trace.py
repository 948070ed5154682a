"""Traces equal the model's own activations at every site of every form, and do not change its output."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.config_strategies import (
    SEEDS,
    SEQ_LEN,
    build_randomized_model,
    configs,
    has_additive_residual,
    ragged_padding_mask,
)
from support.tracing import BATCH_SIZE, TOKENS, count_hooks, run_random_tokens
from torch import nn

import cutaway as ct
from cutaway import config as c
from cutaway.errors import InputError
from cutaway.lens import sites, trace
from cutaway.model import Transformer
from cutaway.model.kernels import Explicit

SOURCE_LEN = 5


@given(config=configs(), seed=SEEDS, side=st.sampled_from([None, "left", "right"]))
@torch.no_grad()
def test_every_site_is_recorded_and_tracing_changes_nothing(config: c.Config, seed: int, side: str | None) -> None:
    model = build_randomized_model(config, torch.float32, seed)
    mask = None if side is None else ragged_padding_mask(BATCH_SIZE, SEQ_LEN, side)
    plain = run_random_tokens(model, config, seed, mask)
    with trace(model, "*") as t:
        traced = run_random_tokens(model, config, seed, mask)
    assert torch.equal(plain, traced)
    assert count_hooks(model) == 0
    for site in t.sites:
        assert tuple(t[site.name].shape) == site.shape(BATCH_SIZE, SEQ_LEN, SOURCE_LEN), site.name
    assert t.nbytes == t.estimate_memory(BATCH_SIZE, SEQ_LEN, SOURCE_LEN).nbytes
    assert torch.equal(t["logits"], plain)


def last_resid_post(model: Transformer, prefix: str, t: Any) -> torch.Tensor:
    stack = model.stacks[prefix[:-1] or next(iter(model.stacks))]
    return t[f"{prefix}blocks.{len(stack.blocks) - 1}.resid_post"]


@given(config=configs(), seed=SEEDS)
@torch.no_grad()
def test_residual_stream_is_embed_plus_sublayer_outputs(config: c.Config, seed: int) -> None:
    model = build_randomized_model(config, torch.float64, seed)
    with trace(model, "embed", "*.out", "resid_post") as t:
        run_random_tokens(model, config, seed)
    for name, stack in config.stacks.items():
        if not has_additive_residual(stack):
            continue
        prefix = f"{name}." if len(config.stacks) > 1 else ""
        total = t[f"{prefix}embed"] + sum(
            t[site] for site in t if site.startswith(f"{prefix}blocks") and site.endswith(".out")
        )
        last = last_resid_post(model, prefix, t)
        assert (total - last).abs().max() <= 1e-9 * max(1.0, float(last.abs().max()))


class SoftmaxRecorder:
    """Records the scores and patterns of the explicit kernels with hooks on their softmax."""

    def __init__(self, model: Transformer) -> None:
        self.records: dict[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        kernels = [module for module in model.modules() if isinstance(module, Explicit)]
        self.handles = [
            kernel.softmax.register_forward_hook(
                lambda module, args, out, kernel=kernel: self.records.setdefault(kernel, []).append((args[0], out))  # type: ignore[misc]
            )
            for kernel in kernels
        ]

    def __enter__(self) -> "SoftmaxRecorder":
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()


@given(config=configs(), seed=SEEDS, side=st.sampled_from([None, "left", "right"]))
@torch.no_grad()
def test_scores_and_patterns_equal_the_explicit_kernel(config: c.Config, seed: int, side: str | None) -> None:
    model = build_randomized_model(config, torch.float64, seed)
    mask = None if side is None else ragged_padding_mask(BATCH_SIZE, SEQ_LEN, side)
    with trace(model, "*.scores", "*.pattern") as fast:
        run_random_tokens(model, config, seed, mask)
    model.use_kernel("explicit")
    with SoftmaxRecorder(model) as recorder, trace(model, "*.scores", "*.pattern") as slow:
        run_random_tokens(model, config, seed, mask)
    for site in slow.sites:
        if sum(site.module is other.module for other in slow.sites) > 2:
            continue  # layers share a block
        scores, pattern = recorder.records[site.module][0]
        expected = scores if site.kind == "scores" else pattern
        assert torch.equal(slow[site.name], expected)
        torch.testing.assert_close(torch.Tensor(fast[site.name]), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.unchecked
@torch.no_grad()
def test_flex_patterns_equal_explicit() -> None:
    for name in ("tiny-llama", "tiny-t5"):
        model = ct.build(name, seed=0, dtype=torch.float32).use_kernel("flex")
        config = model.config
        with trace(model, "*.pattern") as flex:
            run_random_tokens(model, config, 0)
        with trace(model.use_kernel("explicit"), "*.pattern") as explicit:
            run_random_tokens(model, config, 0)
        for site in flex:
            torch.testing.assert_close(flex[site], explicit[site], rtol=1e-5, atol=1e-6)


@given(config=configs(), seed=SEEDS)
def test_gradients_equal_finite_differences(config: c.Config, seed: int) -> None:
    """Each gradient is compared with a central difference of the loss, for a random step added at the site."""
    model = build_randomized_model(config, torch.float64, seed).requires_grad_()
    with trace(model, "*", gradients=True) as t:
        loss = run_random_tokens(model, config, seed).square().mean()
    loss.backward()
    generator = torch.Generator().manual_seed(seed)
    site = t.sites[int(torch.randint(len(t.sites), (), generator=generator))]
    if site.kind == "scores" or site.name.endswith("router"):
        return
    step = torch.randn(t[site.name].shape, generator=generator, dtype=torch.float64) * 1e-5
    losses = []
    for sign in (1, -1):
        with torch.no_grad(), ct.edit(model, {site.name: lambda value, delta=sign * step: value + delta}):
            losses.append(float(run_random_tokens(model, config, seed).square().mean()))
    derivative = float((t.gradient(site.name) * step).sum())
    assert (losses[0] - losses[1]) / 2 == pytest.approx(derivative, rel=1e-3, abs=1e-9), site.name


@pytest.fixture
def model() -> Iterator[Transformer]:
    model = ct.build("tiny-llama", seed=0)
    yield model
    assert count_hooks(model) == 0


def test_layers_positions_and_heads_select_parts(model: Transformer) -> None:
    with trace(model, "attn.*", "resid_post", layers=[0, -1]) as full:
        model(TOKENS)
    heads = dict(full.sites[1].axis_sizes)
    with trace(
        model, "attn.*", "resid_post", layers=[0, -1], positions=[2, -1], heads=[1, 3], dtype=torch.float64
    ) as selected:
        model(TOKENS)
    assert selected.estimate_memory(2, 9).nbytes == selected.nbytes
    for site in selected.sites:
        expected = full[site.name]
        for axis, letter in enumerate(site.axes):
            if letter == ("T" if "T" in site.axes else "S"):
                expected = expected.index_select(axis, torch.tensor([2, 8]))
            if letter == "H":
                expected = expected.index_select(axis, torch.tensor([1, 3]))
            if letter == "G":
                groups = sorted({head * heads["G"] // heads["H"] for head in (1, 3)})
                expected = expected.index_select(axis, torch.tensor(groups))
        torch.testing.assert_close(torch.Tensor(selected[site.name]), expected.double(), rtol=1e-5, atol=1e-6)


def test_values_are_indexed_by_call(model: Transformer) -> None:
    cache = model.new_cache(2, 9)
    with trace(model, "resid_post", "attn.k", "attn.pattern") as t:
        model(TOKENS[:, :8], cache=cache)
        model(TOKENS[:, 8:], cache=cache)
    with trace(model, "resid_post", "attn.pattern") as full:
        model(TOKENS)
    for name in full:
        expected, last = full[name], t[name, -1]
        if name.endswith("pattern"):
            expected, last = expected[:, :, -1:], last[..., :9]
        else:
            expected = expected[:, -1:]
        torch.testing.assert_close(torch.Tensor(last), torch.Tensor(expected), rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match="recorded in 2 calls"):
        t["blocks.0.resid_post"]
    assert len(t.calls("blocks.0.attn.k")) == 2


def test_each_decode_step_is_one_call() -> None:
    checkpoint = ct.load("tiny-python")
    with trace(checkpoint, "resid_post", layers=-1, positions=-1) as t:
        [output] = ct.generate(checkpoint, "def ", max_new_tokens=6)
    [name] = t
    assert len(t.calls(name)) in (6, 7)
    [untraced] = ct.generate(checkpoint, "def ", max_new_tokens=6)
    assert untraced.tokens == output.tokens


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_recomputed_block_is_one_call(mode: Any) -> None:
    model = ct.build("tiny-gpt", seed=0).train().use_activation_checkpointing(mode)
    with trace(model, "resid_post", "ffn.hidden", gradients=True) as t:
        model(TOKENS).square().mean().backward()
    plain = ct.build("tiny-gpt", seed=0).train()
    with trace(plain, "resid_post", "ffn.hidden", gradients=True) as expected:
        plain(TOKENS).square().mean().backward()
    for name in expected:
        assert len(t.calls(name)) == 1
        assert torch.equal(t[name], expected[name])
    assert torch.equal(t.gradient("blocks.0.resid_post"), expected.gradient("blocks.0.resid_post"))


def test_hooks_are_removed_after_an_error(model: Transformer) -> None:
    with pytest.raises(InputError, match="tokens holds"), trace(model, "*"):
        model(TOKENS + 10**6)
    with pytest.raises(InputError, match="was not reached"), trace(model, "logits"):
        pass


@pytest.mark.parametrize(
    ("patterns", "kwargs", "message"),
    [
        (("resid_psot",), {}, "use one of resid_post"),
        (("blocks.9.attn.out",), {}, "it has 4 blocks"),
        ((), {}, "no site is selected"),
        ((3,), {}, "must be a string from sites\\(model\\), not 3"),
        (("resid_post",), {"layers": 9}, "layers contains 9"),
        (("attn.z",), {"heads": [99]}, "heads contains 99"),
        (("logits",), {"layers": []}, None),
    ],
)
def test_unknown_sites_and_indices_are_errors(
    model: Transformer, patterns: Any, kwargs: Any, message: str | None
) -> None:
    if message is None:
        trace(model, *patterns, **kwargs)
        return
    with pytest.raises(InputError, match=message):
        trace(model, *patterns, **kwargs)


def test_traced_tensor_has_site_and_axes(model: Transformer) -> None:
    with trace(model, "attn.pattern") as t:
        model(TOKENS)
    value = t["blocks.1.attn.pattern"]
    assert value.axes == "BHTS"
    assert repr(value).startswith("blocks.1.attn.pattern  B 2 × H ")
    assert "<code>blocks.1.attn.pattern</code>" in value._repr_html_()
    assert type(value + 1) is torch.Tensor
    assert type(value[0]) is torch.Tensor
    assert t.stack_activation("attn.pattern").shape[0] == len(t)
    assert value.plot().get_suptitle() == "blocks.1.attn.pattern"
    assert "MB per call" in repr(trace(model, "*").estimate_memory(8, 512))


@pytest.mark.unchecked
def test_tracing_does_not_recompile_a_compiled_model(model: Transformer) -> None:
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        plain = compiled(TOKENS)
        counts = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        other = ct.build("tiny-gpt", seed=0)
        with trace(other, "*"):
            other(TOKENS)
        with trace(model, "*") as t:
            model(TOKENS)
        assert torch.equal(compiled(TOKENS), plain)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == counts
    torch.testing.assert_close(torch.Tensor(t["logits"]), plain)


def test_site_names_are_the_same_for_every_form() -> None:
    suffixes = {name.split(".", 2)[-1] for name in sites(ct.build("tiny-llama")) if name.startswith("blocks")}
    for preset in ("tiny-gpt", "tiny-bert", "tiny-t5"):
        names = sites(ct.build(preset))
        assert {name.split("blocks.", 1)[1].split(".", 1)[1] for name in names if "blocks." in name} >= suffixes
