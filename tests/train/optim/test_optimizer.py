"""Optimizers equal PyTorch's own and resume bit-exactly from a state dict; schedules equal their formulas."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import cutaway as ct
from cutaway.config.field_docstrings import read_field_docstrings
from cutaway.errors import ConfigError, InputError
from cutaway.model import Transformer
from cutaway.train.objectives import causal_lm, masked_lm
from cutaway.train.optim.lr_scheduler import check_schedule, lr_factor
from cutaway.train.optim.optimizer import (
    OptimizersContainer,
    build_optimizer,
    has_weight_decay,
    muon_parameter_names,
    param_groups,
    total_grad_norm,
    trainable_parameters,
)
from cutaway.train.recipe.load import load_recipe
from cutaway.train.recipe.schema import AdafactorConfig, AdamWConfig, MuonConfig, ScheduleConfig, SGDConfig

OPTIMIZERS = {"adamw": AdamWConfig, "muon": MuonConfig, "adafactor": AdafactorConfig, "sgd": SGDConfig}
TOKENS = torch.randint(250, (6, 2, 10), generator=torch.Generator().manual_seed(0))


def build_model(name: str = "tiny-gpt", dtype: torch.dtype = torch.float32) -> Transformer:
    return ct.build(name, seed=1, dtype=dtype).train()


def build(kind: str, model: nn.Module, weight_decay: float = 0.0, **options: Any) -> OptimizersContainer:
    return build_optimizer(OPTIMIZERS[kind](weight_decay=weight_decay, **options), model)


def run_steps(model: Transformer, optimizer: OptimizersContainer, first: int, last: int) -> None:
    for step in range(first, last):
        optimizer.zero_grad()
        loss = causal_lm(TOKENS[step]).loss(model)
        (loss.loss / loss.weight).backward()
        optimizer.step(1 / (1 + step))


def have_equal_weights(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


@pytest.mark.parametrize("name", ["tiny-gpt", "tiny-mla"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_resumed_from_state_dict_equals_uninterrupted(kind: str, name: str, tmp_path: Path) -> None:
    uninterrupted = build_model(name)
    uninterrupted_optimizer = build(kind, uninterrupted, lr=3e-3, weight_decay=0.1)
    run_steps(uninterrupted, uninterrupted_optimizer, 0, 6)

    first = build_model(name)
    optimizer = build(kind, first, lr=3e-3, weight_decay=0.1)
    run_steps(first, optimizer, 0, 2)
    save_file({key: tensor.clone() for key, tensor in optimizer.state_dict().items()}, tmp_path / "state.safetensors")
    resumed = build_model(name)
    resumed.load_state_dict(first.state_dict())
    resumed_optimizer = build(kind, resumed, lr=3e-3, weight_decay=0.1)
    resumed_optimizer.load_state_dict(load_file(tmp_path / "state.safetensors"))
    run_steps(resumed, resumed_optimizer, 2, 6)
    assert have_equal_weights(uninterrupted, resumed)
    assert not have_equal_weights(uninterrupted, first)
    state, expected = resumed_optimizer.state_dict(), uninterrupted_optimizer.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[key], expected[key]) for key in state)


def test_load_state_dict_copies_tensors() -> None:
    """Steps after loading do not change the caller's tensors."""
    model = build_model()
    optimizer = build("adamw", model, lr=1e-3)
    run_steps(model, optimizer, 0, 1)
    state = {key: tensor.clone() for key, tensor in optimizer.state_dict().items()}
    before = {key: tensor.clone() for key, tensor in state.items()}
    optimizer.load_state_dict(state)
    run_steps(model, optimizer, 1, 3)
    assert all(torch.equal(state[key], before[key]) for key in before)


