"""Residual stacks: sums of paths, deletion of blocks, survival of writes, loss landscape, and copying by depth."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import combinations, pairwise
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cutaway.config import Config, ParallelResidual
from cutaway.config import config as read_config
from cutaway.families.load import load
from cutaway.learn.studies import copy_by_depth, loss_landscape
from cutaway.learn.studies.components import TRAINING_TEXT, VALIDATION_TEXT, VOCAB_SIZE
from cutaway.learn.studies.rank_correlation import spearman
from cutaway.learn.studies.study import Estimate, PartFn, estimate, exact
from cutaway.learn.studies.train_grid import TrainingGrid, next_token_loss, train_grid
from cutaway.lens.edit import edit
from cutaway.model import Transformer, build
from cutaway.model.masks import number_tokens

NUM_GROUPS, GROUP_SIZE, TEXT_TOKENS = 10, 4, 128
"""Texts for tiny-python. Its estimates are means over groups of texts, those of trained models over seeds."""
GRIDS = {
    "8-blocks": (8, 64, TrainingGrid(lrs=(3e-3,), warmups=(100,), steps=1500, seq_len=65)),
    "32-blocks": (32, 32, TrainingGrid(lrs=(3e-3,), warmups=(100,), num_seeds=5, steps=1500, seq_len=65)),
}
"""Trained models: blocks, d_model and training."""
NUM_EVAL_SEQUENCES, EVAL_SEED = 32, 10_000
EXPANDED_TOKENS, MAX_EXPANDED = 16, 16
"""Number of tokens of the expansion by orders, and the largest number of sublayers, whose 2^n subsets are all run."""
EXPANSION_CHUNK = 2048
MAX_PAIRED = 8
"""Largest number of blocks for which all pairs of blocks are measured. In deeper models, distances are powers of 2."""
RATIO_MEASURES = {"path-sum-error", "gradient-by-path-length", "update-size"}
"""Measures whose mean over seeds is geometric."""
NUM_DELETIONS = 20
"""Number of random subsets for each number of deleted blocks."""


def list_parts(device: str) -> dict[str, PartFn]:
    """Measurements of tiny-python and of models trained on bytes."""
    parts: dict[str, PartFn] = {"paths": count_paths, "tiny-python": partial(measure_tiny_python, device)}
    for name in GRIDS:
        parts[f"training and measuring {name}"] = partial(measure_trained, name, device)
    for depth in loss_landscape.DEPTHS:
        for residual in (True, False):
            name = f"loss landscape, {depth} blocks, {'residual' if residual else 'no residual'}"
            parts[name] = partial(loss_landscape.measure_landscape, depth, residual, device)
    for depth in copy_by_depth.DEPTHS:
        for residual in (True, False):
            name = f"copying, {depth} blocks, {'residual' if residual else 'no residual'}"
            parts[name] = partial(copy_by_depth.measure_copying, depth, residual, device)
    return parts


def describe_settings(device: str) -> dict[str, Any]:
    return {
        "tiny-python": f"{NUM_GROUPS} groups of {GROUP_SIZE} texts of {TEXT_TOKENS} tokens from the standard library",
        "trained models": {
            name: f"d_model {d_model}, {grid.num_seeds} seeds, Adam, {grid.steps} steps of"
            f" {grid.batch_size} × {grid.seq_len - 1} bytes of the standard library"
            for name, (_, d_model, grid) in GRIDS.items()
        },
        "expansion": f"{EXPANDED_TOKENS} tokens, all subsets of up to {MAX_EXPANDED} sublayers, fp64",
        "landscape": loss_landscape.describe_settings(),
        "copying": copy_by_depth.describe_settings(),
    }


# ---------------------------------------------------------------------------------------- a stack as sublayers


@dataclass(frozen=True)
class ResidualStack:
    """A pre-norm decoder on given tokens as a sum: x ← x + sublayer(x) for each sublayer, then norm and head."""

    tokens: Tensor
    embedded: Tensor
    sublayers: Sequence[Callable[[Tensor], Tensor]]
    """Attention and FFN of each block, with their norms: functions of the residual stream."""
    compute_logits: Callable[[Tensor], Tensor]

    def run(self, deleted: Iterable[int] = ()) -> Tensor:
        """Residual stream after the last block, without the deleted sublayers."""
        return self.run_from(0, self.embedded, set(deleted))

    def run_from(self, start: int, x: Tensor, deleted: Collection[int] = ()) -> Tensor:
        """Apply the sublayers from `start`, without the deleted ones, to the residual stream before `start`."""
        for index in range(start, len(self.sublayers)):
            if index not in deleted:
                x = x + self.sublayers[index](x)
        return x

    def loss(self, x: Tensor) -> Tensor:
        """(B,): mean next-token loss of each text, from the residual stream after the last block."""
        logits = self.compute_logits(x)[:, :-1]
        return F.cross_entropy(logits.mT, self.tokens[:, 1:], reduction="none").mean(1)

    @cached_property
    def baseline(self) -> Tensor:
        """(B,): loss without deletion."""
        return self.loss(self.run())

    def cost(self, deleted: Iterable[int]) -> Tensor:
        """(B,): increase of the loss by deletion of sublayers."""
        return self.loss(self.run(deleted)) - self.baseline

    def streams(self) -> list[Tensor]:
        """Residual stream before each sublayer and after the last."""
        streams = [self.embedded]
        for sublayer in self.sublayers:
            streams.append(streams[-1] + sublayer(streams[-1]))
        return streams


def residual_stack(model: nn.Module, tokens: Tensor) -> ResidualStack:
    assert isinstance(model, Transformer)
    decoder = model.stacks["decoder"]
    batch_size, seq_len = tokens.shape
    positions = number_tokens(1, seq_len, tokens.device)
    embedded = decoder.embed(tokens, number_tokens(batch_size, seq_len, tokens.device))
    sublayers: list[Callable[[Tensor], Tensor]] = []
    for block, context in zip(
        decoder.blocks, decoder.build_layer_contexts(positions, embedded.dtype, None, {}), strict=True
    ):
        sublayers.append(lambda x, attn=block.attn, context=context: attn(x, context))  # type: ignore[misc]
        sublayers.append(block.ffn)  # type: ignore[arg-type]
    return ResidualStack(tokens, embedded, sublayers, lambda x: model.lm_head(decoder.final_norm(x)))


def _block(index: int) -> tuple[int, int]:
    """Sublayers of a block."""
    return 2 * index, 2 * index + 1


# ---------------------------------------------------------------------------------------- number of paths


def count_paths(depths: Sequence[int] = (1, 6, 12, 32)) -> dict[str, Estimate]:
    """Number of paths through N blocks, counted in a stack whose sublayers are the identity.

    Each sublayer doubles x, or a parallel block triples it, so the last residual stream is the number of paths.
    """
    estimates = {}
    for placement in ("sequential", "parallel"):
        for depth in depths:
            count = _count_paths(placement, depth)
            estimates[f"paths/{placement}/{depth}"] = exact(count)
    return estimates


@torch.no_grad()
def _count_paths(placement: str, depth: int) -> float:
    config = decoder_config(depth, 8, vocab_size=2)
    if placement == "parallel":
        config = config.replace(decoder=config.stacks["decoder"].replace(placement=ParallelResidual()))
    model = build(config, seed=0).double()
    stack = model.stacks["decoder"]
    contexts = stack.build_layer_contexts(number_tokens(1, 1, torch.device("cpu")), torch.float64, None, {})
    x = torch.ones(1, 1, 8, dtype=torch.float64)
    for block, context in zip(stack.blocks, contexts, strict=True):
        block.attn.forward = block.ffn.forward = lambda x, *_: x  # type: ignore[union-attr]
        if placement == "parallel":
            block.norm.forward = lambda x: x  # type: ignore[union-attr]
        x = block(x, context)
    return float(x[0, 0, 0])


def decoder_config(blocks: int, d_model: int, vocab_size: int = VOCAB_SIZE) -> Config:
    """A pre-norm decoder with RoPE, LayerNorm, 4 heads and the initialization of GPT-2."""
    stack = {
        "layers": blocks,
        "norm": {"kind": "layernorm"},
        "block": {"attention": {"heads": 4}, "ffn": {"kind": "mlp"}},
    }
    return read_config({"form": "decoder", "vocab_size": vocab_size, "d_model": d_model, "decoder": stack})


# ---------------------------------------------------------------------------------------- models


def measure_tiny_python(
    device: str = "cpu", num_groups: int = NUM_GROUPS, num_tokens: int = TEXT_TOKENS
) -> dict[str, Estimate]:
    """All measurements of tiny-python, each by group of texts."""
    checkpoint = load("tiny-python")
    model = checkpoint.model.float().to(device).eval()
    tokens = sample_texts(checkpoint.tokenizer, num_groups * GROUP_SIZE, num_tokens).to(device)
    return _summarize("tiny-python", [measure_model(model, group) for group in tokens.split(GROUP_SIZE)])


def sample_texts(tokenizer: Any, num_texts: int, num_tokens: int) -> Tensor:
    """(num_texts, num_tokens): windows of the standard library at random offsets."""
    windows = VALIDATION_TEXT.sample(num_texts, 16 * num_tokens, torch.Generator().manual_seed(EVAL_SEED))
    texts = [bytes(window.tolist()).decode("utf-8", errors="ignore") for window in windows]
    return torch.tensor([tokenizer.encode(text)[:num_tokens] for text in texts])


def measure_trained(name: str, device: str = "cpu", grid: TrainingGrid | None = None) -> dict[str, Estimate]:
    """Train on bytes and measure each seed."""
    blocks, d_model, default_grid = GRIDS[name]
    config = decoder_config(blocks, d_model)
    trained = train_grid(lambda seed: build(config, seed=seed), TRAINING_TEXT, grid or default_grid, device=device)
    tokens = VALIDATION_TEXT.sample(NUM_EVAL_SEQUENCES, trained.grid.seq_len, torch.Generator().manual_seed(EVAL_SEED))
    rows = [measure_model(trained.load_member(index), tokens.to(device)) for index in range(trained.grid.num_seeds)]
    return _summarize(name, rows)


def _summarize(name: str, rows: Sequence[Mapping[str, float]]) -> dict[str, Estimate]:
    """Estimates by key, with the name of the model after the measure: `delete-block/tiny-python/0`."""
    estimates = {}
    for key in rows[0]:
        measure, _, rest = key.partition("/")
        values = [row[key] for row in rows]
        ratio = measure in RATIO_MEASURES and min(values) > 0
        estimates[f"{measure}/{name}/{rest}" if rest else f"{measure}/{name}"] = estimate(values, ratio=ratio)
    return estimates


def measure_model(model: nn.Module, tokens: Tensor) -> dict[str, float]:
    """All measurements of a model on a batch of texts, by key without the name of the model."""
    results = measure_gradient_paths(model, tokens)
    with torch.no_grad():
        stack = residual_stack(model, tokens)
        results |= {"loss": float(stack.baseline.mean())}
        results |= measure_deletions(stack) | measure_heads(model, tokens)
        results |= measure_survival(stack) | measure_reads(stack)
        if len(stack.sublayers) <= MAX_EXPANDED:
            results |= measure_expansion(model, tokens)
    return results


# ---------------------------------------------------------------------------------------- expansion by orders


@torch.no_grad()
def measure_expansion(model: nn.Module, tokens: Tensor) -> dict[str, float]:
    """Error of the expansion of the output into terms of at most k sublayers, and loss of the truncated sum.

    f(S) is the residual stream after the last block with the sublayers in S alone. Its terms are
    m(S) = Σ_{R ⊆ S} (−1)^(|S| − |R|) f(R), and the sum of all 2^n terms is the true output. Order 1 is the embedding
    plus the effect of each sublayer alone. The error is relative to the sum of all writes of the true output.
    """
    model.double()
    stack = residual_stack(model, tokens[:1, :EXPANDED_TOKENS])
    sums = _sums_by_size(stack)
    results = {}
    for order in range(len(sums)):
        approximation = truncated_expansion(sums, order)
        error = (approximation - sums[-1]).norm() / (sums[-1] - sums[0]).norm()
        results[f"path-sum-error/{order}"] = float(error)
        results[f"path-sum-loss/{order}"] = float(stack.loss(approximation))
    model.float()
    return results


def _sums_by_size(stack: ResidualStack) -> list[Tensor]:
    """Sum of f(S) over all sets S of r sublayers, for r from 0 to n. All sets are in one batch."""
    x, sizes = stack.embedded, torch.zeros(1, dtype=torch.long, device=stack.embedded.device)
    for sublayer in stack.sublayers:
        applied = [part + sublayer(part) for part in x.split(EXPANSION_CHUNK)]
        x, sizes = torch.cat([x, *applied]), torch.cat([sizes, sizes + 1])
    return [x[sizes == size].sum(0, keepdim=True) for size in range(len(stack.sublayers) + 1)]


def truncated_expansion(sums: Sequence[Tensor], order: int) -> Tensor:
    """Sum of the terms m(S) of at most `order` sublayers, from the sums of f by size."""
    n = len(sums) - 1
    if order == n:
        return sums[n]
    factors = [(-1) ** (order - size) * math.comb(n - size - 1, order - size) for size in range(order + 1)]
    return torch.stack([factor * total for factor, total in zip(factors, sums, strict=False)]).sum(0)


def measure_gradient_paths(model: nn.Module, tokens: Tensor) -> dict[str, float]:
    """Gradient of the loss at the embedding by path length, relative to the whole gradient.

    The gradient is a sum over 2^n paths of products of Jacobians. A path has a length, the number of sublayers in it.
    `gradient-path-length` is the mean length weighted by the norms, relative to n; that of all paths is 0.5.
    """
    stack = residual_stack(model, tokens[:4])
    with torch.no_grad():
        streams = stack.streams()
    by_length = [_gradient(lambda x: stack.loss(x).mean(), streams[-1])]
    for sublayer, x in zip(reversed(stack.sublayers), reversed(streams[:-1]), strict=True):
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            out = sublayer(x)
        through = [torch.autograd.grad(out, x, gradient, retain_graph=True)[0] for gradient in by_length]
        zero = torch.zeros_like(x)
        by_length = [a + b for a, b in zip([*by_length, zero], [zero, *through], strict=True)]
    norms = torch.stack([gradient.norm() for gradient in by_length]) / sum(by_length).norm()  # type: ignore[union-attr]
    lengths = torch.arange(len(norms), device=norms.device)
    results = {f"gradient-by-path-length/{length}": float(norm) for length, norm in enumerate(norms)}
    return results | {"gradient-path-length": float((norms * lengths).sum() / norms.sum() / lengths[-1])}


def _gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(function(x), x)[0]


# ---------------------------------------------------------------------------------------- deletion


def measure_deletions(stack: ResidualStack) -> dict[str, float]:
    """Increase of the loss by deletion of each block, each sublayer and random blocks and sublayers; size of updates.

    `delete-middle-block` is the mean over the blocks between the first and the last. `delete-blocks/k` and
    `delete-sublayers/k` are means over random sets, and `delete-later-blocks/k` over sets without the first block;
    `delete-additivity/k` is the ratio of the latter to the sum of the costs of its blocks. `size-cost-correlation` is
    Spearman's correlation of ‖F(x)‖/‖x‖ with the cost of deletion.
    """
    num_blocks = len(stack.sublayers) // 2
    blocks = [float(stack.cost(_block(index)).mean()) for index in range(num_blocks)]
    sublayers = [float(stack.cost([index]).mean()) for index in range(len(stack.sublayers))]
    results = {f"delete-block/{index}": cost for index, cost in enumerate(blocks)}
    results |= {f"delete-sublayer/{_name(index)}": cost for index, cost in enumerate(sublayers)}
    results["delete-middle-block"] = fmean(blocks[1:-1])
    results["delete-middle-block-max"] = max(blocks[1:-1])
    all_blocks = [_block(index) for index in range(num_blocks)]
    for count in (count for count in (2, 4, 8, 16) if count < num_blocks):
        results[f"delete-blocks/{count}"] = fmean(_random_deletions(stack, all_blocks, count).values())
        later = _random_deletions(stack, all_blocks[1:], count)
        additive = fmean(sum(blocks[1 + index] for index in chosen) for chosen in later)
        results[f"delete-later-blocks/{count}"] = fmean(later.values())
        results[f"delete-additivity/{count}"] = fmean(later.values()) / additive
        singles = [(index,) for index in range(len(stack.sublayers))]
        results[f"delete-sublayers/{count}"] = fmean(_random_deletions(stack, singles, count).values())
    block_sizes, sublayer_sizes = update_sizes(stack)
    results |= {f"update-size/{index}": size for index, size in enumerate(block_sizes)}
    results["size-cost-correlation/blocks"] = spearman(torch.tensor(block_sizes), torch.tensor(blocks))
    results["size-cost-correlation/blocks-without-first"] = spearman(
        torch.tensor(block_sizes[1:]), torch.tensor(blocks[1:])
    )
    results["size-cost-correlation/sublayers"] = spearman(torch.tensor(sublayer_sizes), torch.tensor(sublayers))
    return results


def _name(sublayer: int) -> str:
    return f"{sublayer // 2}.{'ffn' if sublayer % 2 else 'attn'}"


def _random_deletions(stack: ResidualStack, units: Sequence[Sequence[int]], count: int) -> dict[tuple[int, ...], float]:
    """Cost of the deletion of random sets of `count` units, each of which is a set of sublayers, by the set."""
    costs = {}
    for seed in range(NUM_DELETIONS):
        order = torch.randperm(len(units), generator=torch.Generator().manual_seed(seed))
        chosen = tuple(sorted(order[:count].tolist()))
        costs[chosen] = float(stack.cost([index for unit in chosen for index in units[unit]]).mean())
    return costs


def update_sizes(stack: ResidualStack) -> tuple[list[float], list[float]]:
    """Mean over tokens of ‖F(x)‖/‖x‖ of each block and of each sublayer."""
    streams = stack.streams()

    def sizes(selected: Sequence[Tensor]) -> list[float]:
        return [float(((after - x).norm(dim=-1) / x.norm(dim=-1)).mean()) for x, after in pairwise(selected)]

    return sizes(streams[::2]), sizes(streams)


def measure_heads(model: nn.Module, tokens: Tensor) -> dict[str, float]:
    """Increase of the loss by zero-ablation of one head: mean and maximum over the heads of each block."""
    assert isinstance(model, Transformer)
    blocks = model.stacks["decoder"].blocks
    baseline, results = float(next_token_loss(model(tokens), tokens)), {}
    for layer, block in enumerate(blocks):
        costs = []
        for head in range(block.attn.f.heads):  # type: ignore[union-attr, arg-type]
            with edit(model, {f"blocks.{layer}.attn.z": {"do": "zero", "heads": [head]}}):
                costs.append(float(next_token_loss(model(tokens), tokens)) - baseline)
        results[f"delete-head/{layer}"] = sum(costs) / len(costs)
        results[f"delete-head-max/{layer}"] = max(costs)
    return results


# ---------------------------------------------------------------------------------------- survival of writes


def measure_survival(stack: ResidualStack) -> dict[str, float]:
    """What later blocks leave of the write of a block, and of the embedding.

    `survival/l/m` is 1 + ⟨later, w⟩/⟨w, w⟩, mean over tokens, where w is the write of block l and `later` the sum of
    the writes of the blocks l + 1 to m: 1 if later writes are orthogonal to w, 0 if they remove it.
    `survival-control` has the write of the preceding token as w. `cosine/l/m` is the cosine of w with the residual
    stream after block m.
    """
    streams = stack.streams()[::2]  # before the first block, and after each block
    last, results = len(streams) - 2, {}
    writes = {"embedding": streams[0]} | {str(i): after - x for i, (x, after) in enumerate(pairwise(streams))}
    for index, (name, write) in enumerate(writes.items()):  # the write is in streams[index] and later
        readers = range(index, last + 1)
        for block in readers if name == "embedding" else sorted({*readers[:1], *readers[-1:]}):
            later = streams[block + 1] - streams[index]
            results[f"survival/{name}/{block}"] = 1 + _projection(later, write)
            results[f"survival-control/{name}/{block}"] = 1 + _projection(later, write.roll(1, dims=1))
        results[f"cosine/{name}/{last}"] = float(F.cosine_similarity(write, streams[-1], dim=-1).mean())
    return results


def _projection(x: Tensor, direction: Tensor) -> float:
    return float(((x * direction).sum(-1) / direction.square().sum(-1)).mean())


def measure_reads(stack: ResidualStack) -> dict[str, float]:
    """Increase of the loss if later blocks read the residual stream without the write of block l.

    `read/l/m`: block m alone reads it without the write; m is `head` for the final norm and the head. `remove/l/m`: the
    write is removed before block m, so block m and all that follows are without it. `read-by-distance/k` and
    `remove-by-distance/k` are means over all pairs with m − l = k.
    """
    streams, num_blocks = stack.streams(), len(stack.sublayers) // 2
    writes = [streams[2 * index + 2] - streams[2 * index] for index in range(num_blocks)]
    baseline = stack.baseline.mean()
    costs: dict[str, dict[tuple[int, int], float]] = {"read": {}, "remove": {}}
    distances = list(range(1, num_blocks)) if num_blocks <= MAX_PAIRED else [1, 2, 4, 8, 16]
    pairs = [pair for pair in combinations(range(num_blocks), 2) if pair[1] - pair[0] in distances]
    for source, reader in pairs:
        x, write = streams[2 * reader], writes[source]
        for index in _block(reader):
            x = x + stack.sublayers[index](x - write)
        outputs = {
            "read": stack.run_from(2 * reader + 2, x),
            "remove": stack.run_from(2 * reader, streams[2 * reader] - write),
        }
        for measure, output in outputs.items():
            costs[measure][source, reader] = float(stack.loss(output).mean() - baseline)
    results = {
        f"read/{index}/head": float(stack.loss(streams[-1] - write).mean() - baseline)
        for index, write in enumerate(writes)
    }
    for measure, by_pair in costs.items():
        if num_blocks <= MAX_PAIRED:
            results |= {f"{measure}/{source}/{reader}": cost for (source, reader), cost in by_pair.items()}
        for distance in distances:
            values = [cost for (source, reader), cost in by_pair.items() if reader - source == distance]
            results[f"{measure}-by-distance/{distance}"] = fmean(values)
    return results
