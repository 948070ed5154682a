"""Optimizers ≡ PyTorch's own, saved and loaded ≡ never stopped; schedules ≡ their formulas."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import cutaway as ct
from cutaway.errors import InputError
from cutaway.model import Transformer
from cutaway.train.objectives import causal_lm, masked_lm
from cutaway.train.optim.lr_scheduler import lr_factor, noam_peak_lr
from cutaway.train.optim.optimizer import (
    OPTIMIZER_KINDS,
    OptimizersContainer,
    build_optimizer,
    has_weight_decay,
    muon_parameter_names,
    param_groups,
    total_grad_norm,
    trainable_parameters,
)

TOKENS = torch.randint(250, (6, 2, 10), generator=torch.Generator().manual_seed(0))


def fresh(name: str = "tiny-gpt", dtype: torch.dtype = torch.float32) -> Transformer:
    return ct.build(name, seed=1, dtype=dtype).train()


def steps(model: Transformer, optimizer: OptimizersContainer, first: int, last: int) -> None:
    for number in range(first, last):
        optimizer.zero_grad()
        loss = causal_lm(TOKENS[number]).loss(model)
        (loss.loss / loss.weight).backward()
        optimizer.step(1 / (1 + number))


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a == b and torch.equal(mine, theirs) for (a, mine), (b, theirs) in pairs)


@pytest.mark.parametrize("name", ["tiny-gpt", "tiny-mla"])
@pytest.mark.parametrize("kind", OPTIMIZER_KINDS)
def test_saved_and_loaded_is_never_stopped(kind: str, name: str, tmp_path: Path) -> None:
    whole = fresh(name)
    through = build_optimizer(kind, whole, lr=3e-3, weight_decay=0.1)
    steps(whole, through, 0, 6)

    begun = fresh(name)
    optimizer = build_optimizer(kind, begun, lr=3e-3, weight_decay=0.1)
    steps(begun, optimizer, 0, 2)
    save_file({key: tensor.clone() for key, tensor in optimizer.state_dict().items()}, tmp_path / "state.safetensors")
    resumed = fresh(name)
    resumed.load_state_dict(begun.state_dict())
    again = build_optimizer(kind, resumed, lr=3e-3, weight_decay=0.1)
    again.load_state_dict(load_file(tmp_path / "state.safetensors"))
    steps(resumed, again, 2, 6)
    assert same(whole, resumed)
    assert not same(whole, begun)
    mine, theirs = again.state_dict(), through.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)


def test_loading_copies() -> None:
    """What is loaded may be loaded again: steps do not change the caller's tensors."""
    model = fresh()
    optimizer = build_optimizer("adamw", model, lr=1e-3)
    steps(model, optimizer, 0, 1)
    state = {key: tensor.clone() for key, tensor in optimizer.state_dict().items()}
    kept = {key: tensor.clone() for key, tensor in state.items()}
    optimizer.load_state_dict(state)
    steps(model, optimizer, 1, 3)
    assert all(torch.equal(state[key], kept[key]) for key in kept)


def test_what_is_loaded_takes_the_place_of_what_was() -> None:
    """A state from before the first step is none, also in an optimizer that has stepped."""
    model, twin = fresh(), fresh()
    used = build_optimizer("adamw", model, lr=1e-3)
    steps(model, used, 0, 2)
    used.load_state_dict({})
    assert used.state_dict() == {}
    model.load_state_dict(twin.state_dict())
    steps(model, used, 0, 2)
    steps(twin, build_optimizer("adamw", twin, lr=1e-3), 0, 2)
    assert same(model, twin)


def test_a_state_survives_other_groups() -> None:
    """State is named by parameter: an optimizer whose groups are cut and ordered differently goes on just so."""
    ours, other = fresh(), fresh()
    one = build_optimizer("adamw", ours, lr=3e-3)
    steps(ours, one, 0, 2)
    other.load_state_dict(ours.state_dict())
    singles = [{"params": [each]} for each in reversed(list(other.parameters()))]
    how = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.0, "fused": True}
    regrouped = OptimizersContainer(other, [torch.optim.AdamW(singles, **how)])
    regrouped.load_state_dict(one.state_dict())
    steps(ours, one, 2, 5)
    steps(other, regrouped, 2, 5)
    assert same(ours, other)


def test_names_say_what_and_of_which_weight() -> None:
    model = fresh()
    optimizer = build_optimizer("muon", model, lr=1e-3)
    assert optimizer.state_dict() == {}
    steps(model, optimizer, 0, 3)
    state = optimizer.state_dict()
    assert state["momentum_buffer/decoder.blocks.0.attn.f.q.weight"].shape == (32, 32)
    assert state["exp_avg/decoder.embed.token.weight"].shape == (257, 32)
    assert float(state["step/decoder.final_norm.weight"]) == 3
    assert {key.split("/")[1] for key in state} == trainable_parameters(model).keys()


