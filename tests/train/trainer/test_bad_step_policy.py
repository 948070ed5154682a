"""Step policy: skipped steps, gradient spikes and out-of-memory retries, with messages and bit-exact resume."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_runs import model_bytes, read_metrics, state_digest, tiny_recipe_in

from cutaway.errors import CutawayError
from cutaway.train.logging.callbacks import Callback
from cutaway.train.recipe.load import load_recipe
from cutaway.train.trainer.bad_step_policy import (
    MAX_CONSECUTIVE_SPIKES,
    MAX_NONFINITE_STEPS,
    MIN_OBSERVED_STEPS,
    BadStepPolicy,
    is_out_of_memory,
)
from cutaway.train.trainer.launch import prepare_trainer, resume_trainer, train
from cutaway.train.trainer.trainer import Trainer
from cutaway.train.trainer.training_module import TrainingModule

pytestmark = pytest.mark.usefixtures("skip_preflight")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "cache"))


def scale_gradients(trainer: Trainer, factors: dict[int, float]) -> Trainer:
    """Multiply the gradients of some steps, counted from 1."""
    forward_backward = trainer.train_step_runner.forward_backward

    def scaled_forward_backward(step: int) -> Any:
        output = forward_backward(step)
        for parameter in trainer.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factors.get(step + 1, 1.0))
        return output

    trainer.train_step_runner.forward_backward = scaled_forward_backward  # type: ignore[method-assign]
    return trainer


def skipped_steps(policy: BadStepPolicy, grad_norms: list[float]) -> list[bool]:
    return [bool(policy.check_grad_norm(torch.tensor(grad_norm))[0]) for grad_norm in grad_norms]


def typical_grad_norms(count: int, seed: int = 0) -> list[float]:
    """Log-normal gradient norms around 1, with a deviation of about a fifth."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(count, generator=generator) * 0.2).exp().tolist()


def test_typical_grad_norms_are_never_skipped() -> None:
    for seed in range(5):
        assert not any(skipped_steps(BadStepPolicy(1), typical_grad_norms(400, seed)))
    falling = [10 * norm / math.sqrt(1 + step) for step, norm in enumerate(typical_grad_norms(400))]
    rising = [0.1 * norm * (1 + step) for step, norm in enumerate(typical_grad_norms(400))]
    assert not any(skipped_steps(BadStepPolicy(1), falling))
    assert not any(skipped_steps(BadStepPolicy(1), rising))


def test_spike_is_skipped_after_min_observed_steps() -> None:
    assert not any(skipped_steps(BadStepPolicy(1), [*typical_grad_norms(MIN_OBSERVED_STEPS - 1), 100.0]))
    policy = BadStepPolicy(1)
    skipped_steps(policy, typical_grad_norms(MIN_OBSERVED_STEPS))
    before = {name: tensor.clone() for name, tensor in policy.state.items()}
    assert skipped_steps(policy, [100.0]) == [True]
    # The spike does not change the statistics.
    assert {name for name in before if before[name] != policy.state[name]} == {"consecutive_spikes"}
    assert skipped_steps(policy, [1.0, 100.0, float("nan"), 2.0]) == [False, True, True, False]
    skipped = skipped_steps(BadStepPolicy(1, "continue"), [*typical_grad_norms(40), 100.0, float("inf")])
    assert skipped[-2:] == [False, True]


def test_persistent_spikes_become_the_new_level() -> None:
    policy = BadStepPolicy(1)
    skipped_steps(policy, typical_grad_norms(60))
    skipped = skipped_steps(policy, [50 * norm for norm in typical_grad_norms(60)])
    assert skipped == [True] * MAX_CONSECUTIVE_SPIKES + [False] * (60 - MAX_CONSECUTIVE_SPIKES)
    assert skipped_steps(policy, [1.0, 50.0, 5000.0]) == [False, False, True]


def test_policy_resumes_from_its_state_dict() -> None:
    typical = typical_grad_norms
    grad_norms = [*typical(30), 100.0, *typical(5), *[60.0] * 8, float("nan"), *typical(30, 1), 200.0]
    uninterrupted, first, second = BadStepPolicy(3), BadStepPolicy(3), BadStepPolicy(1)
    expected = skipped_steps(uninterrupted, grad_norms)
    skipped = skipped_steps(first, grad_norms[:38])
    second.load_state_dict(first.state_dict())
    assert skipped + skipped_steps(second, grad_norms[38:]) == expected
    assert second.state_dict() == uninterrupted.state_dict()


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_skipped_step_changes_nothing_and_is_reported(kind: str, tmp_path: Path) -> None:
    messages: list[str] = []
    recipe = load_recipe(tiny_recipe_in(tmp_path, optimizer={"kind": kind}, training={"max_steps": 30}))
    callback = Callback(on_message=messages.append)
    trainer = scale_gradients(
        prepare_trainer(recipe, tmp_path / "run", device="cpu", callback=callback), {8: math.nan, 25: 1e4}
    )
    states: dict[int, dict[str, torch.Tensor]] = {}

    def record_state(metrics: dict[str, Any], timing: dict[str, Any]) -> None:
        state = trainer.optimizer.state_dict() | trainer.model.state_dict()
        states[metrics["step"]] = {name: tensor.clone() for name, tensor in state.items()}

    trainer.callback.on_step_end = record_state
    trainer.train()
    for step in (8, 25):
        assert all(torch.equal(tensor, states[step][name]) for name, tensor in states[step - 1].items())
        assert not all(torch.equal(tensor, states[step][name]) for name, tensor in states[step + 1].items())
    skipped = {row["step"]: row["skipped"] for row in read_metrics(tmp_path / "run") if "skipped" in row}
    assert skipped == {8: "non_finite", 25: "grad_spike"}
    assert "step 8 skipped: the gradient is not finite" in messages
    assert any(
        message.startswith("step 25 skipped: grad_norm is ") and "times its running mean" in message
        for message in messages
    )


