"""Traces and edits in unusual use: nested, overlapping, exited out of order, entered twice, with invalid arguments."""

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
from cutaway.lens.context_hooks import has_active_hooks
from cutaway.lens.hooks import ATTENTION_OVERRIDES
from cutaway.model import Transformer

PATTERN, SCORES, Z = "blocks.0.attn.pattern", "blocks.0.attn.scores", "blocks.0.attn.z"


@pytest.fixture
def model() -> Any:
    model = ct.build("tiny-llama", seed=0)
    yield model
    assert count_hooks(model) == 0
    assert not has_active_hooks()
    assert not ATTENTION_OVERRIDES.values


def trace_edited(model: Transformer, edits: Any, *names: str) -> Any:
    with torch.no_grad(), edit(model, edits), trace(model, *names) as t:
        model(TOKENS)
    return t


@torch.no_grad()
def test_recorded_values_do_not_change_with_later_writes(model: Transformer) -> None:
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
def test_in_place_edit_function_changes_only_its_site() -> None:
    model = ct.build("tiny-bert", seed=0)  # post-norm: attention reads the residual stream itself
    with trace(model, "blocks.0.resid_pre") as plain:
        model(TOKENS)
    t = trace_edited(model, {"blocks.0.attn.in": lambda value: value.zero_()}, "blocks.0.resid_pre", "blocks.0.attn.in")
    assert torch.equal(t["blocks.0.resid_pre"], plain["blocks.0.resid_pre"])
    assert not t["blocks.0.attn.in"].any()


@pytest.mark.parametrize("order", [(Z, PATTERN), (PATTERN, Z)])
@torch.no_grad()
def test_pattern_is_edited_before_z_in_any_order(model: Transformer, order: tuple[str, str]) -> None:
    assert not trace_edited(model, dict.fromkeys(order, "zero"), Z)[Z].any()
    with edit(model, {order[0]: "zero"}):
        assert not trace_edited(model, {order[1]: "zero"}, Z)[Z].any()
    both = trace_edited(model, {PATTERN: {"do": "scale", "value": 3}, SCORES: {"do": "scale", "value": 0}}, PATTERN)
    rows = 3 * torch.ones(9, 9).tril() / torch.arange(1, 10)[:, None]
    torch.testing.assert_close(both[PATTERN].as_subclass(torch.Tensor), rows.expand(2, 4, -1, -1))


@torch.no_grad()
def test_later_edits_and_traces_use_edited_scores(model: Transformer) -> None:
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
    "spec", ["zero", "mean", "resample", {"do": "scale", "value": 0}, {"do": "scale", "value": -1}]
)
def test_masked_scores_stay_masked(model: Transformer, spec: Any) -> None:
    pattern = trace_edited(model, {SCORES: spec}, PATTERN)[PATTERN]
    assert not pattern.triu(1).any()
    torch.testing.assert_close(pattern.sum(-1), torch.ones(2, 4, 9))


def test_duplicate_heads_are_edited_once(model: Transformer) -> None:
    assert not trace_edited(model, {PATTERN: Intervention("zero", heads=[1, 1, -3])}, Z)[Z][:, :, 1].any()


def test_replace_in_shared_kv_heads_keeps_the_order(model: Transformer) -> None:
    name = "blocks.0.attn.k"
    value = torch.tensor([1.0, 2.0])[:, None].expand(2, 16)
    k = trace_edited(model, {name: Intervention("replace", value, heads=[2, 0])}, name)[name]
    assert (k[:, :, 1] == 1).all()
    assert (k[:, :, 0] == 2).all()


def test_zeroed_pattern_gives_zero_z_in_bf16_and_with_dropout() -> None:
    bf16 = ct.build("tiny-llama", seed=0, dtype=torch.bfloat16)
    assert not trace_edited(bf16, {PATTERN: "zero"}, Z)[Z].any()
    dropping = with_dropout()
    assert not trace_edited(dropping, {PATTERN: Intervention("zero", heads=[1])}, Z)[Z][:, :, 1].any()
    runs = []
    for edits in (
        {"embed": {"do": "add", "value": 0.0}},
        {PATTERN: lambda value: value, SCORES: lambda value: value},
    ):
        torch.manual_seed(0)
        runs.append(trace_edited(dropping, edits, "logits")["logits"])
    assert torch.equal(*runs)


