"""fp16 with a scaled loss: PyTorch's GradScaler's decisions, near fp32, back from an overflow, the same if stopped."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_train import TEXT, fingerprint, small

from cutaway.errors import CutawayError
from cutaway.train import scale as scaling
from cutaway.train.loop import Loop
from cutaway.train.recipe import recipe
from cutaway.train.scale import Scale
from cutaway.train.start import begin, resume, train
from cutaway.train.step import settled


@pytest.fixture
def how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text(TEXT)
    return small(tmp_path / "text.txt", training={"precision": "fp16", "steps": 20}, watching={"sample": None})


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in map(json.loads, (run / "metrics.jsonl").open()) if "loss" in row]


def test_it_decides_as_pytorchs_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "EVERY", 3)
    ours = Scale("cpu")
    theirs = torch.amp.GradScaler("cpu", growth_interval=3)
    weight = torch.nn.Parameter(torch.ones(1))
    optimiser = torch.optim.SGD([weight], lr=0.0)
    for bad in [False, True, True, *[False] * 7, True, False, False, False, True]:
        weight.grad = torch.full((1,), float("inf") if bad else 1.0)
        theirs.scale(torch.ones(()))
        theirs.step(optimiser)
        theirs.update()
        ours.step(torch.tensor(bad))
        assert float(ours.value) == theirs.get_scale()


def test_it_learns_as_fp32_does(how: dict[str, Any], tmp_path: Path) -> None:
    narrow = losses(train(how, tmp_path / "fp16", device="cpu").directory)
    how["training"]["precision"] = "fp32"
    wide = losses(train(how, tmp_path / "fp32", device="cpu").directory)
    assert narrow != wide
    assert narrow == pytest.approx(wide, rel=0.01)
    assert narrow[-1] < 0.75 * narrow[0]


def test_the_scale_leaves_a_step_as_it_is(how: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Length and clipping are of the true gradient: another power of two changes no more than rounding does."""
    rows, weights = [], []
    for first in (2.0**10, 2.0**14):
        monkeypatch.setattr(scaling, "FIRST", first)
        loop = begin(recipe(how, ["training.clip=0.5"]), tmp_path / f"{first}", device="cpu")
        loop.model.train()
        rows.append([settled(loop.step(number)) for number in range(3)])
        weights.append(dict(loop.model.named_parameters()))
    for one, two in zip(*rows, strict=True):
        assert one["gradient"] == pytest.approx(two["gradient"], rel=1e-2)
        assert one["gradient"] > 0.5
    for name, weight in weights[0].items():
        assert (weight - weights[1][name]).abs().mean() < 2e-4, name


def stopped_at(loop: Loop, step: int) -> None:
    loop.watcher.step = lambda row, timing: loop.stop.set() if row["step"] == step else None
    loop.go()


def test_an_overflow_is_left_out_and_the_scale_lowered(
    how: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaling, "FIRST", 2.0**28)
    monkeypatch.setattr(scaling, "EVERY", 6)
    loop = begin(recipe(how), tmp_path / "whole", device="cpu")
    before = {name: p.detach().clone() for name, p in loop.model.named_parameters()}
    loop.step(0)
    assert all(torch.equal(p, before[name]) for name, p in loop.model.named_parameters())
    whole = train(how, tmp_path / "another", device="cpu")
    rows = [row for row in map(json.loads, (whole.directory / "metrics.jsonl").open()) if "loss" in row]
    left_out = [row["gradient"] is None for row in rows]
    first = left_out.index(False)
    assert 2 < first < 16
    assert [row["scale"] for row in rows[: first + 1]] == [2.0 ** (28 - n) for n in range(first + 1)]
    assert max(row["scale"] for row in rows[first:]) > rows[first]["scale"]  # and it grows again
    assert rows[-1]["loss"] < 0.9 * rows[0]["loss"]
    for step in (2, first + 2):
        stopped_at(begin(recipe(how), tmp_path / f"stopped {step}", device="cpu"), step)
        resume(tmp_path / f"stopped {step}", device="cpu")
        assert fingerprint(tmp_path / f"stopped {step}") == fingerprint(whole.directory)


def test_what_is_never_finite_ends_the_run(how: dict[str, Any], tmp_path: Path) -> None:
    loop = begin(recipe(how, ["training.steps=40"]), tmp_path / "run", device="cpu")
    with torch.no_grad():
        next(loop.model.parameters()).fill_(float("nan"))
    with pytest.raises(CutawayError, match="is not finite"):
        loop.go()
