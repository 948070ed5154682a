"""What `cutaway size` shows in a terminal: the data of --json as tables and bars."""

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

if TYPE_CHECKING:  # --help needs no configurations, and --json draws nothing: each is imported where it is used
    from cutaway.size import Hardware
    from cutaway.size.memory_fit import MemoryFit

Data = dict[str, Any]
BAR_SYMBOLS = "█▓▒░"
BAR_COLORS = ("cyan", "yellow", "magenta", "green", "blue", "red", "white")


def _stacked_bar(parts: dict[str, float], unit: str, width: int, *, limit: float = 0) -> RenderableType:
    """One bar of all parts and what each sign stands for; `limit` is drawn as far as it is free."""
    scale = (width - 2) / max(sum(parts.values()), limit, 1)
    bar, items, before = Text(), [], 0.0
    for index, (name, value) in enumerate(parts.items()):
        sign, colour = BAR_SYMBOLS[index % len(BAR_SYMBOLS)], BAR_COLORS[index % len(BAR_COLORS)]
        bar.append(sign * (round((before + value) * scale) - round(before * scale)), colour)
        before += value
        items.append(Text.assemble((sign, colour), f" {name} ", format_si(value, unit) if unit else f"{value:.1%}"))
    bar.append("·" * (round(limit * scale) - round(before * scale)), "dim")
    return indent(Group(bar, wrap_items(items, width - 2)))


# ---------------------------------------------------------------------------------------- one model


def render_size(report: Data) -> None:
    """One model on one screen."""
    out = build_console()
    parts: list[RenderableType] = [
        _format_title(report),
        Text(),
        *_parameters_section(report, out.width),
        Text(),
        *_flops_section(report, out.width),
    ]
    for mode in report["options"]:
        parts += [Text(), *_memory_section(report, mode, out.width)]
    if "time" in report:
        parts += [Text(), *_time_section(report)]
    if "training_budget" in report:
        parts += [Text(), *_budget_section(report)]
    out.print(Group(*parts, Text(), _format_assumptions(report)))


def _format_title(report: Data) -> Text:
    model, counts = report["model"], report["parameters"]
    layers = " + ".join(str(layers) for layers in model["layers"].values())
    active = f", {counts['active']:,} active" if counts["active"] != counts["total"] else ""
    shape = f"{model['form']} · {layers} layers × {model['d_model']:,} · {counts['total']:,} parameters{active}"
    return Text.assemble((report["source"], "bold"), f"  {shape}")


def _parameters_section(report: Data, width: int) -> list[RenderableType]:
    counts, stored = report["parameters"], report["checkpoint"]
    owners = [layer for layer in counts["layers"] if layer["shared_with"] is None]
    inside = {
        part: sum(each[part] * each["num_layers"] for each in owners)
        for part in ("attention", "cross_attention", "ffn")
    }
    norms = sum(each["norm"] * each["num_layers"] for each in owners) + counts["embedding_norm"] + counts["final_norm"]
    outside = {name: counts[name] for name in ("positions", "token_types", "embedding_projection")}
    ends = {name: counts[name] for name in ("head_transform", "head", "pooler")}
    every = {"embedding": counts["embedding"], **outside, **inside, "norms": norms, **ends}
    table, longest = borderless_table("lrrl"), max(every.values())
    room = width - 15 - max(len(name) for name, value in every.items() if value) - len(f"{longest:,}")
    for name, value in every.items():
        if value:
            share, bar = value / counts["total"], "█" * round(room * value / longest)
            table.add_row(name.replace("_", " "), f"{value:,}", f"{share:.1%}", Text(bar, "cyan"))
    held = f"{stored['num_tensors']:,} tensors, {stored['num_elements']:,} numbers"
    held += f" of which {stored['num_buffer_elements']:,} buffers" if stored["num_buffer_elements"] else ""
    dtype = next(iter(report["options"].values()))["dtype"]
    kinds = [Text(kind) for kind in _group_layers(counts["layers"], several=len(report["model"]["layers"]) > 1)]
    return [
        format_heading(
            "parameters",
            f"{format_count(counts['total'])}, {format_count(counts['non_embedding'])} without embedding and head",
        ),
        indent(table),
        indent(wrap_items([Text("a layer:", "dim"), *kinds], width - 2)),
        indent(Text.assemble(("a checkpoint: ", "dim"), f"{held}, {format_si(stored['total_bytes'], 'B')} in {dtype}")),
    ]