def with_dropout() -> Transformer:
    settings: Any = ct.config("tiny-gpt").model_dump(mode="json", exclude_none=True)
    settings["decoder"]["block"][0]["attention"]["dropout"] = 0.5
    return ct.build(ct.config(settings), seed=0).train()


def test_zero_change_of_a_pattern_has_a_gradient(model: Transformer) -> None:
    step = torch.zeros(2, 4, 9, 9, requires_grad=True)
    with edit(model, {PATTERN: lambda value: value + step}):
        model(TOKENS).square().mean().backward()
    assert step.grad is not None
    assert step.grad.any()


@torch.no_grad()
def test_structural_edits_nest(model: Transformer) -> None:
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
def test_active_trace_or_edit_cannot_be_entered_again(model: Transformer) -> None:
    plain = model(TOKENS)
    for context in (trace(model, "embed"), edit(model, {"embed": "zero"}), edit(model, {"blocks.0": "skip"})):
        with context:
            inside = model(TOKENS)
            with pytest.raises(InputError, match="already active"), context:
                pass
            assert torch.equal(model(TOKENS), inside)
        assert torch.equal(model(TOKENS), plain)
        with context:
            assert torch.equal(model(TOKENS), inside)


@torch.no_grad()
def test_deep_copy_is_not_traced(model: Transformer) -> None:
    with trace(model, "embed", Z) as t, edit(model, {"blocks.1.ffn.out": "zero"}):
        other = copy.deepcopy(model)
        model(TOKENS)
        copied = other(TOKENS)
    assert len(t.calls("embed")) == 1
    assert torch.equal(copied, model(TOKENS))


@torch.no_grad()
def test_edit_of_another_model_does_not_affect_a_trace(model: Transformer) -> None:
    """Two threads with one model each: an edit in one does not move the hooks of the other."""
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
    "make_indices", [lambda: (n for n in (0, 2)), lambda: np.array([0, 2]), lambda: torch.tensor([0, 2])]
)
def test_indices_may_be_generators_arrays_or_tensors(model: Transformer, make_indices: Any) -> None:
    intervention = Intervention("zero", heads=make_indices(), positions=make_indices(), units=make_indices())
    z = trace_edited(model, {Z: intervention}, Z)[Z]
    assert not z[:, [0, 2]][:, :, [0, 2]][..., [0, 2]].any()
    with torch.no_grad(), trace(model, "resid_post", "attn.z", positions=make_indices(), heads=make_indices()) as t:
        model(TOKENS)
    assert {t[name].shape[1] for name in t} == {2}


@pytest.mark.parametrize("name", ["positions", "heads", "units"])
@pytest.mark.parametrize("bad", [[], 1.5, "1", {"a": 1}, [[1]], True, [1.0]])
def test_invalid_indices_are_errors(model: Transformer, name: str, bad: Any) -> None:
    with pytest.raises(InputError, match=name):
        trace_edited(model, {Z: {"do": "zero", name: bad}}, Z)
    if name != "units":
        with pytest.raises(InputError, match=name), trace(model, Z, **{name: bad}):
            model(TOKENS)


