"""`cutaway convert`: from one directory or file to another, every tensor accounted for."""

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cutaway.cli.model_loading import DType
from cutaway.errors import InputError

if TYPE_CHECKING:  # torch is imported when the work begins
    from cutaway.families.checkpoint import Checkpoint


class OutputFormat(StrEnum):
    hf = "hf"
    gguf = "gguf"
    cutaway = "cutaway"


class GGUFQuantization(StrEnum):
    f32 = "f32"
    f16 = "f16"
    bf16 = "bf16"
    q8_0 = "q8_0"
    q5_1 = "q5_1"
    q5_0 = "q5_0"
    q4_1 = "q4_1"
    q4_0 = "q4_0"


def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A model's directory, a .gguf file or a hub id.")],
    out: Annotated[
        Path | None, typer.Argument(metavar="OUT", help="Where to write; nothing is written without.")
    ] = None,
    to: Annotated[OutputFormat, typer.Option(help="What to write.")] = OutputFormat.hf,
    family: Annotated[str | None, typer.Option(help="Write for this model_type, where several could say it.")] = None,
    dtype: Annotated[DType | None, typer.Option(help="Store numbers so; as they are, unless given.")] = None,
    quantization: Annotated[GGUFQuantization | None, typer.Option(help="For gguf: how matrices are written.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Compare with transformers, layer by layer.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what stands at OUT.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Open a checkpoint, report on every tensor and field, and write it for another tool.

    Example: cutaway convert ./SmolLM2-135M out.gguf --to gguf --quantization q8_0

    Example: cutaway convert ./my-llama --verify
    """
    _check_options(out, to, family, quantization, overwrite)
    import torch

    from cutaway.cli.views.terminal import json_safe, progress_bar
    from cutaway.families.load import load

    chosen = None if dtype is None else getattr(torch, dtype)
    with progress_bar("reading", quiet=as_json) as progress:
        checkpoint = load(source, dtype=chosen, check_finite=True, progress=progress)
    assert checkpoint.load_report is not None
    told: dict[str, Any] = {"report": checkpoint.load_report.to_dict()}
    lines = [str(checkpoint.load_report)]
    if out is not None:
        with progress_bar("writing", quiet=as_json) as progress:
            written = _write_checkpoint(checkpoint, out, to, family, quantization, overwrite, progress)
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
        sys.stdout.write(json.dumps(json_safe(told), indent=2, allow_nan=False) + "\n")
    else:
        from rich.console import Console

        Console(soft_wrap=True, highlight=False).print("\n".join(lines), markup=False)
    if not same:
        raise typer.Exit(1)


def _check_options(
    out: Path | None, to: OutputFormat, family: str | None, quantization: str | None, overwrite: bool
) -> None:
    """What can be told before anything is read."""
    from cutaway.families import families

    if quantization is not None and to is not OutputFormat.gguf:
        raise InputError("--quantization is for --to gguf; for other targets give --dtype")
    if family is not None and to is not OutputFormat.hf:
        raise InputError("--family is for --to hf; leave it out")
    if family is not None and family not in families():
        raise InputError(f"'{family}' is no family of cutaway's; it has: {', '.join(families())}")
    if out is None and (family or quantization):
        raise InputError("--family and --quantization say how to write; name OUT too")
    if out is not None and not overwrite and (out.is_file() or (out.is_dir() and any(out.iterdir()))):
        raise InputError(f"'{out}' exists already, and nothing is replaced unasked; name another or add --overwrite")
    if to is OutputFormat.gguf and out is not None and out.suffix != ".gguf":
        raise InputError(f"'{out}' should end in .gguf: one file is written")


def _write_checkpoint(
    checkpoint: "Checkpoint",
    out: Path,
    to: OutputFormat,
    family: str | None,
    quantization: str | None,
    overwrite: bool,
    progress: Any,
) -> Path:
    if to is OutputFormat.gguf:
        from cutaway.families.gguf.load_save import save_gguf

        return save_gguf(checkpoint, out, quantization=quantization, overwrite=overwrite)
    from cutaway.families.save import save

    name = "cutaway" if to is OutputFormat.cutaway else family
    return save(checkpoint, out, family=name, overwrite=overwrite, progress=progress)
