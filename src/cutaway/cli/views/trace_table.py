"""Terminal table of `cutaway trace` and `cutaway demo`, with one line per site."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from cutaway.cli.views.terminal import escape_control_characters, wrap_items
from cutaway.lens.sites import AXIS_NAMES, is_resid_site, is_sublayer_output
from cutaway.size.units import format_si

if TYPE_CHECKING:
    from cutaway.cli.tokenized_input import TokenizedInput
    from cutaway.lens import Journey, Stage

TableRow = tuple[str, ...]
HEADERS = ("site", "equation", "shape", "norm", "adds", "cosine", "")
NUMERIC_COLUMNS = {3, 4, 5}
"""Indices of the right-aligned columns."""
BAR_WIDTH, WIDE_TERMINAL = 10, 96
"""Width of the longest bar, and minimum terminal width at which bars are shown."""
MAX_TEXT_LENGTH, MAX_NUMBERED_TOKENS = 160, 24
"""Maximum number of characters of a text, and maximum number of tokens that are listed with their index."""


def journey_to_dict(journey: "Journey", tokenized: "TokenizedInput") -> dict[str, object]:
    """Convert the trace of a token (its activations, predictions and consistency checks) to JSON values."""

    def to_dicts(token_ids: Iterable[int]) -> list[dict[str, object]]:
        return [{"token": token, "text": tokenized.token_str(token)} for token in token_ids]

    def with_probability(top: Iterable[tuple[int, float]]) -> list[dict[str, object]]:
        return [entry | {"probability": probability} for token, probability in top for entry in to_dicts([token])]

    return {
        "model": str(tokenized.model),
        "is_untrained": tokenized.is_untrained,
        "text": tokenized.text,
        "target": tokenized.target,
        "tokens": to_dicts(tokenized.tokens),
        "source_tokens": None if tokenized.source is None else to_dicts(tokenized.source),
        "positions": journey.positions,
        "notes": tokenized.notes,
        "stages": [asdict(stage) | {"top_tokens": with_probability(stage.top_tokens)} for stage in journey.stages],
        "top_tokens": with_probability(journey.top_tokens),
        "residual_sum_error": journey.residual_sum_error,
        "pattern_row_error": journey.pattern_row_error,
    }


def render_journey(journey: "Journey", tokenized: "TokenizedInput", name: str, *, hint: str = "") -> None:
    """Print the trace of a token: the input, a table of sites, the predictions and the consistency checks.

    `name` is the model's name. `hint` names the option that shows all blocks.
    """
    console = Console(highlight=False)
    lines = _header_lines(journey, tokenized, name, console.width)
    lines += _table_lines(journey, tokenized, hint, wide=console.width >= WIDE_TERMINAL)
    lines += [Text(), *_legend_lines(journey, console.width), *_prediction_lines(journey, tokenized)]
    lines += [Text(), Text("consistency", "bold"), *_consistency_lines(journey, tokenized)]
    for line in lines:
        console.print(line, soft_wrap=True)


def _legend_lines(journey: "Journey", width: int) -> list[Text]:
    """Format the legend of the table: the axis letters, and the columns that are not empty."""
    letters = {axis for stage in journey.stages for axis in stage.axes.split()}
    items = [f"{axis} {description}" for axis, description in AXIS_NAMES.items() if axis in letters]
    items += ["norm: L2 norm of the token's vector"]
    if any(stage.relative_norm is not None for stage in journey.stages):
        items += ["adds: norm relative to the residual stream", "cosine: with the residual stream"]
    if any(stage.top_tokens for stage in journey.stages):
        items += ["→ logit lens: most likely tokens if decoded here"]
    comma_items = [Text(f"{item},") for item in items[:-1]] + [Text(items[-1])]
    return [Text(line.plain, "dim") for line in wrap_items(comma_items, min(width, 100), " ").split("\n")]


# ---------------------------------------------------------------------------------------- input


def _header_lines(journey: "Journey", tokenized: "TokenizedInput", name: str, width: int) -> list[Text]:
    lines = [Text.assemble((escape_control_characters(name), "bold"), f"  {tokenized.model}")]
    if tokenized.is_untrained:
        lines.append(Text("random weights; the text is tokenized to bytes", "dim"))
    decoder_text = tokenized.text if tokenized.is_untrained and tokenized.target is None else tokenized.target
    texts = {"encoder": (tokenized.text, tokenized.source), "decoder": (decoder_text, tokenized.tokens)}
    if tokenized.source is None:
        texts = dict.fromkeys(journey.positions, (tokenized.text, tokenized.tokens))
    for stack, position in journey.positions.items():
        text, tokens = texts[stack]
        lines.append(_input_line(stack if len(journey.positions) > 1 else "", text, tokens or [], position, tokenized))
        lines += _numbered_token_lines(tokens or [], position, tokenized, width)
    return [*lines, *(Text(note, "yellow") for note in tokenized.notes), Text()]


def _input_line(stack: str, text: str | None, tokens: list[int], position: int, tokenized: "TokenizedInput") -> Text:
    """Format one line with the input text of a stack, its number of tokens and the traced token."""
    quoted = "" if text is None else f'"{escape_control_characters(_truncate_middle(text))}" '
    description = "the last" if position + 1 == len(tokens) else f"index {position}"
    count = f"{len(tokens)} token{'s' if len(tokens) != 1 else ''}"
    return Text.assemble(
        (f"{stack} " if stack else "", "bold"),
        ("input ", "dim"),
        quoted,
        (f"{'as ' if quoted else ''}{count}, tracing {description}: ", "dim"),
        (tokenized.token_str(tokens[position]), "bold cyan"),
    )


def _numbered_token_lines(tokens: Sequence[int], position: int, tokenized: "TokenizedInput", width: int) -> list[Text]:
    """List the tokens of a short text with their indices, which --position takes."""
    if not 1 < len(tokens) <= MAX_NUMBERED_TOKENS:
        return []
    items = [
        Text.assemble((f"{index} ", "dim"), (tokenized.token_str(token), "bold cyan" if index == position else ""))
        for index, token in enumerate(tokens)
    ]
    return [Text.assemble("  ", line) for line in wrap_items(items, width - 2).split("\n")]


def _truncate_middle(text: str) -> str:
    line = text.replace("\n", "⏎")
    return line if len(line) <= MAX_TEXT_LENGTH else f"{line[: MAX_TEXT_LENGTH // 2]} … {line[-MAX_TEXT_LENGTH // 2 :]}"


# ---------------------------------------------------------------------------------------- table


def _table_lines(journey: "Journey", tokenized: "TokenizedInput", hint: str, *, wide: bool) -> list[Text]:
    """Format one line per site, grouped by block, with logit lens predictions below residual-stream sites."""
    max_norm = max((stage.norm for stage in journey.stages if _is_residual_or_output(stage)), default=0.0)
    rows = [(stage, _stage_cells(stage, max_norm, wide=wide)) for stage in journey.stages]
    cell_widths = [max((len(row[column]) for _, row in rows), default=0) for column in range(len(HEADERS))]
    widths = [max(width, len(name)) if width else 0 for width, name in zip(cell_widths, HEADERS, strict=True)]
    lines = [_format_row(HEADERS, widths, "bold")]
    previous_block: str | None = None
    for stage, row in rows:
        block = _block_name(stage.site)
        if block != previous_block and block:
            lines += _skipped_blocks_line(previous_block, block, hint)
            lines.append(Text(block, "bold"))
        previous_block = block or previous_block
        lines.append(_format_row(row, widths, _stage_style(stage)))
        if stage.top_tokens:
            lines.append(_logit_lens_line(stage, tokenized))
    return lines


def _is_residual_or_output(stage: "Stage") -> bool:
    return is_resid_site(stage.site) or is_sublayer_output(stage.site)


def _stage_style(stage: "Stage") -> str:
    return "bold cyan" if is_resid_site(stage.site) else "yellow" if is_sublayer_output(stage.site) else ""


def _block_name(site: str) -> str:
    """Return the block of a site (blocks.3 for blocks.3.attn.out), or an empty string for sites outside blocks."""
    parts = site.split(".")
    return ".".join(parts[: parts.index("blocks") + 2]) if "blocks" in parts else ""


def _skipped_blocks_line(previous_block: str | None, block: str, hint: str) -> list[Text]:
    """Format how many blocks of a stack are not shown between two blocks, if any."""
    stack, _, layer = block.rpartition(".")
    previous_stack, _, previous_layer = (previous_block or "").rpartition(".")
    num_skipped = int(layer) - int(previous_layer) - 1 if stack == previous_stack else 0
    if num_skipped < 1:
        return []
    return [Text(f"… {num_skipped} block{'s' if num_skipped > 1 else ''} between{hint}", "dim")]


def _stage_cells(stage: "Stage", max_norm: float, *, wide: bool) -> TableRow:
    block = _block_name(stage.site)
    name = f"  {stage.site.removeprefix(f'{block}.')}" if block else stage.site
    shape = " ".join(f"{axis}={size}" for axis, size in zip(stage.axes.split(), stage.shape, strict=True))
    has_bar = wide and _is_residual_or_output(stage) and max_norm > 0
    bar = "━" * max(1, round(BAR_WIDTH * stage.norm / max_norm)) if has_bar else ""
    norm = f"{stage.norm:.3f}" if stage.norm < 1e4 else f"{stage.norm:.3g}"
    adds = "" if stage.relative_norm is None else _format_percent(stage.relative_norm)
    cosine = "" if stage.cosine is None else f"{stage.cosine:+.2f}".replace("-", "−")
    return (name, stage.equation, shape, norm, adds, cosine, bar)


def _format_row(row: TableRow, widths: Sequence[int], style: str) -> Text:
    padded = [
        cell.rjust(width) if column in NUMERIC_COLUMNS else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        if width
    ]
    return Text("  ".join(padded).rstrip(), style)


def _logit_lens_line(stage: "Stage", tokenized: "TokenizedInput") -> Text:
    line = Text.assemble(("    → " if _block_name(stage.site) else "  → ", "dim"))
    for index, (token, probability) in enumerate(stage.top_tokens):
        line.append("  " if index else "")
        line.append(_truncate_token(token, tokenized, 16), "cyan")
        line.append(f" {_format_percent(probability)}", "dim")
    return line


def _truncate_token(token: int, tokenized: "TokenizedInput", max_length: int) -> str:
    text = tokenized.token_str(token)
    return text if len(text) <= max_length else f"{text[: max_length - 1]}…"


def _format_percent(fraction: float) -> str:
    return f"{fraction:.0%}" if fraction >= 0.1 else f"{fraction:.1%}"


# ---------------------------------------------------------------------------------------- predictions and consistency


def _prediction_lines(journey: "Journey", tokenized: "TokenizedInput") -> list[Text]:
    """Format the five most likely tokens with their probabilities. Return no lines if there are no predictions."""
    if not journey.top_tokens:
        return []
    target = "the next token" if "decoder" in tokenized.model.stacks else "this position"
    note = Text("  random weights: close to chance" if tokenized.is_untrained else "", "dim")
    lines = [Text(), Text.assemble((f"top 5 for {target}", "bold"), note)]
    token_texts = [_truncate_token(token, tokenized, 24) for token, _ in journey.top_tokens]
    width = max(10, *map(len, token_texts))
    for token_text, (_, probability) in zip(token_texts, journey.top_tokens, strict=True):
        bar = "━" * max(1, round(40 * probability / journey.top_tokens[0][1])) if journey.top_tokens[0][1] > 0 else ""
        lines.append(Text.assemble(f"  {token_text:{width}} {probability:7.2%} ", (bar, "cyan")))
    return lines


def _consistency_lines(journey: "Journey", tokenized: "TokenizedInput") -> list[Text]:
    error = journey.residual_sum_error
    not_a_sum = "not a sum here: norms or scales act on the residual stream"
    lines = [f"embedding + Σ outputs = residual   {not_a_sum if error is None else f'max difference {error:.1e}'}"]
    num_patterns = sum(stage.site.endswith(".pattern") for stage in journey.stages)
    if journey.pattern_row_error is not None:
        blocks = [block for stack in tokenized.model.stacks.values() for block in stack.blocks]
        num_attentions = sum(1 if getattr(block, "cross", None) is None else 2 for block in blocks)
        description = "all patterns" if num_patterns == num_attentions else "patterns shown"
        dtype = str(tokenized.model.dtype).removeprefix("torch.")
        dtype_note = "" if dtype in ("float32", "float64") else f", rounding of {dtype}"
        max_difference = f"max difference {journey.pattern_row_error:.1e}{dtype_note}"
        lines.append(f"{f'rows of {description} sum to 1':34} {max_difference}")
    elif num_patterns:
        lines.append("rows of patterns                   sum to less than 1: attention sinks take the rest")
    return [Text(f"  {line}") for line in lines]


def print_saved_path(path: Path) -> None:
    size = format_si(path.stat().st_size, "B", 3)
    line = Text.assemble("\n", ("saved ", "dim"), escape_control_characters(str(path)), f"  {size}")
    Console(highlight=False).print(line, soft_wrap=True)
