"""Traces and edits under rough use: nested, overlapping, out of order, entered twice, given what makes no sense."""

import copy
import gc
import io
import json
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tracing import TOKENS, count_hooks

import cutaway as ct
from cutaway.errors import InputError
from cutaway.lens import Intervention, edit, sites, trace
from cutaway.lens.analysis import LabeledTensor, head_ablation, path_patching
from cutaway.lens.hooks import ACTIVE_HOOKS, ATTENTION_OVERRIDES
from cutaway.model import Transformer

PATTERN, SCORES, Z = "blocks.0.attn.pattern", "blocks.0.attn.scores", "blocks.0.attn.z"


@pytest.fixture
def model() -> Any:
    made = ct.build("tiny-llama", seed=0)
    yield made
    assert count_hooks(made) == 0
    assert not ACTIVE_HOOKS
    assert not ATTENTION_OVERRIDES


def seen(model: Transformer, changes: Any, *asked: str) -> Any:
    with torch.no_grad(), edit(model, changes), trace(model, *asked) as t:
        model(TOKENS)
    return t


@torch.no_grad()
def test_a_stored_value_does_not_change_afterwards(model: Transformer) -> None:
    cache = model.new_cache(2, 9)
    with trace(model, "attn.k", "attn.v", "logits", "final_norm") as t:
        model(TOKENS[:, :8], cache=cache)
        logits = model(TOKENS[:, 8:], cache=cache)
        before = {name: t[name, -1].clone() for name in t}
        logits.zero_()
        for layer in cache.layers:
            layer.k.zero_()
            layer.v.zero_()
    assert all(torch.equal(t[name, -1], before[name]) for name in t)


@torch.no_grad()
def test_a_function_that_writes_into_its_value_changes_only_that() -> None:
    model = ct.build("tiny-bert", seed=0)  # where attention reads the stream itself
    with trace(model, "blocks.0.resid_pre") as plain:
        model(TOKENS)
    t = seen(model, {"blocks.0.attn.in": lambda value: value.zero_()}, "blocks.0.resid_pre", "blocks.0.attn.in")
    assert torch.equal(t["blocks.0.resid_pre"], plain["blocks.0.resid_pre"])
    assert not t["blocks.0.attn.in"].any()


@pytest.mark.parametrize("order", [(Z, PATTERN), (PATTERN, Z)])
@torch.no_grad()
def test_a_pattern_is_changed_before_z_whoever_is_named_first(model: Transformer, order: tuple[str, str]) -> None:
    assert not seen(model, dict.fromkeys(order, "zero"), Z)[Z].any()
    with edit(model, {order[0]: "zero"}):
        assert not seen(model, {order[1]: "zero"}, Z)[Z].any()
    both = seen(model, {PATTERN: {"do": "scale", "value": 3}, SCORES: {"do": "scale", "value": 0}}, PATTERN)
    rows = 3 * torch.ones(9, 9).tril() / torch.arange(1, 10)[:, None]
    torch.testing.assert_close(both[PATTERN].as_subclass(torch.Tensor), rows.expand(2, 4, -1, -1))


@torch.no_grad()
def test_later_changes_and_readers_see_changed_scores(model: Transformer) -> None:
    first, second = (
        edit(model, {SCORES: Intervention("zero", heads=[0])}),
        edit(model, {SCORES: lambda value: value * 2}),
    )
    with first, second, trace(model, SCORES, PATTERN) as t:
        model(TOKENS)
    with trace(model, SCORES) as plain:
        model(TOKENS)
    low = torch.full((9, 9), float("-inf")).triu(1)
    assert torch.equal(t[SCORES][:, 0], low.expand(2, -1, -1))
    assert torch.equal(t[SCORES][:, 1:], 2 * plain[SCORES][:, 1:])
    torch.testing.assert_close(t[SCORES].softmax(-1), t[PATTERN].as_subclass(torch.Tensor))


