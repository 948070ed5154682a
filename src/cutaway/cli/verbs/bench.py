"""`cutaway bench`: what this machine reaches, kept for `cutaway size --gpu local`; and how fast one model runs."""

import json
import sys
from contextlib import contextmanager
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cutaway.cli.model_loading import DType
from cutaway.errors import CutawayError, InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cutaway.families.checkpoint import Checkpoint


class Phase(StrEnum):
    decode = "decode"
    prefill = "prefill"


def bench(
    phase: Annotated[
        Phase | None,
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
    batch_size: Annotated[int | None, typer.Option(min=1, help="Texts at once; 1 unless given.")] = None,
    context: Annotated[str | None, typer.Option(metavar="N", help="Tokens of each; 128, on a GPU 1,024.")] = None,
    num_steps: Annotated[int | None, typer.Option(min=1, help="Tokens to decode; 64 unless given.")] = None,
    dtype: Annotated[DType | None, typer.Option(help="Of the weights; float32, on a GPU bfloat16.")] = None,
    weight_bits: Annotated[int | None, typer.Option(metavar="16|8|4", help="Of a weight while decoding.")] = None,
    compile_model: Annotated[bool, typer.Option("--compile", help="Compile the steps, on a CPU.")] = False,
    baseline: Annotated[
        bool | None, typer.Option("--baseline/--no-baseline", help="Beside transformers; if it can be, unless given.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Measure this machine: a bare copy and product, and a real model beside them. Takes about half a minute.

    With decode or prefill, measure one model: how fast it writes or reads, beside transformers in the same run.

    Example: cutaway bench && cutaway size llama-3.2-1b --gpu local

    Example: cutaway bench decode gpt2 --batch-size 4 --context 512

    Example: cutaway bench prefill ./my-model --no-baseline --json
    """
    own: dict[str, Any] = {
        "--batch-size": batch_size,
        "--context": context,
        "--num-steps": num_steps,
        "--dtype": dtype,
        "--weight-bits": weight_bits,
        "--compile": compile_model or None,
        "--baseline": baseline,
    }
    if phase is None:
        given = next((name for name, value in own.items() if value is not None), None)
        if given is not None:
            raise InputError(f"{given} is for one model's speed; say which, as in cutaway bench decode gpt2 {given} …")
        _run_machine_bench(device, model, as_json=as_json)
        return
    if source is None:
        raise InputError(f"no SOURCE is given; name a preset or a checkpoint, as in cutaway bench {phase} smollm2-135m")
    for name in ("--num-steps", "--weight-bits", "--compile") if phase == Phase.prefill else ():
        if own[name] is not None:
            raise InputError(f"{name} is about steps, and prefill is reading; leave it out, or measure decode")
    if model is not None:
        raise InputError(f"--model is for the machine's own bench; name what is measured behind {phase}")
    from cutaway.bench.throughput import check_is_decoder, measure_throughput
    from cutaway.cli.views.terminal import progress_bar
    from cutaway.size.units import parse_count

    length = None if context is None else parse_count(context)
    checkpoint = _load_or_build_checkpoint(source, device, dtype)
    check_is_decoder(checkpoint.model)  # before it is written for the baseline
    with (
        _saved_for_transformers(checkpoint, baseline) as (directory, note),
        progress_bar("measuring", quiet=as_json) as progress,
    ):
        found = measure_throughput(
            checkpoint.model,
            phase.value,
            batch_size=batch_size or 1,
            context=length,
            num_steps=num_steps or 64,
            weight_bits=weight_bits,
            compiled=compile_model,
            baseline_dir=directory,
            progress=progress,
        )
    found = replace(found, notes=[note] if note else [])
    if as_json:
        sys.stdout.write(json.dumps({"source": source} | found.to_dict(), indent=2) + "\n")
    else:
        from cutaway.cli.views.bench_report import render_speed

        render_speed(source, found)


# ---------------------------------------------------------------------------------------- one model


def _load_or_build_checkpoint(source: str, device: str | None, dtype: DType | None) -> "Checkpoint":
    """A preset or a configuration with random weights, or a checkpoint with its own."""
    import torch

    from cutaway.bench.hardware import TORCH_DTYPES, default_dtype
    from cutaway.config import config, presets
    from cutaway.families.checkpoint import Checkpoint
    from cutaway.families.load import load
    from cutaway.model import build
    from cutaway.model.inputs import resolve_device

    where = resolve_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    numbers = TORCH_DTYPES[default_dtype(where)] if dtype is None else getattr(torch, dtype)
    if source in presets() or Path(source).suffix in (".toml", ".json"):
        made = config(source)
        return Checkpoint(build(made, device=where, dtype=numbers, seed=0), made)
    return load(source, device=where, dtype=numbers)


@contextmanager
def _saved_for_transformers(checkpoint: "Checkpoint", requested: bool | None) -> "Iterator[tuple[Path | None, str]]":
    """The same model as transformers opens it, or why there is none."""
    import tempfile
    from importlib.util import find_spec

    from cutaway.families.save import save

    if requested is False:
        yield None, ""
        return
    missing = "" if find_spec("transformers") else "transformers is not installed"
    with tempfile.TemporaryDirectory(prefix="cutaway-") as work:
        directory = None
        try:
            directory = None if missing else save(checkpoint, Path(work) / "model")
        except CutawayError as error:
            missing = str(error).split(". ")[0]
        if requested and missing:
            raise InputError(f"--baseline measures beside transformers, which cannot be: {missing}")
        yield directory, missing and f"without a baseline: {missing}"


# ---------------------------------------------------------------------------------------- the machine


def _run_machine_bench(device: str | None, model: str | None, *, as_json: bool) -> None:
    from cutaway.bench import NUM_STAGES, measure_hardware
    from cutaway.cli.views.bench_report import render_calibration
    from cutaway.cli.views.terminal import progress_bar
    from cutaway.size.measured_hardware import measured_hardware_path, save_measured_hardware

    stages: list[str] = []
    with progress_bar("measuring", quiet=as_json) as progress:

        def tell(what: str) -> None:
            stages.append(what)
            progress(len(stages), NUM_STAGES)

        measured = measure_hardware(device, model=model, progress=tell)
    try:
        path = save_measured_hardware(measured)
    except OSError as error:  # what took half a minute is shown all the same
        if not as_json:
            render_calibration(measured)
        raise InputError(
            f"'{measured_hardware_path()}' cannot be written ({error.strerror}); point CUTAWAY_CACHE elsewhere"
        ) from None
    if as_json:
        sys.stdout.write(json.dumps(asdict(measured) | {"path": str(path)}, indent=2) + "\n")
    else:
        render_calibration(measured)
        sys.stdout.write(f"kept in {path}; ask for this machine with: cutaway size NAME --gpu local\n")