@pytest.mark.parametrize("do", ["add", "replace", "scale"])
@pytest.mark.parametrize("bad", ["abc", {"a": 1}, [[1, 2], [3]], 10**400, [10**400], 1j, [None], ["a"]])
def test_invalid_values_are_errors(model: Transformer, do: str, bad: Any) -> None:
    with pytest.raises(InputError, match=f"'{do}' has the value"):
        edit(model, {"embed": {"do": do, "value": bad}})


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ({3: "zero"}, "must be a string from sites\\(model\\), not 3"),
        ({"blocks.1": {"do": "skip", "heads": [1]}}, "leave heads out"),
    ],
)
def test_invalid_edits_are_errors(model: Transformer, edits: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        edit(model, edits)


def test_resample_without_batch_axis_is_an_error() -> None:
    with pytest.raises(InputError, match="has no batch axis"):
        trace_edited(ct.build("tiny-moe", seed=0), {"ffn.router": "resample"}, "logits")


def test_every_value_type_round_trips_through_json(model: Transformer, tmp_path: Path) -> None:
    leaf = torch.ones(model.config.d_model, requires_grad=True)
    value = trace_edited(model, {"blocks.0": "skip"}, "embed")["embed"]
    for operand in (leaf, leaf * 2, value, np.ones(64), np.float32(3), 2, [1.0] * 64, range(64)):
        original = edit(model, {"embed": Intervention("add", operand)})
        original.save(tmp_path / "edits.json")
        loaded = edit(model, tmp_path / "edits.json")
        assert json.dumps(loaded.to_dict()) == json.dumps(original.to_dict())
        assert torch.equal(compute_logits(model, loaded), compute_logits(model, original))
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(InputError, match="is not valid JSON"):
        edit(model, tmp_path / "deep.json")


@torch.no_grad()
def compute_logits(model: Transformer, context: Any) -> torch.Tensor:
    with context:
        return model(TOKENS)


@pytest.mark.parametrize("kernel", ["auto", "explicit"])
@torch.no_grad()
def test_head_selection_with_score_bias(kernel: str) -> None:
    model = ct.build("tiny-t5", seed=0).use_kernel(kernel)
    with trace(model, "*.pattern", "*.scores") as full:
        model(TOKENS[:, :5], TOKENS)
    with trace(model, "*.pattern", "*.scores", heads=[2, 0]) as selected:
        model(TOKENS[:, :5], TOKENS)
    for name in full:
        torch.testing.assert_close(full[name][:, [2, 0]], selected[name].as_subclass(torch.Tensor))


def test_trace_is_freed_by_reference_counting(model: Transformer) -> None:
    """Freed by reference counting, without the garbage collector: a trace may hold gigabytes."""
    gc.disable()
    try:
        with trace(model, "*", gradients=True) as t, edit(model, {"attn.pattern": "mean", "blocks.1": "swap"}) as e:
            model(TOKENS).square().mean().backward()
        references = weakref.ref(t), weakref.ref(e), weakref.ref(t.calls("embed")[0])
        del t, e
        assert [reference() for reference in references] == [None, None, None]
    finally:
        gc.enable()


def check_display(tensor: LabeledTensor) -> None:
    tensor.plot().savefig(io.BytesIO())
    assert repr(tensor)
    assert tensor._repr_html_()


def test_labels_with_dollars_and_nonfinite_values_are_plotted() -> None:
    odd = ("$\\q$", "$x^$", "", "\n", "a$", "_$abcdefghijklm$nop$")
    values = torch.tensor([0.0, float("nan"), float("inf"), 2.0, 1e6, -1.0])
    title = "logit of '$\\frac$'"
    check_display(LabeledTensor(title, values, ("part",), (odd,), "$u_$"))
    check_display(LabeledTensor(title, values.expand(6, 6), ("layer", "token"), (odd, odd), "$u_$"))
    check_display(LabeledTensor(title, values.expand(6, 6), ("placement", "layer"), (odd, odd), "$u_$"))
    check_display(LabeledTensor(title, values.expand(6, 6, 6), ("layer", "token", "kind"), (odd, odd, odd), "$u_$"))


def test_empty_selection_of_labeled_tensor_is_an_error() -> None:
    tensor = LabeledTensor("r", torch.ones(2), ("token",), (("a", "b"),))
    cases = (([], "selects none"), (slice(2, None), "selects none"), ([slice(1)], "is not an index"))
    for key, message in cases:
        with pytest.raises(InputError, match=message):
            tensor[key]  # type: ignore[index]


def test_parallel_block_has_no_path_from_attention_to_its_ffn() -> None:
    settings: Any = ct.config("tiny-gpt").model_dump(mode="json", exclude_none=True)
    settings["decoder"]["placement"] = {"kind": "parallel"}
    model = ct.build(ct.config(settings), seed=0)
    result = path_patching(model, [1, 2, 3, 4], [1, 9, 3, 4], 5, "blocks.0.attn.out", progress=False)
    assert result.labels == (("blocks.1.attn.out", "blocks.1.ffn.out", "logits"),)


def test_head_ablation_of_one_token_is_an_error(model: Transformer) -> None:
    with pytest.raises(InputError, match="a text of one token has no next token"):
        head_ablation(model, [1])


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_trace_and_edit_with_activation_checkpointing(mode: Any) -> None:
    """With dropout: the recomputed block draws the same dropout masks."""
    model = with_dropout()
    gradients = []
    for checkpointing, is_traced in (("none", False), (mode, False), (mode, True)):
        torch.manual_seed(0)
        model.use_activation_checkpointing(checkpointing).zero_grad()
        names = [name for name in sites(model) if not name.endswith(("pattern", "scores"))]
        with edit(model, {PATTERN: Intervention("scale", 0.5), "blocks.1.attn.scores": "mean"}):
            if is_traced:
                with trace(model, *names, gradients=True) as t, trace(model, "attn.pattern", "attn.scores") as inner:
                    model(TOKENS).square().mean().backward()
                assert all(len(traced.calls(name)) == 1 for traced in (t, inner) for name in traced)
            else:
                model(TOKENS).square().mean().backward()
        gradients.append(torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]))
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0])


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_gradients_with_activation_checkpointing(mode: Any) -> None:
    gradients = []
    for checkpointing in ("none", mode):
        model = ct.build("tiny-gpt", seed=0).train().use_activation_checkpointing(checkpointing)
        with trace(model, "*", gradients=True) as t:
            model(TOKENS).square().mean().backward()
        gradients.append({name: t.gradient(name) for name in t})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name].as_subclass(torch.Tensor), gradient.as_subclass(torch.Tensor))


