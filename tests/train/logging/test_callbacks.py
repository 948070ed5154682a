"""What people see of a run: a line that moves or a log, a picture, TensorBoard; none of it can end a run."""

import io
import json
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from support.tiny_runs import read_metrics, state_digest, tiny_recipe_in

import cutaway as ct
from cutaway.cli import main
from cutaway.cli.views import training_progress
from cutaway.cli.views.training_progress import TrainingProgress, format_clock
from cutaway.errors import CutawayError
from cutaway.size.measured_hardware import MeasuredHardware, save_measured_hardware
from cutaway.train.logging import callbacks, tensorboard, throughput
from cutaway.train.logging.callbacks import Callback
from cutaway.train.logging.loss_plot import MAX_POINTS, group_steps, plot_losses
from cutaway.train.recipe.load import load_recipe
from cutaway.train.trainer.launch import prepare_trainer, resume, train

pytestmark = pytest.mark.usefixtures("skip_preflight")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "cache"))


def cli(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["cutaway", "train", "--device", "cpu", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def measured(**rates: float) -> None:
    save_measured_hardware(
        MeasuredHardware(
            device="any",
            kind="cpu",
            hardware_name=None,
            memory=10**9,
            bandwidth=1e10,
            flops=rates,
            efficiency={},
            model="gpt2",
            dtype="fp32",
            date="2026-01-01",
        )
    )


def test_a_log_has_plain_lines_and_json_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured(fp32=1e11)
    (tmp_path / "recipe.json").write_text(json.dumps(tiny_recipe_in(tmp_path, eval={"sample_prompt": "1 and"})))
    monkeypatch.setattr(training_progress, "LOG_INTERVAL_SECONDS", 0.0)
    assert cli(monkeypatch, str(tmp_path / "recipe.json"), "--out", str(tmp_path / "log")) == 0
    told = capsys.readouterr()
    assert told.out == ""
    assert "\x1b" not in told.err
    lines = [line for line in told.err.splitlines() if re.match(r"\d+/12 ", line)]
    assert len(lines) == 12
    shown = r"loss \d\.\d{3}  [\d,]+ tokens/s  \d+% of peak  [\d.]+ GB  \d+:\d\d"
    assert all(re.fullmatch(rf"{step}/12  {shown}( left)?", line) for step, line in enumerate(lines, 1))
    assert "1 and" in told.err
    assert "update/weight ≤" in told.err
    assert cli(monkeypatch, str(tmp_path / "recipe.json"), "--out", str(tmp_path / "data"), "--json") == 0
    told = capsys.readouterr()
    assert told.err == ""
    rows = [json.loads(line) for line in told.out.splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 13))
    assert [row["step"] for row in rows if "layer_stats" in row] == [5, 10, 12]


def test_a_run_says_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = prepare_trainer(load_recipe(tiny_recipe_in(tmp_path)), tmp_path / "run", device="cpu")
    trainer.callback.on_step_end = lambda row, timing: trainer.stop_requested.set() if row["step"] == 7 else None
    trainer.train()
    assert cli(monkeypatch, "--status", str(tmp_path / "run")) == 0
    shown = capsys.readouterr().out
    assert "tiny-gpt, causal-lm, adamw" in shown
    assert "step 7 of 12" in shown
    assert "go on with: cutaway train --resume" in shown
    assert "\n  model " not in shown
    assert cli(monkeypatch, "--resume", str(tmp_path / "run"), "--json") == 0
    assert "finished" not in capsys.readouterr().out
    assert cli(monkeypatch, "--resume", str(tmp_path / "run")) == 0
    assert "is finished: all 12 steps have been taken" in capsys.readouterr().err
    assert cli(monkeypatch, "--status", str(tmp_path / "run"), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["max_steps"], found["num_skipped_steps"]) == (12, 12, 0)
    assert found["best_eval_loss"] == min(
        row["eval_loss"] for row in read_metrics(tmp_path / "run") if "eval_loss" in row
    )
    assert set(found["files"]) == {"metrics.jsonl", "timings.jsonl", "loss.svg", "checkpoints", "model"}
    assert cli(monkeypatch, "--status", str(tmp_path)) == 2
    assert "is no run" in capsys.readouterr().err


def test_a_terminal_has_a_line_that_moves_and_cannot_be_commanded() -> None:
    out = io.StringIO()
    bar = TrainingProgress(as_json=False)
    bar.console = bar.progress_bar.live.console = Console(file=out, force_terminal=True, width=90, legacy_windows=False)
    bar.progress_bar.disable = False
    bar.max_steps = 10
    with bar.progress_bar:
        bar.task_id = bar.progress_bar.add_task("", total=10)
        for step in range(1, 11):
            row = {"step": step, "loss": 2.5, "grad_norm": 1.0} | ({"skipped": "grad_spike"} if step == 4 else {})
            bar.on_step_end(row, {"tokens_per_second": 1234.5, "mfu": 0.432, "peak_memory_bytes": 2.5e9})
        bar.on_evaluate({"step": 10, "eval_loss": 2.0, "sample": "a \x1b[31m sample [bold]"})
    shown = out.getvalue()
    assert "10/10" in shown
    assert "loss 2.500  1,234 tokens/s  43% of peak  2.5 GB  1 skipped" in shown
    assert r"a \x1b[31m sample [bold]" in shown


def test_what_is_no_number_is_shown_and_written(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"step": 1, "loss": float("nan"), "grad_norm": float("inf"), "skipped": "non_finite"}
    TrainingProgress(as_json=True).on_step_end(row, {"tokens_per_second": 1.0})
    assert json.loads(capsys.readouterr().out)["loss"] is None
    bar = TrainingProgress(as_json=False)
    bar.max_steps = 1
    bar.on_step_end(row, {"tokens_per_second": 1.0})
    assert "loss nan" in capsys.readouterr().err


def test_clocks() -> None:
    assert [format_clock(each) for each in (0, 59.6, 61, 3723)] == ["0:00", "1:00", "1:01", "1:02:03"]


def test_the_share_of_the_peak_is_left_out_where_nobody_knows_it(tmp_path: Path) -> None:
    how, config, cpu = load_recipe(tiny_recipe_in(tmp_path)), ct.config("tiny-gpt"), torch.device("cpu")
    assert throughput.Throughput.from_recipe(how, config, cpu).peak_flops_per_second is None
    measured(bf16=1e12)
    assert throughput.Throughput.from_recipe(how, config, cpu).peak_flops_per_second is None
    measured(fp32=2e12)
    found = throughput.Throughput.from_recipe(how, config, cpu)
    assert found.peak_flops_per_second == 2e12
    one = ct.size(config, mode="train", context=32).flops.total_visible
    assert found.step_flops == 6 * one
    assert found.measure(0.5)["mfu"] == pytest.approx(6 * one / 0.5 / 2e12)
    pairs = load_recipe(tiny_recipe_in(tmp_path, model="tiny-t5", objective={"kind": "seq2seq"}))
    assert throughput.Throughput.from_recipe(pairs, ct.config("tiny-t5"), cpu).step_flops is None
    hidden = load_recipe(
        tiny_recipe_in(tmp_path, model="tiny-bert", objective={"kind": "masked-lm", "mlm_probability": 0.5})
    )
    every = ct.size("tiny-bert", mode="train", context=32).flops
    assert throughput.flops_per_step(hidden, ct.config("tiny-bert")) == 6 * (
        every.total_visible - every.visible["head"] / 2
    )
    assert found.measure(1.0)["peak_memory_bytes"] > 10**7


def test_losses_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = train(tiny_recipe_in(tmp_path), tmp_path / "run", device="cpu").directory
    picture = (run / "loss.svg").read_text()
    for words in ("validation", "training, smooth", "learning rate", f"{read_metrics(run)[-2]['eval_loss']:.3f}"):
        assert words in picture
    assert not list(run.glob(".*.svg"))
    drawn = [
        plot_losses(rows, tmp_path / f"{place}.svg")
        for place, rows in enumerate(
            [[], [{"step": 1, "loss": None, "lr": 0.1}], [{"step": 1, "loss": 2.0, "lr": 0.1}]]
        )
    ]
    assert all(each.stat().st_size for each in drawn)


def test_a_long_run_is_a_small_picture() -> None:
    for count in (1, 10, MAX_POINTS, MAX_POINTS + 1, 300_000):
        groups = group_steps(range(count))
        assert [place for group in groups for place in (group.start, group.stop)][:: 2 * len(groups) - 1] == [0, count]
        assert all(one.stop == two.start for one, two in pairwise(groups))
        assert len(groups) <= 1.2 * MAX_POINTS


def test_what_cannot_be_shown_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(tiny_recipe_in(tmp_path), tmp_path / "whole", device="cpu").directory

    def broken(*args: Any) -> None:
        raise RuntimeError("no font")

    monkeypatch.setattr(callbacks, "plot_losses", broken)
    monkeypatch.setattr(callbacks, "MAX_PLOT_TIME_SHARE", 1e9)  # at each look
    monkeypatch.setattr(tensorboard.TensorBoardLogger, "log", broken)
    said: list[str] = []
    how = tiny_recipe_in(tmp_path, logging={"tensorboard": True})
    train(how, tmp_path / "run", device="cpu", callback=Callback(on_message=said.append))
    assert [each for each in said if "no font" in each] == [
        "TensorBoard's file could not be written (no font); training goes on",
        "the losses could not be drawn (no font); training goes on",
    ]
    assert state_digest(tmp_path / "run") == state_digest(whole)


def test_tensorboard_reads_each_point_once(tmp_path: Path) -> None:
    """Also where steps that were written are taken again."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    how = load_recipe(tiny_recipe_in(tmp_path, eval={"sample_prompt": "1 and"}, logging={"tensorboard": True}))
    trainer = prepare_trainer(how, tmp_path / "run", device="cpu")

    def die(row: dict[str, Any], timing: dict[str, Any]) -> None:
        if row["step"] == 7:
            raise ZeroDivisionError

    trainer.callback.on_step_end = die
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    resume(tmp_path / "run", device="cpu")
    found = EventAccumulator(str(tmp_path / "run" / "tensorboard"), {"scalars": 0})
    found.Reload()
    rows = read_metrics(tmp_path / "run")
    for key, name in (("loss", "train/loss"), ("eval_loss", "eval/loss"), ("lr", "train/lr")):
        expected = [(row["step"], pytest.approx(row[key])) for row in rows if key in row]
        assert [(each.step, each.value) for each in found.Scalars(name)] == expected
    assert [each.step for each in found.Scalars("layer_stats/resid_norm/blocks.1")] == [5, 10, 12]
    assert len(found.Scalars("layer_stats/attn_entropy/blocks.0")) == 3
    assert "eval/sample/text_summary" in found.Tags()["tensors"]


def test_tensorboard_that_is_not_there_is_said_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CutawayError, match=r"pip install 'cutaway\[tensorboard\]'"):
        prepare_trainer(
            load_recipe(tiny_recipe_in(tmp_path, logging={"tensorboard": True})), tmp_path / "run", device="cpu"
        )
    assert not (tmp_path / "run").exists()
    assert (
        not train(tiny_recipe_in(tmp_path), tmp_path / "run", device="cpu").directory.joinpath("tensorboard").exists()
    )
