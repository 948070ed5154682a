"""What sliders show is `ct.size`'s answer, and what cannot be is refused by `ct.config`'s sentence."""

from typing import Any

import pytest

import cutaway as ct
from cutaway.errors import ConfigError, InputError
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.model_input import TokenizerAdapter
from cutaway.serve.inspect.protocol import QueryJob
from cutaway.serve.inspect.queries.model_size import MemoryFit, ModelShape, ModelSizes, SizeCatalog, apply_overrides
from cutaway.size.memory_fit import compare_models, fit_to_memory

pytestmark = pytest.mark.unchecked

OWN = "tiny-gpt"


@pytest.fixture(scope="module")
def of() -> Inspector:
    model = ct.build(OWN, seed=0)
    return Inspector(model, TokenizerAdapter(model.config.vocab_size), name=OWN)


@pytest.mark.parametrize("mode", ["infer", "train"])
@pytest.mark.parametrize("base", ["gpt2", "mixtral-8x7b", "bert-base", "t5-small", "deepseek-v2-lite"])
def test_numbers_are_those_of_size(of: Inspector, base: str, mode: Any) -> None:
    asked: dict[str, Any] = {"batch_size": 4, "context": 256, "mode": mode, "hardware": "a100-sxm-80gb"}
    [told] = ModelSizes(models=(ModelShape(base=base),), **asked).run(of, QueryJob()).data["models"]
    said = ct.size(base, **asked)
    assert told["num_parameters"] == said.num_parameters == sum(told["parameters_by_component"].values())
    assert told["flops"]["total"] == said.flops.total_visible == sum(told["flops"]["visible_by_component"].values())
    assert told["memory"]["total_bytes"] == said.memory.total_bytes == sum(told["memory"]["peak_by_component"].values())
    assert told["fits"] == said.fits
    times = [said.train_time] if mode == "train" else [said.prefill_time, said.decode_time]
    expected = [(each.min_seconds, each.arithmetic_intensity) for each in times if each is not None]
    assert [(each["min_seconds"], each["arithmetic_intensity"]) for each in told["bounds"]] == expected


def test_without_a_name_it_is_the_model_that_is_open(of: Inspector) -> None:
    [told] = ModelSizes().run(of, QueryJob()).data["models"]
    assert told["num_parameters"] == sum(each.numel() for each in of.model.parameters())


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
def test_changed_numbers_are_in_every_block(of: Inspector, base: str, changes: dict[str, int]) -> None:
    config = apply_overrides(ct.config(base), changes)
    [told] = ModelSizes(models=(ModelShape(base=base, **changes),)).run(of, QueryJob()).data["models"]
    assert told["num_parameters"] == ct.size(config).num_parameters
    for stack in config.stacks.values():
        assert stack.layers == changes.get("layers", stack.layers)
        for block in stack.blocks:
            assert block.attention.heads == changes.get("heads", block.attention.heads)
    shown = {name: told["shape"][name] for name in changes if told["shape"][name] is not None}
    assert shown == {name: changes[name] for name in shown}


def test_what_cannot_be_says_why_beside_what_can(of: Inspector) -> None:
    models = (ModelShape(base="gpt2"), ModelShape(base="gpt2", heads=7))
    right, wrong = ModelSizes(models=models).run(of, QueryJob()).data["models"]
    assert right["num_parameters"] == ct.size("gpt2").num_parameters
    with pytest.raises(ConfigError) as refused:
        apply_overrides(ct.config("gpt2"), {"heads": 7})
    assert wrong["error"] == str(refused.value)
    assert "7 heads do not divide" in wrong["error"]


@pytest.mark.parametrize("name", ["/etc", "../x.toml", "config.json", "nothing"])
def test_no_name_is_a_path(of: Inspector, name: str) -> None:
    [told] = ModelSizes(models=(ModelShape(base=name),)).run(of, QueryJob()).data["models"]
    assert "no preset" in told["error"]


def test_an_unknown_device_is_refused(of: Inspector) -> None:
    with pytest.raises(InputError, match="choose one of the list"):
        MemoryFit(hardware="abacus").run(of, QueryJob())


@pytest.mark.parametrize(("base", "mode"), [("llama-3.2-1b", "infer"), ("gpt2", "train")])
def test_what_fits_is_what_fit_says(of: Inspector, base: str, mode: Any) -> None:
    told = MemoryFit(model=ModelShape(base=base), batch_size=2, mode=mode, hardware="rtx-4090").run(of, QueryJob()).data
    memory = next(
        each["memory"] for each in SizeCatalog().run(of, QueryJob()).data["devices"] if each["name"] == "rtx-4090"
    )
    said = fit_to_memory(memory, base, batch_size=2, mode=mode)
    assert told["max_context"] == said.max_context
    assert told["max_batch_size"] == said.max_batch_size


def test_a_device_has_room_for_what_is_said_to_fit(of: Inspector) -> None:
    told = MemoryFit(model=ModelShape(base="gpt2"), hardware="t4").run(of, QueryJob()).data
    [edge] = (
        ModelSizes(models=(ModelShape(base="gpt2"),), batch_size=told["max_batch_size"], hardware="t4")
        .run(of, QueryJob())
        .data["models"]
    )
    assert edge["fits"]


def test_side_by_side_the_shortest_context_counts(of: Inspector) -> None:
    told = (
        ModelSizes(models=(ModelShape(base="gpt2"), ModelShape(base="llama-3-8b"))).run(of, QueryJob()).data["models"]
    )
    said = compare_models(["gpt2", "llama-3-8b"])
    assert [each["context"] for each in told] == [each.options.context for each in said] == [1024, 1024]
    assert [each["memory"]["total_bytes"] for each in told] == [each.memory.total_bytes for each in said]
