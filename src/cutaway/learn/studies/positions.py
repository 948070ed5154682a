"""Position methods: loss within and beyond the training length by task, and which methods depend on distances only."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cutaway.config import Config
from cutaway.config import config as read_config
from cutaway.learn.studies.components import TRAINING_TEXT, VALIDATION_TEXT
from cutaway.learn.studies.study import Estimate, PartFn, PartResults, estimate, estimate_difference, exact
from cutaway.learn.studies.train_grid import TrainingGrid, train_grid
from cutaway.model import build

METHODS = ("none", "sinusoidal", "learned", "rope", "alibi", "relative-bias")
"""Trained position methods."""
SCALINGS = ("linear", "ntk", "yarn")
"""Scalings of RoPE, applied in evaluation only, to the weights that were trained without scaling."""
TRAINING_LENGTH = 32
LENGTHS = (1, 2, 4)
"""Lengths of the evaluated sequences, in training lengths."""
D_MODEL, LAYERS, HEADS = 64, 2, 4
GRID = TrainingGrid(
    lrs=(5e-4, 1e-3, 2e-3, 4e-3, 8e-3),
    warmups=(50,),
    num_seeds=10,
    steps=1000,
    batch_size=16,
    seq_len=TRAINING_LENGTH,
)
NUM_EVAL_SEQUENCES = 128
EVAL_SEED = 10_000
IGNORED = -100
"""Label of a position without a loss."""


class Task(ABC):
    """A task: sequences of tokens, and a label for each position. `chance` and `optimum` are known losses, if any."""

    name: ClassVar[str]
    num_symbols: int
    extends: ClassVar[bool] = True
    """Whether labels are defined beyond the training length."""
    chance: float | None = None
    """Loss of a model without the information that the task is about."""
    optimum: float | None = None

    @abstractmethod
    def sample(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        """(count, length): token ids."""

    def sample_evaluation(self, length: int) -> Tensor:
        """(NUM_EVAL_SEQUENCES, length): token ids that are not used in training."""
        return self.sample(NUM_EVAL_SEQUENCES, length, torch.Generator().manual_seed(EVAL_SEED))

    def cut(self, tokens: Tensor, length: int) -> Tensor:
        """Shorten sequences to their last `length` tokens."""
        return tokens[:, -length:]

    @abstractmethod
    def label(self, tokens: Tensor) -> Tensor:
        """(B, T): label of each position, IGNORED where there is none."""

    def loss(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Mean cross-entropy of the labels."""
        return F.cross_entropy(logits.flatten(0, 1), self.label(tokens).flatten(), ignore_index=IGNORED)


def _next_tokens(tokens: Tensor) -> Tensor:
    return F.pad(tokens[:, 1:], (0, 1), value=IGNORED)


