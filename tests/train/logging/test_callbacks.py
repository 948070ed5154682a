"""Progress, loss plot, throughput and TensorBoard of a run; a failing logger does not stop training."""

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


def run_train_command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["cutaway", "train", "--device", "cpu", *arguments])
    with pytest.raises(SystemExit) as exit_info:
        main()
    return int(exit_info.value.code or 0)


def save_measured_flops(**flops: float) -> None:
    save_measured_hardware(
        MeasuredHardware(
            device="any",
            kind="cpu",
            hardware_name=None,
            memory=10**9,
            bandwidth=1e10,
            flops=flops,
            efficiency={},
            model="gpt2",
            dtype="fp32",
            date="2026-01-01",
        )
    )


def test_log_output_is_plain_lines_and_json_output_is_json_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_measured_flops(fp32=1e11)
    (tmp_path / "recipe.json").write_text(json.dumps(tiny_recipe_in(tmp_path, eval={"sample_prompt": "1 and"})))
    monkeypatch.setattr(training_progress, "LOG_INTERVAL_SECONDS", 0.0)
    assert run_train_command(monkeypatch, str(tmp_path / "recipe.json"), "--out", str(tmp_path / "log")) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "\x1b" not in captured.err
    assert f"open the run in a browser: cutaway open {tmp_path / 'log'}" in captured.err.splitlines()
    lines = [line for line in captured.err.splitlines() if re.match(r"\d+/12 ", line)]
    assert len(lines) == 12
    pattern = r"loss \d\.\d{3}  [\d,]+ tokens/s  \d+% MFU  [\d.]+ GB  \d+:\d\d"
    assert all(re.fullmatch(rf"{step}/12  {pattern}( left)?", line) for step, line in enumerate(lines, 1))
    assert "1 and" in captured.err
    assert "update/weight ≤" in captured.err
    assert run_train_command(monkeypatch, str(tmp_path / "recipe.json"), "--out", str(tmp_path / "data"), "--json") == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    rows = [json.loads(line) for line in captured.out.splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 13))
    assert [row["step"] for row in rows if "layer_stats" in row] == [5, 10, 12]


def test_status_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = prepare_trainer(load_recipe(tiny_recipe_in(tmp_path)), tmp_path / "run", device="cpu")
    trainer.callback.on_step_end = lambda row, timing: trainer.stop_requested.set() if row["step"] == 7 else None
    trainer.train()
    assert run_train_command(monkeypatch, "--status", str(tmp_path / "run")) == 0
    shown = capsys.readouterr().out
    assert "tiny-gpt, causal-lm, adamw" in shown
    assert "step 7 of 12" in shown
    assert "continue with: cutaway train --resume" in shown
    assert "\n  model " not in shown
    assert run_train_command(monkeypatch, "--resume", str(tmp_path / "run"), "--json") == 0
    assert "finished" not in capsys.readouterr().out
    assert run_train_command(monkeypatch, "--resume", str(tmp_path / "run")) == 0
    assert "is finished: all 12 steps are done" in capsys.readouterr().err
    assert run_train_command(monkeypatch, "--status", str(tmp_path / "run"), "--json") == 0
    status = json.loads(capsys.readouterr().out)
    assert (status["step"], status["max_steps"], status["num_skipped_steps"]) == (12, 12, 0)
    assert status["best_eval_loss"] == min(
        row["eval_loss"] for row in read_metrics(tmp_path / "run") if "eval_loss" in row
    )
    assert set(status["files"]) == {"metrics.jsonl", "timings.jsonl", "loss.svg", "checkpoints", "snapshots", "model"}
    assert run_train_command(monkeypatch, "--status", str(tmp_path)) == 2
    assert "is not a run directory" in capsys.readouterr().err


def test_progress_bar_escapes_control_characters() -> None:
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
    assert "loss 2.500  1,234 tokens/s  43% MFU  2.5 GB  1 skipped" in shown
    assert r"a \x1b[31m sample [bold]" in shown


def test_nonfinite_loss_is_shown_and_null_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"step": 1, "loss": float("nan"), "grad_norm": float("inf"), "skipped": "non_finite"}
    TrainingProgress(as_json=True).build_callback().on_step_end(row, {"tokens_per_second": 1.0})
    assert json.loads(capsys.readouterr().out)["loss"] is None
    bar = TrainingProgress(as_json=False)
    bar.max_steps = 1
    bar.on_step_end(row, {"tokens_per_second": 1.0})
    assert "loss nan" in capsys.readouterr().err


def test_format_clock() -> None:
    assert [format_clock(seconds) for seconds in (0, 59.6, 61, 3723)] == ["0:00", "1:00", "1:01", "1:02:03"]


