"""What `cutaway generate` shows: answers as they come, fillings of masks, and how fast it went."""

import json
import math
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from cutaway.cli.flow import Flow, begin, told
from cutaway.cli.prompts import Given
from cutaway.cli.screen import Screen, visible
from cutaway.errors import InputError
from cutaway.generate.answer import Generation, Piece
from cutaway.generate.search import own_beams
from cutaway.generate.settings import Settings
from cutaway.generate.texts import generate, opened

if TYPE_CHECKING:
    from rich.table import Table

    from cutaway.families.checkpoint import Checkpoint

LONGEST = 1_000_000
"""Letters of a line; no text that an encoder reads has as many."""


class Show:
    """What the user wants to see, and where it is written."""

    def __init__(self, *, echo: bool | None = None, stats: bool | None = None, as_json: bool = False) -> None:
        self.as_json = as_json
        self.screen = Screen(sys.stdout)
        err = sys.stderr
        self.echo = self.screen.is_terminal if echo is None else echo
        self.stats = (err is not None and err.isatty() and not as_json) if stats is None else stats
        self.aside = Screen(err) if err is not None else None
        self.asked_to_echo = echo

    def json(self, data: Any) -> None:
        self.screen.out.write(json.dumps(data, allow_nan=False) + "\n")
        self.screen.out.flush()

    def beside(self, text: str) -> None:
        """A line that is not part of the answer."""
        if self.aside is not None:
            self.aside.dim(text)
            self.aside.end_line()