@pytest.mark.parametrize(
    "change", ["zero", "mean", "resample", {"do": "scale", "value": 0}, {"do": "scale", "value": -1}]
)
def test_what_the_mask_hides_stays_hidden(model: Transformer, change: Any) -> None:
    pattern = seen(model, {SCORES: change}, PATTERN)[PATTERN]
    assert not pattern.triu(1).any()
    torch.testing.assert_close(pattern.sum(-1), torch.ones(2, 4, 9))


def test_a_head_named_twice_is_changed_once(model: Transformer) -> None:
    assert not seen(model, {PATTERN: Intervention("zero", heads=[1, 1, -3])}, Z)[Z][:, :, 1].any()


def test_what_is_put_into_shared_heads_keeps_its_order(model: Transformer) -> None:
    name = "blocks.0.attn.k"
    put = torch.tensor([1.0, 2.0])[:, None].expand(2, 16)
    found = seen(model, {name: Intervention("replace", put, heads=[2, 0])}, name)[name]
    assert (found[:, :, 1] == 1).all()
    assert (found[:, :, 0] == 2).all()


def test_without_its_pattern_a_head_is_silent_in_bf16_and_under_dropout() -> None:
    half = ct.build("tiny-llama", seed=0, dtype=torch.bfloat16)
    assert not seen(half, {PATTERN: "zero"}, Z)[Z].any()
    dropping = with_dropout()
    assert not seen(dropping, {PATTERN: Intervention("zero", heads=[1])}, Z)[Z][:, :, 1].any()
    runs = []
    for changes in (
        {"embed": {"do": "add", "value": 0.0}},
        {PATTERN: lambda value: value, SCORES: lambda value: value},
    ):
        torch.manual_seed(0)
        runs.append(seen(dropping, changes, "logits")["logits"])
    assert torch.equal(*runs)


def with_dropout() -> Transformer:
    settings: Any = ct.config("tiny-gpt").model_dump(mode="json", exclude_none=True)
    settings["decoder"]["block"][0]["attention"]["dropout"] = 0.5
    return ct.build(ct.config(settings), seed=0).train()


def test_a_change_of_nothing_has_a_slope(model: Transformer) -> None:
    step = torch.zeros(2, 4, 9, 9, requires_grad=True)
    with edit(model, {PATTERN: lambda value: value + step}):
        model(TOKENS).square().mean().backward()
    assert step.grad is not None
    assert step.grad.any()


@torch.no_grad()
def test_builds_nest(model: Transformer) -> None:
    with edit(model, {"blocks.1": "skip"}):
        skipped = model(TOKENS)
        with edit(model, {"blocks.1": "swap"}):
            assert not torch.equal(model(TOKENS), skipped)
        assert torch.equal(model(TOKENS), skipped)
    with edit(model, {"blocks.*": "skip", "blocks.1": "no_residual"}):
        model(TOKENS)
    with edit(model, {"final_norm": "zero"}), edit(model, {"final_norm": "drop"}), trace(model, "final_norm") as t:
        model(TOKENS)
    assert not t["final_norm"].any()


@torch.no_grad()
def test_what_is_open_is_not_entered_again(model: Transformer) -> None:
    plain = model(TOKENS)
    for made in (trace(model, "embed"), edit(model, {"embed": "zero"}), edit(model, {"blocks.0": "skip"})):
        with made:
            inside = model(TOKENS)
            with pytest.raises(InputError, match="open already"), made:
                pass
            assert torch.equal(model(TOKENS), inside)
        assert torch.equal(model(TOKENS), plain)
        with made:
            assert torch.equal(model(TOKENS), inside)


@torch.no_grad()
def test_a_copy_is_not_traced(model: Transformer) -> None:
    with trace(model, "embed", Z) as t, edit(model, {"blocks.1.ffn.out": "zero"}):
        other = copy.deepcopy(model)
        model(TOKENS)
        copied = other(TOKENS)
    assert len(t.calls("embed")) == 1
    assert torch.equal(copied, model(TOKENS))


