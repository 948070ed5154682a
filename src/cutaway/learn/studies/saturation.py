"""Saturation: softmax without the scale 1/√d_head, dead ReLU units, saturated attention, unscaled post-norm."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cutaway.config import Config
from cutaway.learn.studies.study import Estimate, PartFn, estimate
from cutaway.learn.studies.train_grid import MarkovChain, TrainingGrid, train_grid
from cutaway.lens.analysis.gradients import PlacementName, placement_config, relative_gradient_norms
from cutaway.lens.edit import edit
from cutaway.lens.trace import trace
from cutaway.model import Transformer, build

NUM_SEEDS = 10
HEAD_DIMS = (4, 8, 16, 32, 64, 128, 256, 512)
NUM_QUERIES, NUM_KEYS = 256, 64
DEAD_SHARES = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
SCORE_FACTORS = (4, 16, 64)
SCORE_MARGINS = (2, 4, 8, 16)
BLOCKS, SEQ_LEN, NUM_TEXTS = 12, 32, 4
POST_NORM_DEPTHS = (12, 24)
GRID = TrainingGrid(lrs=(3e-4, 1e-3, 3e-3), warmups=(0, 50))
VARIANTS: tuple[tuple[PlacementName, bool], ...] = (("post", True), ("post", False), ("pre", True), ("pre", False))
"""Trained variants: norm placement, and whether scores are scaled."""


def list_parts(device: str) -> dict[str, PartFn]:
    """Measurements on the CPU, and training on `device`."""
    parts: dict[str, PartFn] = {
        "softmax by d_head": measure_softmax,
        "dead ReLU units": measure_dead_units,
        "saturated attention": measure_saturated_attention,
        "post-norm: gradients": measure_post_norm_gradients,
    }
    for (placement, scaled), depth in product(VARIANTS, POST_NORM_DEPTHS):
        name = f"training: {placement}-norm, {'scaled' if scaled else 'unscaled'}, {depth} blocks"
        parts[name] = partial(measure_training, placement, scaled, depth, device)
    return parts


def describe_settings(device: str) -> dict[str, Any]:
    return {
        "seeds": NUM_SEEDS,
        "softmax": f"{NUM_QUERIES} queries and {NUM_KEYS} keys of N(0, 1) per seed",
        "dead units, saturated attention": f"pre-norm decoder, {BLOCKS} blocks, d_model 64, ReLU, Xavier",
        "training": "d_model 32, 1 head, ReLU, Xavier, Markov chain, Adam,"
        f" {GRID.steps} steps of {GRID.batch_size} × {GRID.seq_len - 1} tokens",
    }


# ---------------------------------------------------------------------------------------- softmax by d_head


def measure_softmax(head_dims: Sequence[int] = HEAD_DIMS, num_seeds: int = NUM_SEEDS) -> dict[str, Estimate]:
    """Attention of independent N(0, 1) queries and keys by d_head, with the scale 1/√d_head and without.

    `max-weight` is the mean largest weight of a query, `jacobian` the mean over queries of the Frobenius norm of
    ∂pattern/∂scores, `median-jacobian` its median, and `query-jacobian` the mean for ∂pattern/∂q, which has the keys
    and the scale as further factors.
    """
    estimates = {}
    for d_head, scaled in product(head_dims, (True, False)):
        rows = [_softmax_stats(d_head, d_head**-0.5 if scaled else 1.0, seed) for seed in range(num_seeds)]
        key = f"{'scaled' if scaled else 'unscaled'}/{d_head}"
        for measure in rows[0]:
            estimates[f"{measure}/{key}"] = estimate([row[measure] for row in rows], ratio=True)
    return estimates


def _softmax_stats(d_head: int, scale: float, seed: int) -> dict[str, float]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(NUM_QUERIES, d_head, generator=generator, dtype=torch.float64)
    k = torch.randn(NUM_KEYS, d_head, generator=generator, dtype=torch.float64)
    pattern = torch.softmax(scale * q @ k.T, -1)
    jacobian = softmax_jacobian(pattern)
    norms, query_norms = (x.flatten(1).norm(dim=1) for x in (jacobian, scale * jacobian @ k))
    return {
        "max-weight": float(pattern.max(-1).values.mean()),
        "jacobian": float(norms.mean()),
        "median-jacobian": float(norms.median()),
        "query-jacobian": float(query_norms.mean()),
    }


def softmax_jacobian(pattern: Tensor) -> Tensor:
    """∂pattern/∂scores = diag(p) − p·pᵀ: (…, n) to (…, n, n)."""
    return torch.diag_embed(pattern) - pattern[..., :, None] * pattern[..., None, :]


# ---------------------------------------------------------------------------------------- dead ReLU units


def measure_dead_units(shares: Sequence[float] = DEAD_SHARES, num_seeds: int = NUM_SEEDS) -> dict[str, Estimate]:
    """Gradients by the share of dead units in all FFNs, relative to no dead units.

    `ffn-weights` is the gradient norm of both FFN matrices of the middle block, `first-block` the gradient norm of the
    residual stream after the first block, with the residual connections (`skip`) and without them (`no-skip`).
    A share of 1 without residual connections has no gradient at all: its value is 0.
    """
    estimates = {}
    for skip in (True, False):
        rows = {share: [_dead_unit_gradients(share, skip, seed) for seed in range(num_seeds)] for share in shares}
        for share, measure in product(shares, ("ffn-weights", "first-block")):
            ratios = [row[measure] / base[measure] for row, base in zip(rows[share], rows[0.0], strict=True)]
            key = f"dead-units/{share:g}/{measure}/{'skip' if skip else 'no-skip'}"
            estimates[key] = estimate(ratios, ratio=min(ratios) > 0)
    return estimates


def _dead_unit_gradients(share: float, skip: bool, seed: int) -> dict[str, float]:
    model = build(placement_config("pre", BLOCKS, activation="relu"), seed=seed)
    tokens, targets = _random_tokens(seed)
    kill_units(model, share, seed)
    with nullcontext() if skip else edit(model, {"blocks.*": "no_residual"}):
        gradients = _gradients(model, tokens, targets, "blocks.0.resid_post")
    middle = f"decoder.blocks.{BLOCKS // 2}.ffn.f"
    weights = _gradient_norm(model, f"{middle}.up.weight", f"{middle}.down.weight")
    return {"ffn-weights": weights, "first-block": float(gradients.norm())}


def _gradient_norm(model: Transformer, *names: str) -> float:
    """Norm of the gradients of these parameters together."""
    gradients = [model.get_parameter(name).grad for name in names]
    return float(torch.cat([gradient.flatten() for gradient in gradients if gradient is not None]).norm())


@torch.no_grad()
def kill_units(model: Transformer, share: float, seed: int) -> None:
    """Set the bias of a random share of the ReLU units of each FFN so low that they are 0 for every token."""
    generator = torch.Generator().manual_seed(seed)
    for layer in range(len(model.stacks["decoder"].blocks)):
        bias = model.get_parameter(f"decoder.blocks.{layer}.ffn.f.up.bias")
        bias[torch.randperm(len(bias), generator=generator)[: round(share * len(bias))]] = -1e4


def _random_tokens(seed: int) -> tuple[Tensor, Tensor]:
    tokens, targets = torch.randint(259, (2, NUM_TEXTS, SEQ_LEN), generator=torch.Generator().manual_seed(seed))
    return tokens, targets


def _gradients(model: Transformer, tokens: Tensor, targets: Tensor, site: str) -> Tensor:
    """Backpropagate the cross-entropy of the targets and return the gradient at a site."""
    with trace(model, site, gradients=True) as t:
        F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
    return t.gradient(site)


# ---------------------------------------------------------------------------------------- saturated attention


def measure_saturated_attention(
    factors: Sequence[float] = SCORE_FACTORS, margins: Sequence[float] = SCORE_MARGINS, num_seeds: int = NUM_SEEDS
) -> dict[str, Estimate]:
    """Gradients of the middle block, whose attention scores alone are changed, relative to unchanged scores.

    `factor` multiplies the scores: the largest weight approaches 1, but some queries keep two keys with nearly equal
    scores. `margin` adds to the largest score of each query, so that every query is saturated. `ffn` is the gradient of
    both FFN matrices. `median-query` is the median over queries of the gradient norm of q.
    """
    estimates = {}
    changes: dict[str, Callable[[Tensor], Tensor]] = {f"factor/{c:g}": partial(torch.mul, other=c) for c in factors}
    changes |= {f"margin/{m:g}": partial(add_margin, margin=m) for m in margins}
    baseline = [_attention_gradients(partial(torch.mul, other=1), seed) for seed in range(num_seeds)]
    for key, change in changes.items():
        rows = [_attention_gradients(change, seed) for seed in range(num_seeds)]
        for measure in rows[0]:
            values = [row[measure] for row in rows]
            if measure != "max-weight":
                values = [max(value / base[measure], 1e-30) for value, base in zip(values, baseline, strict=True)]
            estimates[f"saturated/{key}/{measure}"] = estimate(values, ratio=True)
    return estimates


def add_margin(scores: Tensor, margin: float) -> Tensor:
    """Add a margin to the largest score of each query."""
    return scores + margin * F.one_hot(scores.argmax(-1), scores.shape[-1])


def _attention_gradients(change: Callable[[Tensor], Tensor], seed: int) -> dict[str, float]:
    model = build(placement_config("pre", BLOCKS, activation="relu"), seed=seed).use_kernel("explicit")
    tokens, targets = _random_tokens(seed)
    name = f"blocks.{BLOCKS // 2}"
    sites = [f"{name}.attn.pattern", f"{name}.attn.q"]
    with edit(model, {f"{name}.attn.scores": change}), trace(model, *sites, gradients=True) as t:
        F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
    second_half = t[sites[0]][:, :, SEQ_LEN // 2 :]  # (B, H, T, S): queries with many keys
    results = {
        "max-weight": float(second_half.max(-1).values.mean()),
        "median-query": float(t.gradient(sites[1]).norm(dim=-1).median()),
    }
    paths = {"w-q": ("attn.f.q",), "w-k": ("attn.f.k",), "w-v": ("attn.f.v",), "ffn": ("ffn.f.up", "ffn.f.down")}
    for measure, modules in paths.items():
        results[measure] = _gradient_norm(model, *(f"decoder.{name}.{module}.weight" for module in modules))
    return results


# ---------------------------------------------------------------------------------------- post-norm without scale


def post_norm_config(placement: PlacementName, scaled: bool, depth: int, *, vocab_size: int, d_model: int) -> Config:
    """A decoder with one head, so that d_head is d_model, with the scale 1/√d_head or with scale 1."""
    config = placement_config(placement, depth, activation="relu", d_model=d_model, vocab_size=vocab_size)
    scale = None if scaled else 1.0
    stack = config.stacks["decoder"].edit_layers(attention=lambda node: node.replace(heads=1, scale=scale))
    return config.replace(decoder=stack)


def measure_post_norm_gradients(
    depths: Sequence[int] = POST_NORM_DEPTHS, num_seeds: int = NUM_SEEDS
) -> dict[str, Estimate]:
    """Gradient norm of the residual stream after the first block relative to the last block, at initialization."""
    estimates = {}
    for (placement, scaled), depth in product(VARIANTS, depths):
        config = post_norm_config(placement, scaled, depth, vocab_size=259, d_model=64)
        ratios = [
            float(relative_gradient_norms(build(config, seed=seed), SEQ_LEN, seed)[0]) for seed in range(num_seeds)
        ]
        estimates[f"first-to-last/{_variant(placement, scaled)}/{depth}"] = estimate(ratios, ratio=True)
    return estimates


def _variant(placement: str, scaled: bool) -> str:
    return f"{placement}/{'scaled' if scaled else 'unscaled'}"


def measure_training(
    placement: PlacementName, scaled: bool, depth: int, device: str = "cpu", grid: TrainingGrid = GRID
) -> dict[str, Estimate]:
    """Progress of training on a Markov chain by learning rate and warm-up, as in the study of norm placement.

    `train` is the mean progress from the unigram entropy (0) to the entropy rate (1), `train-best` that at the best
    learning rate.
    """
    data = MarkovChain()
    config = post_norm_config(placement, scaled, depth, vocab_size=data.num_symbols, d_model=32)
    trained = train_grid(lambda seed: build(config, seed=seed), data, grid, device=device)
    estimates, variant = {}, _variant(placement, scaled)
    for (lr, warmup), losses in trained.final_losses().items():
        fractions = [max(-1.0, data.progress(loss)) for loss in losses]
        estimates[f"train/{variant}/{depth}/{lr:g}/{warmup}"] = estimate(fractions)
    for warmup in grid.warmups:
        by_lr = [estimates[f"train/{variant}/{depth}/{lr:g}/{warmup}"] for lr in grid.lrs]
        estimates[f"train-best/{variant}/{depth}/{warmup}"] = max(by_lr, key=lambda result: result.mean)
    return estimates