def test_load_state_dict_replaces_the_state() -> None:
    """A state from before the first step is empty, and clears that of an optimizer that has stepped."""
    model, twin = build_model(), build_model()
    optimizer = build("adamw", model, lr=1e-3)
    run_steps(model, optimizer, 0, 2)
    optimizer.load_state_dict({})
    assert optimizer.state_dict() == {}
    model.load_state_dict(twin.state_dict())
    run_steps(model, optimizer, 0, 2)
    run_steps(twin, build("adamw", twin, lr=1e-3), 0, 2)
    assert have_equal_weights(model, twin)


def test_state_dict_is_independent_of_param_groups() -> None:
    """State is keyed by parameter name: an optimizer with other groups in another order continues the same way."""
    model, other = build_model(), build_model()
    optimizer = build("adamw", model, lr=3e-3)
    run_steps(model, optimizer, 0, 2)
    other.load_state_dict(model.state_dict())
    groups = [{"params": [parameter]} for parameter in reversed(list(other.parameters()))]
    adamw = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    regrouped = OptimizersContainer(other, [adamw], 3e-3, {})
    regrouped.load_state_dict(optimizer.state_dict())
    run_steps(model, optimizer, 2, 5)
    run_steps(other, regrouped, 2, 5)
    assert have_equal_weights(model, other)


def test_state_dict_keys_are_state_and_parameter_names() -> None:
    model = build_model()
    optimizer = build("muon", model, lr=1e-3)
    assert optimizer.state_dict() == {}
    run_steps(model, optimizer, 0, 3)
    state = optimizer.state_dict()
    assert state["momentum_buffer/decoder.blocks.0.attn.f.q.weight"].shape == (32, 32)
    assert state["exp_avg/decoder.embed.token.weight"].shape == (257, 32)
    assert float(state["step/decoder.final_norm.weight"]) == 3
    assert {key.split("/")[1] for key in state} == trainable_parameters(model).keys()


def test_adamw_equals_torch_adamw() -> None:
    """In fp64: softmax is invariant to the key bias, so its gradient is rounding, which Adam would amplify."""
    model, reference = build_model(dtype=torch.float64), build_model(dtype=torch.float64)
    optimizer = build("adamw", model, lr=1e-2, weight_decay=0.3, betas=(0.8, 0.9), eps=1e-6)
    matrices = [each for each in reference.parameters() if each.ndim > 1]
    vectors = [each for each in reference.parameters() if each.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.9), eps=1e-6, foreach=False)
    for step in range(4):
        for each in (model, reference):
            each.zero_grad()
            causal_lm(TOKENS[step]).loss(each).loss.backward()
        optimizer.step(0.5)
        for group in adamw.param_groups:
            group["lr"] = 0.5e-2
        adamw.step()
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("name", ["tiny-gpt", "tiny-moe", "tiny-gemma"])
def test_loss_on_one_batch_decreases(kind: str, name: str) -> None:
    model = build_model(name)
    optimizer = build(kind, model, lr={"sgd": 0.1, "adafactor": 0.03}.get(kind, 3e-3), weight_decay=0.1)
    objective, losses = causal_lm(TOKENS[0]), []
    for _ in range(12):
        optimizer.zero_grad()
        loss = objective.loss(model)
        (loss.loss / loss.weight).backward()
        optimizer.step(grad_divisor=total_grad_norm(model).clamp(min=1.0))
        losses.append(float(loss.cross_entropy / loss.weight))
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize(
    "name", ["tiny-gpt", "tiny-t5", "tiny-bert", "tiny-moe", "tiny-mla", "gpt-oss-20b", "command-r-plus"]
)
def test_weight_decay_applies_to_matrices_and_tables_only(name: str) -> None:
    model = ct.build(name, device="meta")
    groups = param_groups(trainable_parameters(model), 0.1)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    count = sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert sum(each.numel() for group in groups for each in group["params"]) == count
    for key, parameter in trainable_parameters(model).items():
        exempt = parameter.ndim < 2 or key.endswith("bias") or "norm" in key or ".positions." in key
        assert has_weight_decay(key, parameter) != exempt, key


