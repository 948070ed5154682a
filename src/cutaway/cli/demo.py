"""`cutaway demo`: a token's journey through a small model."""

import json
import shutil
import sys
from typing import Annotated

import typer

from cutaway.errors import InputError


def demo(
    source: Annotated[
        str | None,
        typer.Argument(help="A preset's name, or a .toml or .json configuration: follow a token through it."),
    ] = None,
    text: Annotated[str | None, typer.Option(help="What that model reads, byte by byte.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the fresh weights.")] = 0,
    steps: Annotated[
        int | None, typer.Option(min=1, help="How long the model of the tour learns; else for about a minute.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Train a small model for about a minute, look at what it learned, and follow a token through a trained one.

    With a model's name or a text: build that model, run it, and follow the last token: each stage, its shape and norm.

    Example: cutaway demo

    Example: cutaway demo tiny-moe --text "Attention is all you"
    """
    if source is None and text is None:
        from cutaway.cli.tour import tour

        tour(steps=steps, seed=seed, as_json=as_json)
        return
    from cutaway.config import config

    source, text = source or "tiny-gpt", "The cat sat on the" if text is None else text
    model_config = config(source)
    if not text:
        raise InputError("--text is empty; give at least one character")
    from cutaway.cli import trace_view
    from cutaway.cli.reading import LONGEST, as_bytes
    from cutaway.cli.trace import followed, for_people
    from cutaway.model import build

    reading = as_bytes(build(model_config, seed=seed), text, None)
    if len(reading.tokens) > LONGEST:
        raise InputError(f"--text has {len(reading.tokens)} bytes; every score is drawn, so give at most {LONGEST}")
    journey = followed(reading, shown=None if as_json else for_people(reading.model))
    if as_json:
        from cutaway.cli.convert import plain

        sys.stdout.write(json.dumps(plain(trace_view.to_data(journey, reading)), indent=2, allow_nan=False) + "\n")
    else:
        trace_view.show(journey, reading, source)
        try_next()


def try_next() -> None:
    """Where to go from here."""
    from rich.console import Console  # --json and --help draw nothing

    console = Console(highlight=False)
    command = "cutaway" if shutil.which("cutaway") else sys.argv[0]
    tries = {
        "open": "the same way as a picture in the browser",
        "presets": "the models that have a name",
        "trace tiny-python 'import o' --all": "any text, any model, any token",
        "demo tiny-mla": "a fresh one's journey: latent attention and experts",
        "train python-stdlib": "the first part of the tour, for longer",
        "generate tiny-python 'import '": "more of what it writes",
    }
    console.print("\n[bold]try next[/bold]")
    for verb, why in tries.items():
        console.print(f"  {command} {verb:36} {why}", soft_wrap=True)
