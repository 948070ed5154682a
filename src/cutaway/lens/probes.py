"""Linear probes: predict a label of each token from its activation, with a held-out split, an interval and a control.

A probe's accuracy alone does not show that the model represents a label: a probe may learn it from the token. The
control is the same probe for labels without meaning (Hewitt & Liang 2019, https://arxiv.org/abs/1909.03368).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cutaway.argument_checks import check_positive_int, check_seed
from cutaway.errors import InputError
from cutaway.lens.activations import ActivationDataset
from cutaway.lens.edit import TensorFn
from cutaway.lens.interventions import Intervention
from cutaway.lens.sites import Indices

__all__ = ["Probe", "ScoreInterval", "fit_probe"]

ProbeKind = Literal["logistic", "ridge"]
ControlKind = Literal["shuffled", "control_task"]
_MAX_LBFGS_STEPS = 100
_INTERVAL = (0.025, 0.975)


class ScoreInterval(NamedTuple):
    """A score on held-out tokens, with its 95 % bootstrap interval over sequences."""

    score: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.score:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True, eq=False)
class Probe:
    """A linear probe: scores = x @ weight.T + bias, for an activation x."""

    kind: ProbeKind
    site: str
    weight: Tensor
    """(classes, d) of a logistic probe, (1, d) of a ridge regression."""
    bias: Tensor
    mean: Tensor
    """Mean activation of the training tokens, (d,)."""
    test: ScoreInterval
    """Accuracy of a logistic probe, R² of a ridge regression, on held-out sequences."""
    control: ScoreInterval
    """Score of a probe for the control labels."""
    baseline: float
    """Score of a constant prediction: the fraction of the most frequent class, or 0 for R²."""
    num_train: int
    num_test: int

    @property
    def selectivity(self) -> float:
        """Score minus control score."""
        return self.test.score - self.control.score

    def predict(self, x: Tensor) -> Tensor:
        """Return the class of each activation, or the value of a ridge regression, (…, d) → (…)."""
        scores = x.to(self.weight.dtype) @ self.weight.T + self.bias
        return scores.argmax(-1) if self.kind == "logistic" else scores[..., 0]

    def direction(self, label: int = 1) -> Tensor:
        """Return the unit vector along which the score of a class increases relative to the others, (d,)."""
        weight = self.weight[0]
        if self.kind == "logistic":
            if not 0 <= label < len(self.weight):
                raise InputError(f"label is {label!r}; the probe has the classes 0 to {len(self.weight) - 1}")
            others = torch.cat((self.weight[:label], self.weight[label + 1 :]))
            weight = self.weight[label] - others.mean(0)
        return weight / weight.norm()

    def steer(self, amount: float, *, label: int = 1, positions: Indices | None = None) -> dict[str, Intervention]:
        """Return the edits for `ct.edit` that add `amount` times the direction to the activation."""
        return {self.site: Intervention("add", self.direction(label) * amount, positions=positions)}

    def ablate(self, *, label: int = 1) -> dict[str, TensorFn]:
        """Return the edits for `ct.edit` that set the component along the direction to its mean on the training set."""
        direction, mean = self.direction(label), self.mean

        def project(value: Tensor) -> Tensor:
            unit = direction.to(value)
            component = (value - mean.to(value)) @ unit
            return value - component[..., None] * unit

        return {self.site: project}

    def __str__(self) -> str:
        name = "accuracy" if self.kind == "logistic" else "R²"
        return f"{self.site}: {name} {self.test}, control {self.control}, constant prediction {self.baseline:.3f}"


class _Data(NamedTuple):
    x: Tensor
    """Standardized activations, (n, d)."""
    groups: Tensor
    """Sequence of each token, (n,)."""
    is_test: Tensor


def fit_probe(
    dataset: ActivationDataset,
    labels: Tensor,
    *,
    site: str | None = None,
    kind: ProbeKind = "logistic",
    control: ControlKind = "control_task",
    l2: float = 1e-3,
    test_fraction: float = 0.25,
    num_bootstrap: int = 1000,
    seed: int = 0,
) -> Probe:
    """Fit a linear probe from the activations at a site to one label per token of the dataset.

    Sequences, not tokens, are divided into a training and a test set, because the tokens of a sequence are similar.

    Args:
        labels: (tokens,). Classes 0, 1, … of a logistic probe, or numbers of a ridge regression. Tokens with the label
            −1 (logistic) or NaN (ridge) are left out.
        site: site of the activations. The default is the only site of the dataset.
        control: labels of the control. control_task: each token id has a fixed random label, drawn from the labels, so
            that the control shows how much a probe can memorize. shuffled: the labels are permuted over the tokens, so
            that the control shows chance.
        l2: weight of the L2 penalty on standardized activations, relative to the mean loss.
        num_bootstrap: number of resamples of the test sequences for the intervals.
    """
    site = dataset.resolve_site(site)
    labels = _check_labels(dataset, labels, kind)
    check_positive_int("num_bootstrap", num_bootstrap)
    check_seed(seed)
    if not 0 < test_fraction < 1 or not 0 < l2 < math.inf:
        raise InputError(f"test_fraction is {test_fraction!r} and l2 is {l2!r}; pass 0 < test_fraction < 1 and l2 > 0")
    keep = (labels.isfinite() if kind == "ridge" else labels >= 0).nonzero()[:, 0]
    batch, labels = dataset.read(keep, [site]), labels[keep]
    generator = torch.Generator().manual_seed(seed)
    x = batch[site].flatten(1).float()
    is_test = _split_sequences(batch.sequences, test_fraction, generator)
    mean, std = x[~is_test].mean(0), x[~is_test].std(0).clamp(min=1e-6)
    data = _Data((x - mean) / std, batch.sequences, is_test)
    weight, bias, test = _fit_and_score(data, labels, kind, l2, num_bootstrap, seed)
    control_labels = _control_labels(control, labels, batch.tokens, generator)
    control_score = _fit_and_score(data, control_labels, kind, l2, num_bootstrap, seed)[2]
    weight = weight / std
    counts = torch.bincount(labels[is_test].long()) if kind == "logistic" else None
    return Probe(
        kind,
        site,
        weight,
        bias - weight @ mean,
        mean,
        test,
        control_score,
        0.0 if counts is None else float(counts.max() / counts.sum()),
        int((~is_test).sum()),
        int(is_test.sum()),
    )


def _check_labels(dataset: ActivationDataset, labels: Tensor, kind: ProbeKind) -> Tensor:
    if kind not in ("logistic", "ridge"):
        raise InputError(f"kind is {kind!r}; use 'logistic' for classes or 'ridge' for numbers")
    if labels.shape != (len(dataset),):
        raise InputError(
            f"labels has shape {tuple(labels.shape)}; pass one label for each of the {len(dataset)} tokens"
        )
    if kind == "ridge":
        return labels.float()
    if labels.is_floating_point():
        raise InputError(f"labels has dtype {labels.dtype}, but a logistic probe needs classes 0, 1, …; pass integers")
    labels = labels.long()
    if len(labels[labels >= 0].bincount().nonzero()) < 2:
        raise InputError("labels has fewer than two classes; pass labels with at least two")
    return labels


def _split_sequences(sequences: Tensor, test_fraction: float, generator: torch.Generator) -> Tensor:
    """Return which tokens are in the test set, (n,)."""
    ids = sequences.bincount().nonzero()[:, 0]
    if len(ids) < 2:
        raise InputError("the labeled tokens are in one sequence, so there is no held-out one; pass at least two")
    count = min(max(round(len(ids) * test_fraction), 1), len(ids) - 1)
    chosen = ids[torch.randperm(len(ids), generator=generator)[:count]]
    return torch.isin(sequences, chosen)


def _control_labels(control: ControlKind, labels: Tensor, tokens: Tensor, generator: torch.Generator) -> Tensor:
    if control == "shuffled":
        return labels[torch.randperm(len(labels), generator=generator)]
    if control != "control_task":
        raise InputError(f"control is {control!r}; use 'control_task' or 'shuffled'")
    # One label per token id, drawn from the distribution of the labels.
    drawn = labels[torch.randint(len(labels), (int(tokens.max()) + 1,), generator=generator)]
    return drawn[tokens]


def _fit_and_score(
    data: _Data, labels: Tensor, kind: ProbeKind, l2: float, num_bootstrap: int, seed: int
) -> tuple[Tensor, Tensor, ScoreInterval]:
    """Fit a probe on the training tokens. Return weight, bias and the score on the test tokens."""
    train, test = ~data.is_test, data.is_test
    fit = _fit_logistic if kind == "logistic" else _fit_ridge
    weight, bias = fit(data.x[train], labels[train], l2)
    scores, targets = data.x[test] @ weight.T + bias, labels[test]
    if kind == "logistic":
        columns = torch.stack(
            ((scores.argmax(1) == targets).double(), torch.ones(len(targets), dtype=torch.float64)), 1
        )
        return (
            weight,
            bias,
            _bootstrap(columns, data.groups[test], lambda sums: sums[:, 0] / sums[:, 1], num_bootstrap, seed),
        )
    error, y = (scores[:, 0] - targets).double(), targets.double()
    columns = torch.stack((error.square(), y.square(), y, torch.ones_like(y)), 1)

    def r_squared(sums: Tensor) -> Tensor:
        return 1 - sums[:, 0] / (sums[:, 1] - sums[:, 2].square() / sums[:, 3]).clamp(min=1e-12)

    return weight, bias, _bootstrap(columns, data.groups[test], r_squared, num_bootstrap, seed)


def _fit_logistic(x: Tensor, labels: Tensor, l2: float) -> tuple[Tensor, Tensor]:
    """Multinomial logistic regression by L-BFGS."""
    classes = int(labels.max()) + 1
    weight, bias = torch.zeros(classes, x.shape[1], requires_grad=True), torch.zeros(classes, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weight, bias], max_iter=_MAX_LBFGS_STEPS, history_size=20, line_search_fn="strong_wolfe"
    )

    def closure() -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(x @ weight.T + bias, labels) + l2 / 2 * weight.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    with torch.enable_grad():
        optimizer.step(closure)  # type: ignore[no-untyped-call]
    return weight.detach(), bias.detach()


def _fit_ridge(x: Tensor, labels: Tensor, l2: float) -> tuple[Tensor, Tensor]:
    """Ridge regression in closed form, in fp64: (XᵀX/n + l2·I)⁻¹ Xᵀy/n."""
    center, offset = x.double().mean(0), labels.double().mean()
    centered = x.double() - center
    gram = centered.T @ centered / len(x) + l2 * torch.eye(x.shape[1], dtype=torch.float64)
    weight = torch.linalg.solve(gram, centered.T @ (labels.double() - offset) / len(x))
    return weight.float()[None], (offset - weight @ center).float()[None]


def _bootstrap(
    columns: Tensor, groups: Tensor, score: Callable[[Tensor], Tensor], count: int, seed: int
) -> ScoreInterval:
    """Return the score of sums of `columns`, (n, c), and its interval when sequences are resampled with replacement."""
    numbers = torch.unique(groups, return_inverse=True)[1]
    sums = columns.new_zeros(int(numbers.max()) + 1, columns.shape[1]).index_add(0, numbers, columns)
    generator = torch.Generator().manual_seed(seed)
    resampled = torch.stack(
        [sums[torch.randint(len(sums), (len(sums),), generator=generator)].sum(0) for _ in range(count)]
    )
    low, high = score(resampled).quantile(torch.tensor(_INTERVAL, dtype=torch.float64)).tolist()
    return ScoreInterval(float(score(sums.sum(0)[None])[0]), low, high)
