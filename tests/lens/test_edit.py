"""Edits change exactly what they name, at every site of every form, and the model is restored."""

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
def test_every_site_can_be_edited_and_restored(config: c.Config, seed: int) -> None:
    model = build_randomized_model(config, torch.float32, seed)
    plain = run_random_tokens(model, config, seed)
    names = sites(model)
    with edit(model, dict.fromkeys(names, lambda value: value.clone())):
        assert torch.equal(run_random_tokens(model, config, seed), plain)
    for name in list(names)[seed % 7 :: 7]:
        with edit(model, {name: add_noise}), trace(model, name) as t:
            edited = run_random_tokens(model, config, seed)
        assert torch.isfinite(t[name]).any()
        assert not torch.equal(edited, plain) or has_no_effect(config, name), name
    assert torch.equal(run_random_tokens(model, config, seed), plain)
    assert count_hooks(model) == 0


def add_noise(value: torch.Tensor) -> torch.Tensor:
    return value + torch.randn(value.shape, generator=torch.Generator().manual_seed(0)).to(value)


def has_no_effect(config: c.Config, name: str) -> bool:
    """Whether no logit depends on the site: with a window of one key, softmax is constant in q, k and scores."""
    windows = [block.attention.window for stack in config.stacks.values() for block in stack.blocks]
    return 1 in windows and name.endswith((".q", ".k", ".scores"))


@pytest.fixture
def model() -> Iterator[Transformer]:
    model = ct.build("tiny-llama", seed=0)
    before = model(TOKENS)
    yield model
    assert count_hooks(model) == 0
    assert torch.equal(model(TOKENS), before)


def trace_edited(model: Transformer, edits: Any, *names: str) -> Any:
    with torch.no_grad(), edit(model, edits), trace(model, *names) as t:
        model(TOKENS)
    return t


def test_each_operation(model: Transformer) -> None:
    name = "blocks.1.ffn.out"
    plain = trace_edited(model, {"embed": {"do": "scale", "value": 1}}, name)[name]
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
    for spec, value in expected.values():
        torch.testing.assert_close(torch.Tensor(trace_edited(model, {name: spec}, name)[name]), value)


def test_only_selected_indices_are_edited(model: Transformer) -> None:
    name = "blocks.0.attn.z"
    plain = trace_edited(model, {"embed": {"do": "scale", "value": 1}}, name)[name]
    edited = trace_edited(model, {name: Intervention("zero", positions=[-1], heads=[1], units=[0, 2])}, name)[name]
    assert (edited[:, -1, 1, [0, 2]] == 0).all()
    unchanged = torch.ones_like(plain, dtype=torch.bool)
    unchanged[:, -1, 1, [0, 2]] = False
    assert torch.equal(edited[unchanged], plain[unchanged])


def test_zeroed_pattern_gives_zero_z(model: Transformer) -> None:
    t = trace_edited(model, {"blocks.0.attn.pattern": Intervention("zero", heads=[2])}, "blocks.0.attn.*")
    assert t["blocks.0.attn.z"][:, :, 2].abs().max() < 1e-6
    assert (t["blocks.0.attn.pattern"][:, 2] == 0).all()
    assert (t["blocks.0.attn.pattern"][:, 1].sum(-1) - 1).abs().max() < 1e-6


def test_trace_records_edited_values(model: Transformer) -> None:
    add_two: Any = {"embed": {"do": "add", "value": 2.0}}
    with trace(model, "embed", "blocks.0.resid_pre") as t, edit(model, {"embed": "zero"}), edit(model, add_two):
        model(TOKENS)
    assert (t["embed"] == 2).all()
    assert (t["blocks.0.resid_pre"] == 2).all()


def edited_logits(model: Transformer, edits: Any) -> torch.Tensor:
    with torch.no_grad(), edit(model, edits):
        return model(TOKENS)


def test_patched_resid_post_gives_the_clean_logits(model: Transformer) -> None:
    other = TOKENS.flip(-1)
    with torch.no_grad(), trace(model, "blocks.1.resid_post") as t:
        clean = model(other)
    patched = edited_logits(model, {"blocks.1.resid_post": t["blocks.1.resid_post"]})
    torch.testing.assert_close(patched, clean)


