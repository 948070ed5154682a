"""Model-size queries equal `ct.size`; invalid shapes have the error messages of `ct.config`."""

from typing import Any

import pytest

import cutaway as ct
from cutaway.errors import ConfigError, InputError
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.model_input import TokenizerAdapter
from cutaway.serve.inspect.protocol import QueryJob
from cutaway.serve.inspect.queries.model_size import MemoryFit, ModelShape, ModelSizes, SizeCatalog, apply_overrides
from cutaway.size import memory_fit
from cutaway.size.memory_fit import compare_models, fit_to_memory

pytestmark = pytest.mark.unchecked

INSPECTED_PRESET = "tiny-gpt"


@pytest.fixture(scope="module")
def inspector() -> Inspector:
    model = ct.build(INSPECTED_PRESET, seed=0)
    return Inspector(model, TokenizerAdapter(model.config.vocab_size), name=INSPECTED_PRESET)


@pytest.mark.parametrize("mode", ["infer", "train"])
@pytest.mark.parametrize("base", ["gpt2", "mixtral-8x7b", "bert-base", "t5-small", "deepseek-v2-lite"])
def test_model_sizes_equal_size(inspector: Inspector, base: str, mode: Any) -> None:
    options: dict[str, Any] = {"batch_size": 4, "context": 256, "mode": mode, "hardware": "a100-sxm-80gb"}
    [data] = ModelSizes(models=(ModelShape(base=base),), **options).run(inspector, QueryJob()).data["models"]
    expected = ct.size(base, **options)
    assert data["num_parameters"] == expected.num_parameters == sum(data["parameters_by_component"].values())
    assert data["flops"]["total"] == expected.flops.total_visible == sum(data["flops"]["visible_by_component"].values())
    assert (
        data["memory"]["total_bytes"]
        == expected.memory.total_bytes
        == sum(data["memory"]["peak_by_component"].values())
    )
    details = data["memory"]["peak_details"]
    totals = {group: sum(components.values()) for group, components in details.items()}
    assert totals == data["memory"]["peak_by_component"]
    assert details["other"] == {"workspace": 64 << 20}  # the page names it
    assert data["fits"] == expected.fits
    times = [expected.train_time] if mode == "train" else [expected.prefill_time, expected.decode_time]
    expected_bounds = [(bound.min_seconds, bound.arithmetic_intensity) for bound in times if bound is not None]
    assert [(bound["min_seconds"], bound["arithmetic_intensity"]) for bound in data["bounds"]] == expected_bounds


def test_gradients_at_the_start_of_the_backward_pass_are_those_of_the_logits(inspector: Inspector) -> None:
    """The page explains with this why gradients can be larger than the weights."""
    query = ModelSizes(models=(ModelShape(base="gpt2"),), batch_size=8, context=512, mode="train")
    [data] = query.run(inspector, QueryJob()).data["models"]
    assert data["memory"]["peak_phase"] == "start of backward"
    [(name, num_bytes)] = data["memory"]["peak_details"]["gradients"].items()
    loss_bytes = 4
    assert (name, num_bytes) == ("temporary gradients", 8 * 512 * 50257 * 4 + loss_bytes)


def test_default_is_the_inspected_model(inspector: Inspector) -> None:
    [data] = ModelSizes().run(inspector, QueryJob()).data["models"]
    assert data["num_parameters"] == sum(parameter.numel() for parameter in inspector.model.parameters())


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        ("gpt2", {"layers": 3, "d_model": 384, "heads": 6, "hidden": 999, "vocab_size": 1000}),
        ("llama-3-8b", {"layers": 2, "heads": 16, "kv_heads": 2, "d_model": 2048}),
        ("mixtral-8x7b", {"hidden": 512}),
        ("deepseek-v2-lite", {"layers": 4, "kv_heads": 2}),
        ("t5-small", {"layers": 1, "heads": 4}),
    ],
)
def test_overrides_apply_to_every_block(inspector: Inspector, base: str, changes: dict[str, int]) -> None:
    config = apply_overrides(ct.config(base), changes)
    [data] = ModelSizes(models=(ModelShape(base=base, **changes),)).run(inspector, QueryJob()).data["models"]
    assert data["num_parameters"] == ct.size(config).num_parameters
    for stack in config.stacks.values():
        assert stack.layers == changes.get("layers", stack.layers)
        for block in stack.blocks:
            assert block.attention.heads == changes.get("heads", block.attention.heads)
    shown = {name: data["shape"][name] for name in changes if data["shape"][name] is not None}
    assert shown == {name: changes[name] for name in shown}


def test_invalid_shape_has_an_error_beside_valid_ones(inspector: Inspector) -> None:
    models = (ModelShape(base="gpt2"), ModelShape(base="gpt2", heads=7))
    valid, invalid = ModelSizes(models=models).run(inspector, QueryJob()).data["models"]
    assert valid["num_parameters"] == ct.size("gpt2").num_parameters
    with pytest.raises(ConfigError) as error:
        apply_overrides(ct.config("gpt2"), {"heads": 7})
    assert invalid["error"] == str(error.value)
    assert "7 heads do not divide" in invalid["error"]


@pytest.mark.parametrize("name", ["/etc", "../x.toml", "config.json", "nothing"])
def test_base_is_never_a_path(inspector: Inspector, name: str) -> None:
    [data] = ModelSizes(models=(ModelShape(base=name),)).run(inspector, QueryJob()).data["models"]
    assert "not a preset" in data["error"]


def test_unknown_device_is_an_error(inspector: Inspector) -> None:
    with pytest.raises(InputError, match="choose one from the list"):
        MemoryFit(hardware="abacus").run(inspector, QueryJob())


@pytest.mark.parametrize(("base", "mode"), [("llama-3.2-1b", "infer"), ("gpt2", "train")])
def test_memory_fit_equals_fit_to_memory(
    inspector: Inspector, base: str, mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_fit, "list_shapes_near_budget", lambda *_: ((), ""))  # takes most of the time
    data = (
        MemoryFit(model=ModelShape(base=base), batch_size=2, mode=mode, hardware="rtx-4090")
        .run(inspector, QueryJob())
        .data
    )
    memory = next(
        device["memory"]
        for device in SizeCatalog().run(inspector, QueryJob()).data["devices"]
        if device["name"] == "rtx-4090"
    )
    expected = fit_to_memory(memory, base, batch_size=2, mode=mode)
    assert data["max_context"] == expected.max_context
    assert data["max_batch_size"] == expected.max_batch_size


def test_max_batch_size_fits_the_device(inspector: Inspector) -> None:
    data = MemoryFit(model=ModelShape(base="gpt2"), hardware="t4").run(inspector, QueryJob()).data
    [largest] = (
        ModelSizes(models=(ModelShape(base="gpt2"),), batch_size=data["max_batch_size"], hardware="t4")
        .run(inspector, QueryJob())
        .data["models"]
    )
    assert largest["fits"]


def test_compared_models_share_the_shortest_context(inspector: Inspector) -> None:
    data = (
        ModelSizes(models=(ModelShape(base="gpt2"), ModelShape(base="llama-3-8b")))
        .run(inspector, QueryJob())
        .data["models"]
    )
    expected = compare_models(["gpt2", "llama-3-8b"])
    assert [entry["context"] for entry in data] == [entry.options.context for entry in expected] == [1024, 1024]
    assert [entry["memory"]["total_bytes"] for entry in data] == [entry.memory.total_bytes for entry in expected]
