"""Terminal report of `cutaway size`: the data of --json as tables and bars."""

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from cutaway.cli.views.terminal import (
    borderless_table,
    build_console,
    format_heading,
    format_number,
    indent,
    wrap_items,
)
from cutaway.size.options import MODE_LABELS
from cutaway.size.plot import component_group
from cutaway.size.units import GIB, format_count, format_duration, format_si

if TYPE_CHECKING:  # imported where they are used: --help needs no configs, and --json no rich
    from cutaway.size import Hardware
    from cutaway.size.memory_fit import MemoryFit

Data = dict[str, Any]
BAR_SYMBOLS = "█▓▒░"
BAR_COLORS = ("cyan", "yellow", "magenta", "green", "blue", "red", "white")


def _stacked_bar(parts: dict[str, float], unit: str, width: int, *, limit: float = 0) -> RenderableType:
    """Render a stacked bar of values by name, with a legend. Without `unit`, the values are fractions.

    Free space up to `limit` is shown as dots.
    """
    scale = (width - 2) / max(sum(parts.values()), limit, 1)
    bar, items, total = Text(), [], 0.0
    for index, (name, value) in enumerate(parts.items()):
        symbol, color = BAR_SYMBOLS[index % len(BAR_SYMBOLS)], BAR_COLORS[index % len(BAR_COLORS)]
        bar.append(symbol * (round((total + value) * scale) - round(total * scale)), color)
        total += value
        items.append(Text.assemble((symbol, color), f" {name} ", format_si(value, unit) if unit else f"{value:.1%}"))
    bar.append("·" * (round(limit * scale) - round(total * scale)), "dim")
    return indent(Group(bar, wrap_items(items, width - 2)))


# ---------------------------------------------------------------------------------------- one model


def render_size(report: Data) -> None:
    """Print the size report of one model: parameters, FLOPs, memory, and time and training cost if estimated."""
    out = build_console()
    sections: list[list[RenderableType]] = [[_format_title(report)]]
    sections += [_parameters_section(report, out.width), _flops_section(report, out.width)]
    sections += [_memory_section(report, mode, out.width) for mode in report["options"]]
    if "time" in report:
        sections.append(_time_section(report))
    if "training_budget" in report:
        sections.append(_budget_section(report))
    for section in sections:
        out.print(Group(*section, Text()))
    out.print(_format_assumptions(report))


def _format_title(report: Data) -> Text:
    model, counts = report["model"], report["parameters"]
    layers = " + ".join(str(layers) for layers in model["layers"].values())
    active = f", {counts['active']:,} active" if counts["active"] != counts["total"] else ""
    shape = f"{model['form']} · {layers} layers × {model['d_model']:,} · {counts['total']:,} parameters{active}"
    return Text.assemble((report["source"], "bold"), f"  {shape}")


def _parameters_section(report: Data, width: int) -> list[RenderableType]:
    counts, checkpoint = report["parameters"], report["checkpoint"]
    unique_layers = [layer for layer in counts["layers"] if layer["shared_with"] is None]

    def in_layers(part: str) -> int:
        return sum(layer[part] * layer["num_layers"] for layer in unique_layers)

    by_component = {name: counts[name] for name in ("embedding", "positions", "token_types", "embedding_projection")}
    by_component |= {name: in_layers(name) for name in ("attention", "cross_attention", "ffn")}
    by_component["norms"] = in_layers("norm") + counts["embedding_norm"] + counts["final_norm"]
    by_component |= {name: counts[name] for name in ("head_transform", "head", "pooler")}
    table, longest = borderless_table("lrrl"), max(by_component.values())
    bar_width = width - 15 - max(len(name) for name, value in by_component.items() if value) - len(f"{longest:,}")
    for name, value in by_component.items():
        if value:
            share, bar = value / counts["total"], "█" * round(bar_width * value / longest)
            table.add_row(name.replace("_", " "), f"{value:,}", f"{share:.1%}", Text(bar, "cyan"))
    num_buffers = checkpoint["num_buffer_elements"]
    buffers = f" of which {num_buffers:,} buffers" if num_buffers else ""
    elements = f"{checkpoint['num_tensors']:,} tensors, {checkpoint['num_elements']:,} values{buffers}"
    dtype, checkpoint_bytes = next(iter(report["options"].values()))["dtype"], format_si(checkpoint["total_bytes"], "B")
    layer_kinds = _group_layers(counts["layers"], several=len(report["model"]["layers"]) > 1)
    total, non_embedding = format_count(counts["total"]), format_count(counts["non_embedding"])
    return [
        format_heading("parameters", f"{total}, {non_embedding} without embedding and head"),
        indent(table),
        indent(_labeled_items("per layer:", layer_kinds, width - 2)),
        *([indent(_format_trainable(report))] if "trainable" in counts else []),
        indent(Text.assemble(("checkpoint: ", "dim"), f"{elements}, {checkpoint_bytes} in {dtype}")),
    ]