def test_muon_optimizes_the_layers_matrices() -> None:
    for name in ("tiny-gpt", "tiny-moe", "tiny-mla", "tiny-albert", "tiny-t5"):
        model = ct.build(name, device="meta")
        muon_names, parameters = muon_parameter_names(model), trainable_parameters(model)
        assert all(parameters[key].ndim == 2 for key in muon_names)
        rest = {key for key, parameter in parameters.items() if parameter.ndim >= 2} - muon_names
        expected = ("embed.token", "embed.position", "embed.token_types", "table", "head.matrix", ".experts.")
        assert all(any(part in key for part in expected) for key in rest), rest


def test_frozen_parameters_are_not_optimized() -> None:
    model = build_model()
    model.decoder.embed.requires_grad_(False)
    before = model.decoder.embed.token.weight.clone()
    optimizer = build("adamw", model, lr=1e-2, weight_decay=0.5)
    run_steps(model, optimizer, 0, 2)
    assert torch.equal(before, model.decoder.embed.token.weight)
    assert not any("embed" in key for key in optimizer.state_dict())
    with pytest.raises(InputError, match="has no trainable parameter"):
        build("adamw", model.requires_grad_(False), lr=1e-2)


def test_parameters_without_gradient_have_no_state() -> None:
    """A pooler that no loss uses: saved and loaded without state."""
    model = ct.build(ct.config("tiny-bert").replace(pooler=True), seed=0).train()
    optimizer = build("adamw", model, lr=1e-3)
    objective = masked_lm(TOKENS[0], mask_id=3, vocab_size=256, mlm_probability=0.5, seed=0, positions=range(2))
    objective.loss(model).loss.backward()
    optimizer.step()
    state = optimizer.state_dict()
    assert not any("pooler" in key for key in state)
    assert any("head.bias" in key for key in state)
    optimizer.load_state_dict(state)


def test_load_state_dict_rejects_other_states() -> None:
    model = build_model()
    optimizer = build("adamw", model, lr=1e-3)
    run_steps(model, optimizer, 0, 1)
    state: dict[str, Tensor] = optimizer.state_dict()
    key = "exp_avg/decoder.final_norm.weight"
    for invalid, message in (
        (state | {"exp_avg/decoder.other": torch.zeros(1)}, "has no such trainable parameter"),
        (state | {key: torch.zeros(3)}, "'decoder.final_norm.weight'"),
        ({name: tensor for name, tensor in state.items() if name != key}, "'decoder.final_norm.weight'"),
    ):
        with pytest.raises(InputError, match=message):
            optimizer.load_state_dict(invalid)
        assert optimizer.state_dict().keys() == state.keys()  # the current state is unchanged
    with pytest.raises(InputError, match="the optimizer it started with"):
        build("sgd", model, lr=1e-3).load_state_dict(state)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_step_divides_the_gradient_or_is_skipped(kind: str) -> None:
    model, twin = build_model(), build_model()
    optimizer, twin_optimizer = (build(kind, each, lr=1e-2, weight_decay=0.1) for each in (model, twin))
    for each in (model, twin):
        causal_lm(TOKENS[0]).loss(each).loss.backward()
    grad_norm = total_grad_norm(model)
    for parameter in twin.parameters():
        parameter.grad = parameter.grad / (grad_norm / 0.5)  # type: ignore[operator]
    assert float(total_grad_norm(twin)) == pytest.approx(0.5, rel=1e-5)
    weights = clone_state_dict(model)
    optimizer.step(grad_divisor=grad_norm / 0.5, skip=torch.tensor(True))
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    optimizer.step(grad_divisor=grad_norm / 0.5, skip=torch.tensor(False))
    twin_optimizer.step()
    for name, tensor in twin.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=1e-5, atol=1e-6)
    assert not hasattr(optimizer.optimizers[-1], "found_inf")
    next(model.parameters()).grad[0, 0] = float("nan")  # type: ignore[index]
    assert not torch.isfinite(total_grad_norm(model))


