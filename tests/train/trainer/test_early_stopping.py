"""Early stopping and export of the best checkpoint: decisions, exported weights, bit-exact resume."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cli_runner import CliRunner
from support.tiny_runs import read_metrics, run_digest, tiny_recipe, write_texts

import cutaway as ct
from cutaway.train.checkpoint.manifest import read_checkpoint
from cutaway.train.logging.callbacks import Callback
from cutaway.train.recipe.load import load_recipe
from cutaway.train.recipe.schema import EarlyStoppingConfig
from cutaway.train.trainer.early_stopping import EvalTracker
from cutaway.train.trainer.launch import prepare_trainer, resume, resume_trainer, train
from cutaway.train.trainer.trainer import Trainer

pytestmark = pytest.mark.usefixtures("skip_preflight")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "cache"))


LOSSES = [3.0, 2.5, 2.4, 2.45, 2.39, 2.6, 2.7, 2.1]


def overfitting_recipe(tmp_path: Path, **overrides: Any) -> dict[str, Any]:
    """A recipe whose eval_loss rises at the end, because the learning rate is high."""
    texts = tmp_path / "texts"
    return tiny_recipe(
        texts if texts.exists() else write_texts(texts),
        optimizer={"lr": 0.3, "weight_decay": 0.0},
        schedule={"kind": "constant"},
        training={"max_steps": 40},
        eval={"interval": 2, "early_stopping": {"patience": 3}} | overrides.pop("eval", {}),
        checkpoint={"interval": 5, "export": "best", "num_snapshots": 0},
        **overrides,
    )


@pytest.mark.parametrize(
    ("min_delta", "patience", "expected_stop"),
    [
        (0.0, 2, 6),  # index of the evaluation after which the run stops: 2.39, then 2.6 and 2.7
        (0.0, 3, None),  # 2.1 is an improvement
        (0.15, 2, 3),  # 2.4 and 2.45 are not better than 2.5 by more than 0.15
        (0.15, 4, 5),
    ],
)
def test_patience_and_min_delta(min_delta: float, patience: int, expected_stop: int | None) -> None:
    tracker = EvalTracker(EarlyStoppingConfig(patience=patience, min_delta=min_delta))
    stops = []
    for step, loss in enumerate(LOSSES):
        tracker.update(step, loss)
        stops.append(tracker.should_stop)
    assert next((index for index, stop in enumerate(stops) if stop), None) == expected_stop


def test_the_best_step_is_the_first_with_the_lowest_loss() -> None:
    tracker = EvalTracker()
    assert [tracker.update(step, loss) for step, loss in enumerate([math.nan, 2.0, 2.0, math.inf, 1.5, 1.5])] == [
        False, True, False, False, True, False
    ]  # fmt: skip
    assert (tracker.best_step, tracker.best_eval_loss, tracker.should_stop) == (4, 1.5, False)


def run_facts(run: Path) -> tuple[int, int, float]:
    """Last step, step with the lowest eval_loss, and this loss."""
    rows = read_metrics(run)
    best = min((row for row in rows if "eval_loss" in row), key=lambda row: row["eval_loss"])
    return max(row["step"] for row in rows), best["step"], best["eval_loss"]


def test_run_stops_early_and_exports_the_best_weights(tmp_path: Path, run_cli: CliRunner) -> None:
    (tmp_path / "recipe.json").write_text(json.dumps(overfitting_recipe(tmp_path)))
    output = run_cli("train", tmp_path / "recipe.json", "--out", tmp_path / "run", "--device", "cpu", "--json")
    last_step, best_step, best_loss = run_facts(tmp_path / "run")
    assert best_step + 6 == last_step < 40
    outcome = json.loads(output.splitlines()[-1])
    assert (outcome["step"], outcome["done"], outcome["model"]) == (last_step, True, str(tmp_path / "run" / "model"))
    checkpoint = read_checkpoint(tmp_path / "run" / "checkpoints" / f"step-{best_step:09d}")
    assert not isinstance(checkpoint, str)
    exported = ct.load(tmp_path / "run").model.state_dict()
    assert all(torch.equal(tensor, exported[name]) for name, tensor in checkpoint.tensor_groups["model"].items())
    status = json.loads(run_cli("train", "--status", tmp_path / "run", "--json"))
    assert (status["finished"], status["exported_step"], status["best_eval_loss"]) == (True, best_step, best_loss)
    assert f"the exported model is that of step {best_step}" in run_cli("train", "--status", tmp_path / "run")
    digest = run_digest(tmp_path / "run")
    run_cli("train", "--resume", tmp_path / "run", "--device", "cpu")  # a run that has stopped early is finished
    assert run_digest(tmp_path / "run") == digest


def stop_at(trainer: Trainer, step: int) -> None:
    trainer.callback.on_step_end = lambda row, timing: trainer.stop_requested.set() if row["step"] == step else None
    trainer.train()


@pytest.mark.parametrize("ema_decay", [None, 0.9])
def test_resumed_run_stops_at_the_same_step_with_the_same_weights(ema_decay: float | None, tmp_path: Path) -> None:
    recipe = overfitting_recipe(tmp_path)
    recipe["training"]["ema_decay"] = ema_decay
    expected = train(recipe, tmp_path / "expected", device="cpu").directory
    last_step, best_step, _ = run_facts(expected)
    trainer = prepare_trainer(load_recipe(recipe), tmp_path / "run", device="cpu")
    stop_at(trainer, 3)
    for step in (best_step, best_step + 3, last_step - 1):  # before, between and after evaluations without improvement
        if step > trainer.global_step:
            trainer = resume_trainer(tmp_path / "run", device="cpu")
            stop_at(trainer, step)
            assert trainer.global_step == step
    resume(tmp_path / "run", device="cpu")
    assert run_digest(tmp_path / "run") == run_digest(expected)


def test_last_weights_are_exported_if_the_best_checkpoint_is_lost(tmp_path: Path) -> None:
    run = train(overfitting_recipe(tmp_path), tmp_path / "run", device="cpu").directory
    last_step, best_step, _ = run_facts(run)
    shutil.rmtree(run / "checkpoints" / f"step-{best_step:09d}")
    messages: list[str] = []
    resume(run, device="cpu", callback=Callback(on_message=messages.append))
    assert any(f"step {best_step}" in message and "last step are exported" in message for message in messages)
    checkpoint = read_checkpoint(run / "checkpoints" / f"step-{last_step:09d}")
    assert not isinstance(checkpoint, str)
    exported = ct.load(run).model.state_dict()
    assert all(torch.equal(tensor, exported[name]) for name, tensor in checkpoint.tensor_groups["model"].items())
