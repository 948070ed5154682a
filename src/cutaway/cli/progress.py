"""What a training run looks like while it runs: a line that moves, and what was seen on the way."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from cutaway.train.loop import Loop, Watcher


class Bar:
    """Steps, loss, tokens a second and the time left; or a JSON object a line."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self.console = Console(stderr=True)
        columns = (
            TextColumn("{task.completed:>5.0f}/{task.total:.0f}"),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
        )
        self.progress = Progress(*columns, console=self.console, disable=as_json or not self.console.is_terminal)
        self.task: TaskID | None = None

    def watcher(self) -> "Watcher":
        from cutaway.train.loop import Watcher

        return Watcher(step=self.step, look=self.look, say=self.say)

    @contextmanager
    def over(self, loop: "Loop") -> Iterator[None]:
        with self.progress:
            self.task = self.progress.add_task("", total=loop.recipe.training.steps, completed=loop.done)
            yield

    def step(self, row: dict[str, Any], timing: dict[str, Any]) -> None:
        if self.as_json:
            self.write(row | timing)
        elif self.task is not None:
            said = f"loss {row['loss']:.3f}  {timing['tokens_per_second']:,.0f} tokens/s"
            self.progress.update(self.task, completed=row["step"], description=said)

    def look(self, row: dict[str, Any]) -> None:
        if self.as_json:
            self.write(row)
            return
        said = f"step {row['step']}: validation {row['validation']:.3f} nats a token"
        said += f", {row['bits_per_byte']:.3f} bits a byte" if "bits_per_byte" in row else ""
        said += f", {row['exact']:.1%} of answers exact" if "exact" in row else ""
        said += f", {row['accuracy']:.1%} of hidden tokens told" if "accuracy" in row else ""
        self.console.print(said, highlight=False)
        if "sample" in row:
            self.console.print(row["sample"], style="dim", markup=False, highlight=False)

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False)

    def write(self, row: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()
