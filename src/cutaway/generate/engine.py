"""Continuous batching: requests come and go while the others' steps go on; prompts are read in pieces between them."""

import threading
from collections import deque
from collections.abc import Sequence

from cutaway.errors import CutawayError
from cutaway.generate.answer import Answer
from cutaway.generate.flight import Flight
from cutaway.generate.pages import Pages
from cutaway.generate.plan import Plan
from cutaway.generate.runner import Runner
from cutaway.generate.settings import Settings
from cutaway.generate.ticket import Ticket
from cutaway.text import Tokenizer


class EngineError(CutawayError):
    """The engine could not go on with a request."""


class BusyError(CutawayError):
    """More requests wait than the engine takes."""


class Engine:
    """One owner of a model and its device. Call `turn` until it is False, or `start` a thread that does.

    Rows 0 … stepping − 1 take steps; the rows behind them are still reading their prompts.
    """

    def __init__(self, plan: Plan, *, tokenizer: Tokenizer | None = None, waiting: int = 1024) -> None:
        """`waiting`: how many requests may wait for a row before more are refused."""
        self.plan, self.tokenizer, self.most_waiting = plan, tokenizer, waiting
        cache = plan.cache()
        self.runner = Runner(plan.model, cache)
        self.turns: list[int] = plan.model.stacks["decoder"].turns
        self.pages = None
        if cache.table is not None:  # with LongRoPE a token's key depends on how long its text became
            self.pages = Pages(cache.page_count, cache.page, share=not self.turns)
        self.waiting: deque[Ticket] = deque()
        self.rows: list[Ticket] = []
        self.stepping = 0
        self.flight: Flight | None = None
        self.ahead = plan.model.device.type == "cuda" and not self.turns
        """Whether the next step is sent off before the last one's tokens are looked at."""
        self.wake = threading.Condition()
        self.thread: threading.Thread | None = None
        self.closed = False

    # What others may call, from any thread

    def submit(
        self, prompt: Sequence[int], settings: Settings, *, seed: int, wait: bool = False, begun: Sequence[int] = ()
    ) -> Ticket:
        """Ask for an answer to a prompt of tokens; `begun` are its first tokens. An encoder's prompt is its source."""
        tokens, source = self.plan.begin(prompt, begun)
        limit = self.plan.limit(tokens, settings, begun)
        answer = Answer(settings, limit, self.tokenizer, self.plan.eos)
        ticket = Ticket(tokens, settings, seed, answer)
        ticket.source, ticket.begun = source, list(begun)
        ticket.launched = len(ticket.begun)
        for token in ticket.begun:
            ticket.tell(answer.take(token))
        with self.wake:
            while wait and not self.closed and len(self.waiting) >= self.most_waiting:
                self.wake.wait()
            if self.closed:
                raise EngineError("the engine is closed; start another")
            if len(self.waiting) >= self.most_waiting:
                raise BusyError(f"{len(self.waiting)} requests are waiting, which is the limit; try again later")
            self.waiting.append(ticket)
            self.wake.notify_all()
        return ticket

    def start(self) -> "Engine":
        """Let a thread do the work from now on."""
        self.thread = threading.Thread(target=self._work, name="cutaway engine", daemon=True)
        self.thread.start()
        return self

    def close(self) -> None:
        """Stop; whoever still waits is told so."""
        with self.wake:
            self.closed = True
            self.wake.notify_all()
        if self.thread is not None:
            self.thread.join()
        self._fail(EngineError("the engine was closed before the answer was complete"))

    def run(self) -> None:
        """Work until nobody waits."""
        while self.turn():
            """Another."""

    # The owner's

    def turn(self) -> bool:
        """Take in who waits, read one piece of prompts, take one step. False if there was nothing to do."""
        try:
            self._drop_cancelled()
            self._admit()
            self._read()
            return self._step() or bool(self.rows or self.waiting)
        except (CutawayError, RuntimeError, MemoryError) as error:
            self._fail(EngineError(f"a step failed ({type(error).__name__}: {error}); what was asked is lost"))
            return bool(self.waiting)

    def _work(self) -> None:
        while True:
            with self.wake:
                while not (self.closed or self.waiting or self.rows):
                    self.wake.wait()
                if self.closed:
                    return
            self.turn()

    def _drop_cancelled(self) -> None:
        with self.wake:
            gone = [ticket for ticket in self.waiting if ticket.cancelled]
            for ticket in gone:
                self.waiting.remove(ticket)
                ticket.finish("cancelled")
        for ticket in [ticket for ticket in self.rows if ticket.cancelled]:
            self._leave(ticket)
            ticket.finish("cancelled")

    def _admit(self) -> None:
        """Rows to those who wait longest; who needs more pages than are free waits, and so do those behind."""
        while self.waiting and len(self.rows) < self.runner.cache.batch:
            ticket = self.waiting[0]
            pages: list[int] = []
            read = 0
            if self.pages is not None:
                taken = self.pages.take([] if ticket.source else ticket.tokens, self.plan.room(ticket))
                if taken is None:
                    return
                pages, read = taken
            with self.wake:
                self.waiting.popleft()
                self.wake.notify_all()
            row = len(self.rows)
            ticket.row, ticket.pages, ticket.read = row, pages, read
            self.rows.append(ticket)
            self.runner.open(row, ticket, self.plan.eos)
            self._ready(ticket)

    def _ready(self, ticket: Ticket) -> None:
        """Whoever has read all but the last token takes steps from now on."""
        text = ticket.text
        if ticket.read != len(text) - 1 or ticket.row is None:
            return
        if self.pages is not None and ticket.source is None:
            self.pages.keep(ticket.pages, text[: ticket.read])
        self.runner.next[ticket.row] = text[-1]
        self._swap(ticket.row, self.stepping)
        self.stepping += 1

    def _read(self) -> None:
        """A piece of the first prompts that are not read yet, no more tokens than the plan allows between steps."""
        group = self.rows[self.stepping :]
        if not group:
            return
        pieces: list[list[int]] = []
        for ticket in group:
            text = ticket.text
            end = min(len(text) - 1, ticket.read + self.plan.chunk)
            whole = any(turn < len(text) for turn in self.turns)  # LongRoPE turns a long text's tokens all together
            piece = text[ticket.read : len(text) if whole else end]
            longest = max(len(piece), *map(len, pieces)) if pieces else len(piece)
            if pieces and longest * (len(pieces) + 1) > self.plan.chunk:
                break
            pieces.append(piece)
        group = group[: len(pieces)]
        self.runner.read(self.stepping, pieces, [ticket.read for ticket in group])
        for ticket, piece in zip(group, pieces, strict=True):
            ticket.read = min(ticket.read + len(piece), len(ticket.text) - 1)
            if ticket.row is not None and any(turn < len(ticket.text) for turn in self.turns):
                self.runner.cache.length[ticket.row] = ticket.read
        for ticket in group:
            self._ready(ticket)

    def _step(self) -> bool:
        """All rows that can take their next step; then the last step's tokens (of this one, on the CPU) are told."""
        last = self.flight
        self.flight = None
        if self.stepping:
            steppers = self.rows[: self.stepping]
            most = max(ticket.read for ticket in steppers)
            self.flight = Flight(self.runner.step(self.stepping, most), steppers)
            for ticket in steppers:
                ticket.read += 1
                ticket.launched += 1
                if ticket.launched >= ticket.answer.limit:  # its last token is on the way
                    self._leave(ticket)
            if not self.ahead:
                last, self.flight = self.flight, None
        if last is not None:
            self._settle(last)
        return last is not None or self.flight is not None

    def _settle(self, flight: Flight) -> None:
        """Tell the tokens to those who asked."""
        for ticket, token, bad, logprob, top in flight.drawn():
            if ticket.done.is_set():
                continue
            if bad:
                self._leave(ticket)
                ticket.finish(error=EngineError(self.plan.explain_bad(ticket)))
                continue
            if self.plan.forced_eos is not None and len(ticket.answer.tokens) + 1 >= ticket.answer.limit:
                token = self.plan.forced_eos
            ticket.tell(ticket.answer.take(token, logprob, top))
            if ticket.answer.reason is not None:
                self._leave(ticket)
                ticket.finish()
            elif ticket.read in self.turns and ticket.row is not None:
                self._read_again(ticket)

    def _read_again(self, ticket: Ticket) -> None:
        """The text has grown to where LongRoPE turns all its tokens by other angles."""
        assert ticket.row is not None
        self.stepping -= 1
        self._swap(ticket.row, self.stepping)
        ticket.read = 0
        self.runner.cache.open(ticket.row, 0, ticket.pages)

    def _swap(self, a: int, b: int) -> None:
        self.runner.swap(a, b)
        first, second = self.rows[a], self.rows[b]
        self.rows[a], self.rows[b] = second, first
        first.row, second.row = b, a

    def _leave(self, ticket: Ticket) -> None:
        """Give the row and its pages to others."""
        if ticket.row is None:
            return
        if ticket.row < self.stepping:
            self.stepping -= 1
            self._swap(ticket.row, self.stepping)
        self._swap(ticket.row, len(self.rows) - 1)
        self.rows.pop()
        if self.pages is not None:
            if ticket.source is None:
                self.pages.keep(ticket.pages, ticket.text[: ticket.read])
            self.pages.give_back(ticket.pages)
        self.runner.close(ticket.row)
        ticket.row, ticket.pages = None, []

    def _fail(self, error: CutawayError) -> None:
        """Everybody in a row is told; who waits goes on waiting unless the engine is closed."""
        for ticket in list(self.rows):
            self._leave(ticket)
            ticket.finish(error=error)
        for ticket in self.flight.tickets if self.flight is not None else []:
            ticket.finish(error=error)
        self.flight = None
        if self.closed:
            while self.waiting:
                self.waiting.popleft().finish(error=error)
