"""All who are told how a run goes: whoever called, TensorBoard, and the drawing of its losses."""

import time
from typing import TYPE_CHECKING, Any

from cutaway.train.curve import draw
from cutaway.train.rows import Rows
from cutaway.train.run import Run
from cutaway.train.track import Track

if TYPE_CHECKING:
    from cutaway.train.loop import Watcher

SHARE = 0.05
"""Of a run's time, what drawing may take; at the end it is drawn whatever it takes."""


class Audience:
    """A run goes on if its picture cannot be drawn; that is said once."""

    def __init__(self, run: Run, rows: Rows, watcher: "Watcher", done: int = 0) -> None:
        self.run, self.rows, self.watcher = run, rows, watcher
        self.track = Track(run.directory / "tensorboard", done) if run.recipe.watching.tensorboard else None
        self.took, self.drawn = 0.5, time.perf_counter()
        self.failed = False

    def step(self, row: dict[str, Any], timing: dict[str, Any]) -> None:
        if self.track is not None:
            self.track.add(timing | row)
        self.watcher.step(row, timing)

    def look(self, row: dict[str, Any]) -> None:
        if self.track is not None:
            self.track.add(row)
        self.watcher.look(row)

    def health(self, row: dict[str, Any]) -> None:
        if self.track is not None:
            self.track.add(row)
        self.watcher.health(row)

    def draw(self, *, last: bool = False) -> None:
        began = time.perf_counter()
        if self.failed or (not last and began - self.drawn < self.took / SHARE):
            return
        where = self.run.directory
        try:
            draw(self.rows, where / "loss.svg", where.name)
        except Exception as error:  # of whatever kind: fonts, disks, numbers; a picture is not worth a run
            self.failed = True
            self.watcher.say(f"the losses could not be drawn ({error}); training goes on")
        self.drawn = time.perf_counter()
        self.took = self.drawn - began

    def settle(self) -> None:
        if self.track is not None:
            self.track.settle()

    def close(self) -> None:
        if self.track is not None:
            self.track.close()