def test_missing_gradient_is_an_error(model: Transformer) -> None:
    with (
        pytest.raises(InputError, match="with attention dropout"),
        trace(with_dropout(), PATTERN, gradients=True) as t,
    ):
        t.model(TOKENS)
    with trace(model, "embed", gradients=True) as t:
        model(TOKENS, cache=model.new_cache(2, 9))
    with pytest.raises(InputError, match="embed has no gradient"):
        t.gradient("embed")


def test_traced_tensor_deepcopy(model: Transformer) -> None:
    value = trace_edited(model, {"blocks.0": "skip"}, "embed")["embed"]
    other = copy.deepcopy({"embed": value})["embed"]
    assert torch.equal(other, value)
    assert (other.site, other.axes) == ("embed", "BTd")
    other.zero_()
    assert value.any()


@torch.no_grad()
def test_edits_exit_in_any_order(model: Transformer) -> None:
    plain = model(TOKENS)
    pairs: list[tuple[Any, Any]] = [
        ({"blocks.1": "skip"}, {"blocks.1": "swap"}),
        ({"mask": "drop"}, {"positions": "drop"}),
        ({PATTERN: "zero"}, {PATTERN: "mean", "blocks.2": "skip"}),
    ]
    for first_edits, second_edits in pairs:
        with edit(model, second_edits):
            expected = model(TOKENS)
        first, second = edit(model, first_edits), edit(model, second_edits)
        first.__enter__()
        second.__enter__()
        model(TOKENS)
        first.__exit__(None, None, None)
        assert torch.equal(model(TOKENS), expected)
        second.__exit__(None, None, None)
        assert torch.equal(model(TOKENS), plain)


@torch.no_grad()
def test_use_kernel_during_a_trace_or_edit_is_an_error(model: Transformer) -> None:
    for kernel, make in (
        ("explicit", lambda: trace(model, "attn.pattern", "embed")),
        ("sdpa", lambda: edit(model, {"attn.z": "zero"})),
    ):
        context = make()
        context.__enter__()
        model(TOKENS)
        model.use_kernel(kernel)
        with pytest.raises(InputError, match="was replaced in the model"):
            context.__exit__(None, None, None)
        with pytest.raises(InputError, match="was replaced in the model"), context:
            pass


@torch.no_grad()
def test_invalid_trace_arguments_are_errors(model: Transformer) -> None:
    with trace(model, "embed") as t:
        model(TOKENS)
    keys: list[Any] = [("embed",), ("embed", 0, 0), ("embed", "x"), None, 3]
    for key in keys:
        with pytest.raises(InputError, match="is not a key of a trace"):
            t[key]
    for sizes in ((0, 1), (1, -1), (1, 2, 0)):
        with pytest.raises(InputError, match=r"(batch_size|seq_len|source_len) is (0|-1); .*1"):
            t.estimate_memory(*sizes)
    for dtype in (torch.int8, torch.bool):
        with pytest.raises(InputError, match="dtype is"):
            trace(model, "embed", dtype=dtype)
    with pytest.raises(InputError, match="nowhere"):
        trace(model, "embed", device="nowhere")


def test_duplicate_sender_heads_count_once(model: Transformer) -> None:
    twice, once = (
        path_patching(model, [1, 2, 3], [9, 2, 3], 5, sender=Z, heads=heads, progress=False)
        for heads in ([1, 0, 1], [0, 1])
    )
    torch.testing.assert_close(twice.values, once.values)
