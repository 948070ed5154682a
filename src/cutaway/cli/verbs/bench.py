"""`cutaway bench`: measure this machine (for `cutaway size --gpu local`), or the throughput of one model."""

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
            help="Measure decode or prefill throughput of one model; default measure the machine.",
            metavar="decode|prefill",
        ),
    ] = None,
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="SOURCE", help="Preset or .toml (random weights), model directory, .gguf file or hub id."
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="Device: cpu or cuda; default cuda if available.")] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Preset that is run to measure the machine; default a small one.")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Batch size; default 1.")] = None,
    context: Annotated[
        str | None, typer.Option(metavar="N", help="Context length; default 128, on a GPU 1,024.")
    ] = None,
    num_steps: Annotated[int | None, typer.Option(min=1, help="Number of decode steps; default 64.")] = None,
    dtype: Annotated[
        DType | None, typer.Option(help="Data type of the weights; default float32, on a GPU bfloat16.")
    ] = None,
    weight_bits: Annotated[
        int | None, typer.Option(metavar="16|8|4", help="Weight quantization during decode.")
    ] = None,
    compile_model: Annotated[bool, typer.Option("--compile", help="Compile decode steps on a CPU.")] = False,
    baseline: Annotated[
        bool | None, typer.Option("--baseline/--no-baseline", help="Compare with transformers; default if possible.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure this machine's memory bandwidth, FLOP/s and efficiency, or the throughput of one model.

    Measuring the machine takes about half a minute. With decode or prefill, measure the throughput of one model, and
    of transformers in the same run.

    Example: cutaway bench && cutaway size llama-3.2-1b --gpu local

    Example: cutaway bench decode gpt2 --batch-size 4 --context 512

    Example: cutaway bench prefill ./my-model --no-baseline --json
    """
    throughput_options: dict[str, Any] = {
        "--batch-size": batch_size,
        "--context": context,
        "--num-steps": num_steps,
        "--dtype": dtype,
        "--weight-bits": weight_bits,
        "--compile": compile_model or None,
        "--baseline": baseline,
    }
    if phase is None:
        misplaced = next((name for name, value in throughput_options.items() if value is not None), None)
        if misplaced is not None:
            raise InputError(
                f"{misplaced} is for one model's throughput; use it as in cutaway bench decode gpt2 {misplaced} …"
            )
        _run_machine_bench(device, model, as_json=as_json)
        return
    if source is None:
        raise InputError(f"SOURCE is missing; name a preset or a checkpoint, as in cutaway bench {phase} smollm2-135m")
    for name in ("--num-steps", "--weight-bits", "--compile") if phase == Phase.prefill else ():
        if throughput_options[name] is not None:
            raise InputError(f"{name} applies to decode, not to prefill; leave it out, or measure decode")
    if model is not None:
        raise InputError(f"--model is for measuring the machine; pass the model as SOURCE after {phase}")
    from cutaway.bench.throughput import check_is_decoder, measure_throughput
    from cutaway.cli.views.terminal import progress_bar
    from cutaway.size.units import parse_count

    context_len = None if context is None else parse_count(context)
    checkpoint = _load_or_build_checkpoint(source, device, dtype)
    check_is_decoder(checkpoint.model)  # before it is saved for the baseline
    with (
        _saved_for_transformers(checkpoint, baseline) as (directory, note),
        progress_bar("measuring", quiet=as_json) as progress,
    ):
        result = measure_throughput(
            checkpoint.model,
            phase.value,
            batch_size=batch_size or 1,
            context=context_len,
            num_steps=num_steps or 64,
            weight_bits=weight_bits,
            compiled=compile_model,
            baseline_dir=directory,
            progress=progress,
        )
    result = replace(result, notes=[note] if note else [])
    if as_json:
        sys.stdout.write(json.dumps({"source": source} | result.to_dict(), indent=2) + "\n")
    else:
        from cutaway.cli.views.bench_report import render_speed

        render_speed(source, result)


# ---------------------------------------------------------------------------------------- throughput of one model


def _load_or_build_checkpoint(source: str, device: str | None, dtype: DType | None) -> "Checkpoint":
    """Build a preset or config file with random weights, or load a checkpoint."""
    import torch

    from cutaway.arguments import resolve_device
    from cutaway.bench.hardware import TORCH_DTYPES, default_dtype
    from cutaway.config import config, presets
    from cutaway.families.checkpoint import Checkpoint
    from cutaway.families.load import load
    from cutaway.model import build

    target_device = resolve_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch_dtype = TORCH_DTYPES[default_dtype(target_device)] if dtype is None else getattr(torch, dtype)
    if source in presets() or Path(source).suffix in (".toml", ".json"):
        model_config = config(source)
        return Checkpoint(build(model_config, device=target_device, dtype=torch_dtype, seed=0), model_config)
    return load(source, device=target_device, dtype=torch_dtype)


@contextmanager
def _saved_for_transformers(checkpoint: "Checkpoint", requested: bool | None) -> "Iterator[tuple[Path | None, str]]":
    """Save the model for transformers; yield its directory and a note if that is not possible."""
    import tempfile
    from importlib.util import find_spec

    from cutaway.families.save import save

    if requested is False:
        yield None, ""
        return
    reason = "" if find_spec("transformers") else "transformers is not installed"
    with tempfile.TemporaryDirectory(prefix="cutaway-") as temporary:
        directory = None
        try:
            directory = None if reason else save(checkpoint, Path(temporary) / "model")
        except CutawayError as error:
            reason = str(error).split(". ")[0]
        if requested and reason:
            raise InputError(f"--baseline cannot run transformers: {reason}; use --no-baseline")
        yield directory, reason and f"no baseline: {reason}"


# ---------------------------------------------------------------------------------------- the machine


def _run_machine_bench(device: str | None, model: str | None, *, as_json: bool) -> None:
    from cutaway.bench import NUM_STAGES, measure_hardware
    from cutaway.cli.views.bench_report import render_calibration
    from cutaway.cli.views.terminal import progress_bar
    from cutaway.size.measured_hardware import measured_hardware_path, save_measured_hardware

    stages: list[str] = []
    with progress_bar("measuring", quiet=as_json) as progress:

        def on_stage(stage: str) -> None:
            stages.append(stage)
            progress(len(stages), NUM_STAGES)

        measured = measure_hardware(device, model=model, progress=on_stage)
    try:
        path = save_measured_hardware(measured)
    except OSError as error:  # print the measurement before the error
        if not as_json:
            render_calibration(measured)
        raise InputError(
            f"'{measured_hardware_path()}' cannot be written ({error.strerror}); set CUTAWAY_CACHE to another directory"
        ) from None
    if as_json:
        sys.stdout.write(json.dumps(asdict(measured) | {"path": str(path)}, indent=2) + "\n")
    else:
        render_calibration(measured)
        sys.stdout.write(f"saved to {path}; use it with: cutaway size NAME --gpu local\n")