def _group_layers(layers: list[Data], *, several: bool) -> list[str]:
    """Layers alike, wherever they stand: how many, and what one has."""
    kinds: dict[tuple[Any, ...], int] = {}
    for each in layers:
        key = each["stack"], each["total"], each["active"], each["shared_with"] is not None
        kinds[key] = kinds.get(key, 0) + each["num_layers"]
    words = []
    for (stack, total, active, again), many in kinds.items():
        where = f"{stack} " if several else ""
        used = f" ({active:,} active)" if active != total else ""
        words.append(f"{many} × {where}" + ("an earlier one's again" if again else f"{total:,}{used}"))
    return words


def _flops_section(report: Data, width: int) -> list[RenderableType]:
    every, modes = report["flops"], report["options"]
    context = next(iter(modes.values()))["context"]
    headers = ("", "visible pairs", "every pair", "rule of thumb", "off")
    table = borderless_table("lrrrr", headers)

    def row(name: str, of: Data, by: int = 1) -> None:
        rule = f"{of['rule_of_thumb']['name']} = {format_si(of['rule_of_thumb']['flops'] / by)}"
        cells = (
            format_si(of["total_visible"] / by),
            format_si(of["total"] / by),
            rule,
            f"{of['rule_of_thumb']['error']:+.1%}",
        )
        table.add_row(name, *(cell.replace("-", "−") for cell in cells))

    row("read, a token", every["forward"], context)
    row(f"read {context:,} tokens", every["forward"])
    if "decode" in every and "infer" in modes:
        row(f"decode at {context:,}", every["decode"])
    if "train" in modes:
        for checkpointing, of in every["train"].items():
            row(f"train, checkpointing {checkpointing}", of)
    seen = every["forward"]["visible"]
    shares = {name: seen[name] / sum(seen.values()) for name in sorted(seen, key=lambda part: -seen[part])}
    said = "two a multiply-add, matrix products only; reading, by part:"
    return [format_heading("FLOPs", said), _stacked_bar(shares, "", width), indent(table)]


def _memory_section(report: Data, mode: str, width: int) -> list[RenderableType]:
    of, asked = report["memory"][mode], report["options"][mode]
    room = (report.get("hardware") or {}).get("memory")
    each = f"on each of {asked['world_size']:,} devices ({asked['parallel_dims']})" if asked["world_size"] > 1 else ""
    peak = f"peak: {of['peak_phase']}"
    head = format_heading(f"{MODE_LABELS[mode]} memory", format_si(of["total_bytes"], "B"), each, peak)
    passing = {name: component_group(name) in ("activations", "logits and loss") for name in of["peak_by_component"]}
    ordered = sorted(of["peak_by_component"].items(), key=lambda part: (passing[part[0]], -part[1]))
    named = {f"{name}*" if passing[name] and mode == "train" else name: size for name, size in ordered}
    rows: list[RenderableType] = [head, _stacked_bar(named, "B", width, limit=room or 0)]
    if mode == "infer" and report.get("kv_cache"):
        rows.append(indent(_format_kv_cache(report["kv_cache"], width - 2)))
    if "by_activation_checkpointing" in of:
        choices = of["by_activation_checkpointing"]
        kernels = [f"in all, {kernel} attention" for kernel in choices["none"]]
        table = borderless_table("lr" + "r" * len(kernels), ("checkpointing", "activations", *kernels))
        for checkpointing, choice in choices.items():
            totals = [format_si(each["total_bytes"], "B") for each in choice.values()]
            table.add_row(checkpointing, format_si(next(iter(choice.values()))["activations"], "B"), *totals)
        rows.append(indent(table))
    if mode == "train" and report.get("collectives"):
        rows.append(indent(_format_collectives(report["collectives"], width - 2)))
    if room is not None:
        fits = report["fits"][mode]
        verdict = ("fits ", "bold green") if fits else ("does not fit ", "bold red")
        used = f"{of['total_bytes'] / GIB:.1f} of {room / GIB:.4g} GiB, {of['total_bytes'] / room:.0%}"
        rows.append(indent(Text.assemble(verdict, f"{report['hardware']['title']}: {used}")))
    return rows


