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
from small_runs import rows_of, small, state_of

import cutaway as ct
from cutaway.cli import main, progress
from cutaway.cli.progress import Bar, clock
from cutaway.errors import CutawayError
from cutaway.size.calibration import Calibration, record
from cutaway.train import audience, pace, track
from cutaway.train.audience import Watcher
from cutaway.train.curve import POINTS, draw, neighbours
from cutaway.train.recipe import recipe
from cutaway.train.start import begin, resume, train


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "cache"))


def cli(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["cutaway", "train", "--device", "cpu", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def measured(**rates: float) -> None:
    how: dict[str, Any] = {"memory": 10**9, "bandwidth": 1e10, "shares": {}, "model": "gpt2", "dtype": "fp32"}
    record(Calibration(device="any", kind="cpu", hardware=None, flops=rates, date="2026-01-01", **how))


def test_a_log_has_plain_lines_and_json_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured(fp32=1e11)
    (tmp_path / "recipe.json").write_text(json.dumps(small(tmp_path, watching={"sample": "1 and"})))
    monkeypatch.setattr(progress, "EVERY", 0.0)
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
    assert [row["step"] for row in rows if "health" in row] == [5, 10, 12]


def test_a_run_says_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = begin(recipe(small(tmp_path)), tmp_path / "run", device="cpu")
    loop.watcher.step = lambda row, timing: loop.stop.set() if row["step"] == 7 else None
    loop.go()
    assert cli(monkeypatch, "--show", str(tmp_path / "run")) == 0
    shown = capsys.readouterr().out
    assert "tiny-gpt, next-token, adamw" in shown
    assert "step 7 of 12" in shown
    assert "go on with: cutaway train --resume" in shown
    assert "\n  model " not in shown
    assert cli(monkeypatch, "--resume", str(tmp_path / "run"), "--json") == 0
    assert "finished" not in capsys.readouterr().out
    assert cli(monkeypatch, "--resume", str(tmp_path / "run")) == 0
    assert "is finished: all 12 steps have been taken" in capsys.readouterr().err
    assert cli(monkeypatch, "--show", str(tmp_path / "run"), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["steps"], found["skipped"]) == (12, 12, 0)
    assert found["best"] == min(row["validation"] for row in rows_of(tmp_path / "run") if "validation" in row)
    assert set(found["files"]) == {"metrics.jsonl", "timings.jsonl", "loss.svg", "checkpoints", "model"}
    assert cli(monkeypatch, "--show", str(tmp_path)) == 2
    assert "is no run" in capsys.readouterr().err


def test_a_terminal_has_a_line_that_moves_and_cannot_be_commanded() -> None:
    out = io.StringIO()
    bar = Bar(as_json=False)
    bar.console = bar.progress.live.console = Console(file=out, force_terminal=True, width=90, legacy_windows=False)
    bar.progress.disable = False
    bar.steps = 10
    with bar.progress:
        bar.task = bar.progress.add_task("", total=10)
        for step in range(1, 11):
            row = {"step": step, "loss": 2.5, "gradient": 1.0} | ({"skipped": "spike"} if step == 4 else {})
            bar.step(row, {"tokens_per_second": 1234.5, "peak_share": 0.432, "memory": 2.5e9})
        bar.look({"step": 10, "validation": 2.0, "sample": "a \x1b[31m sample [bold]"})
    shown = out.getvalue()
    assert "10/10" in shown
    assert "loss 2.500  1,234 tokens/s  43% of peak  2.5 GB  1 skipped" in shown
    assert r"a \x1b[31m sample [bold]" in shown


def test_what_is_no_number_is_shown_and_written(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"step": 1, "loss": float("nan"), "gradient": float("inf"), "skipped": "not finite"}
    Bar(as_json=True).step(row, {"tokens_per_second": 1.0})
    assert json.loads(capsys.readouterr().out)["loss"] is None
    bar = Bar(as_json=False)
    bar.steps = 1
    bar.step(row, {"tokens_per_second": 1.0})
    assert "loss nan" in capsys.readouterr().err


def test_clocks() -> None:
    assert [clock(each) for each in (0, 59.6, 61, 3723)] == ["0:00", "1:00", "1:01", "1:02:03"]


def test_the_share_of_the_peak_is_left_out_where_nobody_knows_it(tmp_path: Path) -> None:
    how, config, cpu = recipe(small(tmp_path)), ct.config("tiny-gpt"), torch.device("cpu")
    assert pace.Pace.of(how, config, cpu).peak is None
    measured(bf16=1e12)
    assert pace.Pace.of(how, config, cpu).peak is None
    measured(fp32=2e12)
    found = pace.Pace.of(how, config, cpu)
    assert found.peak == 2e12
    one = ct.size(config, mode="train", context=32).flops.total_seen
    assert found.flops == 6 * one
    assert found.told(0.5)["peak_share"] == pytest.approx(6 * one / 0.5 / 2e12)
    pairs = recipe(small(tmp_path, model="tiny-t5", objective={"kind": "seq2seq"}))
    assert pace.Pace.of(pairs, ct.config("tiny-t5"), cpu).flops is None
    hidden = recipe(small(tmp_path, model="tiny-bert", objective={"kind": "masked", "rate": 0.5}))
    every = ct.size("tiny-bert", mode="train", context=32).flops
    assert pace.flops_of_step(hidden, ct.config("tiny-bert")) == 6 * (every.total_seen - every.seen["head"] / 2)
    assert found.told(1.0)["memory"] > 10**7


def test_losses_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = train(small(tmp_path), tmp_path / "run", device="cpu").directory
    picture = (run / "loss.svg").read_text()
    for words in ("validation", "training, smooth", "learning rate", f"{rows_of(run)[-2]['validation']:.3f}"):
        assert words in picture
    assert not list(run.glob(".*.svg"))
    drawn = [
        draw(rows, tmp_path / f"{place}.svg")
        for place, rows in enumerate(
            [[], [{"step": 1, "loss": None, "rate": 0.1}], [{"step": 1, "loss": 2.0, "rate": 0.1}]]
        )
    ]
    assert all(each.stat().st_size for each in drawn)


def test_a_long_run_is_a_small_picture() -> None:
    for count in (1, 10, POINTS, POINTS + 1, 300_000):
        groups = neighbours(range(count))
        assert [place for group in groups for place in (group.start, group.stop)][:: 2 * len(groups) - 1] == [0, count]
        assert all(one.stop == two.start for one, two in pairwise(groups))
        assert len(groups) <= 1.2 * POINTS


def test_what_cannot_be_shown_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(small(tmp_path), tmp_path / "whole", device="cpu").directory

    def broken(*given: Any) -> None:
        raise RuntimeError("no font")

    monkeypatch.setattr(audience, "draw", broken)
    monkeypatch.setattr(audience, "SHARE", 1e9)  # at each look
    monkeypatch.setattr(track.Track, "add", broken)
    said: list[str] = []
    how = small(tmp_path, watching={"tensorboard": True})
    train(how, tmp_path / "run", device="cpu", watcher=Watcher(say=said.append))
    assert [each for each in said if "no font" in each] == [
        "TensorBoard's file could not be written (no font); training goes on",
        "the losses could not be drawn (no font); training goes on",
    ]
    assert state_of(tmp_path / "run") == state_of(whole)


def test_tensorboard_reads_each_point_once(tmp_path: Path) -> None:
    """Also where steps that were written are taken again."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    how = recipe(small(tmp_path, watching={"tensorboard": True, "sample": "1 and"}))
    loop = begin(how, tmp_path / "run", device="cpu")

    def die(row: dict[str, Any], timing: dict[str, Any]) -> None:
        if row["step"] == 7:
            raise ZeroDivisionError

    loop.watcher.step = die
    with pytest.raises(ZeroDivisionError):
        loop.go()
    resume(tmp_path / "run", device="cpu")
    found = EventAccumulator(str(tmp_path / "run" / "tensorboard"), {"scalars": 0})
    found.Reload()
    rows = rows_of(tmp_path / "run")
    for key, name in (("loss", "loss/training"), ("validation", "loss/validation"), ("rate", "step/rate")):
        expected = [(row["step"], pytest.approx(row[key])) for row in rows if key in row]
        assert [(each.step, each.value) for each in found.Scalars(name)] == expected
    assert [each.step for each in found.Scalars("health/stream/blocks.1")] == [5, 10, 12]
    assert len(found.Scalars("health/entropy/blocks.0")) == 3
    assert "sample/text_summary" in found.Tags()["tensors"]


def test_tensorboard_that_is_not_there_is_said_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CutawayError, match=r"pip install 'cutaway\[track\]'"):
        begin(recipe(small(tmp_path, watching={"tensorboard": True})), tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()
    assert not train(small(tmp_path), tmp_path / "run", device="cpu").directory.joinpath("tensorboard").exists()