@torch.no_grad()
def test_another_models_edit_leaves_a_trace_alone(model: Transformer) -> None:
    """Two threads, a model each: what one opens moves none of the other's hooks."""
    other, stop = ct.build("tiny-gpt", seed=0), threading.Event()

    def work() -> None:
        with torch.no_grad():
            while not stop.is_set():
                with edit(other, {"blocks.0.attn.pattern": "zero"}):
                    other(TOKENS)

    worker = threading.Thread(target=work)
    worker.start()
    try:
        for _ in range(20):
            with trace(model, "*") as t:
                model(TOKENS)
            assert all(len(t.calls(name)) == 1 for name in t)
    finally:
        stop.set()
        worker.join()


@pytest.mark.parametrize(
    "several", [lambda: (n for n in (0, 2)), lambda: np.array([0, 2]), lambda: torch.tensor([0, 2])]
)
def test_numbers_of_every_kind(model: Transformer, several: Any) -> None:
    found = seen(model, {Z: Intervention("zero", heads=several(), positions=several(), units=several())}, Z)[Z]
    assert not found[:, [0, 2]][:, :, [0, 2]][..., [0, 2]].any()
    with torch.no_grad(), trace(model, "resid_post", "attn.z", positions=several(), heads=several()) as t:
        model(TOKENS)
    assert {t[name].shape[1] for name in t} == {2}


@pytest.mark.parametrize("name", ["positions", "heads", "units"])
@pytest.mark.parametrize("bad", [[], 1.5, "1", {"a": 1}, [[1]], True, [1.0]])
def test_numbers_that_make_no_sense(model: Transformer, name: str, bad: Any) -> None:
    with pytest.raises(InputError, match=name):
        seen(model, {Z: {"do": "zero", name: bad}}, Z)
    if name != "units":
        with pytest.raises(InputError, match=name), trace(model, Z, **{name: bad}):
            model(TOKENS)


