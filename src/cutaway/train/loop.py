"""The loop: steps, looks and checkpoints, in a run's directory.

Where the data is, what dropout draws and what is masked all follow from (seed, step). So a run that was killed goes on
from its last checkpoint to the same bits that it would have reached.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from cutaway.errors import InputError
from cutaway.families.checkpoint import Checkpoint
from cutaway.families.save import save
from cutaway.measure import bits_per_byte
from cutaway.model import Transformer
from cutaway.train.audience import Audience, Watcher
from cutaway.train.average import Average
from cutaway.train.failpoints import reach
from cutaway.train.health import read as read_health
from cutaway.train.health import troubles
from cutaway.train.learner import Learner
from cutaway.train.optimise import Optimiser
from cutaway.train.origin import written_as
from cutaway.train.pace import Pace
from cutaway.train.policy import Policy
from cutaway.train.ranks import ALONE, Ranks
from cutaway.train.reading import Ask, Reading
from cutaway.train.recipe import Recipe
from cutaway.train.rightness import rightness, speaks
from cutaway.train.rows import Rows, Unwritten
from cutaway.train.run import Run
from cutaway.train.saving import newest, put
from cutaway.train.saving import save as save_state
from cutaway.train.scale import Scale
from cutaway.train.signals import asked_to_stop
from cutaway.train.spread import gathered
from cutaway.train.step import Row, Stepper, portion, settled
from cutaway.train.store import SaveError, Store


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
        training, device = self.recipe.training, self.model.device
        self.policy = Policy(training.pieces, training.on_spike, device=device, say=self.watcher.say)
        self.scale = Scale(device) if training.precision == "fp16" else None
        self.average = None if training.ema is None else Average(self.model, training.ema, learner=self.learner)
        how = (self.optimiser, self.reading, self.task, self.policy, self.scale, self.ranks, self.wrapped)
        self.stepper = Stepper(self.recipe, self.learner, *how)
        self.pace = Pace.of(self.recipe, self.model.config, device, self.ranks.world)
        self.audience: Audience

    # The state as one value

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        parts = {name: part.tensors() for name, part in self.parts().items()}
        return {"weights": dict(self.model.state_dict()), **parts}

    def parts(self) -> dict[str, Any]:
        """What has a state of its own beside the weights; some only in some runs."""
        every = {"optimiser": self.optimiser, "policy": self.policy, "average": self.average, "scale": self.scale}
        return {name: part for name, part in every.items() if part is not None}

    def save(self) -> None:
        """Everything that the next step depends on. A disk that is full is no reason to stop learning."""
        self.audience.settle()
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
            self.log(0, 0)
            return
        if found.state["data"] != self.run.fingerprint:
            raise InputError("this checkpoint is of other data than the run's; restore the run's own files")
        put(self.model, found.tensors["weights"])
        for name, part in self.parts().items():
            if name not in found.tensors:
                raise InputError(f"this checkpoint has no {name}, as those of another version; begin a new run from it")
            part.load(found.tensors[name])
        self.done, self.best = found.state["step"], found.state["best"]
        self.log(found.state["rows"], found.state["timings"])

    def log(self, rows: int, timings: int) -> None:
        """Go on with the logs behind so many bytes of them; of several ranks one writes."""
        where, mine = self.run.directory, self.ranks.leader
        self.rows = Rows(where / "metrics.jsonl", rows) if mine else Unwritten()
        self.timings = Rows(where / "timings.jsonl", timings) if mine else Unwritten()
        self.audience = Audience(self.run, self.rows, self.watcher, self.done, heard=mine)

    # The work

    def go(self) -> None:
        """Learn until the recipe's last step, or until somebody asks to stop."""
        recipe = self.recipe
        steps = recipe.training.steps
        self.model.train()
        device = self.model.device
        mine = [device] if device.type == "cuda" else []
        # Whoever called has random numbers of their own, and finds the last checkpoint written.
        with closing(self.audience), asked_to_stop(self.stop), self.saved(), torch.random.fork_rng(mine):
            self.since = time.perf_counter()
            stopping = self.ranks.agree(self.stop.is_set())
            while self.done < steps and not stopping:
                row = self.step(self.done)
                self.tell()  # of the step before: a device computes one step while the next is being asked for
                self.done, self.untold = self.done + 1, row
                look, save = self.looks(self.done), self.done == steps or self.done % recipe.saving.every == 0
                if look or save or device.type == "cpu":
                    self.tell()
                if look:
                    with self.shown():
                        self.look()
                stopping = self.ranks.agree(self.stop.is_set())
                if save or stopping:
                    self.tell()
                    self.save()
                    self.since = time.perf_counter()
                    reach("after save")
        if self.done == steps:
            with self.shown():
                self.export()

    @contextmanager
    def saved(self) -> Iterator[None]:
        try:
            yield
        finally:
            with self.told():
                self.store.wait()

    def step(self, number: int) -> Row:
        row = self.stepper.step(number, measure=self.ranks.mesh is None and self.looks(number + 1))
        if self.average is not None:
            self.average.step(number)
        return row

    def looks(self, done: int) -> bool:
        """Whether so many steps are followed by a look."""
        return done == self.recipe.training.steps or done % self.recipe.watching.every == 0

    def shown(self) -> AbstractContextManager[None]:
        """The weights that others see: their mean, where the recipe asks for one."""
        return nullcontext() if self.average is None else self.average.shown()

    def tell(self) -> None:
        """Write down what the last step has come to; this waits until it has."""
        if self.untold is None:
            return
        row, self.untold = settled(self.untold), None
        now = time.perf_counter()
        took, self.since = now - self.since, now
        self.policy.tell(row, row.pop("judged"))
        timing = {"step": row["step"], "seconds": took, "tokens_per_second": row["tokens"] / took}
        timing |= self.pace.told(took)
        self.rows.add(row)
        self.timings.add(timing)
        self.audience.step(row, timing)
        reach("after step")

    @torch.no_grad()
    def look(self) -> None:
        """How well it does on what it does not learn from."""
        self.model.eval()
        total = weight = 0.0
        count = min(self.recipe.watching.sequences, self.reading.held)
        at_once = -(-self.recipe.training.batch // self.policy.pieces)  # what memory holds
        for low, high in self.ranks.portions(count, max(1, count // at_once)):
            piece = portion(self.task, self.reading.validation, low, high - low)
            total += float(self.learner(piece).entropy_total)
            weight += float(piece.weights.sum())
        health = self.health()
        loss = self.ranks.total(total) / max(1.0, self.ranks.total(weight))
        self.best = loss if self.best is None else min(self.best, loss)
        row: dict[str, Any] = {"step": self.done, "validation": loss}
        if self.reading.bytes_per_token is not None:
            row["bits_per_byte"] = bits_per_byte(loss, self.reading.bytes_per_token)
        if speaks(self.recipe) and (whole := self.checkpoint(self.model.device)) is not None:
            row |= rightness(whole, self.reading, self.task, self.recipe, seed=self.done)
        self.model.train()
        self.rows.add(row)
        self.audience.look(row)
        if health is not None:
            self.rows.add({"step": self.done, "health": health})
            self.audience.health({"step": self.done, "health": health})
        self.audience.draw()
        self.since = time.perf_counter()

    def health(self) -> dict[str, Any] | None:
        """Readings of each layer, where a rank has whole ones."""
        if self.ranks.mesh is not None:
            return None
        found = read_health(self.learner, self.task(self.reading.validation.batch(0, 1), 0), self.stepper.changes)
        return found | {"troubles": troubles(found, self.model.config.d_model)}

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
