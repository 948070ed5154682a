"""`cutaway bench`: what this machine reaches, kept for `cutaway size --gpu here`; and how fast one model runs on it."""

import json
import sys
from contextlib import contextmanager
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cutaway.errors import CutawayError, InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cutaway.bench.decode import Measured
    from cutaway.families.checkpoint import Checkpoint
    from cutaway.size.calibration import Calibration


class Kind(StrEnum):
    decode = "decode"
    prefill = "prefill"


class Numbers(StrEnum):
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


def bench(
    what: Annotated[
        Kind | None,
        typer.Argument(
            help="The speed of one model: writing, or reading. The machine unless given.", metavar="decode|prefill"
        ),
    ] = None,
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="SOURCE", help="A preset or .toml (with random weights), a directory, a .gguf or a hub id."
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; the GPU unless there is none.")] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="The preset that is read, decoded and trained; a small one.")
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Texts at once; 1 unless given.")] = None,
    context: Annotated[str | None, typer.Option(metavar="N", help="Tokens of each; 128, on a GPU 1,024.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Tokens to decode; 64 unless given.")] = None,
    dtype: Annotated[Numbers | None, typer.Option(help="Of the weights; fp32, on a GPU bf16.")] = None,
    bits: Annotated[int | None, typer.Option(metavar="16|8|4", help="Of a weight while decoding.")] = None,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile the steps, on a CPU.")] = False,
    peer: Annotated[
        bool | None, typer.Option("--peer/--no-peer", help="Beside transformers; if it can be, unless given.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Measure this machine: a bare copy and product, and a real model beside them. Takes about half a minute.

    With decode or prefill, measure one model: how fast it writes or reads, beside transformers in the same run.

    Example: cutaway bench && cutaway size llama-3.2-1b --gpu here

    Example: cutaway bench decode gpt2 --batch 4 --context 512

    Example: cutaway bench prefill ./my-model --no-peer --json
    """
    own: dict[str, Any] = {
        "--batch": batch,
        "--context": context,
        "--steps": steps,
        "--dtype": dtype,
        "--bits": bits,
        "--compile": compiled or None,
        "--peer": peer,
    }
    if what is None:
        given = next((name for name, value in own.items() if value is not None), None)
        if given is not None:
            raise InputError(f"{given} is for one model's speed; say which, as in cutaway bench decode gpt2 {given} …")
        bench_machine(device, model, as_json=as_json)
        return
    if source is None:
        raise InputError(f"no SOURCE is given; name a preset or a checkpoint, as in cutaway bench {what} smollm2-135m")
    for name in ("--steps", "--bits", "--compile") if what == Kind.prefill else ():
        if own[name] is not None:
            raise InputError(f"{name} is about steps, and prefill is reading; leave it out, or measure decode")
    if model is not None:
        raise InputError(f"--model is for the machine's own bench; name what is measured behind {what}")
    from cutaway.bench.decode import check_decoder, measure_speed
    from cutaway.cli.convert import bar
    from cutaway.size.units import parse_count

    length = None if context is None else parse_count(context)
    checkpoint = opened(source, device, dtype)
    check_decoder(checkpoint.model)  # before it is written for the peer
    how: dict[str, Any] = {"batch": batch or 1, "context": length, "steps": steps or 64, "bits": bits}
    with peer_directory(checkpoint, peer) as (directory, note), bar("measuring", quiet=as_json) as progress:
        found = measure_speed(checkpoint.model, what.value, peer=directory, progress=progress, compiled=compiled, **how)
    found = replace(found, notes=[note] if note else [])
    if as_json:
        sys.stdout.write(json.dumps({"source": source} | found.to_dict(), indent=2) + "\n")
    else:
        show_speed(source, found)


# ---------------------------------------------------------------------------------------- one model


def opened(source: str, device: str | None, dtype: Numbers | None) -> "Checkpoint":
    """A preset or a configuration with random weights, or a checkpoint with its own."""
    import torch

    from cutaway.bench.limits import DTYPES
    from cutaway.bench.machine import computed_in
    from cutaway.config import config, presets
    from cutaway.families.checkpoint import Checkpoint
    from cutaway.families.load import load
    from cutaway.model import build
    from cutaway.model.inputs import check_device

    where = check_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    numbers = DTYPES[dtype or computed_in(where)]
    if source in presets() or Path(source).suffix in (".toml", ".json"):
        made = config(source)
        return Checkpoint(build(made, device=where, dtype=numbers, seed=0), made)
    return load(source, device=where, dtype=numbers)


@contextmanager
def peer_directory(checkpoint: "Checkpoint", wanted: bool | None) -> "Iterator[tuple[Path | None, str]]":
    """The same model as transformers opens it, or why there is none."""
    import tempfile
    from importlib.util import find_spec

    from cutaway.families.save import save

    if wanted is False:
        yield None, ""
        return
    missing = "" if find_spec("transformers") else "transformers is not installed"
    with tempfile.TemporaryDirectory(prefix="cutaway-") as work:
        directory = None
        try:
            directory = None if missing else save(checkpoint, Path(work) / "model")
        except CutawayError as error:
            missing = str(error).split(". ")[0]
        if wanted and missing:
            raise InputError(f"--peer measures beside transformers, which cannot be: {missing}")
        yield directory, missing and f"without a peer: {missing}"


def show_speed(source: str, found: "Measured") -> None:
    """The two sides, one above the other, and the limit that they are held against."""
    from rich.text import Text

    from cutaway.bench.decode import quartiles
    from cutaway.cli.size import title
    from cutaway.cli.size_view import console, figure, grid, heading, under
    from cutaway.size.units import short, si

    reads = found.work == "prefill"
    out = console()
    numbers = found.dtype if found.bits is None else f"{found.dtype} with {found.bits}-bit weights"
    told = f"{short(found.parameters, 3)} parameters, {numbers}, batch {found.batch:,}, context {found.context:,}"
    out.print(heading(title(source), told))
    out.print(Text(f"{'reading' if reads else 'decoding'} on {found.device}", "dim"))
    table = grid("lrrrr", ["", "tokens/s", "ms" if reads else "ms a step", "quartiles", "of the limit"])
    for name, side in (("cutaway", found.ours), ("transformers", found.peer)):
        if side is not None:
            spread = "–".join(figure(value * 1e3) for value in quartiles(side.seconds))
            share = f"{side.share:.0%}" if side.share >= 0.01 else "<1%"
            table.add_row(name, figure(side.rate), figure(side.median * 1e3), spread, share)
    out.print(under(table))
    if found.ratios:
        low, high = quartiles(found.ratios)
        out.print(f"{median(found.ratios):.2f} times as fast, turn by turn (quartiles {low:.2f}–{high:.2f})")
    if reads:
        limit = f"reading takes {si(found.flops, 'FLOP')}; a bare product here does {si(found.limit, 'FLOP/s')}"
    else:
        limit = f"a step moves {si(found.bytes, 'B')}; a bare copy here does {si(found.limit, 'B/s')}"
    lines = [limit, *([] if found.loss is None else [str(found.loss)]), *found.notes]
    out.print(Text("\n".join(lines), "dim"), soft_wrap=True)


# ---------------------------------------------------------------------------------------- the machine


def bench_machine(device: str | None, model: str | None, *, as_json: bool) -> None:
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
