"""What a training run looks like while it runs: a line that moves, lines in a log, or JSON; and what was seen."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from cutaway.cli.screen import visible
from cutaway.train.rows import plain

if TYPE_CHECKING:
    from cutaway.train.audience import Watcher
    from cutaway.train.loop import Loop

EVERY = 5.0
"""Seconds between two lines where nobody watches a terminal, such as in a log."""
NAMES = {"gradient": "gradient", "update/weight": "update"}
LEAN = 0.1
"""How much the newest step counts in what is shown of the pace."""


class Bar:
    """Steps, loss, tokens a second, the share of the device's peak, memory and the time left."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self.console = Console(stderr=True)
        columns = (TextColumn("{task.completed:.0f}/{task.total:.0f}"), BarColumn(12), TextColumn("{task.description}"))
        self.progress = Progress(*columns, console=self.console, disable=as_json or not self.console.is_terminal)
        self.task: TaskID | None = None
        self.steps = self.begun = self.skipped = 0
        self.since = self.told = time.monotonic()
        self.pace: dict[str, float] = {}

    def watcher(self) -> "Watcher":
        from cutaway.train.audience import Watcher

        return Watcher(step=self.step, look=self.look, health=self.health, say=self.say)

    @contextmanager
    def over(self, loop: "Loop") -> Iterator[None]:
        self.steps, self.begun = loop.recipe.training.steps, loop.done
        self.since = self.told = time.monotonic()
        with self.progress:
            self.task = self.progress.add_task("", total=self.steps, completed=loop.done)
            yield

    def step(self, row: dict[str, Any], timing: dict[str, Any]) -> None:
        if self.as_json:
            self.write(row | timing)
            return
        self.skipped += "skipped" in row
        for name in ("tokens_per_second", "peak_share"):
            if name in timing:  # of steps that take now more, now less, a mean is easier to read
                self.pace[name] = (1 - LEAN) * self.pace.get(name, timing[name]) + LEAN * timing[name]
        now = time.monotonic()
        said = self.described(row, timing, now)
        if not self.progress.disable and self.task is not None:
            self.progress.update(self.task, completed=row["step"], description=said)
        elif now - self.told >= EVERY or row["step"] == self.steps:
            self.told = now
            self.say(f"{row['step']}/{self.steps}  {said}")

    def described(self, row: dict[str, Any], timing: dict[str, Any], now: float) -> str:
        """What is not known is left out."""
        parts = [f"loss {row['loss']:.3f}", f"{self.pace['tokens_per_second']:,.0f} tokens/s"]
        if "peak_share" in timing:
            parts.append(f"{self.pace['peak_share']:.0%} of peak")
        if "memory" in timing:
            parts.append(f"{timing['memory'] / 1e9:.3g} GB")
        if self.skipped:
            parts.append(f"{self.skipped} skipped")
        done = row["step"] - self.begun
        left = (now - self.since) / max(1, done) * (self.steps - row["step"])
        return "  ".join([*parts, f"{clock(left)} left" if row["step"] < self.steps else clock(now - self.since)])

    def look(self, row: dict[str, Any]) -> None:
        if self.as_json:
            self.write(row)
            return
        said = f"step {row['step']}: validation {row['validation']:.3f} nats a token"
        self.say(said + (f", {row['bits_per_byte']:.3f} bits a byte" if "bits_per_byte" in row else ""))
        if "sample" in row:
            self.show(visible(row["sample"]), "dim")

    def health(self, row: dict[str, Any]) -> None:
        if self.as_json:
            self.write(row)
            return
        self.show(summary(row["health"]), "dim")
        for trouble in row["health"]["troubles"]:
            self.show(f"  {trouble}", "yellow")

    def say(self, text: str) -> None:
        if self.as_json:
            self.write({"said": text})
        else:
            self.show(text)

    def show(self, text: str, style: str | None = None) -> None:
        """In a log, lines are as long as they are."""
        wrap = not self.console.is_terminal
        self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=wrap)

    def write(self, row: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(plain(row), allow_nan=False) + "\n")
        sys.stdout.flush()


def summary(health: dict[str, Any]) -> str:
    """One line: what each reading comes to over the layers."""
    said = [f"{name} ≤ {most(health[key])}" for name, key in NAMES.items() if health.get(key)]
    lengths = list(health["stream"].values())
    said.append(f"stream {lengths[0]:.2g} → {lengths[-1]:.2g}")
    heads = [each for bits in health["entropy"].values() for each in bits]
    if heads:
        said.append(f"heads' entropy {min(heads):.2g} to {max(heads):.2g} bits")
    return ", ".join(said)


def most(by_layer: dict[str, float]) -> str:
    layer = max(by_layer, key=by_layer.__getitem__)
    return f"{by_layer[layer]:.2g} ({layer})"


def clock(seconds: float) -> str:
    """1:02:03, or 2:03."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
