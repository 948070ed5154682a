"""The loop: steps, looks and checkpoints, in a run's directory.

Where the data is, what dropout draws and what is masked all follow from (seed, step). So a run that was killed goes on
from its last checkpoint to the same bits that it would have reached.
"""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from cutaway.errors import InputError
from cutaway.families.checkpoint import Checkpoint
from cutaway.families.save import save
from cutaway.model import Transformer
from cutaway.train.failpoints import reach
from cutaway.train.learner import Learner
from cutaway.train.optimise import Optimiser
from cutaway.train.origin import written_as
from cutaway.train.ranks import ALONE, Ranks
from cutaway.train.reading import Ask, Reading
from cutaway.train.recipe import Recipe
from cutaway.train.rightness import rightness, speaks
from cutaway.train.rows import Rows, Unwritten
from cutaway.train.run import Run
from cutaway.train.saving import newest, put
from cutaway.train.saving import save as save_state
from cutaway.train.spread import gathered
from cutaway.train.step import Row, Stepper, TrainingError, portion, settled
from cutaway.train.store import SaveError, Store


@dataclass
class Watcher:
    """Whom the loop tells what it does; each is called if it is given."""

    step: Callable[[dict[str, Any], dict[str, Any]], None] = lambda row, timing: None
    look: Callable[[dict[str, Any]], None] = lambda row: None
    say: Callable[[str], None] = lambda text: None