def _format_trainable(report: Data) -> Text:
    counts, options = report["parameters"], report["options"]["train"]
    adapter = options["adapter"]
    targets = ", ".join(adapter["targets"])
    trained = f"{counts['trainable']:,} in adapters of rank {adapter['rank']} ({targets}), in fp32"
    kind = {"none": options["dtype"].replace("mixed", "bf16")}.get(options["quantization"], options["quantization"])
    return Text.assemble(
        ("trained: ", "dim"), f"{trained}, {counts['trainable'] / counts['total']:.2%}\n",
        ("frozen: ", "dim"), f"{counts['frozen']:,}, in {kind}" + _unquantized_note(options["quantization"]),
    )  # fmt: skip


def _unquantized_note(quantization: str) -> str:
    return "" if quantization == "none" else " (linear layers; embedding, norms and head are not quantized)"


def _labeled_items(label: str, items: Iterable[str], width: int) -> Text:
    return wrap_items([Text(label, "dim"), *map(Text, items)], width)


def _group_layers(layers: list[Data], *, several: bool) -> list[str]:
    """Return one text per group of equal layers, with the number of layers and the parameters of one layer.

    If the model has `several` stacks, the text also names the stack.
    """
    counts: dict[tuple[Any, ...], int] = {}
    for layer in layers:
        key = layer["stack"], layer["total"], layer["active"], layer["shared_with"] is not None
        counts[key] = counts.get(key, 0) + layer["num_layers"]
    items = []
    for (stack, total, active, is_shared), count in counts.items():
        stack_label = f"{stack} " if several else ""
        active_label = f" ({active:,} active)" if active != total else ""
        size = "shared with an earlier layer" if is_shared else f"{total:,}{active_label}"
        items.append(f"{count} × {stack_label}{size}")
    return items


def _flops_section(report: Data, width: int) -> list[RenderableType]:
    flops, modes = report["flops"], report["options"]
    context = next(iter(modes.values()))["context"]
    headers = ("", "visible pairs", "all pairs", "rule of thumb", "error")
    table = borderless_table("lrrrr", headers)

    def row(name: str, entry: Data, divisor: int = 1) -> None:
        rule = entry["rule_of_thumb"]
        flops = [format_si(value / divisor) for value in (entry["total_visible"], entry["total"], rule["flops"])]
        cells = (
            *flops[:2],
            f"{rule['name']} = {flops[2]}",
            f"{rule['error']:+.{0 if abs(rule['error']) >= 0.0995 else 1}%}",
        )
        table.add_row(name, *(cell.replace("-", "−") for cell in cells))

    row("forward, per token", flops["forward"], context)
    row(f"forward, {context:,} tokens", flops["forward"])
    if "decode" in flops and "infer" in modes:
        row(f"decode at {context:,}", flops["decode"])
    if "train" in modes:
        for checkpointing, entry in flops["train"].items():
            row(f"train, checkpointing {checkpointing}", entry)
    visible = flops["forward"]["visible"]
    names = sorted(visible, key=visible.__getitem__, reverse=True)
    fractions = {name: visible[name] / sum(visible.values()) for name in names}
    subtitle = "two per multiply-add, matrix products only; forward pass by component:"
    return [format_heading("FLOPs", subtitle), _stacked_bar(fractions, "", width), indent(table)]


