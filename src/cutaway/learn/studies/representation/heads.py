"""Attention heads of tiny-python: what they attend to, composition across layers, and entropy against usefulness."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from cutaway.evaluate.functional import entropy
from cutaway.learn.studies.rank_correlation import spearman
from cutaway.learn.studies.representation.python_texts import MODULES, is_punctuation, load_model, load_module_text
from cutaway.learn.studies.representation.stacked_weights import attention_weights
from cutaway.learn.studies.study import Estimate, estimate, exact
from cutaway.lens.analysis import head_scores
from cutaway.lens.edit import edit
from cutaway.lens.trace import trace
from cutaway.model import Transformer, build

TEXTS = MODULES[:10]
NUM_WINDOWS, FIRST_QUERY = 2, 32
"""Windows per text, and the first query of a window that counts."""
MAX_OFFSET, THRESHOLD, NUM_EXTREMES = 8, 0.2, 6
"""Largest offset; share of attention from which on a head counts; number of sharpest and of flattest heads."""
NUM_ROTATIONS, NUM_UNTRAINED = 10, 10


@torch.no_grad()
def record_patterns(model: Transformer, ids: Tensor) -> Tensor:
    """(layers, B, heads, T, T): attention patterns."""
    with trace(model, "attn.pattern") as t:
        model(ids)
    return torch.stack([t[f"blocks.{layer}.attn.pattern"].as_subclass(Tensor) for layer in range(len(t))])


def attention_targets(patterns: Tensor, ids: Tensor, punctuation: Tensor) -> dict[str, Tensor]:
    """Mean attention of each head, (layers, heads), to the first token, to offsets 0, 1, … and to punctuation.

    Attention to punctuation excludes the first token and is relative to the frequency of punctuation: 0 if
    proportional, 1 if all attention is on punctuation.
    """
    late = patterns[..., FIRST_QUERY:, :]
    targets = {"first": late[..., 0].mean((1, 3))}
    for offset in range(MAX_OFFSET + 1):
        targets[f"offset-{offset}"] = patterns.diagonal(-offset, -2, -1)[..., FIRST_QUERY - offset :].mean((1, 3))
    is_key = punctuation[ids].float()  # (B, T)
    is_key[:, 0] = 0
    length = ids.shape[1]
    visible = torch.ones(length, length, device=ids.device).tril()[FIRST_QUERY:]
    frequency = (visible * is_key[:, None]).sum(-1) / visible.sum(-1)  # (B, queries)
    on_keys = torch.einsum("lbhqk,bk->lbhq", late, is_key)
    targets["punctuation"] = ((on_keys - frequency[:, None]) / (1 - frequency[:, None])).mean((1, 3))
    return targets


def measure_head_targets(
    device: str, texts: Sequence[str] = TEXTS, num_untrained: int = NUM_UNTRAINED
) -> dict[str, Estimate]:
    """Number of heads with at least THRESHOLD of their attention on a target, and the largest score, over texts.

    An untrained model is measured on the first text, over seeds.
    """
    checkpoint, punctuation = load_model(device), is_punctuation(device)
    ids = [load_module_text(name, NUM_WINDOWS).ids.to(device) for name in texts]
    rows = [attention_targets(record_patterns(checkpoint.model, text), text, punctuation) for text in ids]
    estimates = {}
    for name in rows[0]:
        counts = [float((row[name] >= THRESHOLD).sum()) for row in rows]
        estimates[f"heads/{name}/count"] = estimate(counts)
        estimates[f"heads/{name}/largest"] = estimate([float(row[name].max()) for row in rows])
    any_offset = [torch.stack([row[f"offset-{offset}"] for offset in range(2, MAX_OFFSET + 1)]).amax(0) for row in rows]
    estimates["heads/offset-2-to-8/count"] = estimate([float((row >= THRESHOLD).sum()) for row in any_offset])
    untrained = []
    for seed in range(num_untrained):
        model = build(checkpoint.config, seed=seed, dtype=torch.float32).to(device)
        untrained.append(attention_targets(record_patterns(model, ids[0]), ids[0], punctuation))
    for name in ("first", "offset-1", "punctuation"):
        estimates[f"heads/{name}/largest/untrained"] = estimate([float(row[name].max()) for row in untrained])
    return estimates


@torch.no_grad()
def composition_scores(model: Transformer, rotation: Tensor | None = None) -> dict[str, Tensor]:
    """Composition of each earlier head with each later head: (layers, heads, layers, heads), NaN for other pairs.

    ‖A·B‖ / (‖A‖·‖B‖) in the Frobenius norm, with B the output-value matrix of the earlier head and A the matrix of the
    later head that reads its queries (q), keys (k) or values (v). The gains of the norms are included, RoPE is not.
    `rotation`, an orthogonal matrix, is applied to the earlier head's outputs.
    """
    q, k, v, o = attention_weights(model)
    layers, heads = o.shape[:2]
    ov_norm, qk_norm = _product_norm(o, v), _product_norm(q.mT, k)  # (L, H)
    written = o if rotation is None else rotation @ o
    order = torch.arange(layers, device=o.device)
    is_earlier = (order[:, None] < order)[:, None, :, None].expand(layers, heads, layers, heads)
    readers = {"q": (k.mT, q, qk_norm), "k": (q.mT, k, qk_norm), "v": (o, v, ov_norm)}
    scores = {}
    for name, (outer, reader, norm) in readers.items():
        middle = torch.einsum("mged,lhdf->lhmgef", reader, written)  # what the later head reads of the earlier output
        product = _product_norm(outer[None, None] @ middle, v[:, :, None, None])
        score = product / (norm * ov_norm[:, :, None, None])
        scores[name] = score.masked_fill(~is_earlier, float("nan"))
    return scores


def _product_norm(a: Tensor, b: Tensor) -> Tensor:
    """Frobenius norm of a·b, from Gram matrices: a is (…, m, r), b is (…, r, n) with small r."""
    return ((a.mT @ a) * (b @ b.mT)).sum((-2, -1)).clamp(min=0).sqrt()


def measure_composition(device: str, num_rotations: int = NUM_ROTATIONS) -> dict[str, Estimate]:
    """Composition scores against random rotations of the earlier head's output.

    `ratio` is the mean score relative to rotations, `above-random` the share of pairs above the largest score of a
    rotation, and `induction-rank` the rank of the best previous-token head among the heads that the best induction
    head reads.
    """
    model = load_model(device).model
    generator = torch.Generator().manual_seed(0)
    width = model.config.d_model
    rotations = [torch.linalg.qr(torch.randn(width, width, generator=generator)).Q for _ in range(num_rotations)]
    baselines = [composition_scores(model, rotation.to(device)) for rotation in rotations]
    best = {name: _best_head(model, name) for name in ("previous_token", "induction")}
    estimates = {}
    for name, score in composition_scores(model).items():
        values = score[~score.isnan()]
        random = torch.stack([baseline[name][~score.isnan()] for baseline in baselines])
        ratios = [float(values.mean() / row.mean()) for row in random]
        estimates[f"composition/{name}/ratio"] = estimate(ratios, ratio=True)
        shares = [float((values > row.max()).float().mean()) for row in random]
        estimates[f"composition/{name}/above-random"] = estimate(shares)
        into = score[:, :, best["induction"][0], best["induction"][1]]
        rank = 1 + int((into > into[best["previous_token"]]).sum())
        estimates[f"composition/{name}/induction-rank"] = exact(rank)
    candidates = best["induction"][0] * attention_weights(model).o.shape[1]
    return estimates | {"composition/induction-candidates": exact(candidates)}


def _best_head(model: Transformer, head_type: str) -> tuple[int, int]:
    (layer, head), _ = head_scores(model).select(head_type=head_type).top(1)[0]
    return int(layer), int(head)


@torch.no_grad()
def _losses_without_heads(model: Transformer, ids: Tensor) -> tuple[float, Tensor]:
    """Loss with all heads, and (layers, heads) the increase if one head is zero-ablated. `ids` is (B, T)."""

    def loss() -> float:
        logits = model(ids)
        return float(F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))

    baseline, (layers, heads, *_) = loss(), attention_weights(model).o.shape
    increases = torch.zeros(layers, heads)
    for layer in range(layers):
        for head in range(heads):
            with edit(model, {f"blocks.{layer}.attn.z": {"do": "zero", "heads": [head]}}):
                increases[layer, head] = loss() - baseline
    return baseline, increases


def relative_entropy(patterns: Tensor) -> Tensor:
    """(layers, heads): mean of entropy / ln(number of visible tokens), 0 for one token and 1 for uniform attention."""
    queries = torch.arange(FIRST_QUERY, patterns.shape[-1], device=patterns.device)
    return (entropy(patterns[..., FIRST_QUERY:, :]) / (queries + 1.0).log()).mean((1, 3))


def measure_attention_entropy(
    device: str, texts: Sequence[str] = TEXTS, num_untrained: int = NUM_UNTRAINED
) -> dict[str, Estimate]:
    """Relative entropy of heads, and the loss without the sharpest, flattest and other heads, over texts."""
    checkpoint = load_model(device)
    rows: dict[str, list[float]] = {}
    for name in texts:
        ids = load_module_text(name, 1).ids.to(device)
        relative = relative_entropy(record_patterns(checkpoint.model, ids)).cpu().flatten()
        increase = _losses_without_heads(checkpoint.model, ids)[1].flatten()
        order = relative.argsort()
        row = {
            "smallest": float(relative.min()),
            "largest": float(relative.max()),
            "loss-increase/sharpest": float(increase[order[:NUM_EXTREMES]].mean()),
            "loss-increase/flattest": float(increase[order[-NUM_EXTREMES:]].mean()),
            "loss-increase/other": float(increase[order[NUM_EXTREMES:-NUM_EXTREMES]].mean()),
            "spearman": spearman(relative, increase),
        }
        for key, value in row.items():
            rows.setdefault(key, []).append(value)
    untrained = []
    ids = load_module_text(texts[0], 1).ids.to(device)
    for seed in range(num_untrained):
        model = build(checkpoint.config, seed=seed, dtype=torch.float32).to(device)
        untrained.append(float(relative_entropy(record_patterns(model, ids)).min()))
    estimates = {f"attention-entropy/{key}": estimate(values) for key, values in rows.items()}
    return estimates | {"attention-entropy/smallest/untrained": estimate(untrained)}