def test_adamw_is_pytorchs() -> None:
    """In fp64: a key's bias changes nothing, so its gradient is rounding alone, which Adam would blow up."""
    ours, theirs = fresh(dtype=torch.float64), fresh(dtype=torch.float64)
    optimizer = build_optimizer("adamw", ours, lr=1e-2, weight_decay=0.3, betas=(0.8, 0.9), eps=1e-6)
    matrices = [each for each in theirs.parameters() if each.ndim > 1]
    vectors = [each for each in theirs.parameters() if each.ndim == 1]
    parts = [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}]
    peer = torch.optim.AdamW(parts, lr=1e-2, betas=(0.8, 0.9), eps=1e-6, foreach=False)
    for number in range(4):
        for model in (ours, theirs):
            model.zero_grad()
            causal_lm(TOKENS[number]).loss(model).loss.backward()
        optimizer.step(0.5)
        for group in peer.param_groups:
            group["lr"] = 0.5e-2
        peer.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", OPTIMIZER_KINDS)
@pytest.mark.parametrize("name", ["tiny-gpt", "tiny-moe", "tiny-gemma"])
def test_a_few_steps_learn_a_batch(kind: str, name: str) -> None:
    model = fresh(name)
    optimizer = build_optimizer(kind, model, lr={"sgd": 0.1, "adafactor": 0.03}.get(kind, 3e-3), weight_decay=0.1)
    task, losses = causal_lm(TOKENS[0]), []
    for _ in range(12):
        optimizer.zero_grad()
        loss = task.loss(model)
        (loss.loss / loss.weight).backward()
        optimizer.step(grad_divisor=total_grad_norm(model).clamp(min=1.0))
        losses.append(float(loss.cross_entropy / loss.weight))
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize(
    "name", ["tiny-gpt", "tiny-t5", "tiny-bert", "tiny-moe", "tiny-mla", "gpt-oss-20b", "command-r-plus"]
)
def test_matrices_and_tables_decay_and_nothing_else(name: str) -> None:
    model = ct.build(name, device="meta")
    both = param_groups(model, 0.1)
    assert [group["weight_decay"] for group in both] == [0.1, 0.0]
    count = sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert sum(each.numel() for group in both for each in group["params"]) == count
    for key, parameter in trainable_parameters(model).items():
        exempt = parameter.ndim < 2 or key.endswith("bias") or "norm" in key or ".positions." in key
        assert has_weight_decay(key, parameter) != exempt, key


def test_muon_turns_the_layers_matrices() -> None:
    for name in ("tiny-gpt", "tiny-moe", "tiny-mla", "tiny-albert", "tiny-t5"):
        model = ct.build(name, device="meta")
        mine, every = muon_parameter_names(model), trainable_parameters(model)
        assert all(every[key].ndim == 2 for key in mine)
        rest = {key for key, each in every.items() if each.ndim >= 2} - mine
        words = ("embed.token", "embed.position", "embed.token_types", "table", "head.matrix", ".experts.")
        assert all(any(word in key for word in words) for key in rest), rest


def test_what_is_frozen_is_left_out() -> None:
    model = fresh()
    model.decoder.embed.requires_grad_(False)
    before = model.decoder.embed.token.weight.clone()
    optimizer = build_optimizer("adamw", model, lr=1e-2, weight_decay=0.5)
    steps(model, optimizer, 0, 2)
    assert torch.equal(before, model.decoder.embed.token.weight)
    assert not any("embed" in key for key in optimizer.state_dict())
    with pytest.raises(InputError, match="nothing in this model is trained"):
        build_optimizer("adamw", model.requires_grad_(False), lr=1e-2)


def test_what_never_had_a_gradient_has_no_state() -> None:
    """A pooler that no loss reads: saved without, and loaded without."""
    model = ct.build(ct.config("tiny-bert").replace(pooler=True), seed=0).train()
    optimizer = build_optimizer("adamw", model, lr=1e-3)
    task = masked_lm(TOKENS[0], mask_id=3, vocab_size=256, mlm_probability=0.5, seed=0, positions=range(2))
    task.loss(model).loss.backward()
    optimizer.step()
    state = optimizer.state_dict()
    assert not any("pooler" in key for key in state)
    assert any("head.bias" in key for key in state)
    optimizer.load_state_dict(state)


def test_foreign_states_are_refused() -> None:
    model = fresh()
    optimizer = build_optimizer("adamw", model, lr=1e-3)
    steps(model, optimizer, 0, 1)
    state: dict[str, Tensor] = optimizer.state_dict()
    one = "exp_avg/decoder.final_norm.weight"
    for wrong, words in (
        (state | {"exp_avg/decoder.other": torch.zeros(1)}, "trains no such weight"),
        (state | {one: torch.zeros(3)}, "'decoder.final_norm.weight'"),
        ({key: tensor for key, tensor in state.items() if key != one}, "'decoder.final_norm.weight'"),
    ):
        with pytest.raises(InputError, match=words):
            optimizer.load_state_dict(wrong)
        assert optimizer.state_dict().keys() == state.keys()  # and the state in use is as it was
    with pytest.raises(InputError, match="the optimizer it began with"):
        build_optimizer("sgd", model, lr=1e-3).load_state_dict(state)
    with pytest.raises(InputError, match="optimizer 'adam' is unknown"):
        build_optimizer("adam", model, lr=1e-3)