def _memory_section(report: Data, mode: str, width: int) -> list[RenderableType]:
    memory, options = report["memory"][mode], report["options"][mode]
    device_bytes = (report.get("hardware") or {}).get("memory")
    devices = f"on each of {options['world_size']:,} devices ({options['parallel_dims']})"
    devices = devices if options["world_size"] > 1 else ""
    peak = f"peak: {memory['peak_phase']}"
    head = format_heading(f"{MODE_LABELS[mode]} memory", format_si(memory["total_bytes"], "B"), devices, peak)
    sizes = memory["peak_by_component"]
    is_activation = {name: component_group(name) in ("activations", "logits and loss") for name in sizes}
    names = sorted(sizes, key=lambda name: (is_activation[name], -sizes[name]))
    components = {f"{name}*" if is_activation[name] and mode == "train" else name: sizes[name] for name in names}
    rows: list[RenderableType] = [head, _stacked_bar(components, "B", width, limit=device_bytes or 0)]
    if mode == "infer" and report.get("kv_cache"):
        rows.append(indent(_format_kv_cache(report["kv_cache"], width - 2)))
    if "by_activation_checkpointing" in memory:
        choices = memory["by_activation_checkpointing"]
        kernels = [f"total, {kernel} attention" for kernel in choices["none"]]
        table = borderless_table("lr" + "r" * len(kernels), ("checkpointing", "activations", *kernels))
        for checkpointing, choice in choices.items():
            totals = [format_si(entry["total_bytes"], "B") for entry in choice.values()]
            table.add_row(checkpointing, format_si(next(iter(choice.values()))["activations"], "B"), *totals)
        rows.append(indent(table))
    if mode == "train" and report.get("collectives"):
        items = [
            f"{entry['count']:,} × {kind} {format_si(entry['bytes'], 'B')}"
            for kind, entry in report["collectives"].items()
        ]
        rows.append(indent(_labeled_items("collectives per step:", items, width - 2)))
    if device_bytes is not None:
        fits = report["fits"][mode]
        verdict = ("fits ", "bold green") if fits else ("does not fit ", "bold red")
        total = memory["total_bytes"]
        used = f"{total / GIB:.1f} of {device_bytes / GIB:.4g} GiB, {total / device_bytes:.0%}"
        rows.append(indent(Text.assemble(verdict, f"{report['hardware']['title']}: {used}")))
    return rows


def _format_kv_cache(kv_cache: Data, width: int) -> Text:
    items = [f"{kv_cache['bytes_per_token']:,} bytes per token"]
    for kind, entry in kv_cache["by_kind"].items():
        items.append(f"{entry['num_layers']} {kind} layers {format_si(entry['bytes'], 'B')}")
    if kv_cache["unwindowed_bytes"] != kv_cache["total_bytes"]:
        items.append(f"without windows {format_si(kv_cache['unwindowed_bytes'], 'B')}")
    if kv_cache["expanded_bytes"] != kv_cache["unwindowed_bytes"]:
        items.append(f"expanded keys and values {format_si(kv_cache['expanded_bytes'], 'B')}")
    return _labeled_items("KV cache:", items, width)


def _time_section(report: Data) -> list[RenderableType]:
    device = report["hardware"]
    headers = ("", "minimum", "bottleneck", "tokens/s ≤", "expected", "FLOP/byte")
    table = borderless_table("lrlrrr", headers)
    bounds = {name: bound for mode in report["time"].values() for name, bound in mode.items()}
    for name, bound in bounds.items():
        expected = "–".join(map(format_number, bound["expected_tokens_per_second"]))
        peak, intensity = format_number(bound["max_tokens_per_second"]), format_number(bound["arithmetic_intensity"])
        min_time = format_duration(bound["min_seconds"])
        table.add_row(PHASE_NAMES[name], min_time, bound["bottleneck"], peak, expected, intensity)
    ridge = next(iter(bounds.values()))["ridge_point"]
    note_text = f"below {ridge:,.0f} FLOP/byte bandwidth-bound, above compute-bound"
    if "decode" in bounds:
        batch = bounds["decode"]["compute_bound_batch_size"]
        if batch is None:
            reason = "because each sequence has its own KV cache to read"
            note_text += f"; decode is bandwidth-bound at any batch size, {reason}"
        else:
            note_text += f"; decode is compute-bound from a batch of {batch:,} per device"
    source = next(iter(bounds.values()))["efficiency"]["source"]
    note = Text(f"{note_text}. Expected: {source}.", "dim")
    rows: list[RenderableType] = [format_heading("time", f"on {device['title']}"), indent(table)]
    engine = {PHASE_NAMES[name]: bound.get("engine_seconds") for name, bound in bounds.items()}
    items = [f"{name} {'–'.join(map(format_duration, seconds))}" for name, seconds in engine.items() if seconds]
    rows += [indent(Text.assemble(("expected in the engine: ", "dim"), ", ".join(items)))] if items else []
    return [*rows, indent(note)]


PHASE_NAMES = {"prefill": "prefill", "decode": "decode", "train_step": "training step"}


def _format_token_ratio(budget: Data) -> str:
    """Format the training tokens per parameter, as a number and as a multiple of the compute-optimal number."""
    if budget["train_tokens"] == budget["chinchilla_tokens"]:
        return "20 per parameter, compute-optimal (Chinchilla)"
    per_parameter, ratio = (format_number(budget[name]) for name in ("tokens_per_parameter", "chinchilla_ratio"))
    optimal = format_count(budget["chinchilla_tokens"])
    return f"{per_parameter} per parameter, {ratio} × Chinchilla's 20 ({optimal})"


