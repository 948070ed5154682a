"""What `cutaway trace` and `cutaway demo` show: a token's journey, a line a stage."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from cutaway.cli.screen import visible
from cutaway.cli.size_view import flow
from cutaway.lens.drawing import bytes_in_words
from cutaway.lens.equations import is_added, on_stream

if TYPE_CHECKING:
    from cutaway.cli.reading import Reading
    from cutaway.lens import Journey, Stage

Cells = tuple[str, ...]
HEADERS = ("stage", "what it is", "shape", "norm", "adds", "cosine", "")
RIGHT = {3, 4, 5}
"""Columns of numbers."""
BAR, WIDE = 10, 96
"""Signs of the longest bar, and the width from which there is room for them."""
TOLD, NAMED = 160, 24
"""Letters of a text, and tokens by number, that are shown of a longer one."""
AXES = {
    "T": "tokens",
    "S": "tokens looked at",
    "H": "heads",
    "G": "heads of keys and values",
    "D": "width of a query or key",
    "E": "width of a value",
    "d": "width of the stream",
    "h": "width of the FFN",
    "K": "experts chosen",
    "V": "vocabulary",
}


def to_data(journey: "Journey", reading: "Reading") -> dict[str, Any]:
    """All of it for machines."""

    def likely(top: Iterable[tuple[int, float]]) -> list[dict[str, Any]]:
        return [{"token": token, "text": reading.spelled(token), "probability": share} for token, share in top]

    def tokens(ids: Sequence[int] | None) -> list[dict[str, Any]] | None:
        return None if ids is None else [{"token": each, "text": reading.spelled(each)} for each in ids]

    return {
        "model": str(reading.model),
        "fresh_weights": reading.fresh,
        "text": reading.text,
        "target": reading.target,
        "tokens": tokens(reading.tokens),
        "source_tokens": tokens(reading.source),
        "followed": journey.at,
        "notes": reading.notes,
        "stages": [asdict(stage) | {"top": likely(stage.top)} for stage in journey.stages],
        "top": likely(journey.top),
        "sum_error": journey.sum_error,
        "row_error": journey.row_error,
    }


def show(journey: "Journey", reading: "Reading", name: str, *, hint: str = "") -> None:
    """The table, what comes out in the end, and the proof. `hint`: how to see the blocks that are left out."""
    console = Console(highlight=False)
    say(console, *opening(journey, reading, name, console.width))
    say(console, *table(journey, reading, hint, wide=console.width >= WIDE), Text(), *legend(journey, console.width))
    say(console, *ending(journey, reading), Text(), Text("proof", "bold"), *proof(journey, reading))


def legend(journey: "Journey", width: int) -> list[Text]:
    """What the letters, and the columns that have something in them, stand for."""
    letters = {axis for stage in journey.stages for axis in stage.axes.split()}
    items = [f"{axis} {what}" for axis, what in AXES.items() if axis in letters]
    items += ["norm: length of the token's vector"]
    if any(stage.share is not None for stage in journey.stages):
        items += ["adds: its length by the stream's", "cosine: +1 along the stream, −1 against it"]
    if any(stage.top for stage in journey.stages):
        items += ["→ likeliest tokens if decoded here"]
    return [Text(line, "dim") for line in flowing(items, min(width, 100))]


def say(console: Console, *lines: Text) -> None:
    for line in lines:
        console.print(line, soft_wrap=True)


def flowing(items: Sequence[str], width: int) -> list[str]:
    """Items between commas, broken between them and never inside."""
    lines = [""]
    for number, item in enumerate(items):
        item += "," if number + 1 < len(items) else ""
        if lines[-1] and len(lines[-1]) + 1 + len(item) > width:
            lines.append("")
        lines[-1] += f" {item}" if lines[-1] else item
    return lines


# ---------------------------------------------------------------------------------------- what is read


def opening(journey: "Journey", reading: "Reading", name: str, width: int) -> list[Text]:
    lines = [Text.assemble((visible(name), "bold"), f"  {reading.model}")]
    if reading.fresh:
        lines.append(Text("fresh weights: they have learned nothing, and read the text byte by byte", "dim"))
    own = reading.text if reading.fresh and reading.target is None else reading.target
    texts = {"encoder": (reading.text, reading.source), "decoder": (own, reading.tokens)}
    if reading.source is None:
        texts = dict.fromkeys(journey.at, (reading.text, reading.tokens))
    for stack, place in journey.at.items():
        text, tokens = texts[stack]
        lines.append(read_by(stack if len(journey.at) > 1 else "", text, tokens or [], place, reading))
        lines += numbered(tokens or [], place, reading, width)
    return [*lines, *(Text(note, "yellow") for note in reading.notes), Text()]


def read_by(stack: str, text: str | None, tokens: Sequence[int], place: int, reading: "Reading") -> Text:
    """The text, and which of its tokens is followed."""
    quoted = "" if text is None else f'"{visible(short(text))}" '
    which = "the last" if place + 1 == len(tokens) else f"number {place}"
    count = f"{len(tokens)} token{'s' if len(tokens) != 1 else ''}"
    return Text.assemble(
        (f"{stack} " if stack else "", "bold"),
        ("reading ", "dim"),
        quoted,
        (f"{'as ' if quoted else ''}{count}, following {which}: ", "dim"),
        (reading.spelled(tokens[place]), "bold cyan"),
    )


def numbered(tokens: Sequence[int], place: int, reading: "Reading", width: int) -> list[Text]:
    """The tokens of a short text by the numbers that --at takes."""
    if not 1 < len(tokens) <= NAMED:
        return []
    items = [
        Text.assemble((f"{number} ", "dim"), (reading.spelled(token), "bold cyan" if number == place else ""))
        for number, token in enumerate(tokens)
    ]
    return [Text.assemble("  ", line) for line in flow(items, width - 2).split("\n")]


def short(text: str) -> str:
    whole = text.replace("\n", "⏎")
    return whole if len(whole) <= TOLD else f"{whole[: TOLD // 2]} … {whole[-TOLD // 2 :]}"


# ---------------------------------------------------------------------------------------- the table


def table(journey: "Journey", reading: "Reading", hint: str, *, wide: bool) -> list[Text]:
    """A line a stage under the name of its block; under the stream, what it would say by then."""
    longest = max((stage.norm for stage in journey.stages if bright(stage)), default=0.0)
    rows = [(stage, cells(stage, longest, wide=wide)) for stage in journey.stages]
    longest_of = [max((len(row[column]) for _, row in rows), default=0) for column in range(len(HEADERS))]
    widths = [max(width, len(name)) if width else 0 for width, name in zip(longest_of, HEADERS, strict=True)]
    lines = [laid(HEADERS, widths, "bold")]
    before: str | None = None
    for stage, row in rows:
        here = block_of(stage.site)
        if here != before and here:
            lines += between(before, here, hint)
            lines.append(Text(here, "bold"))
        before = here or before
        lines.append(laid(row, widths, style_of(stage)))
        if stage.top:
            lines.append(says(stage, reading))
    return lines


def bright(stage: "Stage") -> bool:
    return on_stream(stage.site) or is_added(stage.site)


def style_of(stage: "Stage") -> str:
    return "bold cyan" if on_stream(stage.site) else "yellow" if is_added(stage.site) else ""


def block_of(site: str) -> str:
    """blocks.3 of blocks.3.attn.out; nothing for what is outside blocks."""
    parts = site.split(".")
    return ".".join(parts[: parts.index("blocks") + 2]) if "blocks" in parts else ""


def between(before: str | None, here: str, hint: str) -> list[Text]:
    """What was left out between two blocks of a stack."""
    (stack, layer), (other, last) = split(here), split(before) if before else ("", -1)
    missing = layer - last - 1
    if before is None or stack != other or missing < 1:
        return []
    return [Text(f"… {missing} block{'s' if missing > 1 else ''} between{hint}", "dim")]


def split(block: str) -> tuple[str, int]:
    stack, _, layer = block.rpartition(".")
    return stack, int(layer)


def cells(stage: "Stage", longest: float, *, wide: bool) -> Cells:
    block = block_of(stage.site)
    name = f"  {stage.site.removeprefix(f'{block}.')}" if block else stage.site
    shape = " ".join(f"{axis}={size}" for axis, size in zip(stage.axes.split(), stage.shape, strict=True))
    bar = "━" * max(1, round(BAR * stage.norm / longest)) if wide and bright(stage) and longest > 0 else ""
    adds = "" if stage.share is None else f"{stage.share:.0%}" if stage.share >= 0.1 else f"{stage.share:.1%}"
    cosine = "" if stage.cosine is None else f"{stage.cosine:+.2f}".replace("-", "−")
    return (
        name,
        stage.equation,
        shape,
        f"{stage.norm:.3f}" if stage.norm < 1e4 else f"{stage.norm:.3g}",
        adds,
        cosine,
        bar,
    )


def laid(row: Cells, widths: Sequence[int], style: str) -> Text:
    padded = [
        cell.rjust(width) if number in RIGHT else cell.ljust(width)
        for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        if width
    ]
    return Text("  ".join(padded).rstrip(), style)


def says(stage: "Stage", reading: "Reading") -> Text:
    line = Text.assemble(("    → " if block_of(stage.site) else "  → ", "dim"))
    for number, (token, share) in enumerate(stage.top):
        line.append("  " if number else "")
        line.append(spelled(token, reading, 16), "cyan")
        line.append(f" {percent(share)}", "dim")
    return line


def spelled(token: int, reading: "Reading", most: int) -> str:
    whole = reading.spelled(token)
    return whole if len(whole) <= most else f"{whole[: most - 1]}…"


def percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.1 else f"{share:.1%}"


# ---------------------------------------------------------------------------------------- the end


def ending(journey: "Journey", reading: "Reading") -> list[Text]:
    """The likeliest tokens in the end."""
    if not journey.top:
        return []
    of = "the next token" if "decoder" in reading.model.stacks else "this place"
    note = Text("  fresh weights: close to chance" if reading.fresh else "", "dim")
    lines = [Text(), Text.assemble((f"top five for {of}", "bold"), note)]
    named = [spelled(token, reading, 24) for token, _ in journey.top]
    wide = max(10, *map(len, named))
    for name, (_, share) in zip(named, journey.top, strict=True):
        bar = "━" * max(1, round(40 * share / journey.top[0][1])) if journey.top[0][1] > 0 else ""
        lines.append(Text.assemble(f"  {name:{wide}} {share:7.2%} ", (bar, "cyan")))
    return lines


def proof(journey: "Journey", reading: "Reading") -> list[Text]:
    if journey.sum_error is None:
        lines = ["embedding + Σ additions            not a plain sum here: norms or scales stand on the stream"]
    else:
        lines = [f"embedding + Σ additions = stream   largest difference {journey.sum_error:.1e}"]
    shown = sum(stage.site.endswith(".pattern") for stage in journey.stages)
    if journey.row_error is not None:
        blocks = [block for stack in reading.model.stacks.values() for block in stack.blocks]
        there = sum(1 if getattr(block, "cross", None) is None else 2 for block in blocks)
        which = "every pattern" if shown == there else "patterns shown"
        dtype = str(reading.model.dtype).removeprefix("torch.")
        rounded = "" if dtype in ("float32", "float64") else f", as {dtype} rounds"
        lines.append(f"{f'rows of {which} sum to 1':34} largest difference {journey.row_error:.1e}{rounded}")
    elif shown:
        lines.append("rows of patterns                   sum to less than 1: a sink takes a share of each")
    return [Text(f"  {line}") for line in lines]


def saved(path: Path) -> None:
    line = Text.assemble("\n", ("written ", "dim"), visible(str(path)), f"  {bytes_in_words(path.stat().st_size)}")
    Console(highlight=False).print(line, soft_wrap=True)
