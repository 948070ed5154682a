"""`cutaway bench`: measure this machine (for `cutaway size --gpu local`), or the throughput of one model."""

import sys
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cutaway.cli.json_output import print_json
from cutaway.cli.options import Device, DType, JsonFlag, argument, option, parse_length
from cutaway.errors import CutawayError, InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cutaway.families.checkpoint import Checkpoint


Phase = Literal["decode", "prefill"]


def bench(
    phase: Annotated[
        Phase | None,
        argument(
            "Measure decode or prefill throughput of one model; by default the machine is measured.",
            metavar="decode|prefill",
        ),
    ] = None,
    source: Annotated[
        str | None,
        argument("Preset or .toml (random weights), model directory, .gguf file or hub id.", metavar="SOURCE"),
    ] = None,
    device: Device = None,
    model: Annotated[
        str | None, option("Preset for measuring the machine; default a small one.", metavar="NAME")
    ] = None,
    batch_size: Annotated[int | None, option("Batch size; default 1.", min=1)] = None,
    context: Annotated[str | None, option("Context length; default 128, on a GPU 1,024.", metavar="N")] = None,
    num_steps: Annotated[int | None, option("Number of decode steps; default 64.", min=1)] = None,
    dtype: Annotated[DType | None, option("Data type of the weights; default float32, on a GPU bfloat16.")] = None,
    weight_bits: Annotated[int | None, option("Number of bits per weight during decode.", metavar="16|8|4")] = None,
    compile_model: Annotated[bool, option("Compile decode steps on a CPU.", "--compile")] = False,
    baseline: Annotated[
        bool | None, option("Compare with transformers; by default if possible.", "--baseline/--no-baseline")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure this machine's memory bandwidth, FLOP/s and efficiency, or the throughput of one model.

    Measuring the machine takes about half a minute. With decode or prefill, the throughput of one model is measured,
    with cutaway and with transformers in the same run.

    Example: cutaway bench && cutaway size llama-3.2-1b --gpu local

    Example: cutaway bench decode gpt2 --batch-size 4 --context 512

    Example: cutaway bench prefill ./my-model --no-baseline --json
    """
    throughput_options: dict[str, object] = {
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
            raise InputError(f"{misplaced} applies to one model; use it as in cutaway bench decode gpt2 {misplaced} …")
        _run_machine_bench(device, model, as_json=as_json)
        return
    if source is None:
        raise InputError(f"SOURCE is missing; name a preset or a checkpoint, as in cutaway bench {phase} smollm2-135m")
    for name in ("--num-steps", "--weight-bits", "--compile") if phase == "prefill" else ():
        if throughput_options[name] is not None:
            raise InputError(f"{name} applies to decode, not to prefill; leave it out, or measure decode")
    if model is not None:
        raise InputError(f"--model is for measuring the machine; pass the model as SOURCE after {phase}")
    from cutaway.bench.throughput import check_is_decoder, measure_throughput
    from cutaway.cli.views.terminal import progress_bar

    context_len = parse_length(context)
    checkpoint = _load_or_build_checkpoint(source, device, dtype, quiet=as_json)
    check_is_decoder(checkpoint.model)  # before it is saved for the baseline
    with (
        _saved_for_transformers(checkpoint, baseline) as (directory, note),
        progress_bar("measuring", quiet=as_json) as progress,
    ):
        result = measure_throughput(
            checkpoint.model,
            phase,
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
        print_json({"source": source} | result.to_dict())
    else:
        from cutaway.cli.views.bench_report import render_speed

        render_speed(source, result)


# ---------------------------------------------------------------------------------------- throughput of one model


def _load_or_build_checkpoint(source: str, device: str | None, dtype: DType | None, *, quiet: bool) -> "Checkpoint":
    """Build a preset or config file with random weights, or load a checkpoint."""
    from cutaway.cli.model_loading import build_untrained_model, default_device, load_checkpoint
    from cutaway.families.checkpoint import Checkpoint

    dtype = dtype or ("bfloat16" if default_device(device).type == "cuda" else "float32")
    model = build_untrained_model(source, device, dtype)
    return load_checkpoint(source, device, dtype, quiet=quiet) if model is None else Checkpoint(model, model.config)


@contextmanager
def _saved_for_transformers(checkpoint: "Checkpoint", requested: bool | None) -> "Iterator[tuple[Path | None, str]]":
    """Context manager: save the model in a temporary directory that transformers can load.

    Yield the directory and "", or None and a note that says why there is no baseline ("" with --no-baseline).
    """
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
        print_json(asdict(measured) | {"path": str(path)})
    else:
        render_calibration(measured)
        sys.stdout.write(f"saved to {path}; use it with: cutaway size NAME --gpu local\n")
