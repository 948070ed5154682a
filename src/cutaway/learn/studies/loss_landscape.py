"""Loss landscape with and without residual connections: slices, lines between seeds, and the Hessian."""

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.func import grad, vmap

from cutaway.learn.studies.study import Estimate, estimate
from cutaway.learn.studies.train_grid import (
    MarkovChain,
    TrainedGrid,
    TrainingGrid,
    call_with_weights,
    next_token_loss,
    train_grid,
)
from cutaway.lens.analysis.gradients import placement_config
from cutaway.lens.edit import edit
from cutaway.model import build

DEPTHS = (3, 6, 12)
GRID = TrainingGrid(lrs=(1e-3, 3e-3), warmups=(50,), num_seeds=10, steps=1000)
NUM_DIRECTIONS, NUM_POINTS, RADIUS = 3, 41, 1.0
HESSIAN_ITERATIONS = 20
EVAL_SEED = 10_000


def describe_settings() -> str:
    directions = f"{NUM_DIRECTIONS} filter-normalized directions per seed, {NUM_POINTS} points in ±{RADIUS:g}"
    return f"pre-norm, d_model 32, Markov chain, {GRID.steps} steps, {directions}"


def measure_landscape(
    depth: int, residual: bool, device: str = "cpu", grid: TrainingGrid = GRID
) -> dict[str, Estimate]:
    """Shape of the loss around trained weights and between two seeds, at the learning rate with the lowest mean loss.

    Along filter-normalized random directions: `curvature` is the second derivative at the center, `sharpness` the
    increase of the loss at half of the radius, `nonconvex` the share of points with a negative second difference and
    `local-maxima` the number of maxima in the interior. Between seeds: `barrier` is the largest loss above the line
    between the losses of both. `hessian-max` is the largest eigenvalue of the Hessian, `hessian-negative` the absolute
    value of the most negative one, and `hessian-negative-to-max` their ratio.
    """
    data, edits = MarkovChain(), None if residual else {"blocks.*": "no_residual"}
    config = placement_config("pre", depth, activation="relu", d_model=32, vocab_size=data.num_symbols)
    trained = train_grid(lambda seed: build(config, seed=seed), data, grid, edits=edits, device=device)
    members = trained.best_members()
    tokens = data.sample(64, grid.seq_len, torch.Generator().manual_seed(EVAL_SEED)).to(device)
    rows = []
    with torch.no_grad(), nullcontext() if edits is None else edit(trained.model, edits):
        surface = LossSurface(trained, tokens)
        for seed, (member, other) in enumerate(zip(members, [*members[1:], members[0]], strict=True)):
            weights, others = trained.weights[member], trained.weights[other]
            rows.append(_slice_stats(surface, weights, seed) | _interpolation_stats(surface, weights, others))
            rows[-1] |= {"progress": data.progress(float(surface.losses(weights[None])[0]))}
            rows[-1] |= _hessian_stats(surface, weights, seed)
    key = f"{'residual' if residual else 'no-residual'}/{depth}"
    ratios = {"curvature", "sharpness", "hessian-max", "hessian-negative", "hessian-negative-to-max"}
    return {
        f"landscape/{measure}/{key}": estimate(
            [row[measure] for row in rows], ratio=measure in ratios and min(row[measure] for row in rows) > 0
        )
        for measure in rows[0]
    }


class LossSurface:
    """Loss on fixed tokens as a function of the flat weights (P,) of a member of a grid."""

    def __init__(self, trained: TrainedGrid, tokens: Tensor) -> None:
        self.model, self.tokens = trained.model, tokens
        self.shapes = [parameter.shape for parameter in trained.model.parameters()]

    def loss(self, flat: Tensor) -> Tensor:
        return next_token_loss(call_with_weights(self.model, flat, self.tokens), self.tokens)

    def losses(self, weights: Tensor) -> Tensor:
        """(K,): losses at weights (K, P)."""
        return vmap(self.loss, chunk_size=16)(weights)

    def random_direction(self, flat: Tensor, generator: torch.Generator) -> Tensor:
        """A filter-normalized direction: each row of a matrix has the norm of the row of the weights, vectors are 0."""
        pieces = []
        for shape, piece in zip(self.shapes, flat.split([shape.numel() for shape in self.shapes]), strict=True):
            direction = torch.randn(shape, generator=generator).to(flat)
            rows = piece.view(shape)
            scale = rows.norm(dim=-1, keepdim=True) / direction.norm(dim=-1, keepdim=True)
            pieces.append((direction * scale if len(shape) > 1 else torch.zeros_like(direction)).flatten())
        return torch.cat(pieces)

    def hessian_product(self, flat: Tensor, vector: Tensor) -> Tensor:
        return grad(lambda weights: grad(self.loss)(weights) @ vector)(flat)


