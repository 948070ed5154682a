"""One softmax and two targets: an attention layer whose outputs are the tokens at two different positions.

One head has one row of weights and one value projection, so its output is one weighted sum of values. If the weights
depend on the positions alone, (w, 1 − w) with w ≥ ½, a linear readout cannot have both tokens as top-1. The loss is
convex in the readout and symmetric in the tokens, so a best readout treats all tokens alike: it gives the token with
the smaller weight at most half of the probability, and the loss of one target is at least (1 − 1/V)·ln 2.

Weights that depend on the tokens add information on their order, and a nonlinear readout can use unequal weights.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cutaway.evaluate.functional import entropy
from cutaway.learn.studies.study import Estimate, estimate
from cutaway.learn.studies.train_grid import TrainedGrid, TrainingGrid, train_grid

VOCAB, SEQ_LEN, D_MODEL, HIDDEN = 16, 8, 32, 128
TARGETS = (1, 4)
"""Positions of the two target tokens."""
GRID = TrainingGrid(lrs=(3e-3,), warmups=(0,), num_seeds=10, steps=1000, batch_size=64, seq_len=SEQ_LEN)
TEST_SIZE = 2048
QK_SCALES = (1.0, 4.0, 16.0)
"""Factors of the initial query and key weights in the measurement of saturation."""


@dataclass(frozen=True)
class LayerConfig:
    """An attention layer. Its width does not depend on the number of heads."""

    heads: int
    reads_tokens: bool = False
    """Whether queries and keys depend on the tokens, or on the positions alone. Values depend on both."""
    has_ffn: bool = False
    qk_scale: float = 1.0


VARIANTS = {
    "1-head": LayerConfig(1),
    "2-heads": LayerConfig(2),
    "1-head-token-weights": LayerConfig(1, reads_tokens=True),
    "1-head-ffn": LayerConfig(1, has_ffn=True),
}


class AttentionLayer(nn.Module):
    """Attention of the last position to all positions, an optional FFN, and logits of the two targets."""

    def __init__(self, config: LayerConfig, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def matrix(rows: int, columns: int, std: float) -> nn.Parameter:
            return nn.Parameter(std * torch.randn(rows, columns, generator=generator))

        self.config = config
        self.token, self.position = matrix(VOCAB, D_MODEL, 1.0), matrix(SEQ_LEN, D_MODEL, 1.0)
        std = 1 / math.sqrt(D_MODEL)
        self.q, self.k = (matrix(D_MODEL, D_MODEL, config.qk_scale * std) for _ in range(2))
        self.v, self.o = (matrix(D_MODEL, D_MODEL, std) for _ in range(2))
        if config.has_ffn:
            self.up, self.down = matrix(D_MODEL, HIDDEN, std), matrix(HIDDEN, D_MODEL, 1 / math.sqrt(HIDDEN))
            self.up_bias = nn.Parameter(torch.zeros(HIDDEN))
        self.readout = matrix(D_MODEL, 2 * VOCAB, std)

    def pattern(self, tokens: Tensor) -> Tensor:
        """(B, T) → (B, heads, T): attention weights of the last position."""
        x = self.position.expand(len(tokens), -1, -1)
        if self.config.reads_tokens:
            x = x + self.token[tokens]
        q = (x[:, -1] @ self.q).unflatten(-1, (self.config.heads, -1))
        k = (x @ self.k).unflatten(-1, (self.config.heads, -1))
        return torch.softmax(torch.einsum("bhd,bthd->bht", q, k) / math.sqrt(D_MODEL / self.config.heads), -1)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) → (B, 2, V): logits of the two targets."""
        v = ((self.token[tokens] + self.position) @ self.v).unflatten(-1, (self.config.heads, -1))
        h = torch.einsum("bht,bthd->bhd", self.pattern(tokens), v).flatten(1) @ self.o
        if self.config.has_ffn:
            h = h + torch.relu(h @ self.up + self.up_bias) @ self.down
        return (h @ self.readout).unflatten(-1, (2, VOCAB))


class UniformTokens:
    """Independent random tokens."""

    def sample(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        return torch.randint(VOCAB, (count, length), generator=generator)


def two_target_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of the two targets."""
    targets = torch.stack([tokens[:, position] for position in TARGETS], 1)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train_layers(config: LayerConfig, grid: TrainingGrid, device: str) -> TrainedGrid:
    return train_grid(
        lambda seed: AttentionLayer(config, seed), UniformTokens(), grid, loss=two_target_loss, device=device
    )


def measure_two_targets(device: str, grid: TrainingGrid = GRID) -> dict[str, Estimate]:
    """Loss, accuracy of both targets, and weights at the targets, by layer, at the learning rate with the least loss.

    `better` and `worse` are the accuracies of the target that is predicted better and of the other one.
    """
    tokens = UniformTokens().sample(TEST_SIZE, SEQ_LEN, torch.Generator().manual_seed(1)).to(device)
    bound = (1 - 1 / VOCAB) * math.log(2) / 2
    estimates: dict[str, Estimate] = {"two-targets/loss-bound/1-head": Estimate(bound, bound, bound, 1)}
    for name, config in VARIANTS.items():
        trained = train_layers(config, grid, device)
        losses = trained.final_losses()
        best = min(losses, key=lambda key: sum(losses[key]))
        estimates[f"two-targets/loss/{name}"] = estimate(losses[best])
        rows = [
            _evaluate_layer(trained, index, tokens)
            for index, (lr, warmup, _) in enumerate(grid.members)
            if (lr, warmup) == best
        ]
        for key in rows[0]:
            estimates[f"two-targets/{key}/{name}"] = estimate([row[key] for row in rows])
    return estimates


@torch.no_grad()
def _evaluate_layer(trained: TrainedGrid, index: int, tokens: Tensor) -> dict[str, float]:
    """Accuracy of the two targets, and the larger and smaller of the first head's mean weights at them."""
    model = trained.load_member(index)
    assert isinstance(model, AttentionLayer)
    accuracy = (model(tokens).argmax(-1) == tokens[:, list(TARGETS)]).float().mean(0)
    weights = model.pattern(tokens)[:, 0, list(TARGETS)].mean(0)
    return {
        "accuracy": float(accuracy.mean()),
        "better": float(accuracy.max()),
        "worse": float(accuracy.min()),
        "weight": float(weights.max()),
        "other-weight": float(weights.min()),
    }


def measure_saturation(device: str, grid: TrainingGrid = GRID) -> dict[str, Estimate]:
    """Entropy at initialization and accuracy after training of two heads, by the scale of the initial scores.

    Large scores saturate the softmax: a head attends to one random position, and its scores get almost no gradient.
    `entropy` is relative to uniform attention.
    """
    tokens = UniformTokens().sample(TEST_SIZE, SEQ_LEN, torch.Generator().manual_seed(1)).to(device)
    estimates: dict[str, Estimate] = {}
    for scale in QK_SCALES:
        config = LayerConfig(2, qk_scale=scale)
        entropies = []
        for seed in range(grid.num_seeds):
            with torch.no_grad():
                pattern = AttentionLayer(config, seed).pattern(tokens[:1].cpu())
            entropies.append(float(entropy(pattern).mean()) / math.log(SEQ_LEN))
        trained = train_layers(config, grid, device)
        accuracy = [_evaluate_layer(trained, index, tokens)["accuracy"] for index in range(len(grid.members))]
        estimates[f"saturation/entropy/{scale:g}"] = estimate(entropies)
        estimates[f"saturation/accuracy/{scale:g}"] = estimate(accuracy)
    return estimates
