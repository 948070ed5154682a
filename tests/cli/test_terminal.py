"""Terminals that are closed, working directories that were deleted, and control characters in what is printed."""

import os
import pty
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import pytest
from rich.console import Console
from rich.progress import Progress
from support.cli_runner import CliRunner

from cutaway.cli import VERBS
from cutaway.cli.terminal_stream import use_safe_terminals
from cutaway.cli.verbs.ablate import _interrupt_on_signals


@contextmanager
def terminal_as_stderr() -> Iterator[tuple[TextIO, int]]:
    """Standard error is a terminal. Yield the safe stream, and the other end of the terminal."""
    main_end, terminal_end = pty.openpty()
    with (
        open(terminal_end, "w", encoding="utf-8") as err,  # noqa: PTH123
        open(os.devnull, "w") as out,  # noqa: PTH123
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(sys, "stderr", err)
        patch.setattr(sys, "stdout", out)
        use_safe_terminals()
        assert sys.stdout is out
        yield sys.stderr, main_end


def test_output_after_the_terminal_was_closed_is_discarded() -> None:
    with terminal_as_stderr() as (err, main_end):
        err.write("before\n")
        assert os.read(main_end, 100) == b"before\r\n"
        os.close(main_end)
        with pytest.raises(OSError, match="Input/output error"):
            os.write(err.fileno(), b"after")
        err.write("after\n")
        err.flush()


def test_control_sequences_are_escaped_on_a_terminal() -> None:
    """Except line ends, tabs, and those with which rich sets colors and draws progress bars."""
    written = {
        "\x1b]0;title\x07": r"\x1b]0;title\x07",
        "\x1b]52;c;YQ==\x1b\\": r"\x1b]52;c;YQ==\x1b" "\\",
        "\x1bP1$q\x9b5n\x90\x85\x7f\x00\b": r"\x1bP1$q\x9b5n\x90\x85\x7f\x00\x08",
        "\x1b[5n\x1b[6n\x1b[200~\x1b": r"\x1b[5n\x1b[6n\x1b[200~\x1b",
        "a\tb ✓ é": "a\tb ✓ é",
        "\x1b[1;31mred\x1b[0m\x1b[2K\x1b[1A\x1b[?25l": "\x1b[1;31mred\x1b[0m\x1b[2K\x1b[1A\x1b[?25l",
    }
    with terminal_as_stderr() as (err, main_end):
        for text, expected in written.items():
            err.write(f"{text}\n")
            assert os.read(main_end, 1000).decode() == f"{expected}\r\n"
        console = Console(stderr=True, force_terminal=True, color_system="truecolor", width=60)
        with Progress(console=console) as progress:
            progress.add_task("[red]task[/red]", total=3, completed=1)
        err.write("end\n")
        output = b""
        while not output.endswith(b"end\r\n"):
            output += os.read(main_end, 1000)
        os.close(main_end)
    assert b"\x1b[" in output
    assert b"task" in output
    assert b"\\x1b" not in output


def test_impossible_terminal_width_is_ignored(run_cli: CliRunner) -> None:
    assert len(run_cli("--help", columns=999_999_999)) < 40_000  # 1,000 columns


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_stop_an_ablation_like_ctrl_c(number: signal.Signals) -> None:
    previous_handler = signal.getsignal(number)

    def wait_for_workers() -> None:
        try:
            signal.raise_signal(number)  # in this thread: a sleep is not interrupted by a signal to another thread
            time.sleep(10)
        finally:
            signal.raise_signal(number)  # does not interrupt the last saves
            stopped.append(True)

    stopped: list[bool] = []
    with pytest.raises(KeyboardInterrupt), _interrupt_on_signals():
        wait_for_workers()
    assert stopped == [True]
    assert signal.getsignal(number) == previous_handler


def test_deleted_working_directory_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_cli: CliRunner
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    message = "the working directory of this shell has been deleted; change to a directory that exists, with `cd`"
    for verb in VERBS:
        assert run_cli(verb, "x", code=2) == f"cutaway: {message}\n"
    assert "Usage" in run_cli("--help")