@pytest.mark.parametrize("do", ["add", "replace", "scale"])
@pytest.mark.parametrize("bad", ["abc", {"a": 1}, [[1, 2], [3]], 10**400, [10**400], 1j, [None], ["a"]])
def test_values_that_make_no_sense(model: Transformer, do: str, bad: Any) -> None:
    with pytest.raises(InputError, match=f"'{do}' has the value"):
        edit(model, {"embed": {"do": do, "value": bad}})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({3: "zero"}, "a site's name is text"),
        ({"blocks.1": {"do": "skip", "heads": [1]}}, "leave heads out"),
    ],
)
def test_edits_that_make_no_sense(model: Transformer, changes: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        edit(model, changes)


def test_rows_that_are_not_apart_are_not_resampled() -> None:
    with pytest.raises(InputError, match="rows are not apart"):
        seen(ct.build("tiny-moe", seed=0), {"ffn.router": "resample"}, "logits")


def test_every_value_is_written_as_json(model: Transformer, tmp_path: Path) -> None:
    leaf = torch.ones(model.config.d_model, requires_grad=True)
    value = seen(model, {"blocks.0": "skip"}, "embed")["embed"]
    for each in (leaf, leaf * 2, value, np.ones(64), np.float32(3), 2, [1.0] * 64, range(64)):
        made = edit(model, {"embed": Intervention("add", each)})
        made.save(tmp_path / "edits.json")
        again = edit(model, tmp_path / "edits.json")
        assert json.dumps(again.to_dict()) == json.dumps(made.to_dict())
        assert torch.equal(logits(model, again), logits(model, made))
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(InputError, match="is no JSON"):
        edit(model, tmp_path / "deep.json")


@torch.no_grad()
def logits(model: Transformer, made: Any) -> torch.Tensor:
    with made:
        return model(TOKENS)


@pytest.mark.parametrize("kernel", ["auto", "explicit"])
@torch.no_grad()
def test_heads_are_chosen_where_positions_are_added_to_scores(kernel: str) -> None:
    model = ct.build("tiny-t5", seed=0).use_kernel(kernel)
    with trace(model, "*.pattern", "*.scores") as whole:
        model(TOKENS[:, :5], TOKENS)
    with trace(model, "*.pattern", "*.scores", heads=[2, 0]) as some:
        model(TOKENS[:, :5], TOKENS)
    for name in whole:
        torch.testing.assert_close(whole[name][:, [2, 0]], some[name].as_subclass(torch.Tensor))


def test_a_trace_goes_when_nobody_holds_it(model: Transformer) -> None:
    """At once, not when Python next looks for circles: it may hold gigabytes."""
    gc.disable()
    try:
        with trace(model, "*", gradients=True) as t, edit(model, {"attn.pattern": "mean", "blocks.1": "swap"}) as made:
            model(TOKENS).square().mean().backward()
        gone = weakref.ref(t), weakref.ref(made), weakref.ref(t.calls("embed")[0])
        del t, made
        assert [each() for each in gone] == [None, None, None]
    finally:
        gc.enable()


def drawn(reading: LabeledTensor) -> None:
    reading.plot().savefig(io.BytesIO())
    assert repr(reading)
    assert reading._repr_html_()


def test_readings_of_odd_labels_and_values_are_drawn() -> None:
    odd = ("$\\q$", "$x^$", "", "\n", "a$", "_$abcdefghijklm$nop$")
    values = torch.tensor([0.0, float("nan"), float("inf"), 2.0, 1e6, -1.0])
    title = "what wrote '$\\frac$'"
    drawn(LabeledTensor(title, values, ("part",), (odd,), "$u_$"))
    drawn(LabeledTensor(title, values.expand(6, 6), ("layer", "token"), (odd, odd), "$u_$"))
    drawn(LabeledTensor(title, values.expand(6, 6), ("placement", "layer"), (odd, odd), "$u_$"))
    drawn(LabeledTensor(title, values.expand(6, 6, 6), ("layer", "token", "kind"), (odd, odd, odd), "$u_$"))


def test_a_reading_is_not_cut_down_to_nothing() -> None:
    reading = LabeledTensor("r", torch.ones(2), ("token",), (("a", "b"),))
    for place, said in (([], "leaves nothing"), (slice(2, None), "leaves nothing"), ([slice(1)], "none of them")):
        with pytest.raises(InputError, match=said):
            reading[place]  # type: ignore[index]


def test_in_a_parallel_block_nothing_goes_from_attention_to_its_ffn() -> None:
    settings: Any = ct.config("tiny-gpt").model_dump(mode="json", exclude_none=True)
    settings["decoder"]["placement"] = {"kind": "parallel"}
    model = ct.build(ct.config(settings), seed=0)
    found = path_patching(model, [1, 2, 3, 4], [1, 9, 3, 4], 5, "blocks.0.attn.out", progress=False)
    assert found.labels == (("blocks.1.attn.out", "blocks.1.ffn.out", "logits"),)


def test_one_token_has_no_loss(model: Transformer) -> None:
    with pytest.raises(InputError, match="a text of one token has no next token"):
        head_ablation(model, [1])


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_all_is_traced_and_edited_where_blocks_are_computed_again(mode: Any) -> None:
    """With dropout: what is drawn again is what was drawn."""
    model = with_dropout()
    slopes = []
    for how, looked in (("none", False), (mode, False), (mode, True)):
        torch.manual_seed(0)
        model.use_activation_checkpointing(how).zero_grad()
        asked = [name for name in sites(model) if not name.endswith(("pattern", "scores"))]
        with edit(model, {PATTERN: Intervention("scale", 0.5), "blocks.1.attn.scores": "mean"}):
            if looked:
                with trace(model, *asked, gradients=True) as t, trace(model, "attn.pattern", "attn.scores") as inner:
                    model(TOKENS).square().mean().backward()
                assert all(len(each.calls(name)) == 1 for each in (t, inner) for name in each)
            else:
                model(TOKENS).square().mean().backward()
        slopes.append(torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]))
    for each in slopes[1:]:
        torch.testing.assert_close(each, slopes[0])


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_gradients_of_everything_where_blocks_are_computed_again(mode: Any) -> None:
    found = []
    for how in ("none", mode):
        model = ct.build("tiny-gpt", seed=0).train().use_activation_checkpointing(how)
        with trace(model, "*", gradients=True) as t:
            model(TOKENS).square().mean().backward()
        found.append({name: t.gradient(name) for name in t})
    for name, slope in found[0].items():
        torch.testing.assert_close(found[1][name].as_subclass(torch.Tensor), slope.as_subclass(torch.Tensor))


