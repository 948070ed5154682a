"""`cutaway size`: what a model costs before it exists."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from cutaway.errors import InputError

if TYPE_CHECKING:  # --help needs no configurations, and --json draws nothing: each is imported where it is used
    from cutaway.size import Hardware, SizeEstimate

OptionText = str | None
MAX_NAME_LENGTH = 48
Number = TypeVar("Number", int, float)


def size(
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SOURCE",
            help="A preset's name, a .toml or config.json, or a model's directory; several are compared.",
            show_default=False,
        ),
    ] = None,
    mode: Annotated[OptionText, typer.Option(metavar="train|infer", help="Only this; both unless given.")] = None,
    batch_size: Annotated[
        OptionText, typer.Option(metavar="N", help="Sequences, on all devices; one each unless given.")
    ] = None,
    context: Annotated[OptionText, typer.Option(metavar="N", help="Tokens of each; 8k is 8,000 and 8Ki 8,192.")] = None,
    source_len: Annotated[OptionText, typer.Option(metavar="N", help="For encoder-decoders: tokens read.")] = None,
    dtype: Annotated[
        OptionText, typer.Option(metavar="NAME", help="fp32, bf16, fp16, mixed; to serve also fp8, int8, int4.")
    ] = None,
    kv_cache_dtype: Annotated[
        OptionText, typer.Option(metavar="NAME", help="Of the KV cache: fp32, bf16, fp16, fp8, int8, int4.")
    ] = None,
    optimizer: Annotated[
        OptionText, typer.Option(metavar="NAME", help="adamw, adamw-8bit, muon, sgd, sgd-momentum.")
    ] = None,
    activation_checkpointing: Annotated[
        OptionText, typer.Option(metavar="NAME", help="What is recomputed: none, selective, full.")
    ] = None,
    kernel: Annotated[
        OptionText, typer.Option(metavar="NAME", help="Of attention: auto, sdpa, explicit, flex.")
    ] = None,
    loss: Annotated[OptionText, typer.Option(metavar="NAME", help="Over logits: full, or chunked as in train.")] = None,
    gpu: Annotated[
        OptionText, typer.Option(metavar="NAME", help="A device that --list-hardware lists, or 'local', once measured.")
    ] = None,
    bandwidth: Annotated[OptionText, typer.Option(metavar="3.35TB/s", help="Or a device by its figures: this,")] = None,
    flops: Annotated[OptionText, typer.Option(metavar="989TFLOPS", help="this,")] = None,
    memory: Annotated[OptionText, typer.Option(metavar="80GB", help="and how much it holds.")] = None,
    world_size: Annotated[OptionText, typer.Option(metavar="N", help="How many of them.")] = None,
    parallel: Annotated[OptionText, typer.Option(metavar="NAME", help="How they share: dp, fsdp, tp.")] = None,
    tp: Annotated[OptionText, typer.Option(metavar="N", help="Of them, how many share each matrix;")] = None,
    dp_shard: Annotated[OptionText, typer.Option(metavar="N", help="and how many share the states.")] = None,
    train_tokens: Annotated[
        OptionText, typer.Option(metavar="15T", help="To train on; 20 a parameter unless given.")
    ] = None,
    price_per_hour: Annotated[
        float | None, typer.Option(metavar="2.5", min=0, max=1e9, help="Of one device for an hour, in your money.")
    ] = None,
    fit: Annotated[OptionText, typer.Option(metavar="16GB", help="Say what fits in so much memory.")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Side by side, as several SOURCEs always are.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it: .svg, .png or .pdf.")] = None,
    list_hardware: Annotated[bool, typer.Option("--list-hardware", help="List the known devices.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Say what a model costs before it exists: parameters, FLOPs, memory and time.

    Example: cutaway size llama-3-8b --gpu h100 --context 8Ki

    Example: cutaway size ./my-model --mode train --gpu h100 --world-size 8 --train-tokens 1T --price-per-hour 2.5

    Example: cutaway size --compare llama-3-8b qwen3-8b gemma-2-9b --plot costs.svg

    Example: cutaway size llama-3-8b --fit 16GB --dtype int4
    """
    names = sources or []
    if list_hardware:
        _print_hardware_list(as_json)
        return
    if not names and fit is None:
        raise InputError("no SOURCE is given; name a preset (see cutaway presets), a file or a directory, or ask --fit")
    from cutaway.size.units import parse_count

    asked: dict[str, Any] = {
        "batch_size": _parse_option(parse_count, batch_size, "--batch-size"),
        "context": _parse_option(parse_count, context, "--context"),
        "source_len": _parse_option(parse_count, source_len, "--source-len"),
        "dtype": dtype,
        "kv_cache_dtype": kv_cache_dtype,
        "optimizer": optimizer,
        "activation_checkpointing": activation_checkpointing,
        "kernel": kernel,
        "loss": loss,
        "hardware": _resolve_hardware(gpu, bandwidth, flops, memory),
        "world_size": _parse_option(parse_count, world_size, "--world-size"),
        "parallel": parallel,
        "tp": _parse_option(parse_count, tp, "--tp"),
        "dp_shard": _parse_option(parse_count, dp_shard, "--dp-shard"),
        "train_tokens": _parse_option(parse_count, train_tokens, "--train-tokens"),
        "price_per_hour": price_per_hour,
    }
    options = {name: value for name, value in asked.items() if value is not None}
    if batch_size is None and world_size is not None and parallel != "tp":
        options["batch_size"] = max(1, options["world_size"] // options.get("tp", 1))
    if fit is not None:
        if len(names) > 1 or plot is not None:
            raise InputError("--fit answers for one SOURCE and draws no plot; ask for the others by themselves")
        _run_fit(fit, names, mode, options, as_json)
        return
    sizes = list(zip(map(source_name, names), _compute_sizes(names, mode, options), strict=True))
    if plot is not None:
        from cutaway.size.plot import plot_sizes

        plot_sizes(plot, sizes)
    _print_sizes(sizes, side_by_side=compare or len(sizes) > 1, as_json=as_json)
    if plot is not None and not as_json:
        sys.stdout.write(f"drawn: {plot}{'' if 'hardware' in options else ' (memory only: time needs --gpu)'}\n")


def _compute_sizes(sources: list[str], mode: str | None, options: dict[str, Any]) -> "list[list[SizeEstimate]]":
    """For each source one answer a mode. A dtype that cannot train is asked to serve only, if no mode is named."""
    from cutaway.config import config
    from cutaway.size import size as estimate_size
    from cutaway.size.precision import get_precision

    trains = "dtype" not in options or get_precision(options["dtype"]).can_train
    modes = [mode] if mode is not None else ["infer", "train"] if trains else ["infer"]
    models = [config(source) for source in sources]
    if len(models) == 1:
        return [[estimate_size(models[0], mode=each, **options) for each in modes]]
    from cutaway.size.memory_fit import compare_models

    return [list(each) for each in zip(*(compare_models(models, mode=each, **options) for each in modes), strict=True)]


def _print_sizes(sizes: "list[tuple[str, list[SizeEstimate]]]", *, side_by_side: bool, as_json: bool) -> None:
    from cutaway.size.estimate import estimates_to_dict

    told = [{"source": name} | estimates_to_dict(*each) for name, each in sizes]
    if as_json:
        sys.stdout.write(json.dumps(told if side_by_side else told[0], indent=2) + "\n")
        return
    from cutaway.cli.views import size_report

    if side_by_side:
        size_report.render_comparison(told)
    else:
        size_report.render_size(told[0])


def _run_fit(memory: str, names: list[str], mode: str | None, options: dict[str, Any], as_json: bool) -> None:
    from cutaway.size.memory_fit import fit_to_memory
    from cutaway.size.units import parse_bytes

    source = names[0] if names else "llama"
    found = fit_to_memory(_parse_option(parse_bytes, memory, "--fit") or 0, source, mode=mode or "infer", **options)
    if as_json:
        sys.stdout.write(json.dumps({"source": source} | found.to_dict(), indent=2) + "\n")
        return
    from cutaway.cli.views.size_report import render_fit

    render_fit(source_name(source), found)


def _print_hardware_list(as_json: bool) -> None:
    from cutaway.size import list_hardware

    if as_json:
        sys.stdout.write(json.dumps([asdict(device) for device in list_hardware()], indent=2) + "\n")
        return
    from cutaway.cli.views.size_report import render_hardware_list

    render_hardware_list(list_hardware())


def source_name(source: str) -> str:
    """How a source is called: a file or directory by its own name, a config.json by its directory's."""
    path = Path(source)
    name = path.absolute().parent.name if path.name == "config.json" else path.name or path.absolute().name
    shown = "".join(sign if sign.isprintable() else "?" for sign in name)
    return shown if len(shown) <= MAX_NAME_LENGTH else f"{shown[: MAX_NAME_LENGTH - 1]}…"


# ---------------------------------------------------------------------------------------- what is typed


def _resolve_hardware(
    gpu: str | None, bandwidth: str | None, flops: str | None, memory: str | None
) -> "Hardware | str | None":
    own = {"--bandwidth": bandwidth, "--flops": flops, "--memory": memory}
    given = [name for name, value in own.items() if value is not None]
    if not given:
        return gpu
    if gpu is not None:
        raise InputError(f"--gpu names a device, and {given[0]} describes another; give one or the other")
    if bandwidth is None or flops is None:
        raise InputError("a device of your own needs --bandwidth and --flops (and --memory, to know what fits)")
    from cutaway.size import custom_hardware
    from cutaway.size.units import parse_bytes, parse_rate

    if "op" in bandwidth.lower() or "b/s" in flops.lower():
        raise InputError(
            "--bandwidth is bytes a second, as in 3.35TB/s, and --flops operations, as in 989TFLOPS; swap them"
        )
    rates = _parse_option(parse_rate, bandwidth, "--bandwidth"), _parse_option(parse_rate, flops, "--flops")
    return custom_hardware(
        bandwidth=rates[0] or 0, flops=rates[1] or 0, memory=_parse_option(parse_bytes, memory, "--memory")
    )


def _parse_option(parse: Callable[[str], Number], text: str | None, option: str) -> Number | None:
    """What was typed after an option, which an error names."""
    try:
        return None if text is None else parse(text)
    except InputError as error:
        raise InputError(f"{option}: {error}") from None
