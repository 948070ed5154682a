"""What goes wrong while a model learns: each has a policy, a message, and a run that goes on to the same bits."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import rows_of, small, state_of, weights_of

from cutaway.errors import CutawayError
from cutaway.train.audience import Watcher
from cutaway.train.learner import Learner
from cutaway.train.loop import Loop
from cutaway.train.policy import PATIENCE, SETTLING, STUBBORN, Policy, out_of_memory
from cutaway.train.recipe import recipe
from cutaway.train.start import begin, go_on, train


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "cache"))


def spoilt(loop: Loop, factors: dict[int, float]) -> Loop:
    """With the gradients of some steps, counted from 1, multiplied."""
    plain = loop.stepper.gradient

    def gradient(number: int) -> Any:
        found = plain(number)
        for each in loop.model.parameters():
            if each.grad is not None:
                each.grad.mul_(factors.get(number + 1, 1.0))
        return found

    loop.stepper.gradient = gradient  # type: ignore[method-assign]
    return loop


def judged(policy: Policy, lengths: list[float]) -> list[bool]:
    return [bool(policy.judge(torch.tensor(length))[0]) for length in lengths]


def usual(count: int, seed: int = 0) -> list[float]:
    """Lengths as they come, a fifth off here and there."""
    made = torch.Generator().manual_seed(seed)
    return (torch.randn(count, generator=made) * 0.2).exp().tolist()


def test_lengths_as_they_come_are_never_skipped() -> None:
    for seed in range(5):
        assert not any(judged(Policy(1), usual(400, seed)))
    falling = [10 * length / math.sqrt(1 + step) for step, length in enumerate(usual(400))]
    rising = [0.1 * length * (1 + step) for step, length in enumerate(usual(400))]
    assert not any(judged(Policy(1), falling))
    assert not any(judged(Policy(1), rising))


def test_a_length_out_of_line_is_skipped_once_it_is_known_what_is_usual() -> None:
    assert not any(judged(Policy(1), [*usual(SETTLING - 1), 100.0]))
    policy = Policy(1)
    judged(policy, usual(SETTLING))
    before = {name: each.clone() for name, each in policy.state.items()}
    assert judged(policy, [100.0]) == [True]
    assert {name for name in before if before[name] != policy.state[name]} == {
        "spikes"
    }  # else nothing is learned of it
    assert judged(policy, [1.0, 100.0, float("nan"), 2.0]) == [False, True, True, False]
    assert judged(Policy(1, "go-on"), [*usual(40), 100.0, float("inf")])[-2:] == [False, True]


def test_what_stays_out_of_line_becomes_usual() -> None:
    policy = Policy(1)
    judged(policy, usual(60))
    assert judged(policy, [50 * length for length in usual(60)]) == [True] * STUBBORN + [False] * (60 - STUBBORN)
    assert judged(policy, [1.0, 50.0, 5000.0]) == [False, False, True]


def test_a_policy_goes_on_where_it_was() -> None:
    lengths = [*usual(30), 100.0, *usual(5), *[60.0] * 8, float("nan"), *usual(30, 1), 200.0]
    whole, first, second = Policy(3), Policy(3), Policy(1)
    expected = judged(whole, lengths)
    begun = judged(first, lengths[:38])
    second.load(first.tensors())
    assert begun + judged(second, lengths[38:]) == expected
    assert second.tensors() == whole.tensors()


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_skipped_step_changes_nothing_and_says_so(kind: str, tmp_path: Path) -> None:
    said: list[str] = []
    how = recipe(small(tmp_path, optimiser={"kind": kind}, training={"steps": 30}))
    loop = spoilt(begin(how, tmp_path / "run", device="cpu", watcher=Watcher(say=said.append)), {8: math.nan, 25: 1e4})
    kept: dict[int, dict[str, torch.Tensor]] = {}

    def keep(row: dict[str, Any], timing: dict[str, Any]) -> None:
        held = loop.optimiser.tensors() | loop.model.state_dict()
        kept[row["step"]] = {name: each.clone() for name, each in held.items()}

    loop.watcher.step = keep
    loop.go()
    for step in (8, 25):
        assert all(torch.equal(each, kept[step][name]) for name, each in kept[step - 1].items())
        assert not all(torch.equal(each, kept[step][name]) for name, each in kept[step + 1].items())
    skipped = {row["step"]: row["skipped"] for row in rows_of(tmp_path / "run") if "skipped" in row}
    assert skipped == {8: "not finite", 25: "spike"}
    assert "step 8 was skipped: its gradient is not finite" in said
    assert any(
        each.startswith("step 25 was skipped: its gradient is ") and "times as long as usual" in each for each in said
    )


def test_a_run_that_skipped_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    how = recipe(small(tmp_path, training={"steps": 34}))
    bad = {9: math.nan} | dict.fromkeys(range(24, 32), 1e4)
    spoilt(begin(how, tmp_path / "whole", device="cpu"), bad).go()
    loop = spoilt(begin(how, tmp_path / "run", device="cpu"), bad)
    loop.watcher.step = lambda row, timing: loop.stop.set() if row["step"] == 26 else None
    loop.go()
    assert loop.done == 26
    spoilt(go_on(tmp_path / "run", device="cpu"), bad).go()
    assert state_of(tmp_path / "run") == state_of(tmp_path / "whole")
    skipped = [row["step"] for row in rows_of(tmp_path / "run") if "skipped" in row]
    assert skipped == [9, *range(24, 24 + STUBBORN)]


def test_a_run_without_finite_gradients_ends_and_its_checkpoint_is_good(tmp_path: Path) -> None:
    how = recipe(small(tmp_path, training={"steps": 100}, saving={"every": 10}))
    loop = spoilt(begin(how, tmp_path / "run", device="cpu"), dict.fromkeys(range(15, 100), math.inf))
    with pytest.raises(
        CutawayError, match=f"step {14 + PATIENCE} is not finite; begin a run with a lower optimiser.rate"
    ):
        loop.go()
    assert len(rows_of(tmp_path / "run")) > 14  # rows are JSON, with null for what is no number
    again = go_on(tmp_path / "run", device="cpu")
    assert all(torch.isfinite(each).all() for each in again.model.parameters())


def too_small(monkeypatch: pytest.MonkeyPatch, rows: int, error: BaseException) -> None:
    """Memory for so many sequences while it learns."""
    plain = Learner.forward

    def forward(self: Learner, task: Any) -> Any:
        if self.model.training and len(task.targets) > rows:
            raise error
        return plain(self, task)

    monkeypatch.setattr(Learner, "forward", forward)


ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    MemoryError(),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] data. DefaultCPUAllocator: can't allocate memory: you tried"),
]


def test_out_of_memory_is_the_same_step_in_more_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(small(tmp_path, training={"pieces": 4}), tmp_path / "whole", device="cpu").directory
    said: list[str] = []
    too_small(monkeypatch, 2, ERRORS[0])
    train(small(tmp_path), tmp_path / "run", device="cpu", watcher=Watcher(say=said.append))
    assert state_of(tmp_path / "run") == state_of(whole)
    assert [each for each in said if "memory is" in each] == [
        "memory is too small for a batch in 1 pieces; it is read in 2, the same step",
        "memory is too small for a batch in 2 pieces; it is read in 4, the same step",
    ]
    assert go_on(tmp_path / "run", device="cpu").policy.pieces == 4


def test_what_cannot_be_cut_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    too_small(monkeypatch, 0, ERRORS[0])
    with pytest.raises(CutawayError, match=r"does not hold one sequence of a step; lower data.length"):
        train(small(tmp_path), tmp_path / "one", device="cpu")
    monkeypatch.undo()
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "cache"))
    loop = begin(recipe(small(tmp_path)), tmp_path / "state", device="cpu")

    def full(*given: Any, **how: Any) -> None:
        raise MemoryError

    loop.optimiser.step = full  # type: ignore[method-assign]
    with pytest.raises(CutawayError, match="memory does not hold the optimiser's state"):
        loop.go()


def test_other_errors_are_not_memorys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    too_small(monkeypatch, 0, RuntimeError("shapes do not match"))
    with pytest.raises(RuntimeError, match="shapes do not match"):
        train(small(tmp_path), tmp_path / "run", device="cpu")
    assert all(out_of_memory(error) for error in ERRORS)
    assert not out_of_memory(ValueError("not enough memory"))


def test_skipping_nothing_is_the_same_run(tmp_path: Path) -> None:
    one, two = (
        train(
            small(tmp_path, training={"on_spike": way, "steps": SETTLING + 2}), tmp_path / way, device="cpu"
        ).directory
        for way in ("skip", "go-on")
    )
    assert weights_of(one) == weights_of(two)
