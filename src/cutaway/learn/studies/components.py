"""Components of a decoder at an equal number of training tokens: validation loss by variant, paired over seeds."""

import math
import platform
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cutaway.config import Config
from cutaway.config import config as read_config
from cutaway.learn.studies.study import Estimate, PartFn, PartResults, estimate, estimate_difference, exact
from cutaway.learn.studies.train_grid import (
    TrainedGrid,
    TrainingData,
    TrainingGrid,
    next_token_loss,
    train_grid,
)
from cutaway.lens.edit import edit
from cutaway.model import Transformer, build

VOCAB_SIZE = 256
UNIFORM_LOSS = math.log(VOCAB_SIZE)
"""Loss of uniform predictions. After training, a loss that is higher or not finite counts as this loss."""
D_MODEL, LAYERS, HIDDEN, SEQ_LEN = 64, 3, 176, 64
LRS = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)
GRID = TrainingGrid(lrs=LRS, warmups=(50,), num_seeds=10, steps=600, batch_size=16, seq_len=SEQ_LEN + 1)
NUM_EVAL_SEQUENCES = 128
EVAL_SEED = 10_000
PREFIX_LENGTHS = range(SEQ_LEN // 2, SEQ_LEN + 1)


@dataclass(frozen=True)
class LibraryText:
    """Bytes of the top-level modules of Python's standard library, in order of their names.

    Every tenth module is for validation. Sequences are windows at random offsets.
    """

    split: Literal["training", "validation"] = "training"

    @cached_property
    def text(self) -> Tensor:
        paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        paths = [path for path in paths if not path.name.startswith("_sysconfigdata")]  # depends on the machine
        selected = [path for index, path in enumerate(paths) if (index % 10 == 9) == (self.split == "validation")]
        return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in selected)), dtype=torch.uint8)

    @cached_property
    def unigram_entropy(self) -> float:
        """Entropy of the frequencies of bytes, in nats."""
        frequencies = torch.bincount(self.text.long(), minlength=VOCAB_SIZE) / len(self.text)
        return float(torch.special.entr(frequencies).sum())

    def sample(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        offsets = torch.randint(len(self.text) - length, (count, 1), generator=generator)
        return self.text[offsets + torch.arange(length)].long()


TRAINING_TEXT, VALIDATION_TEXT = LibraryText("training"), LibraryText("validation")
Table = Mapping[str, Any]

# ---------------------------------------------------------------------------------------- variants of a decoder


@dataclass(frozen=True)
class Variant:
    """Changes of the decoder's configuration and structural edits, which hold in training and in evaluation."""

    stack: Table = field(default_factory=dict)
    attention: Table = field(default_factory=dict)
    ffn: Table = field(default_factory=dict)
    tied: bool = True
    edits: Mapping[str, str] | None = None

    @property
    def config(self) -> Config:
        attention = {"heads": 4, "position": {"kind": "rope"}} | dict(self.attention)
        ffn = {"kind": "gated", "hidden": HIDDEN} | dict(self.ffn)
        stack = {"layers": LAYERS, "block": {"attention": attention, "ffn": ffn}} | dict(self.stack)
        head = {"tied": self.tied}
        return read_config(
            {"form": "decoder", "vocab_size": VOCAB_SIZE, "d_model": D_MODEL, "head": head, "decoder": stack}
        )


NO_FFN, NO_ATTENTION = {"blocks.*.ffn.out": "zero"}, {"blocks.*.attn.out": "zero"}
SWAP, NO_FINAL_NORM, NO_MASK = {"blocks.*": "swap"}, {"final_norm": "drop"}, {"mask": "drop"}
SMALLEST_FFN, SMALLEST_ATTENTION = {"hidden": 1}, {"heads": 1, "d_head": 2}
"""Sublayers whose output is set to zero are as small as possible."""
BASELINE = "baseline"
VARIANTS = {
    BASELINE: Variant(),  # RMSNorm, pre-norm, SwiGLU, 4 heads, RoPE, tied embeddings
    "untied": Variant(tied=False),
    "untied-equal": Variant(tied=False, ffn={"hidden": HIDDEN - 28}),
    "gelu": Variant(ffn={"kind": "mlp", "activation": "gelu", "bias": False, "hidden": HIDDEN * 3 // 2}),
    "relu": Variant(ffn={"kind": "mlp", "activation": "relu", "bias": False, "hidden": HIDDEN * 3 // 2}),
    "no-ffn": Variant(ffn=SMALLEST_FFN, edits=NO_FFN),
    "no-attention": Variant(attention=SMALLEST_ATTENTION, edits=NO_ATTENTION),
    "no-ffn-equal": Variant(ffn=SMALLEST_FFN, edits=NO_FFN, stack={"layers": 9}),
    "no-attention-equal": Variant(attention=SMALLEST_ATTENTION, edits=NO_ATTENTION, ffn={"hidden": HIDDEN + 85}),
    "layernorm": Variant(stack={"norm": {"kind": "layernorm"}}),
    "no-norm": Variant(stack={"norm": {"kind": "none"}}),
    "post-norm": Variant(stack={"placement": {"kind": "post"}}),
    "no-final-norm": Variant(stack={"placement": {"kind": "pre", "final_norm": False}}),
    "swap": Variant(edits=SWAP),
    "heads-1": Variant(attention={"heads": 1}),
    "heads-2": Variant(attention={"heads": 2}),
    "heads-8": Variant(attention={"heads": 8}),
    "ffn-half": Variant(ffn={"hidden": HIDDEN // 2}),
    "ffn-double": Variant(ffn={"hidden": HIDDEN * 2}),
    "no-mask": Variant(edits=NO_MASK),
}
"""Variants of the baseline. Those with `equal` have the number of parameters of the baseline, within 1 %."""
DIFFERENCES = (
    ("untied", BASELINE),
    ("untied-equal", BASELINE),
    ("gelu", BASELINE),
    ("relu", BASELINE),
    ("relu", "gelu"),
    ("no-ffn", BASELINE),
    ("no-attention", BASELINE),
    ("no-ffn", "no-attention"),
    ("no-ffn-equal", BASELINE),
    ("no-attention-equal", BASELINE),
    ("no-ffn-equal", "no-attention-equal"),
    ("layernorm", BASELINE),
    ("no-norm", BASELINE),
    ("post-norm", BASELINE),
    ("no-final-norm", BASELINE),
    ("swap", BASELINE),
    ("heads-1", BASELINE),
    ("heads-2", BASELINE),
    ("heads-8", BASELINE),
    ("ffn-half", BASELINE),
    ("ffn-double", BASELINE),
    ("no-mask", BASELINE),
)
"""Pairs of variants whose losses are compared."""
EDITS_AFTER_TRAINING = {
    "no-ffn": NO_FFN,
    "no-attention": NO_ATTENTION,
    "no-final-norm": NO_FINAL_NORM,
    "swap": SWAP,
    "no-mask": NO_MASK,
}


def list_parts(device: str) -> dict[str, PartFn]:
    return {name: partial(measure_variant, name, device) for name in VARIANTS}


def measure_variant(name: str, device: str, grid: TrainingGrid | None = None) -> PartResults:
    """Validation losses of a variant by learning rate, one per seed, and further measurements of two variants."""
    variant = train_variant(name, device, grid or GRID)
    results: dict[str, Estimate | Sequence[float]] = {f"loss/{lr:g}": losses for lr, losses in variant.losses.items()}
    results["parameters"] = [sum(p.numel() for p in variant.trained.model.parameters())]
    if name == BASELINE:
        results |= measure_edits(variant)
    if name in (BASELINE, "no-mask"):
        results["prefix-loss"] = [prefix_loss(model, variant.variant.edits) for model in variant.models()]
        results["loss-with-mask"] = [validation_loss(model) for model in variant.models()]
    return results


def describe_settings(device: str) -> dict[str, Any]:
    return {
        "text": f"bytes of the top-level modules of Python {platform.python_version()}'s standard library",
        "baseline": "decoder, RMSNorm, pre-norm, SwiGLU, 4 heads, RoPE, tied embeddings",
        "d_model": D_MODEL,
        "layers": LAYERS,
        "seeds": GRID.num_seeds,
        "training": f"Adam, {GRID.steps} steps of {GRID.batch_size} × {SEQ_LEN} bytes, best of lr {GRID.lrs}",
    }


def summarize(results: Mapping[str, PartResults]) -> dict[str, Estimate]:
    """Estimates of all variants, and differences between them."""
    variants: dict[str, VariantLosses] = {}
    estimates: dict[str, Estimate] = {}
    for name, values in results.items():
        raw = {key: value for key, value in values.items() if not isinstance(value, Estimate)}
        estimates |= {key: value for key, value in values.items() if isinstance(value, Estimate)}
        losses = {float(key.removeprefix("loss/")): value for key, value in raw.items() if key.startswith("loss/")}
        variants[name] = VariantLosses(name, losses)
        estimates |= variants[name].estimates() | {f"parameters/{name}": exact(raw["parameters"][0])}
    estimates |= compare_variants(variants)
    masked, unmasked = (cast(Mapping[str, Sequence[float]], results[name]) for name in (BASELINE, "no-mask"))
    return estimates | compare_missing_mask(variants, masked, unmasked)


# ---------------------------------------------------------------------------------------- training and evaluation


@dataclass(frozen=True)
class VariantLosses:
    """Validation losses of a trained variant by learning rate, one per seed."""

    name: str
    losses: Mapping[float, Sequence[float]]

    @property
    def best_lr(self) -> float:
        """Learning rate with the lowest mean loss over seeds."""
        return min(self.losses, key=lambda lr: fmean(self.losses[lr]))

    @property
    def best_losses(self) -> Sequence[float]:
        return self.losses[self.best_lr]

    def estimates(self) -> dict[str, Estimate]:
        """Loss by learning rate and at the best one, and number of seeds with a loss below the unigram entropy."""
        results = {f"loss/{self.name}": estimate(self.best_losses)}
        results[f"best-lr/{self.name}"] = exact(self.best_lr)
        for lr, losses in self.losses.items():
            num_trained = sum(loss < TRAINING_TEXT.unigram_entropy for loss in losses)
            results[f"loss/{self.name}/{lr:g}"] = estimate(losses)
            results[f"trained-seeds/{self.name}/{lr:g}"] = exact(num_trained, len(losses))
        return results


@dataclass(frozen=True)
class TrainedVariant(VariantLosses):
    """A trained variant, with the weights of all models."""

    variant: Variant
    trained: TrainedGrid

    def models(self) -> Iterator[Transformer]:
        """Load the models with the best learning rate, one per seed. Each becomes invalid when the next is loaded."""
        for index, (lr, _, _) in enumerate(self.trained.grid.members):
            if lr == self.best_lr:
                model = self.trained.load_member(index)
                assert isinstance(model, Transformer)
                yield model


def train_variant(name: str, device: str = "cpu", grid: TrainingGrid = GRID) -> TrainedVariant:
    """Train a variant with every learning rate and seed, and measure its validation losses."""
    variant = VARIANTS[name]
    trained = train_grid(
        lambda seed: build(variant.config, seed=seed), TRAINING_TEXT, grid, edits=variant.edits, device=device
    )
    losses: dict[float, list[float]] = {}
    for index, (lr, _, _) in enumerate(grid.members):
        losses.setdefault(lr, []).append(limit_loss(validation_loss(trained.load_member(index), variant.edits)))
    return TrainedVariant(name, losses, variant, trained)


def sample_evaluation(data: TrainingData, length: int, device: torch.device | str) -> Tensor:
    """(NUM_EVAL_SEQUENCES, length): the same sequences for all models."""
    generator = torch.Generator().manual_seed(EVAL_SEED)
    return data.sample(NUM_EVAL_SEQUENCES, length, generator).to(device)


@torch.no_grad()
def validation_loss(model: nn.Module, edits: Mapping[str, str] | None = None) -> float:
    """Loss of a model on the validation text under `edits`."""
    tokens = sample_evaluation(VALIDATION_TEXT, SEQ_LEN + 1, next(model.parameters()).device)
    with edit(model, edits) if edits else nullcontext():
        return float(next_token_loss(model(tokens), tokens))


def limit_loss(loss: float) -> float:
    """The loss, at most UNIFORM_LOSS."""
    return min(loss, UNIFORM_LOSS) if math.isfinite(loss) else UNIFORM_LOSS


def compare_variants(trained: Mapping[str, VariantLosses]) -> dict[str, Estimate]:
    """Differences between losses of models with equal seeds."""
    return {
        f"difference/{a}-{b}": estimate_difference(trained[a].best_losses, trained[b].best_losses)
        for a, b in DIFFERENCES
        if a in trained and b in trained
    }


def measure_edits(baseline: TrainedVariant) -> dict[str, Estimate]:
    """Loss of the trained baseline after an edit, its increase, and the scale of the logits without the final norm."""
    results = {}
    for name, edits in EDITS_AFTER_TRAINING.items():
        losses = [validation_loss(model, edits) for model in baseline.models()]
        results[f"after/{name}"] = estimate(losses)
        results[f"difference/after-{name}"] = estimate_difference(losses, baseline.best_losses)
    ratios = [logit_scale(model, NO_FINAL_NORM) / logit_scale(model) for model in baseline.models()]
    results["logit-scale/no-final-norm"] = estimate(ratios, ratio=True)
    return results


@torch.no_grad()
def logit_scale(model: Transformer, edits: Mapping[str, str] | None = None) -> float:
    """Standard deviation of the logits over the vocabulary."""
    tokens = sample_evaluation(VALIDATION_TEXT, SEQ_LEN, model.device)
    with edit(model, edits) if edits else nullcontext():
        return float(model(tokens).std(-1).mean())


def compare_missing_mask(
    variants: Mapping[str, VariantLosses],
    baseline: Mapping[str, Sequence[float]],
    no_mask: Mapping[str, Sequence[float]],
) -> dict[str, Estimate]:
    """Models trained without the causal mask: their loss without the mask, with the mask, and in generation.

    `prefix-loss` is the loss of the next byte as in generation: the model sees a prefix and no later byte.
    """
    without_mask, with_mask = variants["no-mask"].best_losses, no_mask["loss-with-mask"]
    prefix_losses = no_mask["prefix-loss"], baseline["prefix-loss"]
    return {
        "no-mask/loss-without-mask": estimate(without_mask),
        "no-mask/loss-with-mask": estimate(with_mask),
        "difference/no-mask-with-mask": estimate_difference(with_mask, without_mask),
        "difference/no-mask-with-mask-baseline": estimate_difference(with_mask, variants[BASELINE].best_losses),
        "prefix-loss/no-mask": estimate(prefix_losses[0]),
        f"prefix-loss/{BASELINE}": estimate(prefix_losses[1]),
        "difference/prefix-loss-no-mask": estimate_difference(*prefix_losses),
    }


@torch.no_grad()
def prefix_loss(model: Transformer, edits: Mapping[str, str] | None = None) -> float:
    """Loss of the byte after prefixes of validation text of PREFIX_LENGTHS bytes."""
    tokens = sample_evaluation(VALIDATION_TEXT, SEQ_LEN + 1, model.device)
    with edit(model, edits) if edits else nullcontext():
        losses = [F.cross_entropy(model(tokens[:, :length])[:, -1], tokens[:, length]) for length in PREFIX_LENGTHS]
    return float(torch.stack(losses).mean())