def test_structural_edits(model: Transformer) -> None:
    with torch.no_grad():
        plain = model(TOKENS)
    skipped = edited_logits(model, {"blocks.1": "skip"})
    zeroed = edited_logits(model, {"blocks.1.attn.out": "zero", "blocks.1.ffn.out": "zero"})
    torch.testing.assert_close(skipped, zeroed)
    for edits in ({"blocks.0": "swap"}, {"blocks.2": "no_residual"}, {"final_norm": "drop"}, {"positions": "drop"}):
        assert not torch.allclose(edited_logits(model, edits), plain), edits
    unmasked = edited_logits(model, {"mask": "drop"})
    later = TOKENS.clone()
    later[:, -1] = 3
    with torch.no_grad(), edit(model, {"mask": "drop"}):
        assert not torch.allclose(model(later)[:, 0], unmasked[:, 0])
    with torch.no_grad():
        torch.testing.assert_close(model(later)[:, 0], plain[:, 0])


def test_positions_can_be_shifted_and_shuffled() -> None:
    """A shift leaves RoPE unchanged and changes learned positions; a permutation changes both."""
    llama, gpt = (ct.build(name, seed=0, dtype=torch.float64) for name in ("tiny-llama", "tiny-gpt"))
    shift: Any = {"positions": {"do": "shift", "value": 7}}
    shuffle: Any = {"positions": {"do": "shuffle", "value": 3}}
    with torch.no_grad():
        torch.testing.assert_close(edited_logits(llama, shift), llama(TOKENS))
        assert not torch.allclose(edited_logits(gpt, shift), gpt(TOKENS))
        positions = torch.arange(7, 16).expand(2, -1)
        torch.testing.assert_close(edited_logits(gpt, shift), gpt(TOKENS, positions=positions))
        for model in (llama, gpt):
            assert not torch.allclose(edited_logits(model, shuffle), model(TOKENS))
            later = TOKENS.clone()
            later[:, -1] = 3
            with edit(model, shuffle):
                assert torch.equal(model(later)[:, :-1], model(TOKENS)[:, :-1])  # the mask is unchanged
    for spec, message in (
        ({"do": "shift", "value": 60}, "has positions 0 to 63"),
        ({"do": "shift"}, "pass the offset of the positions, an integer ≥ 0"),
        ({"do": "drop", "value": 1}, "'drop' takes none"),
        ({"do": "drop", "heads": 1}, "has 'heads'"),
    ):
        with pytest.raises(InputError, match=message):
            edited_logits(ct.build("tiny-gpt", seed=0), {"positions": spec})
    t5 = ct.build("tiny-t5", seed=0)
    with (
        pytest.raises(InputError, match="which cannot be moved"),
        edit(t5, {"encoder.positions": shift["positions"]}),
    ):
        t5(TOKENS, TOKENS)


def test_permutation_equivariance_without_positions_and_mask(model: Transformer) -> None:
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), edit(model, {"mask": "drop", "positions": "drop"}):
        torch.testing.assert_close(model(TOKENS[:, order]), model(TOKENS)[:, order], rtol=1e-4, atol=1e-5)


@given(config=configs(), seed=SEEDS)
@torch.no_grad()
def test_structural_edits_of_every_form(config: c.Config, seed: int) -> None:
    model = build_randomized_model(config, torch.float32, seed)
    plain = run_random_tokens(model, config, seed)
    first = next(iter(model.stacks))
    prefix = f"{first}." if len(model.stacks) > 1 else ""
    for target, op in (("blocks.0", "skip"), ("blocks.0", "no_residual"), ("mask", "drop"), ("positions", "drop")):
        message = edit_error(model, config, seed, f"{prefix}{target}", op)
        assert not message or any(reason in message for reason in UNSUPPORTED_REASONS[target])
    assert torch.equal(run_random_tokens(model, config, seed), plain)
    assert count_hooks(model) == 0


UNSUPPORTED_REASONS = {
    "blocks.0": ("is shared by several layers",),
    "mask": ("an encoder has no causal mask",),
    "positions": ("latent attention", "this model has no"),
}


def edit_error(model: Transformer, config: c.Config, seed: int, target: str, op: str) -> str:
    """Return the error message of a structural edit, or an empty string."""
    try:
        with edit(model, {target: op}):
            run_random_tokens(model, config, seed)
    except InputError as error:
        return str(error)
    return ""


