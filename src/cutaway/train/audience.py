"""All who are told how a run goes: whoever called, TensorBoard, and the drawing of its losses."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cutaway.train.curve import draw
from cutaway.train.rows import Rows
from cutaway.train.run import Run
from cutaway.train.track import Track

SHARE = 0.05
"""Of a run's time, what drawing may take; at the end it is drawn whatever it takes."""


@dataclass
class Watcher:
    """Whom the loop tells what it does; each is called if it is given."""

    step: Callable[[dict[str, Any], dict[str, Any]], None] = lambda row, timing: None
    look: Callable[[dict[str, Any]], None] = lambda row: None
    health: Callable[[dict[str, Any]], None] = lambda row: None
    say: Callable[[str], None] = lambda text: None


class Audience:
    """Rows as they come, and a picture now and then."""

    def __init__(self, run: Run, rows: Rows, watcher: Watcher, done: int = 0, *, heard: bool = True) -> None:
        """Of several ranks one is heard."""
        self.run, self.rows, self.watcher, self.heard = run, rows, watcher, heard
        tracks = heard and run.recipe.watching.tensorboard
        self.track = Track(run.directory / "tensorboard", done) if tracks else None
        self.took, self.drawn = 0.5, time.perf_counter()
        self.failed: set[str] = set()

    def step(self, row: dict[str, Any], timing: dict[str, Any]) -> None:
        self.add(timing | row)
        self.watcher.step(row, timing)

    def look(self, row: dict[str, Any]) -> None:
        self.add(row)
        self.watcher.look(row)

    def health(self, row: dict[str, Any]) -> None:
        self.add(row)
        self.watcher.health(row)

    def add(self, row: dict[str, Any]) -> None:
        if self.track is not None:
            self.attempt("TensorBoard's file could not be written", self.track.add, row)

    def draw(self, *, last: bool = False) -> None:
        began = time.perf_counter()
        if not self.heard or (not last and began - self.drawn < self.took / SHARE):
            return
        where = self.run.directory
        self.attempt("the losses could not be drawn", draw, self.rows, where / "loss.svg", where.name)
        self.drawn = time.perf_counter()
        self.took = self.drawn - began

    def settle(self) -> None:
        if self.track is not None:
            self.attempt("TensorBoard's file could not be written", self.track.settle)

    def close(self) -> None:
        """When a run ends, in whatever way."""
        self.draw(last=True)
        if self.track is not None:
            self.attempt("TensorBoard's file could not be written", self.track.close)

    def attempt(self, failure: str, do: Callable[..., Any], *given: Any) -> None:
        """What is only looked at is not worth a run, whatever the error: it is said once, and not tried again."""
        if failure in self.failed:
            return
        try:
            do(*given)
        except Exception as error:
            self.failed.add(failure)
            self.watcher.say(f"{failure} ({error}); training goes on")