def test_a_gradient_that_is_not_there_is_said(model: Transformer) -> None:
    with (
        pytest.raises(InputError, match="attention is dropped out"),
        trace(with_dropout(), PATTERN, gradients=True) as t,
    ):
        t.model(TOKENS)
    with trace(model, "embed", gradients=True) as t:
        model(TOKENS, cache=model.new_cache(2, 9))
    with pytest.raises(InputError, match="no gradient came to embed"):
        t.gradient("embed")


def test_a_value_can_be_copied(model: Transformer) -> None:
    value = seen(model, {"blocks.0": "skip"}, "embed")["embed"]
    other = copy.deepcopy({"embed": value})["embed"]
    assert torch.equal(other, value)
    assert (other.site, other.axes) == ("embed", "BTd")
    other.zero_()
    assert value.any()


@torch.no_grad()
def test_edits_may_end_in_any_order(model: Transformer) -> None:
    plain = model(TOKENS)
    pairs: list[tuple[Any, Any]] = [
        ({"blocks.1": "skip"}, {"blocks.1": "swap"}),
        ({"mask": "drop"}, {"positions": "drop"}),
        ({PATTERN: "zero"}, {PATTERN: "mean", "blocks.2": "skip"}),
    ]
    for one, other in pairs:
        with edit(model, other):
            alone = model(TOKENS)
        first, second = edit(model, one), edit(model, other)
        first.__enter__()
        second.__enter__()
        model(TOKENS)
        first.__exit__(None, None, None)
        assert torch.equal(model(TOKENS), alone)
        second.__exit__(None, None, None)
        assert torch.equal(model(TOKENS), plain)


@torch.no_grad()
def test_a_kernel_that_is_changed_under_a_trace_or_an_edit_is_said(model: Transformer) -> None:
    for kernel, make in (
        ("explicit", lambda: trace(model, "attn.pattern", "embed")),
        ("sdpa", lambda: edit(model, {"attn.z": "zero"})),
    ):
        made = make()
        made.__enter__()
        model(TOKENS)
        model.use_kernel(kernel)
        with pytest.raises(InputError, match="no longer a part of the model"):
            made.__exit__(None, None, None)
        with pytest.raises(InputError, match="no longer a part of the model"), made:
            pass


@torch.no_grad()
def test_what_cannot_be_asked_of_a_trace_is_said(model: Transformer) -> None:
    with trace(model, "embed") as t:
        model(TOKENS)
    asked: list[Any] = [("embed",), ("embed", 0, 0), ("embed", "x"), None, 3]
    for each in asked:
        with pytest.raises(InputError, match="names no value"):
            t[each]
    for sizes in ((0, 1), (1, -1), (1, 2, 0)):
        with pytest.raises(InputError, match=r"(batch_size|seq_len|source_len) is (0|-1); .*1"):
            t.estimate_memory(*sizes)
    for dtype in (torch.int8, torch.bool):
        with pytest.raises(InputError, match="dtype is"):
            trace(model, "embed", dtype=dtype)
    with pytest.raises(InputError, match="nowhere"):
        trace(model, "embed", device="nowhere")


def test_heads_named_twice_send_once(model: Transformer) -> None:
    how: Any = {"sender": Z, "progress": False}
    twice, once = (path_patching(model, [1, 2, 3], [9, 2, 3], 5, heads=heads, **how) for heads in ([1, 0, 1], [0, 1]))
    torch.testing.assert_close(twice.values, once.values)