def test_run_with_skipped_steps_resumes_bit_exactly(tmp_path: Path) -> None:
    recipe = load_recipe(tiny_recipe_in(tmp_path, training={"max_steps": 34}))
    factors = {9: math.nan} | dict.fromkeys(range(24, 32), 1e4)
    scale_gradients(prepare_trainer(recipe, tmp_path / "uninterrupted", device="cpu"), factors).train()
    trainer = scale_gradients(prepare_trainer(recipe, tmp_path / "run", device="cpu"), factors)
    trainer.callback.on_step_end = lambda row, timing: trainer.stop_requested.set() if row["step"] == 26 else None
    trainer.train()
    assert trainer.global_step == 26
    scale_gradients(resume_trainer(tmp_path / "run", device="cpu"), factors).train()
    assert state_digest(tmp_path / "run") == state_digest(tmp_path / "uninterrupted")
    skipped = [row["step"] for row in read_metrics(tmp_path / "run") if "skipped" in row]
    assert skipped == [9, *range(24, 24 + MAX_CONSECUTIVE_SPIKES)]


def test_nonfinite_gradients_are_an_error_and_the_checkpoint_is_finite(tmp_path: Path) -> None:
    recipe = load_recipe(tiny_recipe_in(tmp_path, training={"max_steps": 100}, checkpoint={"interval": 10}))
    trainer = prepare_trainer(recipe, tmp_path / "run", device="cpu")
    scale_gradients(trainer, dict.fromkeys(range(15, 100), math.inf))
    message = rf"step {14 + MAX_NONFINITE_STEPS} is not finite.*start a run with a lower optimizer.lr"
    with pytest.raises(CutawayError, match=message):
        trainer.train()
    assert len(read_metrics(tmp_path / "run")) > 14  # rows are JSON, with null for non-finite numbers
    resumed = resume_trainer(tmp_path / "run", device="cpu")
    assert all(torch.isfinite(parameter).all() for parameter in resumed.model.parameters())


def limit_memory(monkeypatch: pytest.MonkeyPatch, max_sequences: int, error: BaseException) -> None:
    """Raise `error` in training for micro-batches of more sequences."""
    forward = TrainingModule.forward

    def limited_forward(self: TrainingModule, objective: Any) -> Any:
        if self.model.training and len(objective.targets) > max_sequences:
            raise error
        return forward(self, objective)

    monkeypatch.setattr(TrainingModule, "forward", limited_forward)


OUT_OF_MEMORY_ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    MemoryError(),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] data. DefaultCPUAllocator: can't allocate memory: you tried"),
]


def test_out_of_memory_retries_the_same_step_with_more_micro_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = train(
        tiny_recipe_in(tmp_path, training={"grad_accum_steps": 4}), tmp_path / "expected", device="cpu"
    ).directory
    messages: list[str] = []
    limit_memory(monkeypatch, 2, OUT_OF_MEMORY_ERRORS[0])
    train(tiny_recipe_in(tmp_path), tmp_path / "run", device="cpu", callback=Callback(on_message=messages.append))
    assert state_digest(tmp_path / "run") == state_digest(expected)
    assert [message for message in messages if "out of memory" in message] == [
        "out of memory with 1 micro-batches per step; continuing with 2, which computes the same step",
        "out of memory with 2 micro-batches per step; continuing with 4, which computes the same step",
    ]
    assert resume_trainer(tmp_path / "run", device="cpu").step_policy.grad_accum_steps == 4


def test_out_of_memory_without_smaller_micro_batches_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_memory(monkeypatch, 0, OUT_OF_MEMORY_ERRORS[0])
    with pytest.raises(CutawayError, match=r"micro-batch of one sequence; lower data.seq_len"):
        train(tiny_recipe_in(tmp_path), tmp_path / "one", device="cpu")
    monkeypatch.undo()
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "cache"))
    trainer = prepare_trainer(load_recipe(tiny_recipe_in(tmp_path)), tmp_path / "state", device="cpu")

    def raise_memory_error(*args: Any, **kwargs: Any) -> None:
        raise MemoryError

    trainer.optimizer.step = raise_memory_error  # type: ignore[method-assign]
    with pytest.raises(CutawayError, match="out of memory: the optimizer state does not fit"):
        trainer.train()


def test_other_errors_are_not_treated_as_out_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_memory(monkeypatch, 0, RuntimeError("shapes do not match"))
    with pytest.raises(RuntimeError, match="shapes do not match"):
        train(tiny_recipe_in(tmp_path), tmp_path / "run", device="cpu")
    assert all(is_out_of_memory(error) for error in OUT_OF_MEMORY_ERRORS)
    assert not is_out_of_memory(ValueError("not enough memory"))


def test_on_grad_spike_does_not_matter_without_spikes(tmp_path: Path) -> None:
    one, two = (
        train(
            tiny_recipe_in(tmp_path, training={"on_grad_spike": action, "max_steps": MIN_OBSERVED_STEPS + 2}),
            tmp_path / action,
            device="cpu",
        ).directory
        for action in ("skip", "continue")
    )
    assert model_bytes(one) == model_bytes(two)
