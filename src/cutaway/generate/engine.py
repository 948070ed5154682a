"""Continuous batching: requests come and go while the others' steps go on; prompts are read in pieces between them."""

import atexit
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from cutaway.errors import CutawayError
from cutaway.generate.flight import Flight
from cutaway.generate.plan import Plan
from cutaway.generate.runner import Runner, at_rest
from cutaway.generate.seats import Seats
from cutaway.generate.settings import Settings
from cutaway.generate.ticket import Ticket
from cutaway.text import Tokenizer


class EngineError(CutawayError):
    """The engine could not go on with a request."""


class BusyError(CutawayError):
    """More requests wait than the engine takes."""


class Engine:
    """One owner of a model and its device. Call `turn` until it is False, or `start` a thread that does.

    It keeps what it read and packed: once weights are changed or hooks are added, it is for another engine to answer.
    """

    def __init__(self, plan: Plan, *, tokenizer: Tokenizer | None = None, waiting: int = 1024) -> None:
        """`waiting`: how many requests may wait for a row before more are refused."""
        self.plan, self.tokenizer, self.most_waiting = plan, tokenizer, waiting
        self.runner = Runner(plan.model, plan.cache(), fast=plan.compiled, bits=plan.bits)
        self.turns, self.whole_from = plan.turns, plan.whole_from
        # Where a token's key depends on how long its text became, no two texts share any.
        self.seats = Seats(self.runner, plan, share=self.whole_from is None)
        self.waiting: deque[Ticket] = deque()
        self.flight: Flight | None = None
        self.ahead = plan.model.device.type == "cuda" and not self.turns
        """Whether the next step is sent off before the last one's tokens are looked at."""
        self.wake = threading.Condition()
        self.arrivals = 0
        self.thread: threading.Thread | None = None
        self.closed = False

    # What others may call, from any thread

    def submit(
        self, prompt: Sequence[int], settings: Settings, *, seed: int, wait: bool = False, begun: Sequence[int] = ()
    ) -> Ticket:
        """Ask for an answer to a prompt of tokens; `begun` are its first tokens. An encoder's prompt is its source.

        One answer, by this seed: `n` and `seed` of the settings are for `generate`.
        """
        ticket = self.plan.ticket(prompt, settings, self.tokenizer, seed=seed, begun=begun)
        with self.wake:
            while wait and not self.closed and len(self.waiting) >= self.most_waiting:
                self.wake.wait()
            if self.closed:
                raise EngineError("the engine is closed; start another")
            if ticket.answer.reason is not None:  # what it was begun with is all of it
                ticket.finish()
                return ticket
            if len(self.waiting) >= self.most_waiting:
                raise BusyError(f"{len(self.waiting)} requests are waiting, which is the limit; try again later")
            self.arrivals += 1
            ticket.number = self.arrivals
            self.waiting.append(ticket)
            self.wake.notify_all()
        return ticket

    def start(self) -> "Engine":
        """Let a thread do the work from now on."""
        if self.thread is not None or self.closed:
            raise EngineError("the engine was started or closed before; make another")
        self.thread = threading.Thread(target=self._work, name="cutaway engine", daemon=True)
        self.thread.start()
        atexit.register(self.close)  # a program that ends while a thread is inside PyTorch is aborted
        return self

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop; whoever still waits is told so."""
        with self.wake:
            self.closed = True
            self.wake.notify_all()
        if self.thread is not None:
            self.thread.join()
            atexit.unregister(self.close)
        self._tell_all("the engine was closed before the answer was complete")
        self.runner.let_go()

    def run(self) -> None:
        """Work until nobody waits."""
        while self.turn():
            """Another."""

    # The owner's

    @property
    def stepping(self) -> int:
        """Texts that take steps now."""
        return self.seats.stepping

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.seats.rows or self.flight)

    def turn(self) -> bool:
        """Take in who waits, read one piece of prompts, take one step. False if there is nothing left to do."""
        model = self.plan.model
        try:
            with at_rest(model) if model.training else nullcontext():
                self._land()
                self._drop_cancelled()
                self._admit()
                self._read()
                self._step()
            return self.busy
        except Exception as error:  # not a request's fault: the device is gone, or the books are wrong
            with self.wake:
                self.closed = True
                self.wake.notify_all()
            self._tell_all(f"the engine broke down ({type(error).__name__}: {error}); start another")
            raise EngineError(f"the engine broke down ({type(error).__name__}: {error}); start another") from error

    def _work(self) -> None:
        while True:
            with self.wake:
                while not (self.closed or self.busy):
                    self.wake.wait()
                if self.closed:
                    return
            try:
                self.turn()
            except EngineError:  # everybody has been told
                return

    @contextmanager
    def _together(self, tickets: Sequence[Ticket]) -> Iterator[None]:
        """What fails here fails for these requests; the others go on."""
        try:
            yield
        except Exception as error:
            for ticket in tickets:
                ticket.finish(error=EngineError(f"a step failed ({type(error).__name__}: {error}); ask again"))
            for ticket in tickets:
                self.seats.leave(ticket, sound=False)

    def _land(self) -> None:
        """Look at the last step before the next is sent off, if it ends a text."""
        flight = self.flight
        if flight is not None and any(ticket.launched >= ticket.answer.limit for ticket in flight.tickets):
            self._settle()

    def _drop_cancelled(self) -> None:
        with self.wake:
            gone = [ticket for ticket in self.waiting if ticket.cancelled]
            for ticket in gone:
                self.waiting.remove(ticket)
            if gone:
                self.wake.notify_all()
        for ticket in gone:
            ticket.finish("cancelled")
        gone = [ticket for ticket in self.seats.rows if ticket.cancelled]
        if gone:
            self._settle()
        for ticket in gone:
            self.seats.leave(ticket, sound=ticket.drawn > 0)
            ticket.finish("cancelled")

    def _admit(self) -> None:
        """Rows to those who wait longest; who needs more pages than are free waits, and so do those behind.

        Sources are read here, each as a whole, but not many of them while others wait for their next step.
        """
        others, sources = self.seats.stepping, 0
        while self.waiting and not (others and sources >= self.plan.chunk):
            ticket = self.waiting[0]
            if not self.seats.take(ticket):
                return
            with self.wake:
                self.waiting.popleft()
                self.wake.notify_all()
            sources += len(ticket.source or ())
            with self._together([ticket]):
                self.seats.open(ticket)

    def _read(self) -> None:
        """A piece of those prompts that wait longest, no more tokens than the plan allows between steps."""
        readers = self.seats.readers()
        if not readers:
            return
        group: list[Ticket] = []
        pieces: list[list[int]] = []
        for ticket in readers:
            piece = self._piece(ticket)
            longest = max(map(len, [*pieces, piece]))
            furthest = max(each.read for each in [*group, ticket])
            wide = longest * (len(group) + 1) > self.plan.chunk  # a batch is as wide as its longest piece,
            if group and (wide or furthest + longest > self.runner.cache.slots):  # and padding takes slots too
                break
            group.append(ticket)
            pieces.append(piece)
        with self._together(group):
            self.runner.read(self.seats.stepping, pieces, [ticket.read for ticket in group])
            for ticket, piece in zip(group, pieces, strict=True):
                ticket.read += len(piece)
                if self._is_whole(ticket.text):  # its last token is read again, by its first step
                    ticket.read -= 1
                    self.runner.cache.length[ticket.row] = ticket.read
            for ticket in group:
                self.seats.ready(ticket)

    def _piece(self, ticket: Ticket) -> list[int]:
        text = ticket.text
        if self._is_whole(text):
            return text[ticket.read :]
        return text[ticket.read : min(len(text) - 1, ticket.read + self.plan.chunk)]

    def _is_whole(self, text: Sequence[int]) -> bool:
        """Whether all tokens of a text must be read together, since they turn by angles that go by its length."""
        return self.whole_from is not None and len(text) > self.whole_from

    def _step(self) -> None:
        """All rows that can take their next step; then the last step's tokens (of this one, on the CPU) are told."""
        last = self.flight if self.ahead else None
        steppers = self.seats.steppers
        flight = None
        if steppers:
            with self._together(steppers):
                most = max(ticket.read for ticket in steppers)
                ahead = max(ticket.answer.limit - ticket.launched for ticket in steppers)
                flight = Flight(self.runner.step(len(steppers), most, ahead), steppers)
                for ticket in steppers:
                    ticket.read += 1
                    ticket.launched += 1
        if last is not None:
            self._settle()
        self.flight = flight
        if not self.ahead:
            self._settle()

    def _settle(self) -> None:
        """Tell the last step's tokens to those who asked."""
        flight, self.flight = self.flight, None
        if flight is None:
            return
        with self._together(flight.tickets):
            for ticket, token, bad, logprob, top in flight.drawn():
                if not ticket.done.is_set():
                    with self._together([ticket]):
                        self._tell(ticket, token, bad, logprob, top)

    def _tell(self, ticket: Ticket, token: int, bad: bool, logprob: float | None, top: dict[int, float] | None) -> None:
        if bad:
            ticket.finish(error=EngineError(self.plan.explain_bad(ticket)))
            self.seats.leave(ticket, sound=False)
            return
        end = self.plan.forced_eos
        cut = end is not None and len(ticket.answer.tokens) + 1 >= ticket.answer.limit
        if end is not None and cut:
            token, logprob, top = end, 0.0, top and {end: 0.0}
        ticket.tell(ticket.answer.take(token, logprob, top, cut=cut))
        if ticket.answer.reason is not None:
            self.seats.leave(ticket)
            ticket.finish()
        elif ticket.read in self.turns and ticket.row is not None:
            self.seats.read_again(ticket)  # its tokens turn by other angles from here on

    def _tell_all(self, why: str) -> None:
        """It is over, for those at work and those who wait."""
        tickets = [*self.seats.rows, *self.waiting, *(self.flight.tickets if self.flight is not None else ())]
        self.waiting.clear()
        self.seats.rows, self.seats.stepping, self.flight = [], 0, None
        for ticket in tickets:
            ticket.finish(error=EngineError(why))
