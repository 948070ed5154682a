"""`cutaway size`: what a model costs before it exists."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from cutaway.errors import InputError

if TYPE_CHECKING:  # --help needs no configurations, and --json draws nothing: each is imported where it is used
    from cutaway.size import Hardware, Size
    from cutaway.size.fit import Fit

Typed = str | None
LONGEST_NAME = 48
N = TypeVar("N", int, float)


def size(
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SOURCE",
            help="A preset's name, a .toml or config.json, or a model's directory; several are compared.",
            show_default=False,
        ),
    ] = None,
    mode: Annotated[Typed, typer.Option(metavar="train|infer", help="Only this; both unless given.")] = None,
    batch: Annotated[Typed, typer.Option(metavar="N", help="Sequences, on all devices; one each unless given.")] = None,
    context: Annotated[Typed, typer.Option(metavar="N", help="Tokens of each; 8k is 8,000 and 8Ki 8,192.")] = None,
    source_length: Annotated[Typed, typer.Option(metavar="N", help="For encoder-decoders: tokens read.")] = None,
    dtype: Annotated[
        Typed, typer.Option(metavar="NAME", help="fp32, bf16, fp16, mixed; to serve also fp8, int8, int4.")
    ] = None,
    kv_dtype: Annotated[
        Typed, typer.Option(metavar="NAME", help="Of the KV cache: fp32, bf16, fp16, fp8, int8, int4.")
    ] = None,
    optimizer: Annotated[
        Typed, typer.Option(metavar="NAME", help="adamw, adamw-8bit, muon, sgd, sgd-momentum.")
    ] = None,
    checkpointing: Annotated[
        Typed, typer.Option(metavar="NAME", help="What is recomputed: none, selective, full.")
    ] = None,
    kernel: Annotated[Typed, typer.Option(metavar="NAME", help="Of attention: auto, sdpa, explicit, flex.")] = None,
    loss: Annotated[Typed, typer.Option(metavar="NAME", help="Over logits: whole, or chunked as in train.")] = None,
    gpu: Annotated[
        Typed, typer.Option(metavar="NAME", help="A device that --hardware lists, or 'here', once measured.")
    ] = None,
    bandwidth: Annotated[Typed, typer.Option(metavar="3.35TB/s", help="Or a device by its figures: this,")] = None,
    flops: Annotated[Typed, typer.Option(metavar="989TFLOPS", help="this,")] = None,
    memory: Annotated[Typed, typer.Option(metavar="80GB", help="and how much it holds.")] = None,
    gpus: Annotated[Typed, typer.Option(metavar="N", help="How many of them.")] = None,
    parallel: Annotated[Typed, typer.Option(metavar="NAME", help="How they share: data, sharded, tensor.")] = None,
    tensor: Annotated[Typed, typer.Option(metavar="N", help="Of them, how many share each matrix;")] = None,
    shards: Annotated[Typed, typer.Option(metavar="N", help="and how many share the states.")] = None,
    tokens: Annotated[Typed, typer.Option(metavar="15T", help="To train on; 20 a parameter unless given.")] = None,
    price: Annotated[
        float | None, typer.Option(metavar="2.5", min=0, max=1e9, help="Of one device for an hour, in your money.")
    ] = None,
    fit: Annotated[Typed, typer.Option(metavar="16GB", help="Say what fits in so much memory.")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Side by side, as several SOURCEs always are.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it: .svg, .png or .pdf.")] = None,
    hardware: Annotated[bool, typer.Option("--hardware", help="List the known devices.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Say what a model costs before it exists: parameters, FLOPs, memory and time.

    Example: cutaway size llama-3-8b --gpu h100 --context 8Ki

    Example: cutaway size ./my-model --mode train --gpu h100 --gpus 8 --batch 64 --tokens 1T --price 2.5

    Example: cutaway size --compare llama-3-8b qwen3-8b gemma-2-9b --plot costs.svg

    Example: cutaway size llama-3-8b --fit 16GB --dtype int4
    """
    names = sources or []
    if hardware:
        _list_hardware(as_json)
        return
    if not names and fit is None:
        raise InputError("no SOURCE is given; name a preset (see cutaway presets), a file or a directory, or ask --fit")
    from cutaway.size.units import parse_count

    asked: dict[str, Any] = {
        "batch": _read(parse_count, batch, "--batch"),
        "context": _read(parse_count, context, "--context"),
        "source_length": _read(parse_count, source_length, "--source-length"),
        "dtype": dtype,
        "kv_dtype": kv_dtype,
        "optimizer": optimizer,
        "checkpointing": checkpointing,
        "kernel": kernel,
        "loss": loss,
        "hardware": _device(gpu, bandwidth, flops, memory),
        "gpus": _read(parse_count, gpus, "--gpus"),
        "parallel": parallel,
        "tensor": _read(parse_count, tensor, "--tensor"),
        "shards": _read(parse_count, shards, "--shards"),
        "tokens": _read(parse_count, tokens, "--tokens"),
        "price": price,
    }
    question = {name: value for name, value in asked.items() if value is not None}
    if batch is None and gpus is not None and parallel != "tensor":
        question["batch"] = max(1, question["gpus"] // question.get("tensor", 1))
    if fit is not None:
        if len(names) > 1 or plot is not None:
            raise InputError("--fit answers for one SOURCE and draws no plot; ask for the others by themselves")
        _fit(fit, names, mode, question, as_json)
        return
    sizes = list(zip(map(title, names), _ask(names, mode, question), strict=True))
    if plot is not None:
        from cutaway.size.plot import plot as draw

        draw(plot, sizes)
    _tell(sizes, side_by_side=compare or len(sizes) > 1, as_json=as_json)
    if plot is not None and not as_json:
        sys.stdout.write(f"drawn: {plot}{'' if 'hardware' in question else ' (memory only: time needs --gpu)'}\n")


def _ask(sources: list[str], mode: str | None, question: dict[str, Any]) -> "list[list[Size]]":
    """For each source one answer a mode. A dtype that cannot train is asked to serve only, if no mode is named."""
    from cutaway.config import config
    from cutaway.size import size as ask
    from cutaway.size.numbers import numbers

    trains = "dtype" not in question or numbers(question["dtype"]).trains
    modes = [mode] if mode is not None else ["infer", "train"] if trains else ["infer"]
    models = [config(source) for source in sources]
    if len(models) == 1:
        return [[ask(models[0], mode=each, **question) for each in modes]]
    from cutaway.size.fit import compare

    return [list(each) for each in zip(*(compare(models, mode=each, **question) for each in modes), strict=True)]


def _tell(sizes: "list[tuple[str, list[Size]]]", *, side_by_side: bool, as_json: bool) -> None:
    from cutaway.size.describe import describe

    told = [{"source": name} | describe(*each) for name, each in sizes]
    if as_json:
        sys.stdout.write(json.dumps(told if side_by_side else told[0], indent=2) + "\n")
        return
    from cutaway.cli import size_view

    if side_by_side:
        size_view.show_side_by_side(told)
    else:
        size_view.show(told[0])


def _fit(fit: str, names: list[str], mode: str | None, question: dict[str, Any], as_json: bool) -> None:
    from cutaway.size.fit import fit as solve
    from cutaway.size.units import parse_bytes

    source = names[0] if names else "llama"
    found = solve(_read(parse_bytes, fit, "--fit") or 0, source, mode=mode or "infer", **question)
    if as_json:
        sys.stdout.write(json.dumps({"source": source} | found.to_dict(), indent=2) + "\n")
        return
    _show_fit(title(source), found)


def _show_fit(name: str, found: "Fit") -> None:
    """What fits of the model as it is, and which of its family's shapes do: layers down, width along."""
    from rich.text import Text

    from cutaway.cli.size_view import console, grid, heading, under
    from cutaway.size.question import DOING
    from cutaway.size.units import GIB, short, si

    asked, out = found.question, console()
    out.print(heading(name, f"in {si(found.budget, 'B')} ({found.budget / GIB:.4g} GiB) {DOING[asked.mode]}"))
    if found.total is not None:
        answers = grid("ll")
        answers.add_row("as asked", f"{si(found.total, 'B')}, {'fits' if found.fits else 'does not fit'}")
        longest = _most(found.longest_context, found.unbounded) + f" at a batch of {asked.batch:,}"
        if found.beyond_context:
            longest += f" (it is made for {asked.config.context:,})"
        elif found.longest_context is not None and found.longest_context == found.position_limit:
            longest += " (where its positions end)"
        answers.add_row("longest context", longest)
        batches = _most(found.largest_batch, found.unbounded_batch)
        answers.add_row("largest batch", f"{batches} at a context of {asked.context:,}")
        out.print(under(answers))
    shapes = {(shape.layers, shape.width): shape for shape in found.shapes}
    heads = {shape.width: shape.heads for shape in sorted(found.shapes, key=lambda shape: shape.width)}
    table = grid("l" + "r" * len(heads), ["width\nheads", *(f"{width:,}\n{heads[width]}" for width in heads)], gap=1)
    for layers in sorted({layers for layers, _ in shapes}):
        row = [shapes.get((layers, width)) for width in heads]
        counts = (short(each.parameters, 3) if each else "" for each in row)
        marks = ({True: " ✓", False: " ✗"}[each.fits] if each else "" for each in row)
        table.add_row(f"{layers} layers", *map(str.__add__, counts, marks))
    out.print(heading("shapes of its kind", "by parameters; ✓ fits, ✗ does not"), under(table))
    said = f"batch {asked.batch:,}, context {asked.context:,}, {asked.dtype.name}"
    said += ": --batch, --context, --dtype, --mode … change it."
    out.print(Text(f"{found.note} {said}".strip(), "dim"))


def _most(value: int | None, unbounded: bool) -> str:
    return "none" if value is None else f"{value:,}" + (" or more" if unbounded else "")


def _list_hardware(as_json: bool) -> None:
    from dataclasses import asdict

    from cutaway.size import known

    if as_json:
        sys.stdout.write(json.dumps([asdict(device) for device in known()], indent=2) + "\n")
        return
    from cutaway.cli.size_view import console, figure, grid
    from cutaway.size.units import GIB

    headers = ("name", "kind", "GiB", "GB/s", "fp32 TFLOPS", "16-bit TFLOPS", "year")
    table = grid("llrrrrr", headers)
    for each in known():
        half = each.flops.get("bf16") or each.flops.get("fp16")
        rates = (rate and rate / 1e12 for rate in (each.flops.get("fp32"), half))
        figures = (each.memory and each.memory / GIB, each.bandwidth / 1e9, *rates)
        table.add_row(
            each.name, each.kind, *(figure(value) if value else "" for value in figures), str(each.year or "")
        )
    console().print(table)
    sys.stdout.write("dense peaks; --json has every dtype, links, power, and where each figure is from\n")


def title(source: str) -> str:
    """How a source is called: a file or directory by its own name, a config.json by its directory's."""
    path = Path(source)
    name = path.absolute().parent.name if path.name == "config.json" else path.name or path.absolute().name
    shown = "".join(sign if sign.isprintable() else "?" for sign in name)
    return shown if len(shown) <= LONGEST_NAME else f"{shown[: LONGEST_NAME - 1]}…"


# ---------------------------------------------------------------------------------------- what is typed


def _device(gpu: str | None, bandwidth: str | None, flops: str | None, memory: str | None) -> "Hardware | str | None":
    own = {"--bandwidth": bandwidth, "--flops": flops, "--memory": memory}
    given = [name for name, value in own.items() if value is not None]
    if not given:
        return gpu
    if gpu is not None:
        raise InputError(f"--gpu names a device, and {given[0]} describes another; give one or the other")
    if bandwidth is None or flops is None:
        raise InputError("a device of your own needs --bandwidth and --flops (and --memory, to know what fits)")
    from cutaway.size import custom
    from cutaway.size.units import parse_bytes, parse_rate

    if "op" in bandwidth.lower() or "b/s" in flops.lower():
        raise InputError(
            "--bandwidth is bytes a second, as in 3.35TB/s, and --flops operations, as in 989TFLOPS; swap them"
        )
    rates = _read(parse_rate, bandwidth, "--bandwidth"), _read(parse_rate, flops, "--flops")
    return custom(bandwidth=rates[0] or 0, flops=rates[1] or 0, memory=_read(parse_bytes, memory, "--memory"))


def _read(parse: Callable[[str], N], text: str | None, option: str) -> N | None:
    """What was typed after an option, which an error names."""
    try:
        return None if text is None else parse(text)
    except InputError as error:
        raise InputError(f"{option}: {error}") from None