def answer(
    checkpoint: "Checkpoint",
    given: Sequence[Given],
    asked: Settings,
    search: dict[str, Any],
    how: dict[str, Any],
    show: Show,
    *,
    messages: bool,
    system: str | None,
) -> None:
    """Answers to all prompts, one after another in their order, while the engine works on all of them."""
    prompts = [conversation(each, system, checkpoint) if messages else each for each in given]
    several = len(given) * asked.n > 1
    continues = not messages and "encoder" not in checkpoint.model.stacks
    model, _, start = opened(checkpoint)
    shown = [written(each, checkpoint) for each in given for _ in range(asked.n)]
    if search or own_beams(model, start, asked):
        found, took = searched(checkpoint, prompts, asked, search, how, show)
        for number, result in enumerate(found):
            text = said([Piece(result.text or "", result.tokens)], checkpoint)
            put(show, shown[number], text, continues=continues, several=several, first=number == 0)
            tell(show, given[number // asked.n], result, result_rate(found, took), checkpoint)
        if show.stats:
            count = sum(len(result.tokens) for result in found)
            show.beside(f"{count:,} tokens, {result_rate(found, took) or 0:,.3g} tokens/s, searched with beams")
        return
    flow, tickets = begin(checkpoint, prompts, asked, **how)
    try:
        for number, ticket in enumerate(tickets):
            text = said(flow.pieces(ticket), checkpoint)
            put(show, shown[number], text, continues=continues, several=several, first=number == 0)
            tell(show, given[number // asked.n], ticket.result(), flow.rate(ticket), checkpoint)
    except KeyboardInterrupt:
        show.screen.end_line()
        raise
    if show.stats:
        show.beside(summary(flow))


def conversation(given: Given, system: str | None, checkpoint: "Checkpoint") -> list[dict[str, str]]:
    """A message as the beginning of a chat."""
    check_template(checkpoint)
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": str(given)}]


def check_template(checkpoint: "Checkpoint") -> None:
    tokenizer = checkpoint.tokenizer
    if tokenizer is None or tokenizer.chat_template is None:
        missing = "tokenizer" if tokenizer is None else "chat template"
        raise InputError(
            f"this checkpoint has no {missing}, so it knows no chats; leave --chat or --message out to continue plain"
            " text, or load the version that was trained to answer"
        )


def written(given: Given, checkpoint: "Checkpoint") -> str:
    """A prompt as it is shown."""
    if isinstance(given, str):
        return given
    tokenizer = checkpoint.tokenizer
    return ",".join(map(str, given)) if tokenizer is None else tokenizer.decode(given)


def said(pieces: Iterable[Piece], checkpoint: "Checkpoint") -> Iterable[str]:
    """An answer's text, bit by bit; its ids, where there is no tokenizer."""
    before, reads = "", checkpoint.tokenizer is not None
    for piece in pieces:
        if reads:
            yield piece.text
        for token in () if reads else piece.tokens:
            yield f"{before}{token}"
            before = ","


def put(show: Show, prompt: str, pieces: Iterable[str], *, continues: bool, several: bool, first: bool) -> None:
    """Write one answer while it comes. A text that is continued stands before it, a question above it."""
    if show.as_json:
        for _ in pieces:
            """The whole is told at its end."""
        return
    screen = show.screen
    if show.echo and (continues or several or show.asked_to_echo):
        if several and not first:
            screen.write("\n")
        screen.dim(prompt if continues else f"{prompt}\n")
    for piece in pieces:
        screen.write(piece)
    screen.end_line()


def tell(show: Show, given: Given, result: Generation, rate: float | None, checkpoint: "Checkpoint") -> None:
    """What there is to say about a finished answer."""
    if show.as_json:
        show.json(told(given, result, rate))
    elif result.logprobs is not None:
        show_logprobs(result, checkpoint)


def show_logprobs(result: Generation, checkpoint: "Checkpoint") -> None:
    """Each token with its probability, and what might have stood in its place."""
    from rich.text import Text

    from cutaway.cli.size_view import grid

    tokenizer = checkpoint.tokenizer

    def named(token: int) -> str:
        return visible(repr(tokenizer.decode([token], skip_special=False))) if tokenizer else str(token)

    table = grid("lrl", ["token", "probability", "likeliest" if result.top_logprobs else ""])
    for place, (token, logprob) in enumerate(zip(result.tokens, result.logprobs or [], strict=False)):
        others = result.top_logprobs[place] if result.top_logprobs else {}
        listed = "  ".join(f"{named(other)} {math.exp(value):.1%}" for other, value in others.items())
        table.add_row(Text(named(token)), f"{math.exp(logprob):.1%}", Text(listed))
    lay_out(table)


def lay_out(table: "Table") -> None:
    """Each row on one line, which the terminal breaks if it must: cut to its width, the first columns would go."""
    from cutaway.cli.size_view import console, under

    whole = console()
    whole.width = LONGEST
    whole.print(under(table), soft_wrap=True)


# ---------------------------------------------------------------------------------------- beams


def searched(
    checkpoint: "Checkpoint", prompts: Sequence[Any], asked: Settings, search: dict[str, Any], how: Any, show: Show
) -> tuple[list[Generation], float]:
    """Beams come all at the end; on a terminal something turns until then."""
    from rich.console import Console

    quick = next((name for name in ("bits", "compiled", "draft") if name in how), None)
    if quick is not None:
        raise InputError(f"beams are searched with the model as it is, so {quick} has no part in it; leave it out")
    began = time.perf_counter()
    settings = {name: getattr(asked, name) for name in Settings.__dataclass_fields__}
    about = {("cache" if name == "kind" else name): value for name, value in how.items()}
    console = Console(stderr=True)
    waiting = console.status("searching") if console.is_terminal and not show.as_json else nullcontext()
    with waiting:
        found = generate(checkpoint, prompts, **search, **about, **settings)
    return found, time.perf_counter() - began


def result_rate(found: Sequence[Generation], took: float) -> float | None:
    return sum(len(each.tokens) for each in found) / took if took > 0 else None


# ---------------------------------------------------------------------------------------- masks


def fill(checkpoint: "Checkpoint", given: Sequence[Given], others: Sequence[str], top: int, show: Show) -> None:
    """What an encoder would put in the place of each mask."""
    from cutaway.generate.fill_mask import fill_mask

    if others:
        option = f"--{others[0].replace('_', '-')}".replace("compiled", "compile")
        raise InputError(f"this model is an encoder and fills masks, for which {option} has no meaning; leave it out")
    texts = [each for each in given if isinstance(each, str)]
    if checkpoint.tokenizer is None or len(texts) < len(given) or not texts:
        raise InputError(
            "this model is an encoder: give it texts with a mask to fill, and a tokenizer beside its weights"
        )
    found = fill_mask(checkpoint.model, checkpoint.tokenizer, texts, top=top)
    for text, masks in zip(texts, found, strict=True):
        if show.as_json:
            show.json({"prompt": text, "masks": [[each._asdict() for each in mask] for mask in masks]})
        else:
            show_fillings(text, masks, show)


def show_fillings(text: str, masks: Sequence[Sequence[Any]], show: Show) -> None:
    from rich.text import Text

    from cutaway.cli.size_view import grid

    if show.echo:
        show.screen.dim(f"{text}\n")
    for mask in masks:
        table = grid("rll")
        for each in mask:
            share = f"{each.probability:.1%}"
            table.add_row(share, Text(visible(each.token), "bold"), Text(visible(each.text)))
        lay_out(table)


# ---------------------------------------------------------------------------------------- how fast


def summary(flow: Flow) -> str:
    """One line: how much, how fast, and how near to what the memory allows."""
    parts = [f"{flow.tokens:,} tokens"]
    cut = [ticket for ticket in flow.tickets if ticket.answer.reason == "length"]
    if cut:
        full = all(ticket.answer.limit < (ticket.settings.max_new_tokens or math.inf) for ticket in cut)
        parts[0] += " (cut; the context is full)" if full else " (cut; --max gives more)"
    if flow.decoding > 0 and flow.steps > 0:
        parts.append(f"{flow.decoded / flow.decoding:,.3g} tokens/s")
    if flow.first:
        parts.append(f"{flow.wait * 1e3:,.0f} ms to the first")
    reached = share(flow)
    if reached is not None:
        parts.append(f"{reached:.0%} of memory bandwidth")
    return ", ".join(parts)


def share(flow: Flow) -> float | None:
    """The time that reading weights and caches would take at the speed of a bare copy, of the time that it took."""
    from cutaway.bench.decode import NAMES, copy_bandwidth, costs

    plan = flow.engine.plan
    dtype = NAMES.get(plan.model.dtype)
    if dtype is None or flow.steps < 2 or flow.decoding <= 0:
        return None
    bandwidth = copy_bandwidth(plan.model.device)
    if bandwidth is None:
        return None
    batch = max(1, round(flow.tokens / (flow.steps + 1)))
    moved = costs(plan.model.config, dtype, plan.bits, batch, flow.context).decode_work(batch).bytes
    return flow.steps * moved / bandwidth / flow.decoding
