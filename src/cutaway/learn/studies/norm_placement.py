"""Norm placement: gradients at initialization, and training, by depth, initialization, mask and activation."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Literal

import torch
import torch.nn.functional as F

from cutaway.config import PostNorm
from cutaway.learn.studies.study import Estimate, PartFn, estimate, exact, load_results
from cutaway.learn.studies.train_grid import MarkovChain, TrainingGrid, train_grid
from cutaway.lens.analysis.gradients import InitName, PlacementName, placement_config, relative_gradient_norms
from cutaway.lens.trace import trace
from cutaway.model import Transformer, build

PLACEMENTS: tuple[PlacementName, ...] = ("pre", "post", "sandwich", "none")
INITS: tuple[InitName, ...] = ("xavier", "normal", "gpt2")
FORMS: tuple[Literal["decoder", "encoder"], ...] = ("decoder", "encoder")
ACTIVATIONS: tuple[Literal["relu", "gelu"], ...] = ("relu", "gelu")
DEPTHS = (6, 12, 24, 48, 96)
STATS_DEPTH = 24
"""Depth of the measurements of weight gradients and of the residual stream."""
NUM_SEEDS, NUM_TEXTS, SEQ_LEN = 10, 3, 32
GRID = TrainingGrid()
TRAINED = 0.5
"""A model counts as trained if it makes at least this part of the possible progress."""


@dataclass(frozen=True)
class Variant:
    """A trained variant of the model."""

    placement: PlacementName
    residual: bool = True
    init: InitName = "xavier"
    deepnorm: bool = False
    """Whether residual connections are multiplied by (2·depth)^¼ and Xavier's W_V, W_O and FFN matrices by (8·depth)^−¼
    (https://arxiv.org/abs/2203.00555)."""

    def build(self, depth: int, vocab_size: int, seed: int) -> Transformer:
        config = placement_config(
            self.placement, depth, activation="relu", init=self.init, d_model=32, vocab_size=vocab_size
        )
        if not self.deepnorm:
            return build(config, seed=seed)
        stack = config.stacks["decoder"]
        config = config.replace(decoder=stack.replace(placement=PostNorm(skip_scale=(2 * depth) ** 0.25)))
        model = build(config, seed=seed)
        with torch.no_grad():
            for block in model.get_submodule("decoder.blocks").children():
                for name in ("attn.f.v", "attn.f.o", "ffn.f.up", "ffn.f.down"):
                    block.get_parameter(f"{name}.weight").mul_((8 * depth) ** -0.25)
        return model


VARIANTS = {
    "pre": Variant("pre"),
    "post": Variant("post"),
    "sandwich": Variant("sandwich"),
    "none": Variant("none"),
    "pre, no residual": Variant("pre", residual=False),
    "post, no residual": Variant("post", residual=False),
    "post, GPT-2 init": Variant("post", init="gpt2"),
    "post, DeepNorm": Variant("post", deepnorm=True),
}
"""Trained variants by name."""


@dataclass(frozen=True)
class Setting:
    """A setting of the model other than its depth."""

    placement: PlacementName
    form: Literal["decoder", "encoder"]
    activation: Literal["relu", "gelu"]
    init: InitName
    residual: bool = True

    def key(self, depth: int, measure: str = "gradient") -> str:
        suffix = "" if self.residual else "/no-residual"
        return f"{measure}/{self.placement}/{self.form}/{self.activation}/{self.init}/{depth}{suffix}"


def list_parts(device: str) -> dict[str, PartFn]:
    """Gradients by setting, on the CPU, and training by variant and depth."""
    parts: dict[str, PartFn] = {}
    for setting in all_settings():
        name = f"gradients: {setting.placement}, {setting.form}, {setting.activation}, {setting.init}"
        parts[name if setting.residual else f"{name}, no residual"] = partial(measure_setting, setting)
    for variant, depth in product(VARIANTS, DEPTHS):
        parts[f"training: {variant}, {depth} blocks"] = partial(measure_training, variant, depth, device)
    return parts


def describe_settings(device: str) -> dict[str, Any]:
    return {
        "d_model": 64,
        "seeds": NUM_SEEDS,
        "texts per seed": NUM_TEXTS,
        "tokens per text": SEQ_LEN,
        "training": f"d_model 32, ReLU, Xavier, Adam, {GRID.steps} steps, {GRID.batch_size}×{GRID.seq_len - 1} tokens",
    }


def measure_setting(setting: Setting) -> dict[str, Estimate]:
    """All measurements of a setting without training."""
    estimates: dict[str, Estimate] = {}
    for depth in DEPTHS:
        first, smallest = measure_gradients(setting, depth)
        estimates |= {setting.key(depth): first, setting.key(depth, "smallest-gradient"): smallest}
    return estimates | measure_stats(setting) if setting.residual else estimates


def all_settings() -> Iterator[Setting]:
    for combination in product(PLACEMENTS, FORMS, ACTIVATIONS, INITS):
        yield Setting(*combination)
    for placement, form, activation in product(("pre", "post", "none"), FORMS, ACTIVATIONS):
        yield Setting(placement, form, activation, "xavier", residual=False)  # type: ignore[arg-type]


def measure_gradient(setting: Setting, depth: int, num_seeds: int = NUM_SEEDS) -> Estimate:
    """Gradient norm of the residual stream after the first block, relative to the last block."""
    return measure_gradients(setting, depth, num_seeds)[0]


def measure_gradients(setting: Setting, depth: int, num_seeds: int = NUM_SEEDS) -> tuple[Estimate, Estimate]:
    """Gradient norms of the residual stream relative to the last block: after the first block, and the smallest."""
    ratios, smallest = [], []
    for seed in range(num_seeds):
        model = build(_config(setting, depth), seed=seed)
        norms = relative_gradient_norms(model, SEQ_LEN, seed, num_texts=NUM_TEXTS, residual=setting.residual)
        ratios.append(_clamp(float(norms[0])))
        smallest.append(_clamp(float(norms.nan_to_num(nan=1e30).min())))
    return estimate(ratios, ratio=True), estimate(smallest, ratio=True)


def _clamp(ratio: float) -> float:
    """Limit a ratio to 1e±30: a gradient that overflowed or is not a number counts as exploded."""
    return min(max(ratio, 1e-30), 1e30) if math.isfinite(ratio) else 1e30


def measure_stats(setting: Setting) -> dict[str, Estimate]:
    """Weight gradient and RMS of the residual stream, first block relative to the last, at STATS_DEPTH blocks."""
    weight_ratios, stream_ratios = [], []
    first, last = "blocks.0.resid_post", f"blocks.{STATS_DEPTH - 1}.resid_post"
    for seed in range(NUM_SEEDS):
        model = build(_config(setting, STATS_DEPTH), seed=seed)
        tokens, targets = torch.randint(259, (2, NUM_TEXTS, SEQ_LEN), generator=torch.Generator().manual_seed(seed))
        with trace(model, first, last) as t:
            F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
        blocks = getattr(model, setting.form).blocks
        norms = [float(block.ffn.f.down.weight.grad.norm()) for block in (blocks[0], blocks[-1])]
        weight_ratios.append(_clamp(norms[0] / max(norms[1], 1e-30)))
        stream_ratios.append(_clamp(float(t[last].norm() / t[first].norm())))
    return {
        setting.key(STATS_DEPTH, "weight-gradient"): estimate(weight_ratios, ratio=True),
        setting.key(STATS_DEPTH, "stream-growth"): estimate(stream_ratios, ratio=True),
    }


def _config(setting: Setting, depth: int) -> Any:
    return placement_config(
        setting.placement, depth, form=setting.form, activation=setting.activation, init=setting.init
    )


def measure_training(variant: str, depth: int, device: str = "cpu", grid: TrainingGrid = GRID) -> dict[str, Estimate]:
    """Progress from the unigram entropy to the entropy rate of a Markov chain, by learning rate and warm-up.

    `train` is the mean progress over seeds, `trained-seeds` the number of seeds with more than half of the possible
    progress, and `trained-lrs` the number of learning rates at which every seed trains.
    """
    data, settings = MarkovChain(), VARIANTS[variant]
    edits = None if settings.residual else {"blocks.*": "no_residual"}
    trained = train_grid(
        lambda seed: settings.build(depth, data.num_symbols, seed), data, grid, edits=edits, device=device
    )
    estimates = {}
    for (lr, warmup), by_seed in trained.final_losses().items():
        fractions = [max(-1.0, data.progress(loss)) for loss in by_seed]
        key = f"{variant}/{depth}/{lr:g}/{warmup}"
        estimates[f"train/{key}"] = estimate(fractions)
        num_trained = sum(fraction > TRAINED for fraction in fractions)
        estimates[f"trained-seeds/{key}"] = exact(num_trained, len(fractions))
    for warmup in grid.warmups:
        keys = [f"{variant}/{depth}/{lr:g}/{warmup}" for lr in grid.lrs]
        num_lrs = sum(estimates[f"trained-seeds/{key}"].mean == grid.num_seeds for key in keys)
        estimates[f"trained-lrs/{variant}/{depth}/{warmup}"] = exact(num_lrs)
        best = max((estimates[f"train/{key}"] for key in keys), key=lambda result: result.mean)
        estimates[f"train-best/{variant}/{depth}/{warmup}"] = best
    return estimates


def describe_gradient(setting: Setting, depth: int) -> str:
    """Sentence on the stored gradient ratio of a setting. The page, the notebook and the documentation show it."""
    ratio = load_results("norm-placement").get(setting.key(depth))
    if ratio.low > 0.9 and ratio.high < 1.1:
        trend = "the gradient is preserved within 10 %"
    elif ratio.high < 1:
        trend = f"the gradient decays towards the input{' by more than a factor of 2' if ratio.high < 0.5 else ''}"
    elif ratio.low > 1:
        trend = f"the gradient grows towards the input{' by more than a factor of 2' if ratio.low > 2 else ''}"
    else:
        trend = "decay or growth is not decided: the interval contains 1"
    name = {"none": "no norm", "sandwich": "sandwich norm"}.get(setting.placement, f"{setting.placement}-norm")
    statement = f"the gradient norm after the first block is {ratio} times that after the last"
    smallest = load_results("norm-placement").get(setting.key(depth, "smallest-gradient"))
    if smallest.high < min(1.0, ratio.mean):
        trend += f"; the smallest gradient norm of any block is {smallest} times that of the last"
    return f"{name}, {depth} blocks: {statement}; {trend}."
