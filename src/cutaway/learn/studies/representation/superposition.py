"""Superposition: a toy model that stores more sparse features than it has dimensions, and the tokens of tiny-python.

The toy model is that of Elhage et al. 2022 (https://arxiv.org/abs/2209.10652): features x are compressed to h = W·x and
read back as ReLU(Wᵀ·h + b). Each feature is 0 with probability `sparsity`, else uniform in [0, 1].
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cutaway.learn.studies.representation.python_texts import load_model
from cutaway.learn.studies.study import Estimate, estimate
from cutaway.lens.analysis.attribution import unembedding
from cutaway.model import DecoderOnly

NUM_FEATURES, NUM_DIMS = 20, 5
SPARSITIES = (0.0, 0.5, 0.7, 0.9, 0.97, 0.99)
TEST_SPARSITIES = (0.99, 0.9, 0.7)
NUM_SEEDS, STEPS, BATCH_SIZE, LR = 10, 3000, 256, 5e-3
IMPORTANCE_DECAY = 0.9
REPRESENTED, RECOVERED = 0.5, 0.5
"""A feature is represented if ‖W_i‖² exceeds the first, and recovered if the R² of its output exceeds the second."""


@dataclass(frozen=True)
class ToyModels:
    """Trained toy models, one per sparsity and seed."""

    weight: Tensor
    """(sparsities, seeds, features, dimensions)"""
    bias: Tensor
    """(sparsities, seeds, features)"""

    def reconstruct(self, x: Tensor) -> Tensor:
        """(sparsities, seeds, samples, features) → the same shape."""
        return torch.relu(x @ self.weight @ self.weight.mT + self.bias[..., None, :])

    def represented(self) -> Tensor:
        """(sparsities, seeds, features): whether a feature is represented."""
        return self.weight.square().sum(-1) > REPRESENTED

    def interference(self) -> Tensor:
        """(sparsities, seeds): mean over represented features of Σ_{j≠i} (Ŵ_i·W_j)²."""
        unit = self.weight / self.weight.norm(dim=-1, keepdim=True).clamp(min=1e-9)
        overlaps = (unit @ self.weight.mT).square()
        total = overlaps.sum(-1) - overlaps.diagonal(dim1=-2, dim2=-1)
        represented = self.represented()
        return (total * represented).sum(-1) / represented.sum(-1).clamp(min=1)


def importance(num_features: int = NUM_FEATURES, device: str = "cpu") -> Tensor:
    """(features,): weight of each feature in the loss."""
    return IMPORTANCE_DECAY ** torch.arange(num_features, device=device)


def sample_features(shape: Sequence[int], sparsity: Tensor, generator: torch.Generator) -> Tensor:
    """Features of the given shape; `sparsity` broadcasts to it."""
    values = torch.rand(*shape, generator=generator, device=generator.device)
    return values * (torch.rand(*shape, generator=generator, device=generator.device) >= sparsity)


def train_toy_models(
    sparsities: Sequence[float] = SPARSITIES,
    num_seeds: int = NUM_SEEDS,
    steps: int = STEPS,
    *,
    num_features: int = NUM_FEATURES,
    num_dims: int = NUM_DIMS,
    device: str = "cpu",
) -> ToyModels:
    """Train one toy model per sparsity and seed with Adam, all at once. The learning rate decays linearly."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (len(sparsities), num_seeds)
    sparsity = torch.tensor(sparsities, device=device)[:, None, None, None]
    weight = torch.randn(*shape, num_features, num_dims, generator=generator, device=device) / math.sqrt(num_features)
    bias = torch.zeros(*shape, num_features, device=device)
    models = ToyModels(weight.requires_grad_(), bias.requires_grad_())
    optimizer = torch.optim.Adam([weight, bias], lr=LR)
    weights = importance(num_features, device)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = LR * (1 - step / steps)
        x = sample_features((*shape, BATCH_SIZE, num_features), sparsity, generator)
        # Dense members have larger losses; Adam normalizes the gradient of each weight.
        loss = ((models.reconstruct(x) - x).square() * weights).mean((-2, -1)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return ToyModels(weight.detach(), bias.detach())


@torch.no_grad()
def evaluate_reconstruction(models: ToyModels, test_sparsity: Tensor, num_samples: int = 4096) -> tuple[Tensor, Tensor]:
    """Return (R² by feature, weighted loss): (sparsities, seeds, features) and (sparsities, seeds)."""
    device = models.weight.device
    generator = torch.Generator(device).manual_seed(1)
    *shape, num_features, _ = models.weight.shape
    x = sample_features((*shape, num_samples, num_features), test_sparsity, generator)
    squared = (models.reconstruct(x) - x).square().mean(-2)
    variance = x.var(-2, correction=0)
    return 1 - squared / variance, (squared * importance(num_features, str(device))).sum(-1)


def loss_without_superposition(sparsity: float, num_features: int = NUM_FEATURES, num_dims: int = NUM_DIMS) -> float:
    """Loss if the most important features have one dimension each, and the others are replaced by their means."""
    active = 1 - sparsity
    variance = active / 3 - (active / 2) ** 2
    return float(importance(num_features)[num_dims:].sum()) * variance


def measure_superposition(
    device: str, *, sparsities: Sequence[float] = SPARSITIES, num_seeds: int = NUM_SEEDS, steps: int = STEPS
) -> dict[str, Estimate]:
    """Features represented and recovered, interference and loss, by sparsity of the features."""
    models = train_toy_models(sparsities, num_seeds, steps, device=device)
    r2, losses = evaluate_reconstruction(models, torch.tensor(sparsities, device=device)[:, None, None, None])
    represented, interference = models.represented().sum(-1), models.interference()
    estimates: dict[str, Estimate] = {}
    for row, sparsity in enumerate(sparsities):
        key = f"{sparsity:g}"
        estimates[f"superposition/represented/{key}"] = estimate(represented[row].tolist())
        estimates[f"superposition/recovered/{key}"] = estimate((r2[row] > RECOVERED).sum(-1).tolist())
        estimates[f"superposition/interference/{key}"] = estimate(interference[row].tolist())
        relative = losses[row] / loss_without_superposition(sparsity)
        estimates[f"superposition/relative-loss/{key}"] = estimate(relative.tolist(), ratio=True)
    sparsest = ToyModels(models.weight[-1:], models.bias[-1:])
    for sparsity in TEST_SPARSITIES:
        r2, _ = evaluate_reconstruction(sparsest, torch.tensor(sparsity, device=device))
        counts = (r2[0] > RECOVERED).sum(-1).tolist()
        estimates[f"superposition/recovered/{sparsities[-1]:g}/tested-at-{sparsity:g}"] = estimate(counts)
    return estimates


@torch.no_grad()
def measure_token_directions(device: str) -> dict[str, Estimate]:
    """Tokens and dimensions of tiny-python, cosines between embeddings, and the share that decodes to its own token."""
    model = load_model(device).model
    assert isinstance(model, DecoderOnly)
    embedding = unembedding(model.lm_head)
    cosines = torch.nn.functional.normalize(embedding, dim=-1)
    cosines = (cosines @ cosines.T).abs()
    num_tokens, num_dims = embedding.shape
    mean = (cosines.sum() - cosines.diagonal().sum()) / (num_tokens * (num_tokens - 1))
    decoded = (embedding @ embedding.T).argmax(-1) == torch.arange(num_tokens, device=device)
    values = {
        "tokens": num_tokens,
        "dimensions": num_dims,
        "mean-cosine": float(mean),
        "random-mean-cosine": math.sqrt(2 / math.pi / num_dims),
        "decoded": float(decoded.float().mean()),
    }
    return {f"superposition/tiny-python/{name}": Estimate(value, value, value, 1) for name, value in values.items()}
