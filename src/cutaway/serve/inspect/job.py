"""A piece of work that can be watched and given up."""

import threading
import time
from collections.abc import Callable

from cutaway.errors import InputError
from cutaway.serve.inspect.wire import ANSWER, PART, PROGRESS, Answer, frame, told


class GivenUp(Exception):  # noqa: N818  # what happened, as it reads at a `raise`
    """Nobody waits for the answer any more."""


class Job:
    """Who asks is told how far it is; whoever works asks now and then whether anybody still waits."""

    def __init__(self, tell: Callable[[bytes], None] = lambda frame: None, seconds: float = float("inf")) -> None:
        self.tell, self.seconds = tell, seconds
        self.stop = threading.Event()
        self.end = time.monotonic() + seconds

    def check(self) -> None:
        if self.stop.is_set():
            raise GivenUp
        if time.monotonic() > self.end:
            raise InputError(f"this took more than {self.seconds:.0f} s, and was given up; ask for less")

    def progress(self, done: int, total: int, what: str = "") -> None:
        self.check()
        self.tell(told(PROGRESS, {"done": done, "total": total, "what": what}))

    def part(self, answer: Answer) -> None:
        """Some of the answer, as it comes."""
        self.check()
        self.tell(frame(PART, answer.packed()))

    def done(self, answer: Answer) -> None:
        self.tell(frame(ANSWER, answer.packed()))
