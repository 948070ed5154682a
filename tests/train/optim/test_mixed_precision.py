"""fp16 with loss scaling: equal to torch.amp.GradScaler, close to fp32, recovers from overflow, bit-exact resume."""

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
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text(TEXT)
    return tiny_recipe(
        tmp_path / "text.txt", training={"precision": "fp16", "max_steps": 20}, eval={"sample_prompt": None}
    )


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in map(json.loads, (run / "metrics.jsonl").open()) if "loss" in row]


def test_scale_equals_torch_grad_scaler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_precision, "GROWTH_INTERVAL", 3)
    scaler = GradScaler("cpu")
    reference = torch.amp.GradScaler("cpu", growth_interval=3)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for overflows in [False, True, True, *[False] * 7, True, False, False, False, True]:
        weight.grad = torch.full((1,), float("inf") if overflows else 1.0)
        reference.scale(torch.ones(()))
        reference.step(optimizer)
        reference.update()
        scaler.update(torch.tensor(overflows))
        assert float(scaler.scale) == reference.get_scale()


def test_fp16_trains_like_fp32(recipe: dict[str, Any], tmp_path: Path) -> None:
    fp16_losses = losses(train(recipe, tmp_path / "fp16", device="cpu").directory)
    recipe["training"]["precision"] = "fp32"
    fp32_losses = losses(train(recipe, tmp_path / "fp32", device="cpu").directory)
    assert fp16_losses != fp32_losses
    assert fp16_losses == pytest.approx(fp32_losses, rel=0.01)
    assert fp16_losses[-1] < 0.75 * fp16_losses[0]


def test_step_is_independent_of_the_scale(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradient norm and clipping use the unscaled gradient: another power of two changes only rounding."""
    rows, weights = [], []
    for scale in (2.0**10, 2.0**14):
        monkeypatch.setattr(mixed_precision, "INIT_SCALE", scale)
        trainer = prepare_trainer(load_recipe(recipe, ["training.grad_clip=0.5"]), tmp_path / f"{scale}", device="cpu")
        trainer.model.train()
        rows.append([metrics_to_python(trainer.train_step(step)) for step in range(3)])
        weights.append(dict(trainer.model.named_parameters()))
    for one, two in zip(*rows, strict=True):
        assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-2)
        assert one["grad_norm"] > 0.5
    for name, weight in weights[0].items():
        assert (weight - weights[1][name]).abs().mean() < 2e-4, name


def train_until(trainer: Trainer, step: int) -> None:
    trainer.callback.on_step_end = lambda row, timing: trainer.stop_requested.set() if row["step"] == step else None
    trainer.train()


def test_overflow_skips_the_step_and_lowers_the_scale(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixed_precision, "INIT_SCALE", 2.0**28)
    monkeypatch.setattr(mixed_precision, "GROWTH_INTERVAL", 6)
    trainer = prepare_trainer(load_recipe(recipe), tmp_path / "first", device="cpu")
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train_step(0)
    assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
    uninterrupted = train(recipe, tmp_path / "uninterrupted", device="cpu")
    rows = [row for row in map(json.loads, (uninterrupted.directory / "metrics.jsonl").open()) if "loss" in row]
    skipped = [row["grad_norm"] is None for row in rows]
    first = skipped.index(False)
    assert 2 < first < 16
    assert [row["loss_scale"] for row in rows[: first + 1]] == [2.0 ** (28 - n) for n in range(first + 1)]
    assert max(row["loss_scale"] for row in rows[first:]) > rows[first]["loss_scale"]  # the scale grows again
    assert rows[-1]["loss"] < 0.9 * rows[0]["loss"]
    for step in (2, first + 2):
        train_until(prepare_trainer(load_recipe(recipe), tmp_path / f"stopped {step}", device="cpu"), step)
        resume(tmp_path / f"stopped {step}", device="cpu")
        assert run_digest(tmp_path / f"stopped {step}") == run_digest(uninterrupted.directory)


def test_gradients_that_are_never_finite_are_an_error(recipe: dict[str, Any], tmp_path: Path) -> None:
    trainer = prepare_trainer(load_recipe(recipe, ["training.max_steps=40"]), tmp_path / "run", device="cpu")
    with torch.no_grad():
        next(trainer.model.parameters()).fill_(float("nan"))
    with pytest.raises(CutawayError, match="is not finite"):
        trainer.train()