def _format_collectives(collectives: Data, width: int) -> Text:
    kinds = [f"{each['count']:,} × {kind} {format_si(each['bytes'], 'B')}" for kind, each in collectives.items()]
    return wrap_items([Text("sent in a step:", "dim"), *map(Text, kinds)], width)


def _format_kv_cache(kv_cache: Data, width: int) -> Text:
    kinds = [
        f"{each['num_layers']} {kind} layers {format_si(each['bytes'], 'B')}"
        for kind, each in kv_cache["by_kind"].items()
    ]
    items = [f"{kv_cache['bytes_per_token']:,} bytes a token", *kinds]
    if kv_cache["unwindowed_bytes"] != kv_cache["total_bytes"]:
        items.append(f"without windows {format_si(kv_cache['unwindowed_bytes'], 'B')}")
    if kv_cache["expanded_bytes"] != kv_cache["unwindowed_bytes"]:
        items.append(f"expanded keys and values {format_si(kv_cache['expanded_bytes'], 'B')}")
    return wrap_items([Text("KV cache:", "dim"), *map(Text, items)], width)


def _time_section(report: Data) -> list[RenderableType]:
    device = report["hardware"]
    headers = ("", "at least", "bottleneck", "tokens/s ≤", "expected", "FLOP/byte")
    table = borderless_table("lrlrrr", headers)
    bounds = {name: of for mode in report["time"].values() for name, of in mode.items()}
    for name, of in bounds.items():
        slow, fast = of["expected_tokens_per_second"]
        cells = (
            of["bottleneck"],
            format_number(of["max_tokens_per_second"]),
            f"{format_number(slow)}–{format_number(fast)}",
        )
        table.add_row(
            PHASE_NAMES[name], format_duration(of["min_seconds"]), *cells, format_number(of["arithmetic_intensity"])
        )
    ridge = next(iter(bounds.values()))["ridge_point"]
    said = f"below {ridge:,.0f} FLOP/byte bandwidth binds, above it compute"
    if "decode" in bounds:
        batch = bounds["decode"]["compute_bound_batch_size"]
        never = "decoding stays below at any batch, for each sequence brings a cache to read"
        said += "; " + (never if batch is None else f"decoding turns at a batch of {batch:,} a device")
    source = next(iter(bounds.values()))["efficiency"]["source"]
    note = Text(f"{said}. Expected: {source}.", "dim")
    return [format_heading("time", f"on {device['title']}"), indent(table), indent(note)]


PHASE_NAMES = {"prefill": "prefill", "decode": "decode", "train_step": "training step"}


