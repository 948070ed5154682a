"""Weights & Biases logger, with a stub of the functions that cutaway calls."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.tiny_runs import read_metrics, state_digest, tiny_recipe_in

from cutaway.errors import CutawayError
from cutaway.train.logging.callbacks import Callback
from cutaway.train.recipe.load import load_recipe
from cutaway.train.trainer.launch import prepare_trainer, resume, train

pytestmark = pytest.mark.usefixtures("skip_preflight")
STUB = """
import json
from pathlib import Path

class Run:
    def __init__(self, options):
        self.file = Path(options["dir"]) / "wandb" / "stub.jsonl"
        self.write({"init": options})
    def write(self, row):
        with self.file.open("a") as file:
            file.write(json.dumps(row) + "\\n")
    def define_metric(self, name, step_metric=None):
        self.write({"metric": [name, step_metric]})
    def log(self, row):
        self.write({"log": row})
    def finish(self):
        self.write({"finish": True})

def init(**options):
    return Run(options)
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "wandb.py").write_text(STUB)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)


def wandb_recipe(directory: Path, **options: Any) -> dict[str, Any]:
    return tiny_recipe_in(directory, eval={"sample_prompts": ["1 and", "2 and"]}, logging={"wandb": options})


def read_rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "wandb" / "stub.jsonl").read_text().splitlines()]


def test_metrics_are_logged_and_a_resumed_run_continues_the_same_run(stub: None, tmp_path: Path) -> None:
    trainer = prepare_trainer(load_recipe(wandb_recipe(tmp_path, project="p")), tmp_path / "run", device="cpu")
    trainer.callback.on_step_end = lambda row, timing: trainer.stop_requested.set() if row["step"] == 5 else None
    trainer.train()
    resume(tmp_path / "run", device="cpu")
    rows, metrics = read_rows(tmp_path / "run"), read_metrics(tmp_path / "run")
    inits = [row["init"] for row in rows if "init" in row]
    assert len(inits) == 2
    assert inits[0] == inits[1]  # the same id
    assert (inits[0]["project"], inits[0]["name"], inits[0]["resume"]) == ("p", "run", "allow")
    assert inits[0]["config"]["training"]["max_steps"] == 12
    assert [row["metric"] for row in rows if "metric" in row] == 2 * [["step", None], ["*", "step"]]
    logged = [row["log"] for row in rows if "log" in row]
    losses = [(row["step"], row["train/loss"]) for row in logged if "train/loss" in row]
    assert losses == [(row["step"], row["loss"]) for row in metrics if "loss" in row]
    samples = [row["eval/sample"] for row in logged if "eval/sample" in row]
    assert samples == [row["sample"] for row in metrics if "sample" in row]
    assert sum("finish" in row for row in rows) == 2


def test_failing_wandb_does_not_stop_or_change_training(
    stub: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = train(wandb_recipe(tmp_path), tmp_path / "expected", device="cpu").directory

    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no API key")

    monkeypatch.setattr("wandb.init", fail)
    messages: list[str] = []
    callback = Callback(on_message=messages.append)
    run = train(wandb_recipe(tmp_path), tmp_path / "run", device="cpu", callback=callback).directory
    assert state_digest(run) == state_digest(expected)
    assert messages.count("could not log to Weights & Biases (no API key); training continues") == 1


def test_missing_wandb_is_an_error_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory `wandb` with the files of runs is not the package."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    with pytest.raises(CutawayError, match=r"pip install 'cutaway\[wandb\]'"):
        prepare_trainer(load_recipe(wandb_recipe(tmp_path)), tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()
