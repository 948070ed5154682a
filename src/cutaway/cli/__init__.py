"""The command line: one small file a verb. Nothing here imports torch before a verb needs it."""

import io
import sys
from importlib.metadata import version
from typing import Annotated

import typer

from cutaway.cli.convert import convert
from cutaway.cli.demo import demo
from cutaway.cli.presets import presets
from cutaway.errors import CutawayError

app = typer.Typer(
    name="cutaway",
    help="The Transformer with its side open: build it, run it, look into it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def show_version(asked: bool) -> None:
    if asked:
        sys.stdout.write(f"cutaway {version('cutaway')}\n")
        raise typer.Exit


@app.callback()
def options(
    asked: Annotated[
        bool, typer.Option("--version", help="Which version.", callback=show_version, is_eager=True)
    ] = False,
) -> None:
    """The Transformer with its side open: build it, run it, look into it."""


app.command()(convert)
app.command()(demo)
app.command()(presets)


def main() -> None:
    """Run the command line; an error meant for the user is one sentence and exit code 2."""
    for stream in (sys.stdout, sys.stderr):  # a terminal that cannot show a sign shows a mark instead
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        app()
    except (CutawayError, OSError, MemoryError) as error:
        if sys.stderr is not None:  # closed by whoever started this
            sys.stderr.write(f"cutaway: {str(error) or type(error).__name__}\n")
        sys.exit(2)
