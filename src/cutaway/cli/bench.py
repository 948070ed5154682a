"""`cutaway bench`: what this machine reaches, kept for `cutaway size --gpu here`."""

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from cutaway.errors import InputError

if TYPE_CHECKING:
    from cutaway.size.calibration import Calibration


def bench(
    device: Annotated[str | None, typer.Option(help="cpu or cuda; the GPU unless there is none.")] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="The preset that is read, decoded and trained; a small one.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Measure this machine: a bare copy and product, and a real model beside them. Takes about half a minute.

    Example: cutaway bench && cutaway size llama-3.2-1b --gpu here
    """
    from cutaway.bench import STAGES, measure
    from cutaway.cli.convert import bar
    from cutaway.size.calibration import record, where

    stages: list[str] = []
    with bar("measuring", quiet=as_json) as progress:

        def tell(what: str) -> None:
            stages.append(what)
            progress(len(stages), STAGES)

        measured = measure(device, model=model, progress=tell)
    try:
        path = record(measured)
    except OSError as error:  # what took half a minute is shown all the same
        if not as_json:
            show(measured)
        raise InputError(f"'{where()}' cannot be written ({error.strerror}); point CUTAWAY_CACHE elsewhere") from None
    if as_json:
        sys.stdout.write(json.dumps(asdict(measured) | {"kept": str(path)}, indent=2) + "\n")
    else:
        show(measured)
        sys.stdout.write(f"kept in {path}; ask for this machine with: cutaway size NAME --gpu here\n")


def show(measured: "Calibration") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_row("copy", f"{measured.bandwidth / 1e9:,.1f} GB/s")
    for dtype, rate in measured.flops.items():
        table.add_row(f"product in {dtype}", f"{rate / 1e12:,.3g} TFLOP/s")
    for work, reached in measured.shares.items():
        table.add_row(f"{measured.model}: {work}", f"{reached:.0%} of the bound")
    console = Console()
    console.print(f"[bold]{measured.device}[/bold]")
    console.print(table)
