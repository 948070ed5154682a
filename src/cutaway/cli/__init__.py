"""Command line interface, with one file per verb in `verbs/`. torch is imported only when a verb needs it."""

import codecs
import gc
import io
import os
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from cutaway.cli.lazy_group import lazy_group
from cutaway.cli.terminal_stream import use_safe_terminals
from cutaway.errors import CutawayError, InputError

_FUNCTIONS = {"eval": "evaluate", "open": "open_page"}  # the other functions are named like their verb
_VERB_NAMES = (
    "ablate", "bench", "check", "convert", "demo", "eval", "generate", "learn", "open", "presets", "serve", "size",
    "trace", "train",
)  # fmt: skip
VERBS = {verb: f"cutaway.cli.verbs.{verb}:{_FUNCTIONS.get(verb, verb)}" for verb in _VERB_NAMES}
"""Verb → import path of its function. The file is imported only when the verb is used, to keep startup fast."""
app = typer.Typer(
    name="cutaway",
    cls=lazy_group(VERBS),
    help="Build, train, run, inspect, size and verify Transformer models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def show_version(requested: bool) -> None:
    if requested:
        from importlib.metadata import version  # slow to import

        sys.stdout.write(f"cutaway {version('cutaway')}\n")
        raise typer.Exit


@app.callback()
def root_options(
    requested: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=show_version, is_eager=True)
    ] = False,
) -> None:
    """Build, train, run, inspect, size and verify Transformer models."""
    try:
        Path.cwd()
    except FileNotFoundError:  # relative paths have no meaning, and MKL ends the process when torch is imported
        raise InputError(
            "the working directory of this shell has been deleted; change to a directory that exists, with `cd`"
        ) from None


ASCII_FALLBACKS = str.maketrans("−–×·█▓▒░✓✗≤…²³→━Σ⊙ᵀ⏎", "--x.#=+-yn<~23>=S*T/")


def ascii_fallback(error: UnicodeError) -> tuple[str, int]:
    """Encoding error handler: substitute ASCII for characters that the terminal cannot encode."""
    assert isinstance(error, UnicodeEncodeError)
    characters = error.object[error.start : error.end].translate(ASCII_FALLBACKS)
    return "".join(character if character.isascii() else "?" for character in characters), error.end


codecs.register_error("cutaway-ascii", ascii_fallback)


MAX_TERMINAL_SIZE = 1000
"""Maximum number of columns and lines of the output."""


def bound_terminal_size() -> None:
    """Bound COLUMNS and LINES, for which rich allocates cells: 999,999,999 columns take minutes and gigabytes."""
    for name in ("COLUMNS", "LINES", "TERMINAL_WIDTH"):
        value = os.environ.get(name)
        if value is not None and not re.fullmatch("[1-9][0-9]{0,2}", value):
            if re.fullmatch("[0-9]{4,}", value):
                os.environ[name] = str(MAX_TERMINAL_SIZE)
            else:  # not a number of columns or lines
                del os.environ[name]


def main() -> None:
    """Run the CLI. A CutawayError, OSError or MemoryError prints one message and exits with code 2."""
    bound_terminal_size()
    gc.set_threshold(100_000)  # imports create many objects but no garbage; collection takes a tenth of a short run
    if len(os.environ.get("COLUMNS", "")) > 4:  # lines padded to such a width would fill the memory
        del os.environ["COLUMNS"]
    if sys.stdout is None:  # closed by the parent process
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    use_safe_terminals()
    for stream in (sys.stdout, sys.stderr):  # replace characters that the encoding lacks
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="cutaway-ascii")
    try:
        app()
    except (CutawayError, OSError, MemoryError) as error:
        if sys.stderr is not None:  # closed by the parent process
            sys.stderr.write(f"cutaway: {str(error) or type(error).__name__}\n")
        sys.exit(2)