def _budget_section(report: Data) -> list[RenderableType]:
    of, asked = report["training_budget"], report["options"]["train"]
    table = borderless_table("ll")
    best = f"{of['tokens_per_parameter']:.3g} a parameter; Chinchilla's 20 are {format_count(of['chinchilla_tokens'])}"
    table.add_row("tokens", f"{format_count(of['train_tokens'])} ({best})")
    table.add_row("steps", f"{of['num_steps']:,} of {asked['batch_size'] * asked['context']:,} tokens")
    off = f"{of['flops_6nd'] / of['flops'] - 1:+.1%}".replace("-", "−")
    table.add_row("FLOPs", f"{of['flops']:.4g} (6ND = {of['flops_6nd']:.4g}, {off})".replace("e+", "e"))
    if "device_hours_low" in of:
        hours = f"{format_number(of['device_hours_low'])}–{format_number(of['device_hours_high'])}"
        table.add_row("device-hours", f"{hours}, never below {format_number(of['device_hours_min'])}")
        days = f"{format_number(of['days_low'])}–{format_number(of['days_high'])}"
        table.add_row("days", f"{days} on {asked['world_size']:,} device{'s' * (asked['world_size'] > 1)}")
    if "kwh_low" in of:
        table.add_row(
            "energy", f"{format_number(of['kwh_low'])}–{format_number(of['kwh_high'])} kWh at its rated power"
        )
    if "cost_low" in of:
        table.add_row(
            "money",
            f"{format_number(of['cost_low'])}–{format_number(of['cost_high'])} at {asked['price_per_hour']:g} an hour",
        )
    return [format_heading("training run"), indent(table)]


def _format_assumptions(report: Data) -> Text:
    """What was taken for granted, and how to change it."""
    modes = report["options"]
    asked = next(iter(modes.values()))
    said = f"batch {asked['batch_size']:,}, context {asked['context']:,}"
    said += f" ({asked['context_warning']}: this is arithmetic)" if asked["context_warning"] else ""
    said += f", source {asked['source_len']:,}" if len(report["model"]["layers"]) > 1 else ""
    said += (
        "".join(f", {of['dtype']} for {MODE_LABELS[mode]}" for mode, of in modes.items())
        + f", kernel {asked['kernel']}"
    )
    said += f", cache in {asked['kv_cache_dtype']}" if "kv_cache" in report and "infer" in modes else ""
    said += f", {asked['optimizer']}, checkpointing {asked['activation_checkpointing']}" if "train" in modes else ""
    said += ": --batch-size, --context, --dtype … change it" + ("." if "time" in report else ", --gpu adds time.")
    said += " Visible pairs: those that the mask lets attention see."
    if "train" in modes:
        said += " *: activations."
    elif asked["dtype"] in ("fp8", "int8", "int4"):
        said += f" {asked['dtype']} serves only; training needs fp32, bf16, fp16 or mixed."
    return Text(said, "dim")


# ---------------------------------------------------------------------------------------- several


