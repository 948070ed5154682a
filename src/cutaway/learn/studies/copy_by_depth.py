"""Training loss by depth with and without residual connections: models that predict each token from itself."""

from contextlib import nullcontext
from dataclasses import dataclass
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor

from cutaway.learn.studies.study import Estimate, estimate
from cutaway.learn.studies.train_grid import TrainingGrid, train_grid
from cutaway.lens.analysis.gradients import placement_config
from cutaway.lens.edit import edit
from cutaway.model import build

DEPTHS = (1, 2, 3, 6, 12, 24, 48, 96)
GRID = TrainingGrid()
VOCAB_SIZE = 16
EVAL_SEED = 10_000


def describe_settings() -> str:
    settings = f"best of lr {GRID.lrs} and warm-up {GRID.warmups}"
    return f"pre-norm, d_model 32, {VOCAB_SIZE} symbols, {GRID.steps} steps, {settings}"


@dataclass(frozen=True)
class RandomTokens:
    """Uniform random tokens. A model that predicts each token from itself has to pass it through all blocks."""

    vocab_size: int = VOCAB_SIZE

    def sample(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        return torch.randint(self.vocab_size, (count, length), generator=generator)


def copy_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of each token at its own position."""
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def measure_copying(depth: int, residual: bool, device: str = "cpu", grid: TrainingGrid = GRID) -> dict[str, Estimate]:
    """Training loss and accuracy of copying, at the learning rate and warm-up with the lowest mean loss.

    Every sequence is new, so the training loss is also the loss on unseen data. A uniform guess has ln 16 = 2.77 nats.
    """
    data, edits = RandomTokens(), None if residual else {"blocks.*": "no_residual"}
    config = placement_config("pre", depth, activation="relu", d_model=32, vocab_size=data.vocab_size)
    trained = train_grid(lambda seed: build(config, seed=seed), data, grid, loss=copy_loss, edits=edits, device=device)
    tokens = data.sample(64, grid.seq_len, torch.Generator().manual_seed(EVAL_SEED)).to(device)
    losses = min(trained.final_losses().values(), key=fmean)
    accuracies = []
    for member in trained.best_members():
        model = trained.load_member(member)
        with torch.no_grad(), edit(model, edits) if edits else nullcontext():
            accuracies.append(float((model(tokens).argmax(-1) == tokens).double().mean()))
    key = f"{'residual' if residual else 'no-residual'}/{depth}"
    return {f"copy-loss/{key}": estimate(losses), f"copy-accuracy/{key}": estimate(accuracies)}
