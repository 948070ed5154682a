"""What goes wrong while a model learns: each has a policy, a message, and a run that goes on to the same bits."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_runs import model_bytes, read_metrics, state_digest, tiny_recipe_in

from cutaway.errors import CutawayError
from cutaway.train.logging.callbacks import Callback
from cutaway.train.recipe.load import load_recipe
from cutaway.train.trainer.launch import prepare_trainer, resume_trainer, train
from cutaway.train.trainer.step_policy import (
    MAX_CONSECUTIVE_SPIKES,
    MAX_NONFINITE_STEPS,
    MIN_OBSERVED_STEPS,
    StepPolicy,
    is_out_of_memory,
)
from cutaway.train.trainer.trainer import Trainer
from cutaway.train.trainer.training_module import TrainingModule

pytestmark = pytest.mark.usefixtures("skip_preflight")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "cache"))


def spoilt(trainer: Trainer, factors: dict[int, float]) -> Trainer:
    """With the gradients of some steps, counted from 1, multiplied."""
    plain = trainer.train_step_runner.forward_backward

    def gradient(number: int) -> Any:
        found = plain(number)
        for each in trainer.model.parameters():
            if each.grad is not None:
                each.grad.mul_(factors.get(number + 1, 1.0))
        return found

    trainer.train_step_runner.forward_backward = gradient  # type: ignore[method-assign]
    return trainer


def judged(policy: StepPolicy, lengths: list[float]) -> list[bool]:
    return [bool(policy.check_grad_norm(torch.tensor(length))[0]) for length in lengths]


def usual(count: int, seed: int = 0) -> list[float]:
    """Lengths as they come, a fifth off here and there."""
    made = torch.Generator().manual_seed(seed)
    return (torch.randn(count, generator=made) * 0.2).exp().tolist()


def test_lengths_as_they_come_are_never_skipped() -> None:
    for seed in range(5):
        assert not any(judged(StepPolicy(1), usual(400, seed)))
    falling = [10 * length / math.sqrt(1 + step) for step, length in enumerate(usual(400))]
    rising = [0.1 * length * (1 + step) for step, length in enumerate(usual(400))]
    assert not any(judged(StepPolicy(1), falling))
    assert not any(judged(StepPolicy(1), rising))


def test_a_length_out_of_line_is_skipped_once_it_is_known_what_is_usual() -> None:
    assert not any(judged(StepPolicy(1), [*usual(MIN_OBSERVED_STEPS - 1), 100.0]))
    policy = StepPolicy(1)
    judged(policy, usual(MIN_OBSERVED_STEPS))
    before = {name: each.clone() for name, each in policy.state.items()}
    assert judged(policy, [100.0]) == [True]
    # Else nothing is learned of it.
    assert {name for name in before if before[name] != policy.state[name]} == {"consecutive_spikes"}
    assert judged(policy, [1.0, 100.0, float("nan"), 2.0]) == [False, True, True, False]
    assert judged(StepPolicy(1, "continue"), [*usual(40), 100.0, float("inf")])[-2:] == [False, True]


def test_what_stays_out_of_line_becomes_usual() -> None:
    policy = StepPolicy(1)
    judged(policy, usual(60))
    assert judged(policy, [50 * length for length in usual(60)]) == [True] * MAX_CONSECUTIVE_SPIKES + [False] * (
        60 - MAX_CONSECUTIVE_SPIKES
    )
    assert judged(policy, [1.0, 50.0, 5000.0]) == [False, False, True]


def test_a_policy_goes_on_where_it_was() -> None:
    lengths = [*usual(30), 100.0, *usual(5), *[60.0] * 8, float("nan"), *usual(30, 1), 200.0]
    whole, first, second = StepPolicy(3), StepPolicy(3), StepPolicy(1)
    expected = judged(whole, lengths)
    begun = judged(first, lengths[:38])
    second.load_state_dict(first.state_dict())
    assert begun + judged(second, lengths[38:]) == expected
    assert second.state_dict() == whole.state_dict()


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_skipped_step_changes_nothing_and_says_so(kind: str, tmp_path: Path) -> None:
    said: list[str] = []
    how = load_recipe(tiny_recipe_in(tmp_path, optimizer={"kind": kind}, training={"max_steps": 30}))
    trainer = spoilt(
        prepare_trainer(how, tmp_path / "run", device="cpu", callback=Callback(on_message=said.append)),
        {8: math.nan, 25: 1e4},
    )
    kept: dict[int, dict[str, torch.Tensor]] = {}

    def keep(row: dict[str, Any], timing: dict[str, Any]) -> None:
        held = trainer.optimizer.state_dict() | trainer.model.state_dict()
        kept[row["step"]] = {name: each.clone() for name, each in held.items()}

    trainer.callback.on_step_end = keep
    trainer.train()
    for step in (8, 25):
        assert all(torch.equal(each, kept[step][name]) for name, each in kept[step - 1].items())
        assert not all(torch.equal(each, kept[step][name]) for name, each in kept[step + 1].items())
    skipped = {row["step"]: row["skipped"] for row in read_metrics(tmp_path / "run") if "skipped" in row}
    assert skipped == {8: "non_finite", 25: "grad_spike"}
    assert "step 8 was skipped: its gradient is not finite" in said
    assert any(
        each.startswith("step 25 was skipped: its gradient is ") and "times as long as usual" in each for each in said
    )


def test_a_run_that_skipped_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    how = load_recipe(tiny_recipe_in(tmp_path, training={"max_steps": 34}))
    bad = {9: math.nan} | dict.fromkeys(range(24, 32), 1e4)
    spoilt(prepare_trainer(how, tmp_path / "whole", device="cpu"), bad).train()
    trainer = spoilt(prepare_trainer(how, tmp_path / "run", device="cpu"), bad)
    trainer.callback.on_step_end = lambda row, timing: trainer.stop_requested.set() if row["step"] == 26 else None
    trainer.train()
    assert trainer.global_step == 26
    spoilt(resume_trainer(tmp_path / "run", device="cpu"), bad).train()
    assert state_digest(tmp_path / "run") == state_digest(tmp_path / "whole")
    skipped = [row["step"] for row in read_metrics(tmp_path / "run") if "skipped" in row]
    assert skipped == [9, *range(24, 24 + MAX_CONSECUTIVE_SPIKES)]


def test_a_run_without_finite_gradients_ends_and_its_checkpoint_is_good(tmp_path: Path) -> None:
    how = load_recipe(tiny_recipe_in(tmp_path, training={"max_steps": 100}, checkpoint={"interval": 10}))
    trainer = spoilt(prepare_trainer(how, tmp_path / "run", device="cpu"), dict.fromkeys(range(15, 100), math.inf))
    with pytest.raises(
        CutawayError, match=f"step {14 + MAX_NONFINITE_STEPS} is not finite; begin a run with a lower optimizer.lr"
    ):
        trainer.train()
    assert len(read_metrics(tmp_path / "run")) > 14  # rows are JSON, with null for what is no number
    again = resume_trainer(tmp_path / "run", device="cpu")
    assert all(torch.isfinite(each).all() for each in again.model.parameters())


def too_small(monkeypatch: pytest.MonkeyPatch, rows: int, error: BaseException) -> None:
    """Memory for so many sequences while it learns."""
    plain = TrainingModule.forward

    def forward(self: TrainingModule, task: Any) -> Any:
        if self.model.training and len(task.targets) > rows:
            raise error
        return plain(self, task)

    monkeypatch.setattr(TrainingModule, "forward", forward)


ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    MemoryError(),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] data. DefaultCPUAllocator: can't allocate memory: you tried"),
]


def test_out_of_memory_is_the_same_step_in_more_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(
        tiny_recipe_in(tmp_path, training={"grad_accum_steps": 4}), tmp_path / "whole", device="cpu"
    ).directory
    said: list[str] = []
    too_small(monkeypatch, 2, ERRORS[0])
    train(tiny_recipe_in(tmp_path), tmp_path / "run", device="cpu", callback=Callback(on_message=said.append))
    assert state_digest(tmp_path / "run") == state_digest(whole)
    assert [each for each in said if "memory is" in each] == [
        "memory is too small for a batch in 1 pieces; it is read in 2, the same step",
        "memory is too small for a batch in 2 pieces; it is read in 4, the same step",
    ]
    assert resume_trainer(tmp_path / "run", device="cpu").step_policy.grad_accum_steps == 4


def test_what_cannot_be_cut_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    too_small(monkeypatch, 0, ERRORS[0])
    with pytest.raises(CutawayError, match=r"does not hold one sequence of a step; lower data.seq_len"):
        train(tiny_recipe_in(tmp_path), tmp_path / "one", device="cpu")
    monkeypatch.undo()
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "cache"))
    trainer = prepare_trainer(load_recipe(tiny_recipe_in(tmp_path)), tmp_path / "state", device="cpu")

    def full(*args: Any, **kwargs: Any) -> None:
        raise MemoryError

    trainer.optimizer.step = full  # type: ignore[method-assign]
    with pytest.raises(CutawayError, match="memory does not hold the optimizer's state"):
        trainer.train()


def test_other_errors_are_not_memorys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    too_small(monkeypatch, 0, RuntimeError("shapes do not match"))
    with pytest.raises(RuntimeError, match="shapes do not match"):
        train(tiny_recipe_in(tmp_path), tmp_path / "run", device="cpu")
    assert all(is_out_of_memory(error) for error in ERRORS)
    assert not is_out_of_memory(ValueError("not enough memory"))


def test_skipping_nothing_is_the_same_run(tmp_path: Path) -> None:
    one, two = (
        train(
            tiny_recipe_in(tmp_path, training={"on_grad_spike": way, "max_steps": MIN_OBSERVED_STEPS + 2}),
            tmp_path / way,
            device="cpu",
        ).directory
        for way in ("skip", "continue")
    )
    assert model_bytes(one) == model_bytes(two)
