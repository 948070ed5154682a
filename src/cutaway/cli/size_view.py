"""What `cutaway size` shows in a terminal: the data of --json as tables and bars."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cutaway.size.plot import group
from cutaway.size.question import DOING
from cutaway.size.units import GIB, seconds, short, si

Data = dict[str, Any]
NARROWEST, WIDEST = 76, 100
SIGNS = "█▓▒░"
COLOURS = ("cyan", "yellow", "magenta", "green", "blue", "red", "white")


def figure(value: float) -> str:
    """As people read it: three digits at least, no decimals that mean nothing."""
    if value >= 1e6:
        return si(value, digits=3)
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value >= 0.01 else "<0.01"


def console() -> Console:
    found = Console(highlight=False)
    found.width = max(NARROWEST, min(found.width, WIDEST))  # rather wrapped by the terminal than cut short
    return found


def grid(sides: str, headers: Sequence[str] = (), *, gap: int = 2) -> Table:
    """A table without lines; `sides` says of each column whether it leans left (l) or right (r)."""
    table = Table(box=None, pad_edge=False, show_header=bool(headers), header_style="dim", padding=(0, gap, 0, 0))
    for side, name in zip(sides, headers or sides, strict=True):
        table.add_column(Text(name), justify="right" if side == "r" else "left", no_wrap=True)
    return table


def heading(name: str, *rest: str) -> Text:
    return Text.assemble((name, "bold"), *(f"  {each}" for each in rest if each))


def under(body: RenderableType) -> RenderableType:
    return Padding(body, (0, 0, 0, 2), expand=False)


def flow(items: Iterable[Text], width: int) -> Text:
    """Items one after another, broken between them and never inside."""
    lines = [Text()]
    for item in items:
        if lines[-1] and lines[-1].cell_len + 3 + item.cell_len > width:
            lines.append(Text())
        elif lines[-1]:
            lines[-1].append("   ")
        lines[-1].append(item)
    return Text("\n").join(lines)


def stacked(parts: dict[str, float], unit: str, width: int, *, room: float = 0) -> RenderableType:
    """One bar of all parts and what each sign stands for; `room` is drawn as far as it is free."""
    scale = (width - 2) / max(sum(parts.values()), room, 1)
    bar, items, before = Text(), [], 0.0
    for index, (name, value) in enumerate(parts.items()):
        sign, colour = SIGNS[index % len(SIGNS)], COLOURS[index % len(COLOURS)]
        bar.append(sign * (round((before + value) * scale) - round(before * scale)), colour)
        before += value
        items.append(Text.assemble((sign, colour), f" {name} ", si(value, unit) if unit else f"{value:.1%}"))
    bar.append("·" * (round(room * scale) - round(before * scale)), "dim")
    return under(Group(bar, flow(items, width - 2)))


# ---------------------------------------------------------------------------------------- one model


def show(told: Data) -> None:
    """One model on one screen."""
    out = console()
    parts: list[RenderableType] = [title(told), Text(), *parameters(told, out.width), Text(), *flops(told, out.width)]
    for mode in told["question"]:
        parts += [Text(), *memory(told, mode, out.width)]
    if "time" in told:
        parts += [Text(), *time(told)]
    if "budget" in told:
        parts += [Text(), *budget(told)]
    out.print(Group(*parts, Text(), conventions(told)))


def title(told: Data) -> Text:
    model, counts = told["model"], told["parameters"]
    layers = " + ".join(str(layers) for layers in model["layers"].values())
    active = f", {counts['active']:,} active" if counts["active"] != counts["total"] else ""
    shape = f"{model['form']} · {layers} layers × {model['d_model']:,} · {counts['total']:,} parameters{active}"
    return Text.assemble((told["source"], "bold"), f"  {shape}")


def parameters(told: Data, width: int) -> list[RenderableType]:
    counts, stored = told["parameters"], told["checkpoint"]
    owners = [layer for layer in counts["layers"] if layer["same_as"] is None]
    inside = {part: sum(each[part] * each["layers"] for each in owners) for part in ("attention", "cross", "ffn")}
    norms = sum(each["norm"] * each["layers"] for each in owners) + counts["embedding_norm"] + counts["final_norm"]
    outside = {name: counts[name] for name in ("positions", "types", "embedding_projection")}
    ends = {name: counts[name] for name in ("head_transform", "head", "pooler")}
    every = {"embedding": counts["embedding"], **outside, **inside, "norms": norms, **ends}
    table, longest = grid("lrrl"), max(every.values())
    room = width - 15 - max(len(name) for name, value in every.items() if value) - len(f"{longest:,}")
    for name, value in every.items():
        if value:
            share, bar = value / counts["total"], "█" * round(room * value / longest)
            table.add_row(name.replace("_", " "), f"{value:,}", f"{share:.1%}", Text(bar, "cyan"))
    held = f"{stored['tensors']:,} tensors, {stored['elements']:,} numbers"
    held += f" of which {stored['buffers']:,} buffers" if stored["buffers"] else ""
    dtype = next(iter(told["question"].values()))["dtype"]
    kinds = [Text(kind) for kind in layer_kinds(counts["layers"], several=len(told["model"]["layers"]) > 1)]
    return [
        heading("parameters", f"{short(counts['total'])}, {short(counts['non_embedding'])} without embedding and head"),
        under(table),
        under(flow([Text("a layer:", "dim"), *kinds], width - 2)),
        under(Text.assemble(("a checkpoint: ", "dim"), f"{held}, {si(stored['bytes'], 'B')} in {dtype}")),
    ]


def layer_kinds(layers: list[Data], *, several: bool) -> list[str]:
    """Layers alike, wherever they stand: how many, and what one has."""
    kinds: dict[tuple[Any, ...], int] = {}
    for each in layers:
        key = each["stack"], each["total"], each["active"], each["same_as"] is not None
        kinds[key] = kinds.get(key, 0) + each["layers"]
    words = []
    for (stack, total, active, again), many in kinds.items():
        where = f"{stack} " if several else ""
        used = f" ({active:,} active)" if active != total else ""
        words.append(f"{many} × {where}" + ("an earlier one's again" if again else f"{total:,}{used}"))
    return words


def flops(told: Data, width: int) -> list[RenderableType]:
    every, modes = told["flops"], told["question"]
    context = next(iter(modes.values()))["context"]
    headers = ("", "pairs seen", "every pair", "rule of thumb", "off")
    table = grid("lrrrr", headers)

    def row(name: str, of: Data, by: int = 1) -> None:
        rule = f"{of['rule']['name']} = {si(of['rule']['flops'] / by)}"
        cells = si(of["total_seen"] / by), si(of["total"] / by), rule, f"{of['rule']['error']:+.1%}"
        table.add_row(name, *(cell.replace("-", "−") for cell in cells))

    row("read, a token", every["forward"], context)
    row(f"read {context:,} tokens", every["forward"])
    if "decode" in every and "infer" in modes:
        row(f"decode at {context:,}", every["decode"])
    if "train" in modes:
        for recompute, of in every["train"].items():
            row(f"train, recompute {recompute}", of)
    seen = every["forward"]["seen"]
    shares = {name: seen[name] / sum(seen.values()) for name in sorted(seen, key=lambda part: -seen[part])}
    said = "two a multiply-add, matrix products only; reading, by part:"
    return [heading("FLOPs", said), stacked(shares, "", width), under(table)]


def memory(told: Data, mode: str, width: int) -> list[RenderableType]:
    of, asked = told["memory"][mode], told["question"][mode]
    room = (told.get("hardware") or {}).get("memory")
    each = f"on each of {asked['gpus']:,} devices ({asked['devices']})" if asked["gpus"] > 1 else ""
    head = heading(f"memory {DOING[mode]}", si(of["total"], "B"), each, f"fullest: {of['fullest']}")
    passing = {name: group(name) in ("activations", "logits and loss") for name in of["parts"]}
    ordered = sorted(of["parts"].items(), key=lambda part: (passing[part[0]], -part[1]))
    named = {f"{name}*" if passing[name] and mode == "train" else name: size for name, size in ordered}
    rows: list[RenderableType] = [head, stacked(named, "B", width, room=room or 0)]
    if mode == "infer" and told.get("kv_cache"):
        rows.append(under(cache(told["kv_cache"], width - 2)))
    if "choices" in of:
        kernels = [f"in all, {kernel} attention" for kernel in of["choices"]["none"]]
        table = grid("lr" + "r" * len(kernels), ("recompute", "activations", *kernels))
        for how, choice in of["choices"].items():
            totals = [si(each["total"], "B") for each in choice.values()]
            table.add_row(how, si(next(iter(choice.values()))["activations"], "B"), *totals)
        rows.append(under(table))
    if mode == "train" and told.get("collectives"):
        rows.append(under(sent(told["collectives"], width - 2)))
    if room is not None:
        fits = told["fits"][mode]
        verdict = ("fits ", "bold green") if fits else ("does not fit ", "bold red")
        used = f"{of['total'] / GIB:.1f} of {room / GIB:.4g} GiB, {of['total'] / room:.0%}"
        rows.append(under(Text.assemble(verdict, f"{told['hardware']['title']}: {used}")))
    return rows


def sent(of: Data, width: int) -> Text:
    kinds = [f"{each['number']:,} × {kind} {si(each['bytes'], 'B')}" for kind, each in of.items()]
    return flow([Text("sent in a step:", "dim"), *map(Text, kinds)], width)


def cache(of: Data, width: int) -> Text:
    kinds = [f"{each['layers']} {kind} layers {si(each['bytes'], 'B')}" for kind, each in of["kinds"].items()]
    items = [f"{of['bytes_per_token']:,} bytes a token", *kinds]
    if of["without_windows"] != of["bytes"]:
        items.append(f"without windows {si(of['without_windows'], 'B')}")
    if of["expanded"] != of["without_windows"]:
        items.append(f"expanded keys and values {si(of['expanded'], 'B')}")
    return flow([Text("KV cache:", "dim"), *map(Text, items)], width)


def time(told: Data) -> list[RenderableType]:
    device = told["hardware"]
    headers = ("", "at least", "binds", "tokens/s ≤", "expected", "FLOP/byte")
    table = grid("lrlrrr", headers)
    bounds = {name: of for mode in told["time"].values() for name, of in mode.items()}
    for name, of in bounds.items():
        slow, fast = of["expected_tokens_per_second"]
        cells = of["binds"], figure(of["tokens_per_second_bound"]), f"{figure(slow)}–{figure(fast)}"
        table.add_row(WORK[name], seconds(of["bound_seconds"]), *cells, figure(of["intensity"]))
    ridge = next(iter(bounds.values()))["ridge"]
    said = f"below {ridge:,.0f} FLOP/byte bandwidth binds, above it compute"
    if "decode" in bounds:
        batch = bounds["decode"]["turning_batch"]
        never = "decoding stays below at any batch, for each sequence brings a cache to read"
        said += "; " + (never if batch is None else f"decoding turns at a batch of {batch:,} a device")
    source = next(iter(bounds.values()))["efficiency"]["source"]
    note = Text(f"{said}. Expected: {source}.", "dim")
    return [heading("time", f"on {device['title']}"), under(table), under(note)]


WORK = {"prefill": "prefill", "decode": "decode", "step": "training step"}


def budget(told: Data) -> list[RenderableType]:
    of, asked = told["budget"], told["question"]["train"]
    table = grid("ll")
    best = f"{of['tokens_per_parameter']:.3g} a parameter; Chinchilla's 20 are {short(of['chinchilla_tokens'])}"
    table.add_row("tokens", f"{short(of['tokens'])} ({best})")
    table.add_row("steps", f"{of['steps']:,} of {asked['batch'] * asked['context']:,} tokens")
    off = f"{of['six_n'] / of['flops'] - 1:+.1%}".replace("-", "−")
    table.add_row("FLOPs", f"{of['flops']:.4g} (6N = {of['six_n']:.4g}, {off})".replace("e+", "e"))
    if "hours_best" in of:
        hours = f"{figure(of['hours_best'])}–{figure(of['hours_plain'])}"
        table.add_row("device-hours", f"{hours}, never below {figure(of['hours_bound'])}")
        days = f"{figure(of['days_best'])}–{figure(of['days_plain'])}"
        table.add_row("days", f"{days} on {asked['gpus']:,} device{'s' * (asked['gpus'] > 1)}")
    if "kwh_best" in of:
        table.add_row("energy", f"{figure(of['kwh_best'])}–{figure(of['kwh_plain'])} kWh at its rated power")
    if "cost_best" in of:
        table.add_row("money", f"{figure(of['cost_best'])}–{figure(of['cost_plain'])} at {asked['price']:g} an hour")
    return [heading("training run"), under(table)]


def conventions(told: Data) -> Text:
    """What was taken for granted, and how to change it."""
    modes = told["question"]
    asked = next(iter(modes.values()))
    said = f"batch {asked['batch']:,}, context {asked['context']:,}"
    said += f" ({asked['beyond']}: this is arithmetic)" if asked["beyond"] else ""
    said += f", source {asked['source']:,}" if len(told["model"]["layers"]) > 1 else ""
    said += "".join(f", {of['dtype']} {DOING[mode]}" for mode, of in modes.items()) + f", kernel {asked['kernel']}"
    said += f", cache in {asked['kv_dtype']}" if "kv_cache" in told and "infer" in modes else ""
    said += f", {asked['optimizer']}, checkpointing {asked['checkpointing']}" if "train" in modes else ""
    said += ": --batch, --context, --dtype … change it" + ("." if "time" in told else ", --gpu adds time.")
    said += " Pairs seen: those that the mask lets attention see."
    if "train" in modes:
        said += " *: activations."
    elif asked["dtype"] in ("fp8", "int8", "int4"):
        said += f" {asked['dtype']} serves only; training needs fp32, bf16, fp16 or mixed."
    return Text(said, "dim")


# ---------------------------------------------------------------------------------------- several


def show_side_by_side(told: list[Data]) -> None:
    """Models as columns, as many at once as there is room for."""
    out = console()
    at_once = max(1, (out.width - 26) // max(16, *(len(each["source"]) + 2 for each in told)))
    for start in range(0, len(told), at_once):
        shown = told[start : start + at_once]
        columns = [facts(each) for each in shown]
        table = grid("l" + "r" * len(shown), ["", *(each["source"] for each in shown)])
        for name in dict.fromkeys(name for column in columns for name in column):
            table.add_row(name, *(column.get(name, "") for column in columns))
        out.print(table, Text())
    out.print(Text("per device; --json gives every digit, one SOURCE alone the whole account", "dim"))


def facts(told: Data) -> dict[str, str]:
    """One model's column."""
    model, counts, modes = told["model"], told["parameters"], told["question"]
    asked = next(iter(modes.values()))
    column = {
        "form": model["form"],
        "layers × width": f"{' + '.join(map(str, model['layers'].values()))} × {model['d_model']:,}",
        "parameters": f"{counts['total']:,}",
        "active": f"{counts['active']:,}",
        "checkpoint": si(told["checkpoint"]["bytes"], "B"),
        "batch × context": f"{asked['batch']:,} × {asked['context']:,}",
        "FLOPs a token": si(told["flops"]["forward"]["per_token_seen"]),
    }
    if "kv_cache" in told and "infer" in modes:
        column |= {"KV cache a token": si(told["kv_cache"]["bytes_per_token"], "B")}
        column |= {"KV cache": si(told["kv_cache"]["bytes"], "B")}
    for mode in modes:
        fits = {True: " ✓", False: " ✗", None: ""}[told.get("fits", {}).get(mode)]
        column[f"memory {DOING[mode]}"] = si(told["memory"][mode]["total"], "B") + fits
    for mode in told.get("time", {}).values():
        for name, of in mode.items():
            column[f"{WORK[name]}, tokens/s"] = f"≤ {figure(of['tokens_per_second_bound'])}"
    if "cost_best" in told.get("budget", {}):
        column["money to train"] = f"{told['budget']['cost_best']:,.0f}–{told['budget']['cost_plain']:,.0f}"
    return column