def _budget_section(report: Data) -> list[RenderableType]:
    budget, options = report["training_budget"], report["options"]["train"]
    table = borderless_table("ll")
    table.add_row("tokens", f"{format_count(budget['train_tokens'])}: {_format_token_ratio(budget)}")
    table.add_row("steps", f"{budget['num_steps']:,} with {options['batch_size'] * options['context']:,} tokens each")
    error = f"{budget['flops_6nd'] / budget['flops'] - 1:+.1%}".replace("-", "−")
    table.add_row("FLOPs", f"{budget['flops']:.4g} (6ND = {budget['flops_6nd']:.4g}, {error})".replace("e+", "e"))

    def range_of(name: str) -> str:
        return f"{format_number(budget[f'{name}_low'])}–{format_number(budget[f'{name}_high'])}"

    if "device_hours_low" in budget:
        min_hours = format_number(budget["device_hours_min"])
        table.add_row("device-hours", f"{range_of('device_hours')}, at least {min_hours}")
        devices = f"{options['world_size']:,} device{'s' * (options['world_size'] > 1)}"
        table.add_row("days", f"{range_of('days')} on {devices}")
    if "kwh_low" in budget:
        table.add_row("energy", f"{range_of('kwh')} kWh at rated power")
    if "cost_low" in budget:
        table.add_row("cost", f"{range_of('cost')} at {options['price_per_hour']:g} per device-hour")
    return [format_heading("training run"), indent(table)]


def _format_assumptions(report: Data) -> Text:
    """Format the options that the estimate assumes, and how to change them."""
    modes = report["options"]
    options = next(iter(modes.values()))
    text = f"batch {options['batch_size']:,}, context {options['context']:,}"
    text += f" ({options['context_warning']}: estimated anyway)" if options["context_warning"] else ""
    text += f", source {options['source_len']:,}" if len(report["model"]["layers"]) > 1 else ""
    text += "".join(f", {mode_options['dtype']} for {MODE_LABELS[mode]}" for mode, mode_options in modes.items())
    text += f", kernel {options['kernel']}"
    stored = [MODE_LABELS[mode] for mode, mode_options in modes.items() if mode_options["stores_attention_scores"]]
    if stored and options["kernel"] == "auto":
        text += f" (explicit for {' and '.join(stored)}, which stores the scores; --kernel flex does not)"
    text += f", cache in {options['kv_cache_dtype']}" if "kv_cache" in report and "infer" in modes else ""
    if "train" in modes:
        text += f", {options['optimizer']}, checkpointing {options['activation_checkpointing']}"
        layers = options["activation_checkpointing_layers"]
        text += "" if layers is None else f" of {layers:,} layers"
    adapter = options["adapter"]
    text += "" if adapter is None else f", loss {options['loss']}, {'compiled' if options['compiled'] else 'eager'}"
    text += "; change with --batch-size, --context, --dtype" + ("." if "time" in report else "; --gpu adds time.")
    text += " Visible pairs: query-key pairs that are not masked."
    if "train" in modes:
        text += " *: activations."
    elif options["dtype"] not in ("fp32", "bf16", "fp16", "mixed", "float8"):
        text += f" {options['dtype']} is for inference only; training needs fp32, bf16, fp16, mixed or float8."
    if options["stored_as"]:
        text += f" The file has weights quantized {options['stored_as']}; --dtype bf16 for dequantized weights."
    return Text(text, "dim")


# ---------------------------------------------------------------------------------------- comparison