def test_mfu_is_left_out_if_the_peak_is_unknown(tmp_path: Path) -> None:
    recipe, config, cpu = load_recipe(tiny_recipe_in(tmp_path)), ct.config("tiny-gpt"), torch.device("cpu")
    assert throughput.Throughput.from_recipe(recipe, config, cpu).peak_flops_per_second is None
    save_measured_flops(bf16=1e12)
    assert throughput.Throughput.from_recipe(recipe, config, cpu).peak_flops_per_second is None
    save_measured_flops(fp32=2e12)
    measured = throughput.Throughput.from_recipe(recipe, config, cpu)
    assert measured.peak_flops_per_second == 2e12
    sequence_flops = ct.size(config, mode="train", context=32).flops.total_visible
    assert measured.step_flops == 6 * sequence_flops
    assert measured.measure(0.5)["mfu"] == pytest.approx(6 * sequence_flops / 0.5 / 2e12)
    assert throughput.peak_flops_per_second(cpu, "float8") is None
    save_measured_flops(bf16=1e12)
    assert throughput.peak_flops_per_second(cpu, "float8") == 1e12  # that of bf16
    seq2seq = load_recipe(tiny_recipe_in(tmp_path, model="tiny-t5", objective={"kind": "seq2seq"}))
    assert throughput.Throughput.from_recipe(seq2seq, ct.config("tiny-t5"), cpu).step_flops is None
    masked_lm = load_recipe(
        tiny_recipe_in(tmp_path, model="tiny-bert", objective={"kind": "masked-lm", "mlm_probability": 0.5})
    )
    flops = ct.size("tiny-bert", mode="train", context=32).flops
    assert throughput.flops_per_step(masked_lm, ct.config("tiny-bert")) == 6 * (
        flops.total_visible - flops.visible["head"] / 2
    )
    assert measured.measure(1.0)["peak_memory_bytes"] > 10**7


def test_loss_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callbacks, "plot_losses", plot_losses)
    run = train(tiny_recipe_in(tmp_path), tmp_path / "run", device="cpu").directory
    svg = (run / "loss.svg").read_text()
    for text in ("validation", "training, smoothed", "learning rate", f"{read_metrics(run)[-2]['eval_loss']:.3f}"):
        assert text in svg
    assert not list(run.glob(".*.svg"))
    paths = [
        plot_losses(rows, tmp_path / f"{index}.svg")
        for index, rows in enumerate(
            [[], [{"step": 1, "loss": None, "lr": 0.1}], [{"step": 1, "loss": 2.0, "lr": 0.1}]]
        )
    ]
    assert all(path.stat().st_size for path in paths)
    rewards = [{"step": 1, "loss": 0.0, "reward": 0.5, "lr": 0.1}, {"step": 1, "eval_reward": 0.625}]
    assert all(text in plot_losses(rewards, tmp_path / "grpo.svg").read_text() for text in ("reward", "0.625"))


def test_plot_of_a_long_run_has_a_bounded_number_of_points() -> None:
    for count in (1, 10, MAX_POINTS, MAX_POINTS + 1, 300_000):
        groups = group_steps(range(count))
        assert [edge for group in groups for edge in (group.start, group.stop)][:: 2 * len(groups) - 1] == [0, count]
        assert all(one.stop == two.start for one, two in pairwise(groups))
        assert len(groups) <= 1.2 * MAX_POINTS


def test_failing_loggers_do_not_stop_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = train(tiny_recipe_in(tmp_path), tmp_path / "expected", device="cpu").directory

    def fail(*args: Any) -> None:
        raise RuntimeError("no font")

    monkeypatch.setattr(callbacks, "plot_losses", fail)
    monkeypatch.setattr(callbacks, "MAX_PLOT_TIME_SHARE", 1e9)  # at each evaluation
    monkeypatch.setattr(tensorboard.TensorBoardLogger, "log", fail)
    messages: list[str] = []
    recipe = tiny_recipe_in(tmp_path, logging={"tensorboard": True})
    train(recipe, tmp_path / "run", device="cpu", callback=Callback(on_message=messages.append))
    assert [message for message in messages if "no font" in message] == [
        "could not write the TensorBoard log (no font); training continues",
        "could not draw the loss plot (no font); training continues",
    ]
    assert state_digest(tmp_path / "run") == state_digest(expected)


def test_tensorboard_has_each_point_once(tmp_path: Path) -> None:
    """Also if steps that were logged are run again after a resume."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recipe = load_recipe(tiny_recipe_in(tmp_path, eval={"sample_prompt": "1 and"}, logging={"tensorboard": True}))
    trainer = prepare_trainer(recipe, tmp_path / "run", device="cpu")

    def fail_at_step_7(row: dict[str, Any], timing: dict[str, Any]) -> None:
        if row["step"] == 7:
            raise ZeroDivisionError

    trainer.callback.on_step_end = fail_at_step_7
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    resume(tmp_path / "run", device="cpu")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"), {"scalars": 0})
    events.Reload()
    rows = read_metrics(tmp_path / "run")
    for key, name in (("loss", "train/loss"), ("eval_loss", "eval/loss"), ("lr", "train/lr")):
        expected = [(row["step"], pytest.approx(row[key])) for row in rows if key in row]
        assert [(event.step, event.value) for event in events.Scalars(name)] == expected
    assert [event.step for event in events.Scalars("layer_stats/resid_norm/blocks.1")] == [5, 10, 12]
    assert len(events.Scalars("layer_stats/attn_entropy/blocks.0")) == 3
    assert "eval/sample/text_summary" in events.Tags()["tensors"]


def test_missing_tensorboard_is_an_error_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CutawayError, match=r"pip install 'cutaway\[tensorboard\]'"):
        prepare_trainer(
            load_recipe(tiny_recipe_in(tmp_path, logging={"tensorboard": True})), tmp_path / "run", device="cpu"
        )
    assert not (tmp_path / "run").exists()
    assert (
        not train(tiny_recipe_in(tmp_path), tmp_path / "run", device="cpu").directory.joinpath("tensorboard").exists()
    )