@dataclass
class Loop:
    """A model that learns from data, in a run's directory."""

    run: Run
    learner: Learner
    optimiser: Optimiser
    reading: Reading
    task: Ask
    watcher: Watcher = field(default_factory=Watcher)
    ranks: Ranks = ALONE
    wrapped: nn.Module | None = None
    """What a step calls in the learner's place where ranks have copies of it."""

    def __post_init__(self) -> None:
        self.recipe: Recipe = self.run.recipe
        self.store = Store(self.run.checkpoints, keep=self.recipe.saving.keep)
        self.done = 0
        self.best: float | None = None
        self.rows: Rows
        self.timings: Rows
        self.stop = threading.Event()
        self.untold: Row | None = None
        self.since = time.perf_counter()
        self.model: Transformer = self.learner.model
        how = (self.optimiser, self.reading, self.task, self.ranks, self.wrapped)
        self.stepper = Stepper(self.recipe, self.learner, *how)

    # The state as one value

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        return {"weights": dict(self.model.state_dict()), "optimiser": self.optimiser.tensors()}

    def save(self) -> None:
        """Everything that the next step depends on. A disk that is full is no reason to stop learning."""
        state: dict[str, Any] = {
            "step": self.done,
            "best": self.best,
            "rows": self.rows.settle(),
            "timings": self.timings.settle(),
        }
        state |= {"data": self.run.fingerprint}
        with self.told():
            save_state(self.store, self.ranks, self.done, self.tensors(), state, best=self.best)

    @contextmanager
    def told(self) -> Iterator[None]:
        try:
            yield
        except SaveError as error:
            self.watcher.say(f"{error}; training goes on, and the last checkpoint stays")

    def restore(self) -> None:
        """Go on from the newest checkpoint that is whole, or from the beginning if there is none."""
        found = newest(self.store, self.ranks, self.watcher.say)
        if found is None:
            self.rows, self.timings = self.log("metrics.jsonl", 0), self.log("timings.jsonl", 0)
            return
        if found.state["data"] != self.run.fingerprint:
            raise InputError("this checkpoint is of other data than the run's; restore the run's own files")
        put(self.model, found.tensors["weights"])
        self.optimiser.load(found.tensors["optimiser"])
        self.done, self.best = found.state["step"], found.state["best"]
        self.rows = self.log("metrics.jsonl", found.state["rows"])
        self.timings = self.log("timings.jsonl", found.state["timings"])

    def log(self, name: str, length: int) -> Rows:
        return Rows(self.run.directory / name, length) if self.ranks.leader else Unwritten()

    # The work

    def go(self) -> None:
        """Learn until the recipe's last step, or until somebody asks to stop."""
        recipe = self.recipe
        steps = recipe.training.steps
        self.model.train()
        device = self.model.device
        mine = [device] if device.type == "cuda" else []
        # Whoever called has random numbers of their own, and finds the last checkpoint written.
        with asked_to_stop(self.stop), self.saved(), torch.random.fork_rng(mine):
            self.since = time.perf_counter()
            stopping = self.ranks.agree(self.stop.is_set())
            while self.done < steps and not stopping:
                row = self.step(self.done)
                self.tell()  # of the step before: a device computes one step while the next is being asked for
                self.done, self.untold = self.done + 1, row
                last = self.done == steps
                look, save = (
                    last or self.done % recipe.watching.every == 0,
                    last or self.done % recipe.saving.every == 0,
                )
                if look or save or device.type == "cpu":
                    self.tell()
                if look:
                    self.look()
                stopping = self.ranks.agree(self.stop.is_set())
                if save or stopping:
                    self.tell()
                    self.save()
                    self.since = time.perf_counter()
                    reach("after save")
        if self.done == steps:
            self.export()

    @contextmanager
    def saved(self) -> Iterator[None]:
        try:
            yield
        finally:
            with self.told():
                self.store.wait()

    def step(self, number: int) -> Row:
        return self.stepper.step(number)

    def tell(self) -> None:
        """Write down what the last step has come to; this waits until it has."""
        if self.untold is None:
            return
        row, self.untold = settled(self.untold), None
        now = time.perf_counter()
        took, self.since = now - self.since, now
        if not math.isfinite(row["gradient"]):
            raise TrainingError(
                f"the gradient of step {row['step']} is not finite; begin a run with a lower optimiser.rate, a longer"
                " schedule.warmup, or precision fp32"
            )
        timing = {"step": row["step"], "seconds": took, "tokens_per_second": row["tokens"] / took}
        self.rows.add(row)
        self.timings.add(timing)
        self.watcher.step(row, timing)
        reach("after step")

    @torch.no_grad()
    def look(self) -> None:
        """How well it does on what it does not learn from."""
        self.model.eval()
        total = weight = 0.0
        count = min(self.recipe.watching.sequences, self.reading.held)
        for low, high in self.ranks.portions(count, max(1, count // self.recipe.training.batch)):
            piece = portion(self.task, self.reading.validation, low, high - low)
            total += float(self.learner(piece).entropy_total)
            weight += float(piece.weights.sum())
        loss = self.ranks.total(total) / max(1.0, self.ranks.total(weight))
        self.best = loss if self.best is None else min(self.best, loss)
        row: dict[str, Any] = {"step": self.done, "validation": loss}
        if self.reading.bytes_per_token is not None:
            row["bits_per_byte"] = loss / math.log(2) / self.reading.bytes_per_token
        if speaks(self.recipe) and (whole := self.checkpoint(self.model.device)) is not None:
            row |= rightness(whole, self.reading, self.task, self.recipe, seed=self.done)
        self.model.train()
        self.rows.add(row)
        self.watcher.look(row)
        self.since = time.perf_counter()

    def checkpoint(self, device: torch.device) -> Checkpoint | None:
        """The whole model beside what it was before, for the leader."""
        model: Transformer | None = self.model
        if self.ranks.mesh is not None:
            model = gathered(self.model, device, keep=self.ranks.leader)
        if model is None or not self.ranks.leader:
            return None
        origin = self.run.origin
        beside: Any = {"theirs": origin.theirs, "generation": origin.generation}
        return Checkpoint(model, model.config, origin.family, read_tokenizer=lambda: self.run.tokenizer, **beside)

    def export(self) -> None:
        """The model as others open it, if others have such models."""
        self.model.eval()
        checkpoint = self.checkpoint(torch.device("cpu"))
        if checkpoint is not None:
            family = written_as(checkpoint.config, checkpoint.family)
            save(checkpoint, self.run.model, family=family, overwrite=self.run.model.exists())


@contextmanager
def asked_to_stop(stop: threading.Event) -> Iterator[None]:
    """SIGTERM and Ctrl-C end a run after the step at hand, with a checkpoint; a second Ctrl-C at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: Any) -> None:
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
