"""`cutaway demo`: a token's journey through a small model."""

import json
import shutil
import sys
from typing import Annotated, Any

import typer

from cutaway.errors import InputError

LONGEST = 2048


def demo(
    source: Annotated[str, typer.Argument(help="A preset's name, or a .toml or .json configuration.")] = "tiny-gpt",
    text: Annotated[str, typer.Option(help="What the model reads, byte by byte.")] = "The cat sat on the",
    seed: Annotated[int, typer.Option(help="Seed of the fresh weights.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Build a small model, run it, and follow the last token: each stage, its shape and norm, and the top five.

    Example: cutaway demo tiny-moe --text "Attention is all you"
    """
    from cutaway.config import config

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
        show(journey, text, str(model), source, trained=False)


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


def show(journey: Any, text: str, model: str, source: str, *, trained: bool) -> None:
    from rich.console import Console  # --json and --help draw nothing
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    last = text.encode("utf-8", "surrogateescape")[-1:]
    console.print(f"[bold]{escape(source)}[/bold]  {model}")
    console.print(f'[dim]reading[/dim] "{escape(text)}" [dim]byte by byte; following the last one, {last!r}[/dim]\n')
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("stage", "what it is", "shape"):
        table.add_column(name, no_wrap=True)
    table.add_column("norm", justify="right")
    table.add_column("")
    longest = max(stage.norm for stage in journey.stages if on_stream(stage) or is_added(stage))
    for stage in journey.stages:
        style = "bold cyan" if on_stream(stage) else "yellow" if is_added(stage) else ""
        bar = "━" * max(1, round(10 * stage.norm / longest)) if style else ""
        shape = " ".join(f"{axis}={size}" for axis, size in zip(stage.axes.split(), stage.shape, strict=True))
        cells = (stage.site, escape(stage.equation), shape, f"{stage.norm:.3f}", bar)
        table.add_row(*cells, style=style)
    console.print(table)
    if journey.top:
        note = "" if trained else " [dim](fresh weights: still close to chance)[/dim]"
        console.print(f"\n[bold]top five for the next token[/bold]{note}")
    for token, probability in journey.top:
        shown = repr(bytes([token])) if token < 256 else f"<{token}>"
        bar = "━" * max(1, round(40 * probability / journey.top[0][1]))
        console.print(f"  {shown:10} {probability:7.2%} [cyan]{bar}[/cyan]")
    console.print("\n[bold]proof[/bold]")
    if journey.sum_error is not None:
        console.print(f"  embedding + Σ additions = stream   largest difference {journey.sum_error:.1e}")
    if journey.row_error is not None:
        console.print(f"  rows of every pattern sum to 1     largest difference {journey.row_error:.1e}")
    command = "cutaway" if shutil.which("cutaway") else sys.argv[0]
    console.print(
        "\n[bold]try next[/bold]\n"
        f"  {command} presets                      the models that have a name\n"
        f"  {command} presets tiny-gpt > my.toml   a configuration to change\n"
        f"  {command} demo my.toml                 and its journey\n"
        f"  {command} demo tiny-mla                latent attention and experts",
        soft_wrap=True,
    )