@pytest.mark.parametrize("kind", OPTIMIZER_KINDS)
def test_a_gradient_is_shrunk_or_the_step_is_skipped(kind: str) -> None:
    model, twin = fresh(), fresh()
    optimizer, plain = (build_optimizer(kind, each, lr=1e-2, weight_decay=0.1) for each in (model, twin))
    for each in (model, twin):
        causal_lm(TOKENS[0]).loss(each).loss.backward()
    length = total_grad_norm(model)
    for each in twin.parameters():
        each.grad = each.grad / (length / 0.5)  # type: ignore[operator]
    assert float(total_grad_norm(twin)) == pytest.approx(0.5, rel=1e-5)
    weights = copied(model)
    optimizer.step(grad_divisor=length / 0.5, skip=torch.tensor(True))
    assert all(torch.equal(weights[name], each) for name, each in model.state_dict().items())
    optimizer.step(grad_divisor=length / 0.5, skip=torch.tensor(False))
    plain.step()
    for name, each in twin.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], each, rtol=1e-5, atol=1e-6)
    assert not hasattr(optimizer.optimizers[-1], "found_inf")
    next(model.parameters()).grad[0, 0] = float("nan")  # type: ignore[index]
    assert not torch.isfinite(total_grad_norm(model))


def copied(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.clone() for name, each in model.state_dict().items()}


# Schedules


@dataclass
class Schedule:
    kind: str
    warmup_steps: int = 0
    min_lr_ratio: float = 0.0
    decay_ratio: float = 0.2


def line(schedule: Schedule, steps: int, upto: int | None = None) -> list[float]:
    return [lr_factor(schedule, step, steps) for step in range(steps if upto is None else upto)]


def test_schedules_by_hand() -> None:
    assert line(Schedule("constant", warmup_steps=4), 7) == [0.25, 0.5, 0.75, 1, 1, 1, 1]
    assert line(Schedule("linear", warmup_steps=2), 6) == [0.5, 1, 1, 0.75, 0.5, 0.25]
    assert line(Schedule("linear", min_lr_ratio=0.2), 4, 6) == pytest.approx([1, 0.8, 0.6, 0.4, 0.2, 0.2])
    assert line(Schedule("warmup-stable-decay", warmup_steps=2, decay_ratio=0.4), 10) == pytest.approx(
        [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]
    )
    half = math.sqrt(0.5)
    assert line(Schedule("cosine"), 4, 6) == pytest.approx([1, (1 + half) / 2, 0.5, (1 - half) / 2, 0, 0])
    assert lr_factor(Schedule("cosine", min_lr_ratio=0.1), 50, 100) == pytest.approx(0.55)


def test_inverse_sqrt_is_the_papers() -> None:
    d_model, warmup = 512, 40
    peak = noam_peak_lr(d_model, warmup)
    for step in (0, 5, 39, 40, 41, 1000):
        n = step + 1
        paper = d_model**-0.5 * min(n**-0.5, n * warmup**-1.5)
        assert peak * lr_factor(Schedule("inverse-sqrt", warmup_steps=warmup), step, 10**5) == pytest.approx(paper)


@pytest.mark.parametrize("kind", ["cosine", "linear", "warmup-stable-decay", "inverse-sqrt", "constant"])
@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_every_schedule_rises_once_and_then_never(kind: str, warmup: int) -> None:
    found = line(Schedule(kind, warmup, min_lr_ratio=0.1), 30, 40)
    assert all(0 < each <= 1 for each in found)
    assert max(found) == 1
    top = max(0, warmup - 1)
    assert found[: top + 1] == sorted(found[: top + 1])
    assert found[top:] == sorted(found[top:], reverse=True)
    if kind in ("cosine", "linear", "warmup-stable-decay"):
        assert found[30:] == pytest.approx([0.1] * 10)


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (Schedule("square"), "schedule 'square' is unknown"),
        (Schedule("cosine", min_lr_ratio=1.5), "schedule.min_lr_ratio"),
        (Schedule("warmup-stable-decay", decay_ratio=-0.1), "schedule.decay_ratio"),
        (Schedule("linear", warmup_steps=-1), "schedule.warmup_steps"),
        (Schedule("warmup-stable-decay", warmup_steps=60, decay_ratio=0.5), "overlap"),
    ],
)
def test_wrong_schedules_are_refused(schedule: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        lr_factor(schedule, 0, 100)
