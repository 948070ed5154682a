"""`cutaway demo`: a token's journey through a small model."""

import json
import shutil
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from cutaway.errors import InputError

LONGEST = 2048


def demo(
    source: Annotated[
        str | None,
        typer.Argument(help="A preset's name, or a .toml or .json configuration: follow a token through it."),
    ] = None,
    text: Annotated[str | None, typer.Option(help="What that model reads, byte by byte.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the fresh weights.")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="How long the model of the tour learns.")] = 120,
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
    import torch

    from cutaway.lens import follow
    from cutaway.model import build

    model = build(model_config, seed=seed)
    ids = [byte % model_config.vocab_size for byte in text.encode("utf-8", "surrogateescape")]
    if len(ids) > LONGEST:
        raise InputError(f"--text has {len(ids)} bytes; every score is drawn, so give at most {LONGEST}")
    journey = follow(model, torch.tensor([ids]))
    if as_json:
        sys.stdout.write(json.dumps(to_data(journey, text, str(model)), indent=2) + "\n")
    else:
        show(journey, text, str(model), source)


def to_data(journey: Any, text: str, model: str) -> dict[str, Any]:
    return {
        "model": model,
        "text": text,
        "stages": [vars(stage) for stage in journey.stages],
        "top": [{"token": token, "probability": probability} for token, probability in journey.top],
        "sum_error": journey.sum_error,
        "row_error": journey.row_error,
    }


def on_stream(stage: Any) -> bool:
    return stage.site == "embed" or "resid" in stage.site


def is_added(stage: Any) -> bool:
    return stage.site.endswith(".out")


def spelled(token: int) -> str:
    """Of a model that reads bytes."""
    return repr(bytes([token])) if token < 256 else f"<{token}>"


def told(stages: Any) -> list[Any]:
    """All of the first block, and of deeper models' other blocks what is added and what comes of it."""
    deep = any(stage.site.startswith("blocks.2.") for stage in stages)
    middle = [stage.site.startswith("blocks.") and not stage.site.startswith("blocks.0.") for stage in stages]
    return [
        stage
        for stage, later in zip(stages, middle, strict=True)
        if not (deep and later) or is_added(stage) or stage.site.endswith("resid_post")
    ]


def show(journey: Any, text: str, model: str, source: str, *, spell: Callable[[int], str] | None = None) -> None:
    """`spell` says a token of a trained model; without it the weights are fresh, and the tokens bytes."""
    from rich.console import Console  # --json and --help draw nothing
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    last = text.encode("utf-8", "surrogateescape")[-1:]
    way = f"byte by byte; following the last one, {last!r}" if spell is None else "following its last token"
    console.print(f"[bold]{escape(source)}[/bold]  {model}")
    console.print(f'[dim]reading[/dim] "{escape(text)}" [dim]{way}[/dim]\n')
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("stage", "what it is", "shape"):
        table.add_column(name, no_wrap=True)
    table.add_column("norm", justify="right")
    table.add_column("")
    longest = max(stage.norm for stage in journey.stages if on_stream(stage) or is_added(stage))
    for stage in told(journey.stages):
        style = "bold cyan" if on_stream(stage) else "yellow" if is_added(stage) else ""
        bar = "━" * max(1, round(10 * stage.norm / longest)) if style else ""
        shape = " ".join(f"{axis}={size}" for axis, size in zip(stage.axes.split(), stage.shape, strict=True))
        cells = (stage.site, escape(stage.equation), shape, f"{stage.norm:.3f}", bar)
        table.add_row(*cells, style=style)
    console.print(table)
    if journey.top:
        note = "" if spell is not None else " [dim](fresh weights: still close to chance)[/dim]"
        console.print(f"\n[bold]top five for the next token[/bold]{note}")
    for token, probability in journey.top:
        shown = escape((spell or spelled)(token))
        bar = "━" * max(1, round(40 * probability / journey.top[0][1]))
        console.print(f"  {shown:10} {probability:7.2%} [cyan]{bar}[/cyan]")
    console.print("\n[bold]proof[/bold]")
    if journey.sum_error is not None:
        console.print(f"  embedding + Σ additions = stream   largest difference {journey.sum_error:.1e}")
    if journey.row_error is not None:
        console.print(f"  rows of every pattern sum to 1     largest difference {journey.row_error:.1e}")
    command = "cutaway" if shutil.which("cutaway") else sys.argv[0]
    tries = {
        "presets": "the models that have a name",
        "demo tiny-mla": "a fresh one's journey: latent attention and experts",
        "train python-stdlib": "the first part of the tour, for longer",
        "generate tiny-python 'import '": "more of what it writes",
    }
    console.print("\n[bold]try next[/bold]")
    for verb, why in tries.items():
        console.print(f"  {command} {verb:32} {why}", soft_wrap=True)