@dataclass(frozen=True)
class LocalTask(Task):
    """Next token of a second-order Markov chain: its distribution depends on the two latest tokens.

    `chance` is the entropy of the next token given the current token alone, `optimum` the entropy rate.
    """

    name: ClassVar[str] = "local"
    num_symbols: int = 8
    sharpness: float = 2.0

    @cached_property
    def transitions(self) -> Tensor:
        """(a, b, c): probability of c after a, b."""
        generator = torch.Generator().manual_seed(0)
        return torch.softmax(self.sharpness * torch.randn(*[self.num_symbols] * 3, generator=generator), -1)

    @cached_property
    def pair_frequencies(self) -> Tensor:
        """(a, b): stationary probability of the pair."""
        n = self.num_symbols
        matrix = torch.zeros(n, n, n, n, dtype=torch.float64)
        for b in range(n):
            matrix[:, b, b] = self.transitions[:, b].double()
        return torch.linalg.matrix_power(matrix.view(n * n, n * n), 512)[0].view(n, n)

    @property
    def optimum(self) -> float:  # type: ignore[override]
        return float(-(self.pair_frequencies[..., None] * self.transitions * self.transitions.log()).sum())

    @property
    def chance(self) -> float:  # type: ignore[override]
        joint = (self.pair_frequencies[..., None] * self.transitions).sum(0)
        return float(-(joint * (joint / joint.sum(-1, keepdim=True)).log()).sum())

    def sample(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        pairs = torch.multinomial(self.pair_frequencies.flatten(), count, replacement=True, generator=generator)
        tokens = [pairs // self.num_symbols, pairs % self.num_symbols]
        while len(tokens) < length:
            following = torch.multinomial(self.transitions[tokens[-2], tokens[-1]], 1, generator=generator)
            tokens.append(following[:, 0])
        return torch.stack(tokens, 1)

    def label(self, tokens: Tensor) -> Tensor:
        return _next_tokens(tokens)


class RandomTokensTask(Task):
    """A task on uniformly random tokens. Every label is one of 16 symbols, so that chance is ln(16)."""

    num_symbols = 16
    optimum = 0.0
    chance = math.log(16)

    def sample(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        return torch.randint(self.num_symbols, (count, length), generator=generator)


class DistanceTask(RandomTokensTask):
    """Output the token DISTANCE positions back."""

    name = "distance"
    DISTANCE = 5

    def label(self, tokens: Tensor) -> Tensor:
        return F.pad(tokens[:, : -self.DISTANCE], (self.DISTANCE, 0), value=IGNORED)


class AbsoluteTask(RandomTokensTask):
    """Output the token at the absolute position INDEX, from the next position on."""

    name = "absolute"
    INDEX = 5

    def label(self, tokens: Tensor) -> Tensor:
        later = tokens[:, self.INDEX : self.INDEX + 1].expand(-1, tokens.shape[1] - self.INDEX - 1)
        return F.pad(later, (self.INDEX + 1, 0), value=IGNORED)


class StartTokenTask(AbsoluteTask):
    """The absolute task with a start token at position 0, which no other position has."""

    name = "absolute-start"
    num_symbols = RandomTokensTask.num_symbols + 1

    def sample(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        return self._add_start(torch.randint(self.num_symbols - 1, (count, length), generator=generator))

    def cut(self, tokens: Tensor, length: int) -> Tensor:
        return self._add_start(tokens[:, -length:])

    def _add_start(self, tokens: Tensor) -> Tensor:
        return F.pad(tokens[:, 1:], (1, 0), value=self.num_symbols - 1)


class IndexTask(RandomTokensTask):
    """Output the current token plus a random number that belongs to its absolute position, modulo num_symbols."""

    name = "index"
    extends = False

    def __init__(self, device: str = "cpu") -> None:
        generator = torch.Generator().manual_seed(0)
        self.numbers = torch.randint(self.num_symbols, (TRAINING_LENGTH,), generator=generator).to(device)

    def label(self, tokens: Tensor) -> Tensor:
        return (tokens + self.numbers[: tokens.shape[1]]) % self.num_symbols


class TextTask(Task):
    """Next byte of Python's standard library."""

    name = "text"
    num_symbols = 256

    def sample(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        return TRAINING_TEXT.sample(count, length, generator)

    def sample_evaluation(self, length: int) -> Tensor:
        return VALIDATION_TEXT.sample(NUM_EVAL_SEQUENCES, length, torch.Generator().manual_seed(EVAL_SEED))

    def label(self, tokens: Tensor) -> Tensor:
        return _next_tokens(tokens)


def tasks(device: str = "cpu") -> dict[str, Task]:
    """The tasks by name."""
    random_tokens = (DistanceTask(), AbsoluteTask(), StartTokenTask(), IndexTask(device))
    return {task.name: task for task in (LocalTask(), *random_tokens, TextTask())}


# ---------------------------------------------------------------------------------------- models


def position_config(method: str, vocab_size: int, *, scaling: str | None = None, factor: int = 1) -> Config:
    """Config of a small decoder with a position method. `factor` is the sequence length in training lengths."""
    embedding: dict[str, Any] = {"scale": "sqrt_d_model"}  # token embeddings as large as sinusoidal positions
    attention: dict[str, Any] = {"heads": HEADS, "position": {"kind": "none"}}
    if method == "sinusoidal":
        embedding["position"] = {"kind": "sinusoidal"}
    elif method == "learned":
        embedding["position"] = {"kind": "learned", "length": TRAINING_LENGTH}
    elif method == "relative-bias":
        # Distances from half of the training length on share one bucket, so that every bucket is trained.
        attention["position"] = {"kind": "relative-bias", "buckets": 16, "max_distance": TRAINING_LENGTH // 2}
    else:
        attention["position"] = {"kind": method}
    if scaling is not None:
        attention["position"]["scaling"] = _scaling_config(scaling, factor)
    stack = {"layers": LAYERS, "embedding": embedding, "block": {"attention": attention}}
    head = {"vocab_size": vocab_size, "d_model": D_MODEL, "init": {"kind": "xavier"}}
    return read_config({"form": "decoder", "decoder": stack} | head)


def _scaling_config(name: str, factor: int) -> dict[str, Any]:
    """Scaling of RoPE for `factor` training lengths.

    Dynamic NTK with factor 1 multiplies theta by `factor` to the power of d/(d − 2) (NTK-aware scaling).
    """
    return {
        "linear": {"kind": "linear", "factor": factor},
        "ntk": {"kind": "dynamic", "factor": 1.0, "original_length": TRAINING_LENGTH},
        "yarn": {"kind": "yarn", "factor": factor, "original_length": TRAINING_LENGTH},
    }[name]


# ---------------------------------------------------------------------------------------- measurements

Losses = dict[tuple[str, int], list[float]]
"""(Position method, length in training lengths) → losses, one per seed."""


def measure_method(
    task: Task, method: str, device: str = "cpu", grid: TrainingGrid = GRID
) -> tuple[Losses, list[float], float]:
    """Train a position method on a task; return its losses by length, the effects of a shift, and the learning rate.

    Of the learning rates, the one with the lowest training loss is used. Results are absent for learned positions
    beyond their table, and beyond the training length if the task does not extend.
    """
    config = position_config(method, task.num_symbols)
    trained = train_grid(lambda seed: build(config, seed=seed), task, grid, loss=task.loss, device=device)
    members = trained.best_members()
    tokens = task.sample_evaluation(max(LENGTHS) * TRAINING_LENGTH).to(device)
    losses: Losses = {}
    for length, scaling in product(LENGTHS, (None, *SCALINGS)):
        if not is_defined(task, method, length, scaling):
            continue
        config = position_config(method, task.num_symbols, scaling=scaling, factor=length)
        model = build(config, device=device)
        view = replace(trained, model=model)
        name = method if scaling is None else f"{method}-{scaling}"
        losses[name, length] = [evaluate(view.load_member(member), task, tokens, length) for member in members]
    return losses, [shift_effect(trained.load_member(member), tokens) for member in members], trained.best_lr


def is_defined(task: Task, method: str, length: int, scaling: str | None) -> bool:
    """Whether a method can be evaluated at a length. At the training length, scaling does not change RoPE."""
    if length == 1:
        return scaling is None
    return task.extends and method != "learned" and (scaling is None or method == "rope")


@torch.no_grad()
def evaluate(model: nn.Module, task: Task, tokens: Tensor, length: int) -> float:
    """Loss on the last half training length of sequences of `length` training lengths, cut from the end of `tokens`."""
    tokens = task.cut(tokens, length * TRAINING_LENGTH)
    labels = task.label(tokens)[:, -TRAINING_LENGTH // 2 :]
    logits = model(tokens)[:, -TRAINING_LENGTH // 2 :]
    return float(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED))


@torch.no_grad()
def shift_effect(model: nn.Module, tokens: Tensor) -> float:
    """Relative change of the logits if all positions increase by half of the training length.

    It is zero, up to rounding, for a method that depends on distances only.
    """
    tokens = tokens[:, : TRAINING_LENGTH // 2]
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    logits, shifted = model(tokens), model(tokens, positions=positions + TRAINING_LENGTH // 2)
    return float((shifted - logits).norm() / logits.norm())


DIFFERENCES = (("sinusoidal", "learned"), ("rope", "sinusoidal"), ("rope", "learned"), ("alibi", "rope"))
"""Pairs of methods whose losses within the training length are compared."""


def list_parts(device: str) -> dict[str, PartFn]:
    return {
        f"{task}: {method}": partial(measure_part, task, method, device)
        for task, method in product(tasks(device), METHODS)
    }


def measure_part(task: str, method: str, device: str) -> dict[str, list[float]]:
    """Losses by `METHOD/LENGTH` and effects of a shift, one per seed, and the learning rate."""
    losses, shifts, lr = measure_method(tasks(device)[task], method, device)
    return {f"{name}/{length}": values for (name, length), values in losses.items()} | {"shift": shifts, "lr": [lr]}


def describe_settings(device: str) -> dict[str, Any]:
    return {
        "model": f"decoder, {LAYERS} layers, d_model {D_MODEL}, {HEADS} heads",
        "training": f"Adam, {GRID.steps} steps of {GRID.batch_size} × {TRAINING_LENGTH} tokens, best of lr {GRID.lrs}",
        "training length": TRAINING_LENGTH,
        "seeds": GRID.num_seeds,
        "evaluated positions": f"last {TRAINING_LENGTH // 2}",
        "absent": "learned positions beyond the table; RoPE scaling at 1x; task index beyond 1x",
    }


def summarize(results: Mapping[str, PartResults]) -> dict[str, Estimate]:
    """Estimates of the values by seed of all parts."""
    estimates: dict[str, Estimate] = {}
    for task in tasks().values():
        losses: Losses = {}
        for method in METHODS:
            values = {key: list(cast(Sequence[float], part)) for key, part in results[f"{task.name}: {method}"].items()}
            shifts = values.pop("shift")
            estimates[f"best-lr/{method}/{task.name}"] = exact(values.pop("lr")[0])
            if task.name == "text":
                estimates[f"shift/{method}"] = estimate(shifts)
            for key, by_seed in values.items():
                name, _, length = key.rpartition("/")
                losses[name, int(length)] = by_seed
        estimates |= summarize_task(task, losses)
    return estimates


def summarize_task(task: Task, losses: Losses) -> dict[str, Estimate]:
    """Loss, progress from chance to optimum, change of the loss with the length, and differences between methods.

    Changes and differences are between models with equal seeds.
    """
    estimates = {}
    for (method, length), values in losses.items():
        key = f"{method}/{task.name}/{length}x"
        estimates[f"loss/{key}"] = estimate(values)
        if task.chance is not None and task.optimum is not None:
            span = task.chance - task.optimum
            estimates[f"progress/{key}"] = estimate([(task.chance - value) / span for value in values])
        if length > 1:
            base = losses["rope" if method.startswith("rope") else method, 1]
            estimates[f"change/{key}"] = estimate_difference(values, base)
    for a, b in DIFFERENCES:
        if (a, 1) in losses and (b, 1) in losses:
            estimates[f"difference/{a}-{b}/{task.name}/1x"] = estimate_difference(losses[a, 1], losses[b, 1])
    return estimates