def clone_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


# Schedules


def schedule_of(kind: Any, warmup_steps: int = 0, min_lr_ratio: float = 0.0, **options: float) -> ScheduleConfig:
    return ScheduleConfig(kind=kind, warmup_steps=warmup_steps, min_lr_ratio=min_lr_ratio, **options)


def lr_factors(schedule: ScheduleConfig, max_steps: int, count: int | None = None) -> list[float]:
    return [lr_factor(schedule, step, max_steps) for step in range(max_steps if count is None else count)]


def test_schedules_equal_values_computed_by_hand() -> None:
    assert lr_factors(schedule_of("constant", warmup_steps=4), 7) == [0.25, 0.5, 0.75, 1, 1, 1, 1]
    assert lr_factors(schedule_of("linear", warmup_steps=2), 6) == [0.5, 1, 1, 0.75, 0.5, 0.25]
    assert lr_factors(schedule_of("linear", min_lr_ratio=0.2), 4, 6) == pytest.approx([1, 0.8, 0.6, 0.4, 0.2, 0.2])
    assert lr_factors(schedule_of("warmup-stable-decay", warmup_steps=2, decay_ratio=0.4), 10) == pytest.approx(
        [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]
    )
    half = math.sqrt(0.5)
    assert lr_factors(schedule_of("cosine"), 4, 6) == pytest.approx([1, (1 + half) / 2, 0.5, (1 - half) / 2, 0, 0])
    assert lr_factor(schedule_of("cosine", min_lr_ratio=0.1), 50, 100) == pytest.approx(0.55)


def test_inverse_sqrt_equals_the_paper() -> None:
    d_model, warmup = 512, 40
    peak = (d_model * warmup) ** -0.5
    for step in (0, 5, 39, 40, 41, 1000):
        n = step + 1
        paper = d_model**-0.5 * min(n**-0.5, n * warmup**-1.5)
        assert peak * lr_factor(schedule_of("inverse-sqrt", warmup_steps=warmup), step, 10**5) == pytest.approx(paper)


@pytest.mark.parametrize("kind", ["cosine", "linear", "warmup-stable-decay", "inverse-sqrt", "constant"])
@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_every_schedule_increases_then_decreases(kind: str, warmup: int) -> None:
    factors = lr_factors(schedule_of(kind, warmup, min_lr_ratio=0.1), 30, 40)
    assert all(0 < factor <= 1 for factor in factors)
    assert max(factors) == 1
    top = max(0, warmup - 1)
    assert factors[: top + 1] == sorted(factors[: top + 1])
    assert factors[top:] == sorted(factors[top:], reverse=True)
    if kind in ("cosine", "linear", "warmup-stable-decay"):
        assert factors[30:] == pytest.approx([0.1] * 10)


def test_warmup_is_as_the_recipe_describes_it() -> None:
    description = read_field_docstrings(ScheduleConfig)["warmup_steps"]
    assert "The factor of the first step is 1 / warmup_steps" in description
    assert "warm-up to factor 1" in description
    factors = lr_factors(schedule_of("constant", warmup_steps=5), 10)
    assert factors[0] == 1 / 5
    assert factors[4:] == [1.0] * 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "square"}, "schedule.kind"),
        ({"min_lr_ratio": 1.5}, "schedule.min_lr_ratio"),
        ({"decay_ratio": -0.1}, "schedule.decay_ratio"),
        ({"warmup_steps": -1}, "schedule.warmup_steps"),
    ],
)
def test_invalid_schedules_are_errors(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe({"schedule": changes})


def test_overlapping_phases_are_an_error() -> None:
    with pytest.raises(InputError, match="overlaps with the decay over the last 50% of 100 steps"):
        check_schedule(schedule_of("warmup-stable-decay", warmup_steps=60, decay_ratio=0.5), 100)
