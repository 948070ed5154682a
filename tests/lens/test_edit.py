"""Edits: at every site of every form what is changed is changed, what is not is not, and the model is as it was."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from support.config_strategies import SEEDS, build_randomized_model, configs
from support.tracing import TOKENS, count_hooks, run_random_tokens

import cutaway as ct
from cutaway import config as c
from cutaway.errors import InputError
from cutaway.lens import Intervention, edit, sites, trace
from cutaway.model import Transformer


@given(config=configs(), seed=SEEDS)
@torch.no_grad()
def test_every_site_can_be_changed_and_left(config: c.Config, seed: int) -> None:
    model = build_randomized_model(config, torch.float32, seed)
    plain = run_random_tokens(model, config, seed)
    found = sites(model)
    with edit(model, dict.fromkeys(found, lambda value: value.clone())):
        assert torch.equal(run_random_tokens(model, config, seed), plain)
    for name in list(found)[seed % 7 :: 7]:
        with edit(model, {name: shaken}), trace(model, name) as inner:
            changed = run_random_tokens(model, config, seed)
        assert torch.isfinite(inner[name]).any()
        assert not torch.equal(changed, plain) or alone(config, name), name
    assert torch.equal(run_random_tokens(model, config, seed), plain)
    assert count_hooks(model) == 0


def shaken(value: torch.Tensor) -> torch.Tensor:
    return value + torch.randn(value.shape, generator=torch.Generator().manual_seed(0)).to(value)


def alone(config: c.Config, name: str) -> bool:
    """Whether no logit can depend on it: scores of one key, and queries and keys with them."""
    windows = [block.attention.window for stack in config.stacks.values() for block in stack.blocks]
    return 1 in windows and name.endswith((".q", ".k", ".scores"))


@pytest.fixture
def model() -> Iterator[Transformer]:
    made = ct.build("tiny-llama", seed=0)
    before = made(TOKENS)
    yield made
    assert count_hooks(made) == 0
    assert torch.equal(made(TOKENS), before)


def inside(model: Transformer, changes: Any, *asked: str) -> Any:
    with torch.no_grad(), edit(model, changes), trace(model, *asked) as t:
        model(TOKENS)
    return t


def test_each_change_does_what_it_says(model: Transformer) -> None:
    name = "blocks.1.ffn.out"
    plain = inside(model, {"embed": {"do": "scale", "value": 1}}, name)[name]
    vector = torch.arange(float(plain.shape[-1]))
    other = torch.randn(2, 9, plain.shape[-1])
    expected: dict[str, tuple[Any, torch.Tensor]] = {
        "zero": ("zero", plain * 0),
        "mean": ("mean", plain.mean((0, 1), keepdim=True).expand_as(plain)),
        "resample": ("resample", plain.flip(0)),
        "add": (Intervention("add", vector), plain + vector),
        "replace": (other, other),
        "scale": ({"do": "scale", "value": 3}, plain * 3),
        "function": (torch.relu, plain.relu()),
    }
    for what, true in expected.values():
        torch.testing.assert_close(torch.Tensor(inside(model, {name: what}, name)[name]), true)


def test_a_part_is_changed_and_the_rest_is_not(model: Transformer) -> None:
    name = "blocks.0.attn.z"
    plain = inside(model, {"embed": {"do": "scale", "value": 1}}, name)[name]
    found = inside(model, {name: Intervention("zero", positions=[-1], heads=[1], units=[0, 2])}, name)[name]
    assert (found[:, -1, 1, [0, 2]] == 0).all()
    same = torch.ones_like(plain, dtype=torch.bool)
    same[:, -1, 1, [0, 2]] = False
    assert torch.equal(found[same], plain[same])


def test_a_head_without_pattern_reads_nothing(model: Transformer) -> None:
    t = inside(model, {"blocks.0.attn.pattern": Intervention("zero", heads=[2])}, "blocks.0.attn.*")
    assert t["blocks.0.attn.z"][:, :, 2].abs().max() < 1e-6
    assert (t["blocks.0.attn.pattern"][:, 2] == 0).all()
    assert (t["blocks.0.attn.pattern"][:, 1].sum(-1) - 1).abs().max() < 1e-6


def test_a_reader_sees_what_the_model_goes_on_with(model: Transformer) -> None:
    two: Any = {"embed": {"do": "add", "value": 2.0}}
    with trace(model, "embed", "blocks.0.resid_pre") as t, edit(model, {"embed": "zero"}), edit(model, two):
        model(TOKENS)
    assert (t["embed"] == 2).all()
    assert (t["blocks.0.resid_pre"] == 2).all()


def logits_of(model: Transformer, changes: Any) -> torch.Tensor:
    with torch.no_grad(), edit(model, changes):
        return model(TOKENS)


def test_a_patch_carries_the_answer_over(model: Transformer) -> None:
    other = TOKENS.flip(-1)
    with torch.no_grad(), trace(model, "blocks.1.resid_post") as t:
        clean = model(other)
    patched = logits_of(model, {"blocks.1.resid_post": t["blocks.1.resid_post"]})
    torch.testing.assert_close(patched, clean)


def test_builds(model: Transformer) -> None:
    with torch.no_grad():
        plain = model(TOKENS)
    skipped = logits_of(model, {"blocks.1": "skip"})
    zeroed = logits_of(model, {"blocks.1.attn.out": "zero", "blocks.1.ffn.out": "zero"})
    torch.testing.assert_close(skipped, zeroed)
    for changes in ({"blocks.0": "swap"}, {"blocks.2": "no_residual"}, {"final_norm": "drop"}, {"positions": "drop"}):
        assert not torch.allclose(logits_of(model, changes), plain), changes
    seen = logits_of(model, {"mask": "drop"})
    later = TOKENS.clone()
    later[:, -1] = 3
    with torch.no_grad(), edit(model, {"mask": "drop"}):
        assert not torch.allclose(model(later)[:, 0], seen[:, 0])
    with torch.no_grad():
        torch.testing.assert_close(model(later)[:, 0], plain[:, 0])


def test_positions_can_be_moved() -> None:
    """What turns by distance does not notice a shift; a table does. An order is noticed by both."""
    llama, gpt = (ct.build(name, seed=0, dtype=torch.float64) for name in ("tiny-llama", "tiny-gpt"))
    shift: Any = {"positions": {"do": "shift", "value": 7}}
    shuffle: Any = {"positions": {"do": "shuffle", "value": 3}}
    with torch.no_grad():
        torch.testing.assert_close(logits_of(llama, shift), llama(TOKENS))
        assert not torch.allclose(logits_of(gpt, shift), gpt(TOKENS))
        where = torch.arange(7, 16).expand(2, -1)
        torch.testing.assert_close(logits_of(gpt, shift), gpt(TOKENS, positions=where))
        for model in (llama, gpt):
            assert not torch.allclose(logits_of(model, shuffle), model(TOKENS))
            later = TOKENS.clone()
            later[:, -1] = 3
            with edit(model, shuffle):
                assert torch.equal(model(later)[:, :-1], model(TOKENS)[:, :-1])  # the mask is the one it was
    for name, change, said in (
        ("tiny-gpt", {"do": "shift", "value": 60}, "has learned 0 to 63"),
        ("tiny-gpt", {"do": "shift"}, "an integer from 0 on"),
        ("tiny-gpt", {"do": "drop", "value": 1}, "takes no value"),
        ("tiny-gpt", {"do": "drop", "heads": 1}, "has 'heads'"),
    ):
        with pytest.raises(InputError, match=said):
            logits_of(ct.build(name, seed=0), {"positions": change})
    t5 = ct.build("tiny-t5", seed=0)
    with (
        pytest.raises(InputError, match="can be dropped, not moved"),
        edit(t5, {"encoder.positions": shift["positions"]}),
    ):
        t5(TOKENS, TOKENS)


def test_without_positions_and_mask_order_is_nothing(model: Transformer) -> None:
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), edit(model, {"mask": "drop", "positions": "drop"}):
        torch.testing.assert_close(model(TOKENS[:, order]), model(TOKENS)[:, order], rtol=1e-4, atol=1e-5)


@given(config=configs(), seed=SEEDS)
@torch.no_grad()
def test_builds_of_every_form(config: c.Config, seed: int) -> None:
    model = build_randomized_model(config, torch.float32, seed)
    plain = run_random_tokens(model, config, seed)
    first = next(iter(model.stacks))
    prefix = f"{first}." if len(model.stacks) > 1 else ""
    for place, how in (("blocks.0", "skip"), ("blocks.0", "no_residual"), ("mask", "drop"), ("positions", "drop")):
        said = outcome(model, config, seed, f"{prefix}{place}", how)
        assert not said or any(reason in said for reason in REFUSED[place])
    assert torch.equal(run_random_tokens(model, config, seed), plain)
    assert count_hooks(model) == 0


REFUSED = {
    "blocks.0": ("serves several layers",),
    "mask": ("in an encoder",),
    "positions": ("latent attention", "there are no"),
}


def outcome(model: Transformer, config: c.Config, seed: int, place: str, how: str) -> str:
    """What is said against it, if anything."""
    try:
        with edit(model, {place: how}):
            run_random_tokens(model, config, seed)
    except InputError as error:
        return str(error)
    return ""


def test_json_and_back(model: Transformer, tmp_path: Path) -> None:
    changes = {
        "blocks.0.attn.z": Intervention("zero", heads=range(1, 3)),
        "blocks.1.ffn.out": Intervention("add", torch.ones(model.config.d_model), positions=[-1]),
        "blocks.2": "skip",
        "final_norm": {"do": "drop"},
    }
    made = edit(model, changes)
    made.save(tmp_path / "edits.json")
    assert json.loads((tmp_path / "edits.json").read_text())["blocks.0.attn.z"] == {"do": "zero", "heads": [1, 2]}
    assert torch.equal(logits_of(model, tmp_path / "edits.json"), logits_of(model, changes))
    with pytest.raises(InputError, match="JSON cannot hold"):
        edit(model, {"embed": torch.relu}).save(tmp_path / "no.json")
    (tmp_path / "bad.json").write_text("{")
    for path, said in ((tmp_path / "bad.json", "is no JSON"), (tmp_path / "none.json", "cannot be read")):
        with pytest.raises(InputError, match=said):
            edit(model, path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"blocks.0.attn.outt": "zero"}, "there is attn.out"),
        ({"embed": "nothing"}, "cannot be changed by 'nothing'"),
        ({"embed": {"do": "add"}}, "needs a vector"),
        ({"embed": {"do": "zero", "value": 1}}, "takes no value"),
        ({"embed": {"do": "scale", "value": "x"}}, "give a number"),
        ({"embed": {"do": "zero", "head": 1}}, "has 'head'"),
        ({"embed": {"value": 1}}, "has no 'do'"),
        ({"embed": 5}, "is a int"),
        ({"embed": "skip"}, "is for a part of the model"),
        ({"blocks.0": "drop"}, "'drop' is not known for blocks.0"),
        ({}, "with one at least"),
    ],
)
def test_what_cannot_be_done_is_said(model: Transformer, changes: Any, said: str) -> None:
    with pytest.raises(InputError, match=said), edit(model, changes):
        model(TOKENS)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"embed": {"do": "zero", "heads": [0]}}, "has no heads"),
        ({"embed": {"do": "zero", "positions": [50]}}, "positions holds 50"),
        ({"embed": {"do": "replace", "value": [1.0, 2.0]}}, r"has shape \(2,\)"),
        ({"embed": lambda value: value[:, :1]}, "must give"),
        ({"embed": lambda value: None}, "must give"),
    ],
)
def test_what_fails_while_it_runs_leaves_the_model_whole(model: Transformer, changes: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        logits_of(model, changes)


def test_an_edit_that_nothing_passes_is_an_error(model: Transformer) -> None:
    for changes in ({"logits": "zero"}, {"blocks.1": "skip"}, {"mask": "drop"}):
        with pytest.raises(InputError, match="so that edit did nothing"), edit(model, changes):
            pass


def test_layers_that_share_a_block_are_told_apart() -> None:
    settings: Any = ct.config("tiny-gpt").model_dump(mode="json", exclude_none=True)
    settings["decoder"] |= {"layers": 4, "layer_groups": 2}
    model = ct.build(ct.config(settings), seed=0)
    with torch.no_grad(), trace(model, "resid_pre", "resid_post", "attn.out", "attn.pattern") as t:
        plain = model(TOKENS)
    for layer in range(3):
        assert torch.equal(t[f"blocks.{layer}.resid_post"], t[f"blocks.{layer + 1}.resid_pre"])
    assert not torch.equal(t["blocks.0.attn.out"], t["blocks.1.attn.out"])
    with torch.no_grad(), edit(model, {"blocks.1.attn.out": "zero"}), trace(model, "attn.out", "resid_post") as cut:
        assert not torch.equal(model(TOKENS), plain)
    assert (cut["blocks.1.attn.out"] == 0).all()
    assert torch.equal(cut["blocks.0.resid_post"], t["blocks.0.resid_post"])
    assert cut["blocks.0.attn.out"].abs().max() > 0
    with pytest.raises(InputError, match="serves several layers"), edit(model, {"blocks.1": "skip"}):
        model(TOKENS)


def test_an_edit_holds_in_training_and_generation() -> None:
    model = ct.build("tiny-gpt", seed=0).train().use_activation_checkpointing("full")
    with edit(model, {"blocks.0.ffn.out": "zero"}):
        model(TOKENS).square().mean().backward()
    ffn = [each.grad for name, each in model.named_parameters() if name.startswith("decoder.blocks.0.ffn")]
    assert all(each is None or not each.any() for each in ffn)
    checkpoint = ct.load("tiny-python", dtype=torch.float32)
    [plain] = ct.generate(checkpoint, "def ", max_new_tokens=8)
    with edit(checkpoint, {"blocks.*.attn.out": "zero"}):
        [cut] = ct.generate(checkpoint, "def ", max_new_tokens=8)
    assert cut.tokens != plain.tokens