def test_edits_round_trip_through_json(model: Transformer, tmp_path: Path) -> None:
    edits = {
        "blocks.0.attn.z": Intervention("zero", heads=range(1, 3)),
        "blocks.1.ffn.out": Intervention("add", torch.ones(model.config.d_model), positions=[-1]),
        "blocks.2": "skip",
        "final_norm": {"do": "drop"},
    }
    edit(model, edits).save(tmp_path / "edits.json")
    assert json.loads((tmp_path / "edits.json").read_text())["blocks.0.attn.z"] == {"do": "zero", "heads": [1, 2]}
    assert torch.equal(edited_logits(model, tmp_path / "edits.json"), edited_logits(model, edits))
    with pytest.raises(InputError, match="cannot be written as JSON"):
        edit(model, {"embed": torch.relu}).save(tmp_path / "no.json")
    (tmp_path / "bad.json").write_text("{")
    for path, message in ((tmp_path / "bad.json", "is not valid JSON"), (tmp_path / "none.json", "cannot read edits")):
        with pytest.raises(InputError, match=message):
            edit(model, path)


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ({"blocks.0.attn.outt": "zero"}, "use one of attn.out"),
        ({"embed": "nothing"}, "do is 'nothing'"),
        ({"embed": {"do": "add"}}, "needs a value; pass a vector"),
        ({"embed": {"do": "zero", "value": 1}}, "takes no value"),
        ({"embed": {"do": "scale", "value": "x"}}, "pass a number"),
        ({"embed": {"do": "zero", "head": 1}}, "has 'head'"),
        ({"embed": {"value": 1}}, "has no 'do'"),
        ({"embed": 5}, "is a int"),
        ({"embed": "skip"}, "'skip' is a structural edit"),
        ({"blocks.0": "drop"}, "'drop' does not apply to blocks.0"),
        ({}, "non-empty mapping"),
    ],
)
def test_invalid_edits_are_errors(model: Transformer, edits: Any, message: str) -> None:
    with pytest.raises(InputError, match=message), edit(model, edits):
        model(TOKENS)


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ({"embed": {"do": "zero", "heads": [0]}}, "embed has no head axis"),
        ({"embed": {"do": "zero", "positions": [50]}}, "positions contains 50"),
        ({"embed": {"do": "replace", "value": [1.0, 2.0]}}, r"has shape \(2,\)"),
        ({"embed": lambda value: value[:, :1]}, "return a tensor of shape"),
        ({"embed": lambda value: None}, "return a tensor of shape"),
    ],
)
def test_model_is_restored_after_an_error_in_a_call(model: Transformer, edits: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        edited_logits(model, edits)


def test_unused_edit_is_an_error(model: Transformer) -> None:
    for edits in ({"logits": "zero"}, {"blocks.1": "skip"}, {"mask": "drop"}):
        with pytest.raises(InputError, match="so the edit had no effect"), edit(model, edits):
            pass


def test_layers_that_share_a_block_are_distinguished() -> None:
    settings: Any = ct.config("tiny-gpt").model_dump(mode="json", exclude_none=True)
    settings["decoder"] |= {"layers": 4, "layer_groups": 2}
    model = ct.build(ct.config(settings), seed=0)
    with torch.no_grad(), trace(model, "resid_pre", "resid_post", "attn.out", "attn.pattern") as t:
        plain = model(TOKENS)
    for layer in range(3):
        assert torch.equal(t[f"blocks.{layer}.resid_post"], t[f"blocks.{layer + 1}.resid_pre"])
    assert not torch.equal(t["blocks.0.attn.out"], t["blocks.1.attn.out"])
    with torch.no_grad(), edit(model, {"blocks.1.attn.out": "zero"}), trace(model, "attn.out", "resid_post") as edited:
        assert not torch.equal(model(TOKENS), plain)
    assert (edited["blocks.1.attn.out"] == 0).all()
    assert torch.equal(edited["blocks.0.resid_post"], t["blocks.0.resid_post"])
    assert edited["blocks.0.attn.out"].abs().max() > 0
    with pytest.raises(InputError, match="is shared by several layers"), edit(model, {"blocks.1": "skip"}):
        model(TOKENS)


def test_edit_in_training_and_generation() -> None:
    model = ct.build("tiny-gpt", seed=0).train().use_activation_checkpointing("full")
    with edit(model, {"blocks.0.ffn.out": "zero"}):
        model(TOKENS).square().mean().backward()
    parameters = model.named_parameters()
    ffn_grads = [parameter.grad for name, parameter in parameters if name.startswith("decoder.blocks.0.ffn")]
    assert all(grad is None or not grad.any() for grad in ffn_grads)
    checkpoint = ct.load("tiny-python", dtype=torch.float32)
    [plain] = ct.generate(checkpoint, "def ", max_new_tokens=8)
    with edit(checkpoint, {"blocks.*.attn.out": "zero"}):
        [edited] = ct.generate(checkpoint, "def ", max_new_tokens=8)
    assert edited.tokens != plain.tokens
