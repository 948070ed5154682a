"""Answers of tiny-python: the logit lens and direct logit attribution against ablation, and entropy against error."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from cutaway.evaluate.functional import entropy
from cutaway.families.checkpoint import Checkpoint
from cutaway.learn.studies.rank_correlation import spearman
from cutaway.learn.studies.representation.python_texts import MODULES, PROMPTS, load_model, load_module_text
from cutaway.learn.studies.study import Estimate, estimate, estimate_share
from cutaway.lens.analysis import LabeledTensor, component_effects, direct_logit_attribution
from cutaway.lens.analysis.component_effects import ABLATION_METHODS, AblationMethod
from cutaway.lens.journey import follow_token

NUM_POSITIONS, CONTEXT = 100, 32
"""Number of random texts, and their length in tokens."""
NUM_REFERENCES = 20
OTHER_MODULES = tuple(
    f"torch.nn.modules.{name}"
    for name in (
        "activation", "batchnorm", "container", "conv", "dropout", "linear", "loss", "normalization", "rnn", "sparse",
    )
)  # fmt: skip
"""Code that tiny-python was not trained on."""


def logit_lens_sublayer(checkpoint: Checkpoint, ids: Tensor) -> str | None:
    """Return the sublayer from which on the logit lens shows the prediction, such as `4.attn`; None for the embedding.

    The Trace screen shows it. It is an observation, not a cause.
    """
    journey = follow_token(checkpoint.model, ids)
    points = [stage for stage in journey.stages if stage.site.endswith(("embed", "resid_mid", "resid_post"))]
    prediction, first = journey.top_tokens[0][0], len(points) - 1
    while first > 0 and points[first - 1].top_tokens[0][0] == prediction:
        first -= 1
    if points[first].site == "embed":
        return None
    _, layer, name = points[first].site.split(".")
    return f"{layer}.{'attn' if name == 'resid_mid' else 'ffn'}"


def random_texts(count: int, length: int = CONTEXT) -> Iterator[Tensor]:
    """Texts of modules of the standard library, (1, length)."""
    generator = torch.Generator().manual_seed(0)
    windows = torch.cat([load_module_text(name).ids for name in MODULES])
    for _ in range(count):
        row, start = (int(torch.randint(size, (1,), generator=generator)) for size in (len(windows), 256 - length))
        yield windows[row : row + 1, start : start + length]


def measure_logit_lens_cause(
    device: str,
    prompts: Sequence[str] = PROMPTS,
    num_positions: int = NUM_POSITIONS,
    prompt_methods: Sequence[AblationMethod] = ABLATION_METHODS,
) -> dict[str, Estimate]:
    """Whether the sublayer at which the logit lens shows the answer is necessary for it.

    `necessary`: share of texts in which its ablation changes the answer. `largest`: share in which no other sublayer
    has a larger effect on the logit difference. `num-necessary`: number of necessary sublayers. `none-necessary`: share
    of texts without a necessary sublayer.
    """
    checkpoint = load_model(device)
    assert checkpoint.tokenizer is not None
    texts = {
        "prompts": [torch.tensor([checkpoint.tokenizer.encode(prompt)]) for prompt in prompts],
        "positions": list(random_texts(num_positions)) if num_positions else [],
    }
    methods: dict[str, Sequence[AblationMethod]] = {"prompts": prompt_methods, "positions": ("zero",)}
    estimates: dict[str, Estimate] = {}
    for group, group_texts in texts.items():
        for method in methods[group]:
            rows: dict[str, list[float]] = {}
            for index, ids in enumerate(group_texts):
                effects = _measure_effects(checkpoint, ids.to(device), method, index)
                necessary, change = (effects.select(metric=name) for name in ("necessary", "logit difference"))
                name = logit_lens_sublayer(checkpoint, ids.to(device))
                if name is None:
                    continue
                row = {
                    "necessary": float(necessary[name]),
                    "largest": float(change[name].values == change.values.min()),
                    "num-necessary": float(necessary.values.sum()),
                    "none-necessary": float(necessary.values.sum() == 0),
                }
                for key, value in row.items():
                    rows.setdefault(key, []).append(value)
            for key, values in rows.items():
                function = estimate if key == "num-necessary" else estimate_share
                estimates[f"logit-lens/{key}/{group}/{method}"] = function(values)
    return estimates


def _measure_effects(checkpoint: Checkpoint, ids: Tensor, method: AblationMethod, seed: int) -> LabeledTensor:
    length = ids.shape[1]
    if method == "zero":
        return component_effects(checkpoint, ids, progress=False)
    others = [text.to(ids.device) for text in random_texts(NUM_REFERENCES, length)]
    if method == "mean":
        return component_effects(checkpoint, ids, ablation="mean", reference=others, progress=False)
    with torch.no_grad():
        answers = checkpoint.model(torch.cat([ids, *others]))[:, -1].argmax(-1).tolist()
    different = [text for text, answer in zip(others, answers[1:], strict=True) if answer != answers[0]]
    corrupted = different[seed % len(different)]
    return component_effects(checkpoint, ids, ablation="resample", corrupted=corrupted, progress=False)


def measure_attribution(device: str, prompts: Sequence[str] = PROMPTS) -> dict[str, Estimate]:
    """Direct logit attribution: relative error of the sum, and agreement with the effects of zero ablation.

    `spearman-with-ablation` and `same-largest` compare the sublayers' contributions to the logit difference with its
    decrease when the sublayer is ablated.
    """
    checkpoint = load_model(device)
    rows: dict[str, list[float]] = {}
    assert checkpoint.tokenizer is not None
    for prompt in prompts:
        ids = torch.tensor([checkpoint.tokenizer.encode(prompt)], device=device)
        with torch.no_grad():
            logits = checkpoint.model(ids)[0, -1]
        answer, other = logits.topk(2).indices.tolist()
        effects = component_effects(checkpoint, ids, incorrect_token=other, progress=False)
        effects = effects.select(metric="logit difference")
        attribution = direct_logit_attribution(checkpoint, ids, answer, incorrect_token=other)
        logit, attributed = logits[answer], direct_logit_attribution(checkpoint, ids, answer).values.sum()
        names = [name for name in attribution.labels[0] if name != "embed"]
        direct = torch.stack([attribution[name].values for name in names])
        total = -torch.stack([effects[name].values for name in names])
        row = {
            "error": float((attributed - logit).abs() / logit.abs()),
            "spearman-with-ablation": spearman(direct, total),
            "same-largest": float(direct.argmax() == total.argmax()),
        }
        for key, value in row.items():
            rows.setdefault(key, []).append(value)
    shares = {"attribution/same-largest": estimate_share(rows.pop("same-largest"))}
    return {f"attribution/{key}": estimate(values) for key, values in rows.items()} | shares


@torch.no_grad()
def measure_entropy(device: str, max_windows: int = 4) -> dict[str, Estimate]:
    """Entropy of the next-token distribution against errors, over texts: of the training data, and other code.

    `auroc`: probability that a wrong prediction has a higher entropy than a right one. `error/lowest` and
    `error/highest`: share of wrong predictions in the tenth of the positions with the lowest and the highest entropy.
    `spearman`: rank correlation of entropy and loss.
    """
    model = load_model(device).model
    estimates: dict[str, Estimate] = {}
    for group, modules in (("standard-library", MODULES[:10]), ("other", OTHER_MODULES)):
        rows: dict[str, list[float]] = {}
        for name in modules:
            ids = load_module_text(name, max_windows).ids.to(device)
            logits, targets = model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
            uncertainty = entropy(logits.softmax(-1))
            wrong = logits.argmax(-1) != targets
            order, tenth = uncertainty.argsort(), len(uncertainty) // 10
            row = {
                "auroc": _auroc(uncertainty, wrong),
                "error/lowest": float(wrong[order[:tenth]].float().mean()),
                "error/highest": float(wrong[order[-tenth:]].float().mean()),
                "spearman": spearman(uncertainty, F.cross_entropy(logits, targets, reduction="none")),
            }
            for key, value in row.items():
                rows.setdefault(key, []).append(value)
        estimates |= {f"entropy/{key}/{group}": estimate(values) for key, values in rows.items()}
    return estimates


def _auroc(scores: Tensor, positive: Tensor) -> float:
    """Area under the ROC curve: probability that a positive has a higher score than a negative."""
    ranks = scores.argsort().argsort().double() + 1
    num_positive = int(positive.sum())
    num_negative = len(scores) - num_positive
    return float((ranks[positive].sum() - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative))
