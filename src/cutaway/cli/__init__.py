"""The command line: one small file a verb. Nothing here imports torch before a verb needs it."""

import codecs
import gc
import io
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from cutaway.cli.lazy_group import lazy_group
from cutaway.errors import CutawayError

VERBS = {
    "ablate": "cutaway.cli.verbs.ablate:ablate",
    "bench": "cutaway.cli.verbs.bench:bench",
    "check": "cutaway.cli.verbs.check:check",
    "convert": "cutaway.cli.verbs.convert:convert",
    "demo": "cutaway.cli.verbs.demo:demo",
    "eval": "cutaway.cli.verbs.eval:evaluate",
    "generate": "cutaway.cli.verbs.generate:generate",
    "learn": "cutaway.cli.verbs.learn:learn",
    "open": "cutaway.cli.verbs.open:open_page",
    "presets": "cutaway.cli.verbs.presets:presets",
    "serve": "cutaway.cli.verbs.serve:serve",
    "size": "cutaway.cli.verbs.size:size",
    "trace": "cutaway.cli.verbs.trace:trace",
    "train": "cutaway.cli.verbs.train:train",
}
"""The function behind each verb. Its file is imported when the verb is asked for, so that none waits for the others."""
app = typer.Typer(
    name="cutaway",
    cls=lazy_group(VERBS),
    help="The Transformer with its side open: build it, run it, look into it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def show_version(requested: bool) -> None:
    if requested:
        from importlib.metadata import version  # slow to import, and rarely asked for

        sys.stdout.write(f"cutaway {version('cutaway')}\n")
        raise typer.Exit


@app.callback()
def root_options(
    requested: Annotated[
        bool, typer.Option("--version", help="Which version.", callback=show_version, is_eager=True)
    ] = False,
) -> None:
    """The Transformer with its side open: build it, run it, look into it."""


ASCII_FALLBACKS = str.maketrans("−–×·█▓▒░✓✗≤…²³→━Σ⊙ᵀ⏎", "--x.#=+-yn<~23>=S*T/")


def ascii_fallback(error: UnicodeError) -> tuple[str, int]:
    """For a sign that the terminal does not have, one that it has."""
    assert isinstance(error, UnicodeEncodeError)
    signs = error.object[error.start : error.end].translate(ASCII_FALLBACKS)
    return "".join(sign if sign.isascii() else "?" for sign in signs), error.end


codecs.register_error("cutaway-ascii", ascii_fallback)


def main() -> None:
    """Run the command line; an error meant for the user is one sentence and exit code 2."""
    gc.set_threshold(100_000)  # imports make many objects and no garbage: looking for it takes a tenth of a short run
    if sys.stdout is None:  # closed by whoever started this
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):  # a terminal that has not all signs shows others
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="cutaway-ascii")
    try:
        app()
    except (CutawayError, OSError, MemoryError) as error:
        if sys.stderr is not None:  # closed by whoever started this
            sys.stderr.write(f"cutaway: {str(error) or type(error).__name__}\n")
        sys.exit(2)
