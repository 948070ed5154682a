"""Train many small models of one shape at once: all seeds, learning rates and warm-ups in one batch of weights."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from statistics import fmean
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from cutaway.lens.edit import edit
from cutaway.model import Transformer

BETAS, EPS = (0.9, 0.98), 1e-8


@dataclass(frozen=True)
class MarkovChain:
    """A Markov chain over a few symbols with known entropies, as training data.

    A model of the symbol frequencies alone reaches `unigram_entropy`, a model of the transitions `entropy_rate`.
    """

    num_symbols: int = 16
    sharpness: float = 3.0
    seed: int = 0

    @cached_property
    def transitions(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.softmax(self.sharpness * torch.randn(self.num_symbols, self.num_symbols, generator=generator), -1)

    @cached_property
    def frequencies(self) -> Tensor:
        """Stationary distribution."""
        return torch.linalg.matrix_power(self.transitions.double(), 200)[0].float()

    @property
    def unigram_entropy(self) -> float:
        return float(-(self.frequencies * self.frequencies.log()).sum())

    @property
    def entropy_rate(self) -> float:
        return float(-(self.frequencies[:, None] * self.transitions * self.transitions.log()).sum())

    def progress(self, loss: float) -> float:
        """0 at the loss of symbol frequencies alone, 1 at the entropy rate."""
        return (self.unigram_entropy - loss) / (self.unigram_entropy - self.entropy_rate)

    def sample(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        """(count, length): sequences."""
        tokens = torch.multinomial(self.frequencies, count, replacement=True, generator=generator)[:, None]
        for _ in range(length - 1):
            following = torch.multinomial(self.transitions[tokens[:, -1]], 1, generator=generator)
            tokens = torch.cat([tokens, following], 1)
        return tokens


class TrainingData(Protocol):
    """Training data of a grid. Every seed has its own sequences."""

    def sample(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        """(count, length): token ids."""
        ...


LossFn = Callable[[Tensor, Tensor], Tensor]
"""Loss from logits (B, T, V) and tokens (B, T)."""


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of each next token."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@dataclass(frozen=True)
class TrainingGrid:
    """Learning rates, numbers of warm-up steps and seeds. Every combination is one model, a member of the grid."""

    lrs: Sequence[float] = (3e-4, 1e-3, 3e-3, 1e-2)
    warmups: Sequence[int] = (0, 50)
    num_seeds: int = 10
    steps: int = 200
    batch_size: int = 16
    seq_len: int = 17

    @property
    def members(self) -> list[tuple[float, int, int]]:
        """Learning rate, number of warm-up steps and seed of each member."""
        return list(product(self.lrs, self.warmups, range(self.num_seeds)))


@dataclass(frozen=True)
class TrainedGrid:
    """The trained members of a grid."""

    grid: TrainingGrid
    model: nn.Module
    """Model into which the weights of a member can be loaded."""
    weights: Tensor
    """(members, parameters): the trained weights."""
    losses: Tensor
    """(steps, members): training loss before each step."""

    def final_losses(self) -> dict[tuple[float, int], list[float]]:
        """Mean loss of the last tenth of the steps by learning rate and warm-up, one per seed.

        A loss that is not finite is infinity.
        """
        final = self.losses[-max(1, self.grid.steps // 10) :].mean(0).nan_to_num(nan=float("inf")).tolist()
        results: dict[tuple[float, int], list[float]] = {}
        for (lr, warmup, _), loss in zip(self.grid.members, final, strict=True):
            results.setdefault((lr, warmup), []).append(loss)
        return results

    def best_members(self) -> list[int]:
        """Indices of the members at the learning rate and warm-up with the lowest mean final loss, one per seed."""
        losses = self.final_losses()
        best = min(losses, key=lambda setting: fmean(losses[setting]))
        return [index for index, (lr, warmup, _) in enumerate(self.grid.members) if (lr, warmup) == best]

    @property
    def best_lr(self) -> float:
        """Learning rate of the best members."""
        return self.grid.members[self.best_members()[0]][0]

    @torch.no_grad()
    def load_member(self, index: int) -> nn.Module:
        """Load the weights of a member into the model and return it. Earlier results become invalid."""
        offset = 0
        for param in self.model.parameters():
            param.copy_(self.weights[index, offset : offset + param.numel()].view_as(param))
            offset += param.numel()
        return self.model


def train_grid(
    build_model: Callable[[int], nn.Module],
    data: TrainingData,
    grid: TrainingGrid,
    *,
    loss: LossFn = next_token_loss,
    edits: Mapping[str, str] | None = None,
    device: str = "cpu",
) -> TrainedGrid:
    """Train one model per combination with Adam and a constant learning rate after warm-up.

    `build_model(seed)` returns a model that maps tokens (B, T) to logits (B, T, V). Members of one seed have equal
    initial weights and equal data. `edits` are structural edits (`ct.edit`) in effect during training.
    """
    members = grid.members
    seeds = torch.tensor([seed for *_, seed in members], device=device)
    lr = torch.tensor([lr for lr, *_ in members], device=device)
    warmup = torch.tensor([max(1, steps) for _, steps, _ in members], device=device)
    batches = torch.stack(
        [
            data.sample(grid.steps * grid.batch_size, grid.seq_len, torch.Generator().manual_seed(seed))
            for seed in range(grid.num_seeds)
        ]
    ).unflatten(1, (grid.steps, grid.batch_size))
    batches = batches.to(device)
    losses = torch.empty(grid.steps, len(members), device=device)
    model = build_model(0).to(device)
    if isinstance(model, Transformer):
        model.use_kernel("explicit")  # vmap runs SDPA once per member
    with torch.no_grad(), edit(model, edits) if edits else nullcontext():
        models = [build_model(seed) for seed in range(grid.num_seeds)]
        weights = torch.stack([torch.cat([p.flatten() for p in m.parameters()]) for m in models]).to(device)
        trainer = _GridTrainer(model, weights[seeds], loss)
        run_step = _capture(trainer, batches[seeds, 0]) if device == "cuda" else trainer.step
        for step in range(grid.steps):
            correction = [1 - beta ** (step + 1) for beta in BETAS]
            rate = lr * ((step + 1) / warmup).clamp(max=1)
            losses[step] = run_step(batches[seeds, step], torch.stack([rate, *(rate * 0 + c for c in correction)]))
    return TrainedGrid(grid, model, trainer.weights, losses)


def call_with_weights(model: nn.Module, flat: Tensor, tokens: Tensor) -> Tensor:
    """Call a model with other weights, all of them in one vector, in the order of its parameters."""
    params = dict(model.named_parameters())
    pieces = flat.split([param.numel() for param in params.values()])
    weights = {name: piece.view(params[name].shape) for name, piece in zip(params, pieces, strict=True)}
    return functional_call(model, weights, (tokens,), tie_weights=False)  # a tied module is shared


class _GridTrainer:
    """Weights and Adam state of all members, (members, parameters), and a training step."""

    def __init__(self, model: nn.Module, weights: Tensor, loss: LossFn) -> None:
        self.model, self.weights, self.compute_loss = model, weights, loss
        self.first, self.second = torch.zeros_like(weights), torch.zeros_like(weights)

    def loss(self, flat: Tensor, tokens: Tensor) -> Tensor:
        """Loss of one member."""
        return self.compute_loss(call_with_weights(self.model, flat, tokens), tokens)

    def step(self, tokens: Tensor, schedule: Tensor) -> Tensor:
        """Adam step of all members, in place. `schedule` has, by member, the learning rate and two bias corrections.

        Return the losses before the step.
        """
        gradient, losses = vmap(grad_and_value(self.loss))(self.weights, tokens)
        rate, first_correction, second_correction = schedule[:, :, None]
        self.first.lerp_(gradient, 1 - BETAS[0])
        self.second.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        denominator = (self.second / second_correction).sqrt_().add_(EPS)
        self.weights.addcdiv_(self.first * rate / first_correction, denominator, value=-1)
        return losses


def _capture(trainer: _GridTrainer, tokens: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Capture the step as a CUDA graph: a deep model has thousands of short kernels, which are slow to launch."""
    tokens, schedule = tokens.clone(), torch.zeros(3, len(tokens), device=tokens.device)
    schedule[1:] = 1  # learning rate 0: the warm-up steps do not change the weights
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            trainer.step(tokens, schedule)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        losses = trainer.step(tokens, schedule)
    trainer.first.zero_()
    trainer.second.zero_()

    def replay(new_tokens: Tensor, new_schedule: Tensor) -> Tensor:
        tokens.copy_(new_tokens)
        schedule.copy_(new_schedule)
        graph.replay()
        return losses

    return replay
