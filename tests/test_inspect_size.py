"""What sliders show is `ct.size`'s answer, and what cannot be is refused by `ct.config`'s sentence."""

from typing import Any

import pytest

import cutaway as ct
from cutaway.errors import ConfigError, InputError
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.job import Job
from cutaway.serve.inspect.questions.sizes import Choices, Fits, Shape, Sizes, changed
from cutaway.serve.inspect.words import Words
from cutaway.size.fit import compare, fit

pytestmark = pytest.mark.unchecked

OWN = "tiny-gpt"


@pytest.fixture(scope="module")
def of() -> Inspector:
    model = ct.build(OWN, seed=0)
    return Inspector(model, Words(model.config.vocab_size), name=OWN)


@pytest.mark.parametrize("mode", ["infer", "train"])
@pytest.mark.parametrize("base", ["gpt2", "mixtral-8x7b", "bert-base", "t5-small", "deepseek-v2-lite"])
def test_numbers_are_those_of_size(of: Inspector, base: str, mode: Any) -> None:
    asked: dict[str, Any] = {"batch": 4, "context": 256, "mode": mode, "hardware": "a100-sxm-80gb"}
    [told] = Sizes(models=(Shape(base=base),), **asked).answer(of, Job()).facts["models"]
    said = ct.size(base, **asked)
    assert told["params"] == said.params == sum(told["parts"].values())
    assert told["flops"]["total"] == said.flops.total_seen == sum(told["flops"]["parts"].values())
    assert told["memory"]["total"] == said.memory.total == sum(told["memory"]["parts"].values())
    assert told["fits"] == said.fits
    times = [said.train_time] if mode == "train" else [said.prefill_time, said.decode_time]
    expected = [(each.seconds, each.intensity) for each in times if each is not None]
    assert [(each["seconds"], each["intensity"]) for each in told["bounds"]] == expected


def test_without_a_name_it_is_the_model_that_is_open(of: Inspector) -> None:
    [told] = Sizes().answer(of, Job()).facts["models"]
    assert told["params"] == sum(each.numel() for each in of.model.parameters())


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
    config = changed(ct.config(base), changes)
    [told] = Sizes(models=(Shape(base=base, **changes),)).answer(of, Job()).facts["models"]
    assert told["params"] == ct.size(config).params
    for stack in config.stacks.values():
        assert stack.layers == changes.get("layers", stack.layers)
        for block in stack.blocks:
            assert block.attention.heads == changes.get("heads", block.attention.heads)
    shown = {name: told["shape"][name] for name in changes if told["shape"][name] is not None}
    assert shown == {name: changes[name] for name in shown}


def test_what_cannot_be_says_why_beside_what_can(of: Inspector) -> None:
    models = (Shape(base="gpt2"), Shape(base="gpt2", heads=7))
    right, wrong = Sizes(models=models).answer(of, Job()).facts["models"]
    assert right["params"] == ct.size("gpt2").params
    with pytest.raises(ConfigError) as refused:
        changed(ct.config("gpt2"), {"heads": 7})
    assert wrong["error"] == str(refused.value)
    assert "7 heads do not divide" in wrong["error"]


@pytest.mark.parametrize("name", ["/etc", "../x.toml", "config.json", "nothing"])
def test_no_name_is_a_path(of: Inspector, name: str) -> None:
    [told] = Sizes(models=(Shape(base=name),)).answer(of, Job()).facts["models"]
    assert "no preset" in told["error"]


def test_an_unknown_device_is_refused(of: Inspector) -> None:
    with pytest.raises(InputError, match="choose one of the list"):
        Fits(hardware="abacus").answer(of, Job())


@pytest.mark.parametrize(("base", "mode"), [("llama-3.2-1b", "infer"), ("gpt2", "train")])
def test_what_fits_is_what_fit_says(of: Inspector, base: str, mode: Any) -> None:
    told = Fits(model=Shape(base=base), batch=2, mode=mode, hardware="rtx-4090").answer(of, Job()).facts
    memory = next(each["memory"] for each in Choices().answer(of, Job()).facts["devices"] if each["name"] == "rtx-4090")
    said = fit(memory, base, batch=2, mode=mode)
    assert told["longest_context"] == said.longest_context
    assert told["largest_batch"] == said.largest_batch


def test_a_device_has_room_for_what_is_said_to_fit(of: Inspector) -> None:
    told = Fits(model=Shape(base="gpt2"), hardware="t4").answer(of, Job()).facts
    [edge] = (
        Sizes(models=(Shape(base="gpt2"),), batch=told["largest_batch"], hardware="t4")
        .answer(of, Job())
        .facts["models"]
    )
    assert edge["fits"]


def test_side_by_side_the_shortest_context_counts(of: Inspector) -> None:
    told = Sizes(models=(Shape(base="gpt2"), Shape(base="llama-3-8b"))).answer(of, Job()).facts["models"]
    said = compare(["gpt2", "llama-3-8b"])
    assert [each["context"] for each in told] == [each.question.context for each in said] == [1024, 1024]
    assert [each["memory"]["total"] for each in told] == [each.memory.total for each in said]
