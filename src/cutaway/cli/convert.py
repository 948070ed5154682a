"""`cutaway convert`: from one directory or file to another, every tensor accounted for."""

import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cutaway.errors import InputError

if TYPE_CHECKING:  # torch is imported when the work begins
    from cutaway.families.checkpoint import Checkpoint


class Target(StrEnum):
    hf = "hf"
    gguf = "gguf"
    cutaway = "cutaway"


class Packing(StrEnum):
    f32 = "f32"
    f16 = "f16"
    bf16 = "bf16"
    q8_0 = "q8_0"
    q5_1 = "q5_1"
    q5_0 = "q5_0"
    q4_1 = "q4_1"
    q4_0 = "q4_0"


class DType(StrEnum):
    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A model's directory, a .gguf file or a hub id.")],
    out: Annotated[
        Path | None, typer.Argument(metavar="OUT", help="Where to write; nothing is written without.")
    ] = None,
    to: Annotated[Target, typer.Option(help="What to write.")] = Target.hf,
    family: Annotated[str | None, typer.Option(help="Write for this model_type, where several could say it.")] = None,
    dtype: Annotated[DType | None, typer.Option(help="Store numbers so; as they are, unless given.")] = None,
    packing: Annotated[Packing | None, typer.Option(help="For gguf: how matrices are written.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Compare with transformers, layer by layer.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what stands at OUT.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Open a checkpoint, report on every tensor and field, and write it for another tool.

    Example: cutaway convert ./SmolLM2-135M out.gguf --to gguf --packing q8_0

    Example: cutaway convert ./my-llama --verify
    """
    _check_options(out, to, family, packing, overwrite)
    import torch

    from cutaway.families.load import load

    chosen = None if dtype is None else getattr(torch, dtype)
    with bar("reading", quiet=as_json) as progress:
        checkpoint = load(source, dtype=chosen, check=True, progress=progress)
    assert checkpoint.report is not None
    told: dict[str, Any] = {"report": checkpoint.report.to_dict()}
    lines = [str(checkpoint.report)]
    if out is not None:
        with bar("writing", quiet=as_json) as progress:
            written = _write(checkpoint, out, to, family, packing, overwrite, progress)
        told["written"] = str(written)
        lines.append(f"written: {written}")
    same = True
    if verify:
        del checkpoint
        from cutaway.families.verify import verify as compare

        found = compare(source)
        told["verification"], same = found.to_dict(), found.ok
        lines.append(str(found))
    if as_json:
        sys.stdout.write(json.dumps(plain(told), indent=2, allow_nan=False) + "\n")
    else:
        from rich.console import Console

        Console(soft_wrap=True, highlight=False).print("\n".join(lines), markup=False)
    if not same:
        raise typer.Exit(1)


def plain(value: Any) -> Any:
    """JSON has no word for NaN and infinity: they are told as text."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


def _check_options(out: Path | None, to: Target, family: str | None, packing: str | None, overwrite: bool) -> None:
    """What can be told before anything is read."""
    from cutaway.families import families

    if packing is not None and to is not Target.gguf:
        raise InputError("--packing is for --to gguf; for other targets give --dtype")
    if family is not None and to is not Target.hf:
        raise InputError("--family is for --to hf; leave it out")
    if family is not None and family not in families():
        raise InputError(f"'{family}' is no family of cutaway's; it has: {', '.join(families())}")
    if out is None and (family or packing):
        raise InputError("--family and --packing say how to write; name OUT too")
    if out is not None and not overwrite and (out.is_file() or (out.is_dir() and any(out.iterdir()))):
        raise InputError(f"'{out}' exists already, and nothing is replaced unasked; name another or add --overwrite")
    if to is Target.gguf and out is not None and out.suffix != ".gguf":
        raise InputError(f"'{out}' should end in .gguf: one file is written")


def _write(
    checkpoint: "Checkpoint",
    out: Path,
    to: Target,
    family: str | None,
    packing: str | None,
    overwrite: bool,
    progress: Any,
) -> Path:
    if to is Target.gguf:
        from cutaway.families.gguf.convert import save_gguf

        return save_gguf(checkpoint, out, packing=packing, overwrite=overwrite)
    from cutaway.families.save import save

    name = "cutaway" if to is Target.cutaway else family
    return save(checkpoint, out, family=name, overwrite=overwrite, progress=progress)


@contextmanager
def bar(what: str, *, quiet: bool) -> Iterator[Any]:
    """A progress bar on the terminal, for work that takes more than two seconds."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeRemainingColumn())
    shown = Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal)
    began = time.monotonic()
    task = shown.add_task(what, total=None, visible=False)
    with shown:
        yield lambda done, total: shown.update(task, completed=done, total=total, visible=time.monotonic() - began > 2)
