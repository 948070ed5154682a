"""Snapshots are the weights of the run at their steps, and saved models are listed and loaded while files change."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_runs import tiny_recipe_in
from torch import Tensor

import cutaway as ct
from cutaway.errors import InputError
from cutaway.train.checkpoint.run_directory import RunDirectory
from cutaway.train.checkpoint.saved_models import list_saved_models, load_newest_model, load_saved_model
from cutaway.train.checkpoint.snapshots import resolve_num_snapshots, snapshot_steps
from cutaway.train.logging.callbacks import Callback
from cutaway.train.recipe.load import load_recipe
from cutaway.train.trainer.launch import prepare_trainer, train

pytestmark = [pytest.mark.unchecked, pytest.mark.usefixtures("skip_preflight")]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "cache"))


def run_with_weights(tmp_path: Path, **overrides: Any) -> tuple[RunDirectory, dict[int, dict[str, Tensor]]]:
    """Train a tiny run and return it with copies of its weights by step."""
    weights: dict[int, dict[str, Tensor]] = {}
    callback = Callback(on_step_end=lambda row, timing: record(row["step"]))
    trainer = prepare_trainer(
        load_recipe(tiny_recipe_in(tmp_path, **overrides)), tmp_path / "run", device="cpu", callback=callback
    )

    def record(step: int) -> None:
        weights[step] = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}

    record(0)
    trainer.train()
    return trainer.run_directory, weights


def test_default_steps_are_logarithmic() -> None:
    assert snapshot_steps(12, 1100) == [0, 11, 17, 25, 39, 59, 89, 136, 206, 313, 476, 724]
    assert snapshot_steps(12, 6) == [0, 1, 2, 3, 4]
    assert [snapshot_steps(count, 100) for count in (0, 1, 2)] == [[], [0], [0, 1]]
    assert [resolve_num_snapshots(None, size) for size in (30_000_000, 30_000_001)] == [12, 0]
    assert resolve_num_snapshots(3, 10**9) == 3


def test_saved_models_have_the_weights_of_their_steps(tmp_path: Path) -> None:
    run, weights = run_with_weights(tmp_path, checkpoint={"num_snapshots": 4})
    saved = list_saved_models(run)
    assert [each.step for each in saved if each.kind == "snapshot"] == [0, 1, 3]
    assert [each.id for each in saved if each.kind != "snapshot"] == ["checkpoints/step-000000008", "model"]
    for each in saved:
        loaded = load_saved_model(run, each).model.state_dict()
        assert loaded.keys() == weights[each.step].keys()
        assert all(torch.equal(loaded[name], weight) for name, weight in weights[each.step].items())
        num_weights = sum(weight.numel() for weight in weights[each.step].values())
        assert each.num_bytes == pytest.approx(4 * num_weights, rel=0.2)


def test_snapshots_of_a_run_with_ema_have_the_averaged_weights(tmp_path: Path) -> None:
    run, weights = run_with_weights(tmp_path, training={"ema_decay": 0.5})
    snapshot = next(each for each in list_saved_models(run) if each.step == 3)
    loaded = load_saved_model(run, snapshot).model.state_dict()
    assert any(not torch.equal(loaded[name], weight) for name, weight in weights[3].items())
    exported = ct.load(run.model_directory).model.state_dict()
    assert any(not torch.equal(exported[name], weight) for name, weight in weights[12].items())


def test_snapshots_do_not_change_the_run(tmp_path: Path) -> None:
    run, _ = run_with_weights(tmp_path)
    other = train(tiny_recipe_in(tmp_path, checkpoint={"num_snapshots": 0}), tmp_path / "none", device="cpu")
    assert not other.snapshot_directory.exists()
    assert (other.directory / "metrics.jsonl").read_bytes() == (run.directory / "metrics.jsonl").read_bytes()


def test_vanished_damaged_and_partial_models(tmp_path: Path) -> None:
    run, weights = run_with_weights(tmp_path, checkpoint={"num_snapshots": 4})
    saved = {each.id: each for each in list_saved_models(run)}
    shutil.rmtree(run.checkpoint_directory)
    shutil.rmtree(run.model_directory)
    with pytest.raises(InputError, match="the run has removed it"):
        load_saved_model(run, saved["checkpoints/step-000000008"])
    (run.snapshot_directory / ".step-000000009.safetensors.saving").write_bytes(b"partial")
    (run.snapshot_directory / "step-000000010.safetensors").write_bytes(b"damaged")
    assert "snapshots/step-000000009" not in {each.id for each in list_saved_models(run)}
    damaged = next(each for each in list_saved_models(run) if each.step == 10)
    with pytest.raises(InputError, match=r"cannot be parsed .* choose another checkpoint"):
        load_saved_model(run, damaged)
    checkpoint, step = load_newest_model(run)
    assert step == 3
    assert all(torch.equal(checkpoint.model.state_dict()[name], weight) for name, weight in weights[step].items())


def test_failed_snapshot_is_reported_and_training_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("cutaway.train.checkpoint.snapshots.write_file", fail)
    messages: list[str] = []
    recipe = tiny_recipe_in(tmp_path, checkpoint={"num_snapshots": 2})
    run = train(recipe, tmp_path / "run", device="cpu", callback=Callback(on_message=messages.append))
    assert run.model_directory.is_dir()
    assert any("could not save the snapshot of step 0: No space left on device" in text for text in messages)


def test_a_run_without_a_saved_model_has_its_initial_weights(tmp_path: Path) -> None:
    trainer = prepare_trainer(load_recipe(tiny_recipe_in(tmp_path)), tmp_path / "run", device="cpu")
    run = trainer.run_directory
    assert list_saved_models(run) == []
    checkpoint, step = load_newest_model(run)
    assert step == 0
    weights = checkpoint.model.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in trainer.model.state_dict().items())


def test_fine_tuning_run_without_a_saved_model_has_the_base_weights(tmp_path: Path) -> None:
    base = train(tiny_recipe_in(tmp_path, training={"max_steps": 2}), tmp_path / "base", device="cpu")
    recipe = tiny_recipe_in(tmp_path) | {"model": {"checkpoint": str(base.directory)}}
    run = prepare_trainer(load_recipe(recipe), tmp_path / "run", device="cpu").run_directory
    expected = ct.load(base.directory, dtype=torch.float32).model.state_dict()
    loaded = load_newest_model(run)[0].model.state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in expected.items())
    shutil.rmtree(base.model_directory)
    with pytest.raises(InputError, match="wait for the first checkpoint"):
        load_newest_model(run)


def test_training_lock(tmp_path: Path) -> None:
    seen: list[bool | None] = []
    callback = Callback(on_step_end=lambda row, timing: seen.append(RunDirectory.open(tmp_path / "run").is_training()))
    run = train(tiny_recipe_in(tmp_path), tmp_path / "run", device="cpu", callback=callback)
    assert set(seen) == {True}
    assert run.is_training() is False
