"""What `cutaway trace` and `cutaway demo` show: a token's journey, a line a stage."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from cutaway.cli.views.terminal import escape_control_characters, wrap_items
from cutaway.lens.display import format_bytes
from cutaway.lens.sites import is_resid_site, is_sublayer_output

if TYPE_CHECKING:
    from cutaway.cli.tokenized_input import TokenizedInput
    from cutaway.lens import Journey, Stage

TableRow = tuple[str, ...]
HEADERS = ("stage", "what it is", "shape", "norm", "adds", "cosine", "")
NUMERIC_COLUMNS = {3, 4, 5}
"""Columns of numbers."""
BAR_WIDTH, WIDE_TERMINAL = 10, 96
"""Signs of the longest bar, and the width from which there is room for them."""
MAX_TEXT_LENGTH, MAX_NUMBERED_TOKENS = 160, 24
"""Letters of a text, and tokens by number, that are shown of a longer one."""
AXIS_NAMES = {
    "T": "tokens",
    "S": "key positions",
    "H": "heads",
    "G": "KV heads",
    "D": "head dim",
    "E": "value head dim",
    "d": "d_model",
    "h": "FFN hidden size",
    "K": "top-k experts",
    "V": "vocabulary",
}


def journey_to_dict(journey: "Journey", tokenized: "TokenizedInput") -> dict[str, Any]:
    """All of it for machines."""

    def likely(top: Iterable[tuple[int, float]]) -> list[dict[str, Any]]:
        return [{"token": token, "text": tokenized.token_str(token), "probability": share} for token, share in top]

    def tokens(ids: Sequence[int] | None) -> list[dict[str, Any]] | None:
        return None if ids is None else [{"token": each, "text": tokenized.token_str(each)} for each in ids]

    return {
        "model": str(tokenized.model),
        "is_untrained": tokenized.is_untrained,
        "text": tokenized.text,
        "target": tokenized.target,
        "tokens": tokens(tokenized.tokens),
        "source_tokens": tokens(tokenized.source),
        "positions": journey.positions,
        "notes": tokenized.notes,
        "stages": [asdict(stage) | {"top_tokens": likely(stage.top_tokens)} for stage in journey.stages],
        "top_tokens": likely(journey.top_tokens),
        "residual_sum_error": journey.residual_sum_error,
        "pattern_row_error": journey.pattern_row_error,
    }


def render_journey(journey: "Journey", tokenized: "TokenizedInput", name: str, *, hint: str = "") -> None:
    """The table, what comes out in the end, and the proof. `hint`: how to see the blocks that are left out."""
    console = Console(highlight=False)
    _print_lines(console, *_header_lines(journey, tokenized, name, console.width))
    _print_lines(
        console,
        *_table_lines(journey, tokenized, hint, wide=console.width >= WIDE_TERMINAL),
        Text(),
        *_legend_lines(journey, console.width),
    )
    _print_lines(
        console,
        *_prediction_lines(journey, tokenized),
        Text(),
        Text("proof", "bold"),
        *_consistency_lines(journey, tokenized),
    )


def _legend_lines(journey: "Journey", width: int) -> list[Text]:
    """What the letters, and the columns that have something in them, stand for."""
    letters = {axis for stage in journey.stages for axis in stage.axes.split()}
    items = [f"{axis} {what}" for axis, what in AXIS_NAMES.items() if axis in letters]
    items += ["norm: length of the token's vector"]
    if any(stage.relative_norm is not None for stage in journey.stages):
        items += ["adds: its length by the stream's", "cosine: +1 along the stream, −1 against it"]
    if any(stage.top_tokens for stage in journey.stages):
        items += ["→ likeliest tokens if decoded here"]
    return [Text(line, "dim") for line in _wrap_comma_list(items, min(width, 100))]


def _print_lines(console: Console, *lines: Text) -> None:
    for line in lines:
        console.print(line, soft_wrap=True)


def _wrap_comma_list(items: Sequence[str], width: int) -> list[str]:
    """Items between commas, broken between them and never inside."""
    lines = [""]
    for number, item in enumerate(items):
        item += "," if number + 1 < len(items) else ""
        if lines[-1] and len(lines[-1]) + 1 + len(item) > width:
            lines.append("")
        lines[-1] += f" {item}" if lines[-1] else item
    return lines


# ---------------------------------------------------------------------------------------- what is read


def _header_lines(journey: "Journey", tokenized: "TokenizedInput", name: str, width: int) -> list[Text]:
    lines = [Text.assemble((escape_control_characters(name), "bold"), f"  {tokenized.model}")]
    if tokenized.is_untrained:
        lines.append(Text("fresh weights: they have learned nothing, and read the text byte by byte", "dim"))
    own = tokenized.text if tokenized.is_untrained and tokenized.target is None else tokenized.target
    texts = {"encoder": (tokenized.text, tokenized.source), "decoder": (own, tokenized.tokens)}
    if tokenized.source is None:
        texts = dict.fromkeys(journey.positions, (tokenized.text, tokenized.tokens))
    for stack, place in journey.positions.items():
        text, tokens = texts[stack]
        lines.append(_input_line(stack if len(journey.positions) > 1 else "", text, tokens or [], place, tokenized))
        lines += _numbered_token_lines(tokens or [], place, tokenized, width)
    return [*lines, *(Text(note, "yellow") for note in tokenized.notes), Text()]


def _input_line(
    stack: str, text: str | None, tokens: Sequence[int], position: int, tokenized: "TokenizedInput"
) -> Text:
    """The text, and which of its tokens is followed."""
    quoted = "" if text is None else f'"{escape_control_characters(_truncate_middle(text))}" '
    which = "the last" if position + 1 == len(tokens) else f"number {position}"
    count = f"{len(tokens)} token{'s' if len(tokens) != 1 else ''}"
    return Text.assemble(
        (f"{stack} " if stack else "", "bold"),
        ("reading ", "dim"),
        quoted,
        (f"{'as ' if quoted else ''}{count}, following {which}: ", "dim"),
        (tokenized.token_str(tokens[position]), "bold cyan"),
    )


def _numbered_token_lines(tokens: Sequence[int], position: int, tokenized: "TokenizedInput", width: int) -> list[Text]:
    """The tokens of a short text by the numbers that --position takes."""
    if not 1 < len(tokens) <= MAX_NUMBERED_TOKENS:
        return []
    items = [
        Text.assemble((f"{number} ", "dim"), (tokenized.token_str(token), "bold cyan" if number == position else ""))
        for number, token in enumerate(tokens)
    ]
    return [Text.assemble("  ", line) for line in wrap_items(items, width - 2).split("\n")]


def _truncate_middle(text: str) -> str:
    whole = text.replace("\n", "⏎")
    return (
        whole
        if len(whole) <= MAX_TEXT_LENGTH
        else f"{whole[: MAX_TEXT_LENGTH // 2]} … {whole[-MAX_TEXT_LENGTH // 2 :]}"
    )


# ---------------------------------------------------------------------------------------- the table


def _table_lines(journey: "Journey", tokenized: "TokenizedInput", hint: str, *, wide: bool) -> list[Text]:
    """A line a stage under the name of its block; under the stream, what it would say by then."""
    longest = max((stage.norm for stage in journey.stages if _is_residual_or_output(stage)), default=0.0)
    rows = [(stage, _stage_cells(stage, longest, wide=wide)) for stage in journey.stages]
    longest_of = [max((len(row[column]) for _, row in rows), default=0) for column in range(len(HEADERS))]
    widths = [max(width, len(name)) if width else 0 for width, name in zip(longest_of, HEADERS, strict=True)]
    lines = [_format_row(HEADERS, widths, "bold")]
    before: str | None = None
    for stage, row in rows:
        here = _block_name(stage.site)
        if here != before and here:
            lines += _skipped_blocks_line(before, here, hint)
            lines.append(Text(here, "bold"))
        before = here or before
        lines.append(_format_row(row, widths, _stage_style(stage)))
        if stage.top_tokens:
            lines.append(_logit_lens_line(stage, tokenized))
    return lines


def _is_residual_or_output(stage: "Stage") -> bool:
    return is_resid_site(stage.site) or is_sublayer_output(stage.site)


def _stage_style(stage: "Stage") -> str:
    return "bold cyan" if is_resid_site(stage.site) else "yellow" if is_sublayer_output(stage.site) else ""


def _block_name(site: str) -> str:
    """blocks.3 of blocks.3.attn.out; nothing for what is outside blocks."""
    parts = site.split(".")
    return ".".join(parts[: parts.index("blocks") + 2]) if "blocks" in parts else ""


def _skipped_blocks_line(before: str | None, here: str, hint: str) -> list[Text]:
    """What was left out between two blocks of a stack."""
    (stack, layer), (other, last) = _split_block_name(here), _split_block_name(before) if before else ("", -1)
    missing = layer - last - 1
    if before is None or stack != other or missing < 1:
        return []
    return [Text(f"… {missing} block{'s' if missing > 1 else ''} between{hint}", "dim")]


def _split_block_name(block: str) -> tuple[str, int]:
    stack, _, layer = block.rpartition(".")
    return stack, int(layer)


def _stage_cells(stage: "Stage", longest: float, *, wide: bool) -> TableRow:
    block = _block_name(stage.site)
    name = f"  {stage.site.removeprefix(f'{block}.')}" if block else stage.site
    shape = " ".join(f"{axis}={size}" for axis, size in zip(stage.axes.split(), stage.shape, strict=True))
    bar = (
        "━" * max(1, round(BAR_WIDTH * stage.norm / longest))
        if wide and _is_residual_or_output(stage) and longest > 0
        else ""
    )
    adds = (
        ""
        if stage.relative_norm is None
        else f"{stage.relative_norm:.0%}"
        if stage.relative_norm >= 0.1
        else f"{stage.relative_norm:.1%}"
    )
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


def _format_row(row: TableRow, widths: Sequence[int], style: str) -> Text:
    padded = [
        cell.rjust(width) if number in NUMERIC_COLUMNS else cell.ljust(width)
        for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        if width
    ]
    return Text("  ".join(padded).rstrip(), style)


def _logit_lens_line(stage: "Stage", tokenized: "TokenizedInput") -> Text:
    line = Text.assemble(("    → " if _block_name(stage.site) else "  → ", "dim"))
    for number, (token, share) in enumerate(stage.top_tokens):
        line.append("  " if number else "")
        line.append(_truncate_token(token, tokenized, 16), "cyan")
        line.append(f" {_format_percent(share)}", "dim")
    return line


def _truncate_token(token: int, tokenized: "TokenizedInput", max_length: int) -> str:
    whole = tokenized.token_str(token)
    return whole if len(whole) <= max_length else f"{whole[: max_length - 1]}…"


def _format_percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.1 else f"{share:.1%}"


# ---------------------------------------------------------------------------------------- the end


def _prediction_lines(journey: "Journey", tokenized: "TokenizedInput") -> list[Text]:
    """The likeliest tokens in the end."""
    if not journey.top_tokens:
        return []
    of = "the next token" if "decoder" in tokenized.model.stacks else "this place"
    note = Text("  fresh weights: close to chance" if tokenized.is_untrained else "", "dim")
    lines = [Text(), Text.assemble((f"top five for {of}", "bold"), note)]
    named = [_truncate_token(token, tokenized, 24) for token, _ in journey.top_tokens]
    wide = max(10, *map(len, named))
    for name, (_, share) in zip(named, journey.top_tokens, strict=True):
        bar = "━" * max(1, round(40 * share / journey.top_tokens[0][1])) if journey.top_tokens[0][1] > 0 else ""
        lines.append(Text.assemble(f"  {name:{wide}} {share:7.2%} ", (bar, "cyan")))
    return lines


def _consistency_lines(journey: "Journey", tokenized: "TokenizedInput") -> list[Text]:
    if journey.residual_sum_error is None:
        lines = ["embedding + Σ additions            not a plain sum here: norms or scales stand on the stream"]
    else:
        lines = [f"embedding + Σ additions = stream   largest difference {journey.residual_sum_error:.1e}"]
    shown = sum(stage.site.endswith(".pattern") for stage in journey.stages)
    if journey.pattern_row_error is not None:
        blocks = [block for stack in tokenized.model.stacks.values() for block in stack.blocks]
        there = sum(1 if getattr(block, "cross", None) is None else 2 for block in blocks)
        which = "every pattern" if shown == there else "patterns shown"
        dtype = str(tokenized.model.dtype).removeprefix("torch.")
        rounded = "" if dtype in ("float32", "float64") else f", as {dtype} rounds"
        lines.append(f"{f'rows of {which} sum to 1':34} largest difference {journey.pattern_row_error:.1e}{rounded}")
    elif shown:
        lines.append("rows of patterns                   sum to less than 1: a sink takes a share of each")
    return [Text(f"  {line}") for line in lines]


def print_saved_path(path: Path) -> None:
    line = Text.assemble(
        "\n", ("written ", "dim"), escape_control_characters(str(path)), f"  {format_bytes(path.stat().st_size)}"
    )
    Console(highlight=False).print(line, soft_wrap=True)