def render_comparison(reports: list[Data]) -> None:
    """Print the sizes of models in a table with one column per model, or in several tables on a narrow terminal."""
    out = build_console()
    num_columns = max(1, (out.width - 26) // max(16, *(len(report["source"]) + 2 for report in reports)))
    for start in range(0, len(reports), num_columns):
        group = reports[start : start + num_columns]
        columns = [_comparison_column(report) for report in group]
        table = borderless_table("l" + "r" * len(group), ["", *(report["source"] for report in group)])
        for name in dict.fromkeys(name for column in columns for name in column):
            table.add_row(name, *(column.get(name, "") for column in columns))
        out.print(table, Text())
    out.print(Text("per device; --json prints all digits, and a single SOURCE prints the full report", "dim"))


def _comparison_column(report: Data) -> dict[str, str]:
    """Return the column of one model, as a dict from row name to text."""
    model, counts, modes = report["model"], report["parameters"], report["options"]
    options = next(iter(modes.values()))
    column = {
        "form": model["form"],
        "layers × d_model": f"{' + '.join(map(str, model['layers'].values()))} × {model['d_model']:,}",
        "parameters": f"{counts['total']:,}",
        "active": f"{counts['active']:,}",
        "checkpoint": format_si(report["checkpoint"]["total_bytes"], "B"),
        "batch × context": f"{options['batch_size']:,} × {options['context']:,}",
        "FLOPs per token": format_si(report["flops"]["forward"]["per_token_visible"]),
    }
    if "kv_cache" in report and "infer" in modes:
        column |= {"KV cache per token": format_si(report["kv_cache"]["bytes_per_token"], "B")}
        column |= {"KV cache": format_si(report["kv_cache"]["total_bytes"], "B")}
    for mode in modes:
        fits = {True: " ✓", False: " ✗", None: ""}[report.get("fits", {}).get(mode)]
        column[f"{MODE_LABELS[mode]} memory"] = format_si(report["memory"][mode]["total_bytes"], "B") + fits
    for mode in report.get("time", {}).values():
        for name, bound in mode.items():
            column[f"{PHASE_NAMES[name]}, tokens/s"] = f"≤ {format_number(bound['max_tokens_per_second'])}"
    budget = report.get("training_budget", {})
    if "cost_low" in budget:
        column["training cost"] = f"{budget['cost_low']:,.0f}–{budget['cost_high']:,.0f}"
    return column


def render_fit(name: str, fit: "MemoryFit") -> None:
    """Print the maximum context and batch size of the model, and which shapes (layers × d_model) of its family fit."""
    options, out = fit.options, build_console()
    budget = f"{format_si(fit.memory_budget, 'B')} ({fit.memory_budget / GIB:.4g} GiB)"
    out.print(format_heading(name, f"in {budget} for {MODE_LABELS[options.mode]}"))
    if fit.total_bytes is not None:
        fit_table = borderless_table("ll")
        fit_table.add_row("requested", f"{format_si(fit.total_bytes, 'B')}, {'fits' if fit.fits else 'does not fit'}")
        longest = _format_maximum(fit.max_context, fit.unbounded_context) + f" at a batch of {options.batch_size:,}"
        if fit.exceeds_model_context:
            longest += f" (the model's context is {options.config.context:,})"
        elif fit.max_context is not None and fit.max_context == fit.max_position_embeddings:
            longest += " (maximum of its position embeddings)"
        fit_table.add_row("maximum context", longest)
        batches = _format_maximum(fit.max_batch_size, fit.unbounded_batch_size)
        fit_table.add_row("maximum batch size", f"{batches} at a context of {options.context:,}")
        out.print(indent(fit_table))
    shapes = {(shape.layers, shape.d_model): shape for shape in fit.model_shapes}
    heads = {shape.d_model: shape.heads for shape in sorted(fit.model_shapes, key=lambda shape: shape.d_model)}
    headers = ["d_model\nheads", *(f"{width:,}\n{count}" for width, count in heads.items())]
    table = borderless_table("l" + "r" * len(heads), headers, gap=1)
    for layers in sorted({layers for layers, _ in shapes}):
        row = [shapes.get((layers, width)) for width in heads]
        counts = (format_count(shape.num_parameters, 3) if shape else "" for shape in row)
        marks = ({True: " ✓", False: " ✗"}[shape.fits] if shape else "" for shape in row)
        table.add_row(f"{layers} layers", *map(str.__add__, counts, marks))
    out.print(format_heading("shapes of this family", "number of parameters; ✓ fits, ✗ does not fit"), indent(table))
    assumptions = f"batch {options.batch_size:,}, context {options.context:,}, {options.precision.name}"
    assumptions += "; change with --batch-size, --context, --dtype or --mode."
    out.print(Text(f"{fit.note} {assumptions}".strip(), "dim"))


def _format_maximum(value: int | None, unbounded: bool) -> str:
    return "none" if value is None else f"{value:,}" + (" or more" if unbounded else "")


def render_hardware_list(devices: Iterable["Hardware"]) -> None:
    headers = ("name", "kind", "GiB", "GB/s", "fp32 TFLOPS", "16-bit TFLOPS", "year")
    table = borderless_table("llrrrrr", headers)
    for device in devices:
        half_precision = device.flops.get("bf16") or device.flops.get("fp16")
        rates = (rate and rate / 1e12 for rate in (device.flops.get("fp32"), half_precision))
        figures = (device.memory and device.memory / GIB, device.bandwidth / 1e9, *rates)
        cells = [format_number(value) if value else "" for value in figures]
        table.add_row(device.name, device.kind, *cells, str(device.year or ""))
    build_console().print(table)
    sys.stdout.write("peak FLOP/s without sparsity; --json has all dtypes, interconnect, power and sources\n")
