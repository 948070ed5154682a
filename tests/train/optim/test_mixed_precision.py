"""fp16 with a scaled loss: PyTorch's GradScaler's decisions, near fp32, back from an overflow, the same if stopped."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_runs import TEXT, run_digest, tiny_recipe

from cutaway.errors import CutawayError
from cutaway.train.optim import mixed_precision
from cutaway.train.optim.mixed_precision import GradScaler
from cutaway.train.recipe.load import load_recipe
from cutaway.train.trainer.launch import prepare_trainer, resume, train
from cutaway.train.trainer.train_step import metrics_to_python
from cutaway.train.trainer.trainer import Trainer

pytestmark = pytest.mark.usefixtures("skip_preflight")


@pytest.fixture
def how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text(TEXT)
    return tiny_recipe(
        tmp_path / "text.txt", training={"precision": "fp16", "max_steps": 20}, eval={"sample_prompt": None}
    )


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in map(json.loads, (run / "metrics.jsonl").open()) if "loss" in row]


def test_it_decides_as_pytorchs_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_precision, "GROWTH_INTERVAL", 3)
    ours = GradScaler("cpu")
    theirs = torch.amp.GradScaler("cpu", growth_interval=3)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for bad in [False, True, True, *[False] * 7, True, False, False, False, True]:
        weight.grad = torch.full((1,), float("inf") if bad else 1.0)
        theirs.scale(torch.ones(()))
        theirs.step(optimizer)
        theirs.update()
        ours.update(torch.tensor(bad))
        assert float(ours.scale) == theirs.get_scale()


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
        monkeypatch.setattr(mixed_precision, "INIT_SCALE", first)
        trainer = prepare_trainer(load_recipe(how, ["training.grad_clip=0.5"]), tmp_path / f"{first}", device="cpu")
        trainer.model.train()
        rows.append([metrics_to_python(trainer.train_step(number)) for number in range(3)])
        weights.append(dict(trainer.model.named_parameters()))
    for one, two in zip(*rows, strict=True):
        assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-2)
        assert one["grad_norm"] > 0.5
    for name, weight in weights[0].items():
        assert (weight - weights[1][name]).abs().mean() < 2e-4, name


def stopped_at(trainer: Trainer, step: int) -> None:
    trainer.callback.on_step_end = lambda row, timing: trainer.stop_requested.set() if row["step"] == step else None
    trainer.train()


def test_an_overflow_is_left_out_and_the_scale_lowered(
    how: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixed_precision, "INIT_SCALE", 2.0**28)
    monkeypatch.setattr(mixed_precision, "GROWTH_INTERVAL", 6)
    trainer = prepare_trainer(load_recipe(how), tmp_path / "whole", device="cpu")
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train_step(0)
    assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
    whole = train(how, tmp_path / "another", device="cpu")
    rows = [row for row in map(json.loads, (whole.directory / "metrics.jsonl").open()) if "loss" in row]
    left_out = [row["grad_norm"] is None for row in rows]
    first = left_out.index(False)
    assert 2 < first < 16
    assert [row["loss_scale"] for row in rows[: first + 1]] == [2.0 ** (28 - n) for n in range(first + 1)]
    assert max(row["loss_scale"] for row in rows[first:]) > rows[first]["loss_scale"]  # and it grows again
    assert rows[-1]["loss"] < 0.9 * rows[0]["loss"]
    for step in (2, first + 2):
        stopped_at(prepare_trainer(load_recipe(how), tmp_path / f"stopped {step}", device="cpu"), step)
        resume(tmp_path / f"stopped {step}", device="cpu")
        assert run_digest(tmp_path / f"stopped {step}") == run_digest(whole.directory)


def test_what_is_never_finite_ends_the_run(how: dict[str, Any], tmp_path: Path) -> None:
    trainer = prepare_trainer(load_recipe(how, ["training.max_steps=40"]), tmp_path / "run", device="cpu")
    with torch.no_grad():
        next(trainer.model.parameters()).fill_(float("nan"))
    with pytest.raises(CutawayError, match="is not finite"):
        trainer.train()
