"""A conversation in the terminal: one engine keeps what was said, so that only what is new is read."""

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cutaway.cli.answers import Show, check_template, said, summary, tell
from cutaway.cli.flow import Flow
from cutaway.cli.prompts import MOST_BYTES, decoded
from cutaway.errors import CutawayError
from cutaway.generate.engine import Engine
from cutaway.generate.settings import Settings
from cutaway.generate.texts import make_plan, opened, own_limits, seeds
from cutaway.generate.ticket import Ticket

if TYPE_CHECKING:
    from cutaway.families.checkpoint import Checkpoint

UNASKED = 1024
"""Tokens of an answer, unless told."""
ROOM = 8192
"""Tokens of a conversation, unless told, where the model takes more."""
HELP = "Ctrl-C stops an answer, /reset begins anew, /quit or Ctrl-D ends."


def converse(
    checkpoint: "Checkpoint",
    first: Sequence[str],
    system: str | None,
    asked: Settings,
    how: dict[str, Any],
    show: Show,
) -> None:
    """Messages and answers in turn, until the messages end."""
    check_template(checkpoint)
    talk = Conversation(checkpoint, system, asked, how)
    interactive = sys.stdin is not None and sys.stdin.isatty() and not show.as_json
    if interactive:
        show.beside(HELP)
    for message in spoken(first, show, interactive):
        if message == "/reset":
            talk.reset()
            continue
        try:
            turn(talk, message, show)
        except CutawayError as error:  # the conversation so far is still there
            if not interactive:
                raise
            show.beside(f"{error} (/reset begins anew)")


class Conversation:
    """The messages so far, and an engine whose pages hold what was read of them."""

    def __init__(self, checkpoint: "Checkpoint", system: str | None, asked: Settings, how: dict[str, Any]) -> None:
        model, tokenizer, self.start = opened(checkpoint)
        assert tokenizer is not None
        asked.check(model.config.vocab_size)
        self.checkpoint, self.tokenizer, self.asked = checkpoint, tokenizer, asked
        kind = "paged" if how["kind"] == "auto" else how["kind"]
        context = how["context"] or min(model.config.context or ROOM, ROOM)
        self.engine = Engine(
            make_plan(model, self.start, **(how | {"kind": kind, "context": context, "rows": 1})),
            tokenizer=tokenizer,
            waiting=1,
        )
        self.first = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self.first)

    def reset(self) -> None:
        self.messages = list(self.first)

    def ask(self, message: str) -> tuple[Flow, Ticket]:
        """A request for the answer to everything said so far and this."""
        prompt = self.tokenizer.encode_chat([*self.messages, {"role": "user", "content": message}])
        own = own_limits(self.asked, self.start, len(prompt))
        if self.asked.max_new_tokens is None and self.start.most_new(len(prompt)) is None:
            own = replace(own, max_new_tokens=max(UNASKED, own.min_new_tokens))
        flow = Flow(self.engine)
        return flow, flow.submit(prompt, own, seed=seeds(self.asked)[0])

    def keep(self, message: str, answer: str) -> None:
        self.messages += [{"role": "user", "content": message}, {"role": "assistant", "content": answer}]


def turn(talk: Conversation, message: str, show: Show) -> None:
    """One message, its answer, and both kept; an answer that was stopped is kept as far as it came."""
    flow, ticket = talk.ask(message)
    with stopping(ticket):
        for text in said(flow.pieces(ticket), talk.checkpoint):
            if not show.as_json:
                show.screen.write(text)
        show.screen.end_line()
        result = ticket.result()
        talk.keep(message, result.text or "")
        tell(show, message, result, flow.rate(ticket), talk.checkpoint)
        if show.stats:
            show.beside(summary(flow))


@contextmanager
def stopping(ticket: Ticket) -> Iterator[None]:
    """While an answer comes, Ctrl-C stops it at its next token; a second Ctrl-C ends the program."""

    def stop(number: int, frame: object) -> None:
        ticket.cancel()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def spoken(first: Sequence[str], show: Show, interactive: bool) -> Iterator[str]:
    """The messages: those given, and then line by line what is typed or piped in."""
    for message in first:
        if interactive:
            show.screen.dim(f"> {message}\n")
        yield message
    if sys.stdin is None:
        return
    if interactive:
        from importlib.util import find_spec

        if find_spec("readline") is not None:
            import readline  # noqa: F401  # gives input() its history and its keys
    while (line := typed(show, interactive)) is not None:
        if line in ("/quit", "/exit"):
            return
        if line == "/help":
            show.beside(HELP)
        elif line:
            yield line


def typed(show: Show, interactive: bool) -> str | None:
    """The next line, or None at the end. Ctrl-C gives up the line, not the conversation."""
    if not interactive:
        data = sys.stdin.buffer.readline(MOST_BYTES + 1)
        return decoded("this line of standard input", data).strip() if data else None
    try:
        return input("> ").strip()
    except UnicodeDecodeError as error:
        show.beside(f"what was typed is no UTF-8 text at byte {error.start}; type it again")
        return ""
    except KeyboardInterrupt:
        show.screen.write("\n")
        return ""
    except EOFError:
        show.screen.write("\n")
        return None
