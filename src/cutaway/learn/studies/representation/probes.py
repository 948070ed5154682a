"""Linear probes by depth: mutual information of the residual stream of tiny-python with properties of the token.

A probe is a multinomial logistic regression. The information that it extracts is the cross-entropy of the label
frequencies minus the cross-entropy of the probe, on modules that it was not trained on. This is a lower bound of the
mutual information of label and activation.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cutaway.learn.studies.representation.python_texts import (
    MAX_INDENT,
    MODULES,
    TOKEN_CLASSES,
    load_model,
    load_module_text,
)
from cutaway.learn.studies.representation.stacked_weights import num_layers
from cutaway.learn.studies.study import Estimate, estimate
from cutaway.lens.trace import trace
from cutaway.model import Transformer, build

NUM_SEEDS, STEPS, BATCH_SIZE, LR, WEIGHT_DECAY = 10, 300, 512, 1e-2, 1e-2
MAX_WINDOWS, NUM_TRAIN_MODULES = 6, 12
FIRST_POSITION = 32
"""Tokens before this position of a window are left out, because they have little context."""
NUM_LABELS = {"class": len(TOKEN_CLASSES), "indent": MAX_INDENT + 1, "string": 2}
CONTROLS = ("shuffled", "by-token")
"""`shuffled`: labels in random order. `by-token`: a random label for each token id (control task, arXiv:1909.03368)."""


@dataclass(frozen=True)
class ProbeData:
    """Activations and labels of the tokens of all modules."""

    activations: Tensor
    """(depths, tokens, d_model)"""
    ids: Tensor
    labels: dict[str, Tensor]
    """Property → (tokens,)"""
    module: Tensor
    """(tokens,): index of the module."""


@dataclass(frozen=True)
class ProbeResult:
    """Results of the probes of one label, by depth."""

    information: list[float]
    """Bits."""
    accuracy: list[float]
    entropy: float
    """Cross-entropy of the label frequencies, in bits."""


def collect_probe_data(model: Transformer, modules: tuple[str, ...], max_windows: int) -> ProbeData:
    """Run the model on windows of the modules, and record the residual stream after the embedding and each block."""
    texts = [load_module_text(name, max_windows) for name in modules]
    device = model.device
    ids = torch.cat([text.ids for text in texts]).to(device)
    with torch.no_grad(), trace(model, "embed", "resid_post") as t:
        model(ids)
    names = ["embed", *(f"blocks.{layer}.resid_post" for layer in range(num_layers(model)))]
    kept = slice(FIRST_POSITION, None)

    def flatten(values: list[Tensor]) -> Tensor:
        return torch.cat(values)[:, kept].flatten().to(device)

    return ProbeData(
        torch.stack([t[name].as_subclass(Tensor)[:, kept].flatten(0, 1) for name in names]),
        ids[:, kept].flatten(),
        {
            "class": flatten([text.token_class for text in texts]),
            "indent": flatten([text.indent for text in texts]),
            "string": flatten([text.in_string for text in texts]),
        },
        flatten([torch.full_like(text.ids, index) for index, text in enumerate(texts)]),
    )


def train_probes(
    data: ProbeData, seed: int, num_train_modules: int, steps: int, *, controls: bool
) -> dict[str, ProbeResult]:
    """Train probes for all labels (and their controls) at all depths, and evaluate them on the other modules."""
    generator = torch.Generator().manual_seed(seed)
    device = data.activations.device
    order = torch.randperm(int(data.module.max()) + 1, generator=generator)
    is_train = torch.isin(data.module, order[:num_train_modules].to(device))
    labels = data.labels | (_control_labels(data, generator) if controls else {})
    sizes = [NUM_LABELS[name.split("/")[0]] for name in labels]
    train, test = data.activations[:, is_train], data.activations[:, ~is_train]
    mean, std = train.mean(1, keepdim=True), train.std(1, keepdim=True).clamp(min=1e-6)
    train, test = (train - mean) / std, (test - mean) / std
    targets = torch.stack([label[is_train] for label in labels.values()])
    depths, count, width = train.shape
    weight = torch.zeros(depths, width, sum(sizes), device=device, requires_grad=True)
    # Without input, a probe predicts the label frequencies.
    frequencies = [_log_frequencies(label, size) for label, size in zip(targets, sizes, strict=True)]
    bias = torch.cat(frequencies).repeat(depths, 1, 1).requires_grad_()
    groups: list[dict[str, Any]] = [{"params": [weight], "weight_decay": WEIGHT_DECAY}, {"params": [bias]}]
    optimizer = torch.optim.Adam(groups, lr=LR)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LR * (1 - step / steps)
        rows = torch.randint(count, (BATCH_SIZE,), generator=generator).to(device)
        logits = (train[:, rows] @ weight + bias).split(sizes, -1)
        parts = [_mean_loss(part, target[rows]).sum() for part, target in zip(logits, targets, strict=True)]
        optimizer.zero_grad()
        torch.stack(parts).sum().backward()
        optimizer.step()
    with torch.no_grad():
        logits = (test @ weight + bias).split(sizes, -1)
        return {
            name: _evaluate(part, label[is_train], label[~is_train])
            for (name, label), part in zip(labels.items(), logits, strict=True)
        }


def _control_labels(data: ProbeData, generator: torch.Generator) -> dict[str, Tensor]:
    """`property/control` → (tokens,): labels with the same frequencies and no relation to the text."""
    controls = {}
    for name, label in data.labels.items():
        order = torch.randperm(len(label), generator=generator).to(label.device)
        controls[f"{name}/shuffled"] = label[order]
        # The label of a random token is drawn for each token id.
        drawn = torch.randint(len(label), (int(data.ids.max()) + 1,), generator=generator).to(label.device)
        controls[f"{name}/by-token"] = label[drawn][data.ids]
    return controls


def _log_frequencies(labels: Tensor, num_labels: int) -> Tensor:
    """(labels,): logarithm of the frequencies; a label that does not occur counts as one occurrence."""
    counts = torch.bincount(labels, minlength=num_labels).float().clamp(min=1)
    return (counts / counts.sum()).log()


def _mean_loss(logits: Tensor, target: Tensor) -> Tensor:
    """(depths, tokens, labels) → (depths,): mean cross-entropy in nats."""
    log_probs = F.log_softmax(logits, -1)
    return -log_probs.gather(-1, target.expand(len(logits), -1)[..., None])[..., 0].mean(-1)


def _evaluate(logits: Tensor, train_labels: Tensor, test_labels: Tensor) -> ProbeResult:
    frequencies = _log_frequencies(train_labels, logits.shape[-1])
    entropy = float(_mean_loss(frequencies.expand(1, len(test_labels), -1), test_labels)) / math.log(2)
    information = [entropy - loss / math.log(2) for loss in _mean_loss(logits, test_labels).tolist()]
    return ProbeResult(information, (logits.argmax(-1) == test_labels).float().mean(-1).tolist(), entropy)


def measure_probes(
    device: str,
    *,
    modules: tuple[str, ...] = MODULES,
    num_seeds: int = NUM_SEEDS,
    steps: int = STEPS,
    max_windows: int = MAX_WINDOWS,
    num_train_modules: int = NUM_TRAIN_MODULES,
) -> dict[str, Estimate]:
    """Information and accuracy of probes by property and depth, of tiny-python and of an untrained model.

    A seed selects the modules that the probes are trained on and tested on.
    """
    checkpoint = load_model(device)
    untrained = build(checkpoint.config, seed=0, dtype=torch.float32).to(device)
    estimates: dict[str, Estimate] = {}
    for kind, model in (("", checkpoint.model), ("/untrained", untrained)):
        data = collect_probe_data(model, modules, max_windows)
        results = [train_probes(data, seed, num_train_modules, steps, controls=not kind) for seed in range(num_seeds)]
        depths = ["embed", *map(str, range(len(data.activations) - 1))]
        for name in NUM_LABELS:
            for row, depth in enumerate(depths):
                key = f"{name}/{depth}"
                bits = estimate([result[name].information[row] for result in results])
                estimates[f"probe/information/{key}{kind}"] = bits
                if kind:
                    continue
                estimates[f"probe/accuracy/{key}"] = estimate([result[name].accuracy[row] for result in results])
                shuffled = [result[f"{name}/shuffled"].information[row] for result in results]
                estimates[f"probe/information/{key}/shuffled"] = estimate(shuffled)
                differences = [
                    result[name].accuracy[row] - result[f"{name}/by-token"].accuracy[row] for result in results
                ]
                estimates[f"probe/selectivity/{key}"] = estimate(differences)
            if not kind:
                estimates[f"probe/entropy/{name}"] = estimate([result[name].entropy for result in results])
    return estimates