def _slice_stats(surface: LossSurface, weights: Tensor, seed: int) -> dict[str, float]:
    generator = torch.Generator().manual_seed(seed)
    steps = torch.linspace(-RADIUS, RADIUS, NUM_POINTS, device=weights.device)
    slices = []
    for _ in range(NUM_DIRECTIONS):
        direction = surface.random_direction(weights, generator)
        slices.append(describe_slice(surface.losses(weights + steps[:, None] * direction)))
    return {measure: sum(row[measure] for row in slices) / len(slices) for measure in slices[0]}


def describe_slice(losses: Tensor) -> dict[str, float]:
    """Measures of the losses (K,) at equally spaced points in ±RADIUS."""
    center, spacing = len(losses) // 2, 2 * RADIUS / (len(losses) - 1)
    second = losses[2:] - 2 * losses[1:-1] + losses[:-2]
    half = (losses[center // 2] + losses[center + (len(losses) - center) // 2]) / 2
    return {
        "curvature": float(second[center - 1]) / spacing**2,
        "sharpness": float(half - losses[center]),
        "nonconvex": float((second < 0).double().mean()),
        "local-maxima": float(count_maxima(losses)),
    }


def count_maxima(values: Tensor, prominence: float = 0.01) -> int:
    """Number of interior local maxima that exceed the lowest value on each side by a part of the range."""
    limit = prominence * float(values.max() - values.min())
    first, *rest = values.tolist()
    count, low, high, rising = 0, first, first, False
    for value in rest:
        if rising:
            high = max(high, value)
            if high - value > limit:
                count, rising, low = count + 1, False, value
        else:
            low = min(low, value)
            if value - low > limit:
                rising, high = True, value
    return count


def _interpolation_stats(surface: LossSurface, first: Tensor, second: Tensor) -> dict[str, float]:
    """Loss on the line between the weights of two seeds."""
    parts = torch.linspace(0, 1, NUM_POINTS, device=first.device)
    losses = surface.losses(torch.lerp(first, second, parts[:, None]))
    chord = torch.lerp(losses[0], losses[-1], parts)
    return {"barrier": float((losses - chord).max()), "barrier-maxima": float(count_maxima(losses))}


def _hessian_stats(surface: LossSurface, weights: Tensor, seed: int) -> dict[str, float]:
    """Extreme eigenvalues of the Hessian by the Lanczos method."""
    vector = torch.randn(len(weights), generator=torch.Generator().manual_seed(seed)).to(weights)
    eigenvalues = lanczos(lambda v: surface.hessian_product(weights, v), vector, HESSIAN_ITERATIONS)
    largest, negative = float(eigenvalues.max()), max(1e-6, -float(eigenvalues.min()))
    return {"hessian-max": largest, "hessian-negative": negative, "hessian-negative-to-max": negative / largest}


def lanczos(product: Callable[[Tensor], Tensor], start: Tensor, iterations: int) -> Tensor:
    """Eigenvalues of the tridiagonal matrix of the Lanczos method, with full orthogonalization."""
    basis = [start / start.norm()]
    diagonal, off_diagonal = [], []
    for _ in range(iterations):
        vector = product(basis[-1])
        diagonal.append(vector @ basis[-1])
        for _ in range(2):
            for other in basis:
                vector = vector - (vector @ other) * other
        off_diagonal.append(vector.norm())
        basis.append(vector / off_diagonal[-1])
    matrix = torch.diag(torch.stack(diagonal))
    side = torch.diag(torch.stack(off_diagonal[:-1]), 1)
    return torch.linalg.eigvalsh((matrix + side + side.T).double().cpu())