def render_comparison(reports: list[Data]) -> None:
    """Models as columns, as many at once as there is room for."""
    out = build_console()
    at_once = max(1, (out.width - 26) // max(16, *(len(each["source"]) + 2 for each in reports)))
    for start in range(0, len(reports), at_once):
        shown = reports[start : start + at_once]
        columns = [_comparison_column(each) for each in shown]
        table = borderless_table("l" + "r" * len(shown), ["", *(each["source"] for each in shown)])
        for name in dict.fromkeys(name for column in columns for name in column):
            table.add_row(name, *(column.get(name, "") for column in columns))
        out.print(table, Text())
    out.print(Text("per device; --json gives every digit, one SOURCE alone the whole account", "dim"))


def _comparison_column(report: Data) -> dict[str, str]:
    """One model's column."""
    model, counts, modes = report["model"], report["parameters"], report["options"]
    asked = next(iter(modes.values()))
    column = {
        "form": model["form"],
        "layers × width": f"{' + '.join(map(str, model['layers'].values()))} × {model['d_model']:,}",
        "parameters": f"{counts['total']:,}",
        "active": f"{counts['active']:,}",
        "checkpoint": format_si(report["checkpoint"]["total_bytes"], "B"),
        "batch × context": f"{asked['batch_size']:,} × {asked['context']:,}",
        "FLOPs a token": format_si(report["flops"]["forward"]["per_token_visible"]),
    }
    if "kv_cache" in report and "infer" in modes:
        column |= {"KV cache a token": format_si(report["kv_cache"]["bytes_per_token"], "B")}
        column |= {"KV cache": format_si(report["kv_cache"]["total_bytes"], "B")}
    for mode in modes:
        fits = {True: " ✓", False: " ✗", None: ""}[report.get("fits", {}).get(mode)]
        column[f"{MODE_LABELS[mode]} memory"] = format_si(report["memory"][mode]["total_bytes"], "B") + fits
    for mode in report.get("time", {}).values():
        for name, of in mode.items():
            column[f"{PHASE_NAMES[name]}, tokens/s"] = f"≤ {format_number(of['max_tokens_per_second'])}"
    if "cost_low" in report.get("training_budget", {}):
        column["money to train"] = (
            f"{report['training_budget']['cost_low']:,.0f}–{report['training_budget']['cost_high']:,.0f}"
        )
    return column


def render_fit(name: str, fit: "MemoryFit") -> None:
    """What fits of the model as it is, and which of its family's shapes do: layers down, width along."""
    asked, out = fit.options, build_console()
    out.print(
        format_heading(
            name,
            f"in {format_si(fit.memory_budget, 'B')} ({fit.memory_budget / GIB:.4g} GiB) for {MODE_LABELS[asked.mode]}",
        )
    )
    if fit.total_bytes is not None:
        answers = borderless_table("ll")
        answers.add_row("as asked", f"{format_si(fit.total_bytes, 'B')}, {'fits' if fit.fits else 'does not fit'}")
        longest = _format_maximum(fit.max_context, fit.unbounded_context) + f" at a batch of {asked.batch_size:,}"
        if fit.exceeds_model_context:
            longest += f" (it is made for {asked.config.context:,})"
        elif fit.max_context is not None and fit.max_context == fit.max_position_embeddings:
            longest += " (where its positions end)"
        answers.add_row("longest context", longest)
        batches = _format_maximum(fit.max_batch_size, fit.unbounded_batch_size)
        answers.add_row("largest batch", f"{batches} at a context of {asked.context:,}")
        out.print(indent(answers))
    shapes = {(shape.layers, shape.d_model): shape for shape in fit.model_shapes}
    heads = {shape.d_model: shape.heads for shape in sorted(fit.model_shapes, key=lambda shape: shape.d_model)}
    table = borderless_table(
        "l" + "r" * len(heads), ["d_model\nheads", *(f"{width:,}\n{heads[width]}" for width in heads)], gap=1
    )
    for layers in sorted({layers for layers, _ in shapes}):
        row = [shapes.get((layers, width)) for width in heads]
        counts = (format_count(each.num_parameters, 3) if each else "" for each in row)
        marks = ({True: " ✓", False: " ✗"}[each.fits] if each else "" for each in row)
        table.add_row(f"{layers} layers", *map(str.__add__, counts, marks))
    out.print(format_heading("shapes of its kind", "by parameters; ✓ fits, ✗ does not"), indent(table))
    said = f"batch {asked.batch_size:,}, context {asked.context:,}, {asked.precision.name}"
    said += ": --batch-size, --context, --dtype, --mode … change it."
    out.print(Text(f"{fit.note} {said}".strip(), "dim"))


def _format_maximum(value: int | None, unbounded: bool) -> str:
    return "none" if value is None else f"{value:,}" + (" or more" if unbounded else "")


def render_hardware_list(devices: Iterable["Hardware"]) -> None:
    headers = ("name", "kind", "GiB", "GB/s", "fp32 TFLOPS", "16-bit TFLOPS", "year")
    table = borderless_table("llrrrrr", headers)
    for each in devices:
        half = each.flops.get("bf16") or each.flops.get("fp16")
        rates = (rate and rate / 1e12 for rate in (each.flops.get("fp32"), half))
        figures = (each.memory and each.memory / GIB, each.bandwidth / 1e9, *rates)
        table.add_row(
            each.name, each.kind, *(format_number(value) if value else "" for value in figures), str(each.year or "")
        )
    build_console().print(table)
    sys.stdout.write("dense peaks; --json has every dtype, links, power, and where each figure is from\n")
