"""`cutaway size`: parameters, FLOPs, memory and time of a model, from its config."""

import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from cutaway.cli.json_output import print_json
from cutaway.cli.options import JsonFlag, argument, option
from cutaway.errors import InputError

if TYPE_CHECKING:  # imported where they are used: --help needs no configs, and --json no rich
    from cutaway.size import Hardware, SizeEstimate

OptionText = str | None
MAX_NAME_LENGTH = 48
Number = TypeVar("Number", int, float)
COUNT_OPTIONS = (
    "batch_size", "context", "source_len", "world_size", "tp", "dp_shard", "train_tokens",
    "activation_checkpointing_layers",
)  # fmt: skip
PLAIN_OPTIONS = (
    "dtype", "kv_cache_dtype", "optimizer", "activation_checkpointing", "kernel", "loss", "parallel", "price_per_hour",
    "quantization",
)  # fmt: skip
"""Options that are passed unchanged to `cutaway.size`. COUNT_OPTIONS are first parsed as counts."""


def size(
    sources: Annotated[
        list[str] | None,
        argument(
            "Preset name, size such as 7b, .toml, config.json or .gguf file, or model directory; several are compared.",
            metavar="SOURCE",
            show_default=False,
        ),
    ] = None,
    mode: Annotated[OptionText, option("Training or inference; default both.", metavar="train|infer")] = None,
    train: Annotated[
        OptionText, option("What is trained: all weights, or adapters.", metavar="full|lora|dora|rslora|qlora")
    ] = None,
    rank: Annotated[OptionText, option("Rank of the adapters; default 16.", metavar="N")] = None,
    targets: Annotated[OptionText, option("Layers with adapters; default all-linear.", metavar="attn.q,attn.v")] = None,
    quantization: Annotated[
        OptionText, option("Quantization of the frozen weights: nf4 (the default of qlora), int8.", metavar="NAME")
    ] = None,
    compiled: Annotated[
        bool, option("Training with compiled blocks, as in cutaway train on a GPU, not eager.", "--compile")
    ] = False,
    batch_size: Annotated[OptionText, option("Global batch size; default one per device.", metavar="N")] = None,
    context: Annotated[OptionText, option("Context length; 8k is 8,000 and 8Ki 8,192.", metavar="N")] = None,
    source_len: Annotated[OptionText, option("Source length, for encoder-decoders.", metavar="N")] = None,
    dtype: Annotated[
        OptionText,
        option(
            "Data type: fp32, bf16, fp16, mixed, float8; for inference also fp8, int8, int4, and block formats: q8_0,"
            " q4_k, q6_k, mxfp4, int4_g128, nf4, fp8_g128, ... Default for inference: that of quantized weights, or"
            " bf16.",
            metavar="NAME",
        ),
    ] = None,
    kv_cache_dtype: Annotated[
        OptionText, option("Data type of the KV cache: fp32, bf16, fp16, fp8, int8, int4.", metavar="NAME")
    ] = None,
    optimizer: Annotated[OptionText, option("adamw, adamw-8bit, muon, sgd, sgd-momentum.", metavar="NAME")] = None,
    activation_checkpointing: Annotated[
        OptionText, option("Activation checkpointing: none, selective, full.", metavar="NAME")
    ] = None,
    activation_checkpointing_layers: Annotated[
        OptionText, option("Number of layers with activation checkpointing, from the first; default all.", metavar="N")
    ] = None,
    kernel: Annotated[OptionText, option("Attention kernel: auto, sdpa, explicit, flex.", metavar="NAME")] = None,
    loss: Annotated[
        OptionText, option("Cross-entropy: full (over all logits at once), or chunked as in train.", metavar="NAME")
    ] = None,
    gpu: Annotated[
        OptionText,
        option("Device from --list-hardware, or 'local': this machine, measured by cutaway bench.", metavar="NAME"),
    ] = None,
    bandwidth: Annotated[OptionText, option("Memory bandwidth of a custom device.", metavar="3.35TB/s")] = None,
    flops: Annotated[OptionText, option("Peak FLOP/s of a custom device.", metavar="989TFLOPS")] = None,
    memory: Annotated[OptionText, option("Memory of a custom device.", metavar="80GB")] = None,
    world_size: Annotated[OptionText, option("Number of devices.", metavar="N")] = None,
    parallel: Annotated[OptionText, option("Parallelism: dp, fsdp, tp.", metavar="NAME")] = None,
    tp: Annotated[OptionText, option("Tensor parallel degree.", metavar="N")] = None,
    dp_shard: Annotated[OptionText, option("Data parallel shard degree (FSDP).", metavar="N")] = None,
    train_tokens: Annotated[OptionText, option("Training tokens; default 20 per parameter.", metavar="15T")] = None,
    price_per_hour: Annotated[
        float | None, option("Price per device-hour, in any currency.", metavar="2.5", min=0, max=1e9)
    ] = None,
    fit: Annotated[
        OptionText,
        option(
            "Find the maximum context and batch size, and the model shapes, that fit in this much memory.",
            metavar="16GB",
        ),
    ] = None,
    compare: Annotated[bool, option("Show a comparison table, the default for several SOURCEs.", "--compare")] = False,
    plot: Annotated[Path | None, option("Write a plot: .svg, .png or .pdf.", metavar="FILE")] = None,
    list_hardware: Annotated[bool, option("List the known devices.", "--list-hardware")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Estimate a model's parameters, FLOPs, memory, time and training cost from its config.

    Example: cutaway size llama-3-8b --gpu h100 --context 8Ki

    Example: cutaway size ./my-model --mode train --gpu h100 --world-size 8 --train-tokens 1T --price-per-hour 2.5

    Example: cutaway size 7b --train lora --rank 16 --gpu rtx-4090 --compile

    Example: cutaway size --compare llama-3-8b qwen3-8b gemma-2-9b --plot costs.svg

    Example: cutaway size llama-3-8b --fit 16GB --dtype int4
    """
    arguments = dict(locals())
    names = sources or []
    if list_hardware:
        _print_hardware_list(as_json)
        return
    if not names and fit is None:
        raise InputError("SOURCE is missing; name a preset (see cutaway presets), a file or a directory, or use --fit")
    from cutaway.size.units import parse_count

    names = [_resolve_size_class(name) for name in names]
    mode, adapter = _resolve_training(mode, train, rank, targets, quantization)
    options: dict[str, Any] = {name: arguments[name] for name in PLAIN_OPTIONS} | {"adapter": adapter}
    if compiled:
        options["compiled"] = True
    if train == "qlora" and quantization is None:
        options["quantization"] = "nf4"
    for name in COUNT_OPTIONS:
        options[name] = _parse_option(parse_count, arguments[name], f"--{name.replace('_', '-')}")
    options["hardware"] = _resolve_hardware(gpu, bandwidth, flops, memory)
    options = {name: value for name, value in options.items() if value is not None}
    if batch_size is None and world_size is not None and parallel != "tp":
        options["batch_size"] = max(1, options["world_size"] // options.get("tp", 1))
    if fit is not None:
        if len(names) > 1 or plot is not None:
            raise InputError("--fit takes one SOURCE and no --plot; run it once per SOURCE")
        _run_fit(fit, names, mode, options, as_json)
        return
    sizes = list(zip(map(source_name, names), _compute_sizes(names, mode, options), strict=True))
    if plot is not None:
        from cutaway.size.plot import plot_sizes

        plot_sizes(plot, sizes)
    _print_sizes(sizes, side_by_side=compare or len(sizes) > 1, as_json=as_json)
    if plot is not None and not as_json:
        sys.stdout.write(f"plot: {plot}{'' if 'hardware' in options else ' (memory only: time needs --gpu)'}\n")


def _resolve_size_class(source: str) -> str:
    """Preset of a size class such as '7b'; other sources are returned unchanged. The choice is printed to stderr."""
    from cutaway.size.size_classes import find_size_class

    preset = find_size_class(source)
    if preset is None:
        return source
    sys.stderr.write(f"{source}: {preset}; for another model of this size, pass its name (cutaway presets)\n")
    return preset


def _resolve_training(
    mode: str | None, train: str | None, rank: str | None, targets: str | None, quantization: str | None
) -> tuple[str | None, dict[str, Any] | None]:
    """Return the mode and the adapter, or None, that the options --train, --rank and --targets describe."""
    methods: dict[str, dict[str, Any]] = {
        "lora": {}, "qlora": {}, "dora": {"use_dora": True}, "rslora": {"use_rslora": True},
    }  # fmt: skip
    given = {"--rank": rank, "--targets": targets, "--quantization": quantization}
    adapter_options = [name for name, value in given.items() if value is not None]
    if train is None and not adapter_options:
        return mode, None
    train = train or "lora"
    if train not in ("full", *methods):
        raise InputError(f"--train {train!r} is not known; use one of full, {', '.join(methods)}")
    if mode == "infer":
        raise InputError(
            f"--mode infer and {(['--train', *adapter_options])[0]} contradict each other; pass one of them"
        )
    if train == "full":
        if adapter_options:
            raise InputError(f"{adapter_options[0]} is an option of adapters, but --train is full; use --train lora")
        return "train", None
    from cutaway.size.units import parse_count

    adapter = dict(methods[train])
    if rank is not None:
        adapter["rank"] = _parse_option(parse_count, rank, "--rank")
    if targets is not None:
        adapter["targets"] = [target.strip() for target in targets.split(",")]
    return "train", adapter


def _compute_sizes(sources: list[str], mode: str | None, options: dict[str, Any]) -> "list[list[SizeEstimate]]":
    """Return for each source one size estimate per mode.

    If `mode` is None, the modes are inference and training, or only inference if the dtype cannot be used for training.
    """
    from cutaway.size import size as estimate_size
    from cutaway.size.precision import get_precision
    from cutaway.size.unpublished_sizes import check_size_is_published

    can_train = "dtype" not in options or get_precision(options["dtype"]).can_train
    modes = [mode] if mode is not None else ["infer", "train"] if can_train else ["infer"]
    for source in sources:
        check_size_is_published(source)
    if len(sources) == 1:
        return [[estimate_size(sources[0], mode=name, **options) for name in modes]]
    from cutaway.size.memory_fit import compare_models

    by_mode = [compare_models(sources, mode=name, **options) for name in modes]
    return [list(estimates) for estimates in zip(*by_mode, strict=True)]


def _print_sizes(sizes: "list[tuple[str, list[SizeEstimate]]]", *, side_by_side: bool, as_json: bool) -> None:
    from cutaway.size.estimate_json import estimates_to_dict

    reports = [{"source": name} | estimates_to_dict(*estimates) for name, estimates in sizes]
    if as_json:
        print_json(reports if side_by_side else reports[0])
        return
    from cutaway.cli.views import size_report

    if side_by_side:
        size_report.render_comparison(reports)
    else:
        size_report.render_size(reports[0])


def _run_fit(memory: str, names: list[str], mode: str | None, options: dict[str, Any], as_json: bool) -> None:
    from cutaway.size.memory_fit import fit_to_memory
    from cutaway.size.units import parse_bytes

    source = names[0] if names else "llama"
    result = fit_to_memory(_parse_option(parse_bytes, memory, "--fit") or 0, source, mode=mode or "infer", **options)
    if as_json:
        print_json({"source": source} | result.to_dict())
        return
    from cutaway.cli.views.size_report import render_fit

    render_fit(source_name(source), result)


def _print_hardware_list(as_json: bool) -> None:
    from cutaway.size import list_hardware

    if as_json:
        print_json([asdict(device) for device in list_hardware()])
        return
    from cutaway.cli.views.size_report import render_hardware_list

    render_hardware_list(list_hardware())


def source_name(source: str) -> str:
    """Return the display name of a source: the file or directory name, or for config.json the name of its directory."""
    path = Path(source)
    name = path.absolute().parent.name if path.name == "config.json" else path.name or path.absolute().name
    printable = "".join(character if character.isprintable() else "?" for character in name)
    return printable if len(printable) <= MAX_NAME_LENGTH else f"{printable[: MAX_NAME_LENGTH - 1]}…"


def _resolve_hardware(
    gpu: str | None, bandwidth: str | None, flops: str | None, memory: str | None
) -> "Hardware | str | None":
    device_options = {"--bandwidth": bandwidth, "--flops": flops, "--memory": memory}
    set_options = [name for name, value in device_options.items() if value is not None]
    if not set_options:
        return gpu
    if gpu is not None:
        raise InputError(f"--gpu and {set_options[0]} both describe a device; pass one of them")
    if bandwidth is None or flops is None:
        raise InputError("a custom device needs --bandwidth and --flops (and --memory, to check what fits); pass both")
    from cutaway.size import custom_hardware
    from cutaway.size.units import parse_bytes, parse_rate

    if "op" in bandwidth.lower() or "b/s" in flops.lower():
        raise InputError(
            "--bandwidth is in bytes per second, such as 3.35TB/s, and --flops in FLOP/s, such as 989TFLOPS; swap them"
        )
    return custom_hardware(
        bandwidth=_parse_option(parse_rate, bandwidth, "--bandwidth") or 0,
        flops=_parse_option(parse_rate, flops, "--flops") or 0,
        memory=_parse_option(parse_bytes, memory, "--memory"),
    )


def _parse_option(parse: Callable[[str], Number], text: str | None, option: str) -> Number | None:
    """Parse an option's text. Error messages name the option."""
    try:
        return None if text is None else parse(text)
    except InputError as error:
        raise InputError(f"{option}: {error}") from None
