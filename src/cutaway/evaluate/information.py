"""Entropy, cross-entropy, perplexity, KL divergence and mutual information of distributions, logits or samples.

A distribution is a list, an array or a tensor of probabilities along the last axis. Logits are converted by softmax.
The result has the shape of the leading axes; for a single distribution it is a float. Units are bits (default) or nats.

    cross-entropy = entropy + divergence        H(P, Q) = H(P) + KL(P ‖ Q)
"""

import math
from collections import Counter
from collections.abc import Hashable
from typing import Any

import numpy as np

from cutaway.errors import InputError
from cutaway.evaluate import distributions as dist
from cutaway.evaluate import functional
from cutaway.evaluate.distributions import Array, ArrayLike, Operand, Samples, parse_unit, require_exactly_one
from cutaway.evaluate.functional import array_namespace, is_tensor


def entropy(
    p: ArrayLike | None = None,
    *,
    logits: ArrayLike | None = None,
    samples: Samples | None = None,
    bias_correction: bool = False,
    unit: str = "bits",
) -> Any:
    """Entropy H(P) = −Σ p·log p: the minimum average code length of one outcome.

    For samples, the result is the plug-in estimate, which is too low on average with few samples. `bias_correction`
    adds the Miller-Madow correction, (observed outcomes − 1) / (2·samples) nats, which removes most of the bias.
    """
    nats_per_unit = parse_unit(unit)
    if require_exactly_one("entropy", p=p, logits=logits, samples=samples) == "samples":
        return _entropy_of_counts(dist.count_samples("samples", samples), bias_correction) / nats_per_unit
    if bias_correction:
        raise InputError("bias_correction applies only to estimates from samples; leave it out, or pass samples")
    distribution = dist.from_probabilities("p", p) if logits is None else dist.from_logits("logits", logits)
    return _to_float_if_scalar(functional.cross_entropy(*distribution) / nats_per_unit)


def cross_entropy(
    p: ArrayLike | None = None,
    q: ArrayLike | None = None,
    *,
    target: int | ArrayLike | None = None,
    p_logits: ArrayLike | None = None,
    q_logits: ArrayLike | None = None,
    p_samples: Samples | None = None,
    q_samples: Samples | None = None,
    unit: str = "bits",
) -> Any:
    """Cross-entropy H(P, Q) = −Σ p·log q of the true P and the model Q. It is infinite if q = 0 where p > 0.

    Instead of P, `target` may be the index of the true class, or an array of indices; the result is −log q(target). If
    one side is samples and the other a distribution, the samples must be outcome indices. If both sides are samples,
    they may be any hashable values.
    """
    nats_per_unit = parse_unit(unit)
    nats = _cross_entropy_nats(Operand("p", p, p_logits, p_samples), Operand("q", q, q_logits, q_samples), target)
    return _to_float_if_scalar(nats / nats_per_unit)


def perplexity(
    p: ArrayLike | None = None,
    q: ArrayLike | None = None,
    *,
    target: int | ArrayLike | None = None,
    p_logits: ArrayLike | None = None,
    q_logits: ArrayLike | None = None,
    p_samples: Samples | None = None,
    q_samples: Samples | None = None,
) -> Any:
    """Perplexity 2^H(P) or 2^H(P, Q), with H in bits: the number of equally likely outcomes with the same entropy."""
    if q is None and q_logits is None and q_samples is None and target is None:
        nats = entropy(p, logits=p_logits, samples=p_samples, unit="nats")
    else:
        nats = _cross_entropy_nats(Operand("p", p, p_logits, p_samples), Operand("q", q, q_logits, q_samples), target)
    with np.errstate(over="ignore"):
        return _to_float_if_scalar(array_namespace(nats).exp(nats))


def kl_divergence(
    p: ArrayLike | None = None,
    q: ArrayLike | None = None,
    *,
    p_logits: ArrayLike | None = None,
    q_logits: ArrayLike | None = None,
    p_samples: Samples | None = None,
    q_samples: Samples | None = None,
    unit: str = "bits",
) -> Any:
    """KL divergence KL(P ‖ Q) = Σ p·log(p / q) = H(P, Q) − H(P). It is not symmetric."""
    nats_per_unit = parse_unit(unit)
    p_dist, q_dist = dist.resolve_pair(Operand("p", p, p_logits, p_samples), Operand("q", q, q_logits, q_samples))
    return _to_float_if_scalar(functional.kl_divergence(p_dist.p, p_dist.log_p, q_dist.log_p) / nats_per_unit)


def mutual_information(
    joint: ArrayLike | None = None, *, samples: Samples | None = None, bias_correction: bool = False, unit: str = "bits"
) -> Any:
    """Mutual information I(X; Y) = KL(P(x, y) ‖ P(x)·P(y)).

    `joint` is the table of P(x, y) with one row per x; `samples` are pairs (x, y). With few samples, the plug-in
    estimate H(X) + H(Y) − H(X, Y) is too high on average: it is above 0 even for independent variables.
    `bias_correction` applies the Miller-Madow correction to each entropy. The result may then be negative.
    """
    nats_per_unit = parse_unit(unit)
    if require_exactly_one("mutual information", joint=joint, samples=samples) == "samples":
        return _mutual_information_of_samples(samples, bias_correction) / nats_per_unit
    if bias_correction:
        raise InputError("bias_correction applies only to estimates from samples; leave it out, or pass samples")
    table = dist.as_float_array("joint", joint, "probabilities")
    if table.ndim < 2:
        raise InputError(f"joint has {table.ndim} axis; p(x, y) is a table, so pass one row per value of x")
    flat = dist.from_probabilities("joint", table.reshape(*table.shape[:-2], -1))
    table = flat.p.reshape(table.shape)
    log_independent = functional.log(table.sum(-1))[..., :, None] + functional.log(table.sum(-2))[..., None, :]
    nats = functional.kl_divergence(flat.p, flat.log_p, log_independent.reshape(flat.p.shape))
    return _to_float_if_scalar(nats / nats_per_unit)


def bits_per_byte(nats: float, num_bytes: float) -> float:
    """Convert a loss in nats over `num_bytes` UTF-8 bytes to bits per byte.

    Unlike the loss per token, bits per byte can be compared between models with different tokenizers.
    """
    if num_bytes < 0:
        raise InputError(f"num_bytes is {num_bytes}; pass the UTF-8 length of the scored text")
    return nats / math.log(2) / num_bytes if num_bytes else math.inf


def _cross_entropy_nats(p: Operand, q: Operand, target: int | ArrayLike | None) -> Array:
    if target is None:
        p_dist, q_dist = dist.resolve_pair(p, q)
        return functional.cross_entropy(p_dist.p, q_dist.log_p)
    p.check(target=target)
    q.check()
    if q.samples is not None:
        raise InputError(
            "a class index as target needs class probabilities, which q_samples do not give; pass q or q_logits"
        )
    return 0.0 - dist.log_prob_of_class(target, q.distribution())


def _entropy_of_counts(counts: Counter[Hashable], bias_correction: bool) -> float:
    """Return the plug-in entropy in nats, with the Miller-Madow correction if `bias_correction`."""
    correction = (len(counts) - 1) / (2 * counts.total()) if bias_correction else 0.0
    return float(functional.cross_entropy(*dist.from_counts(counts.values()))) + correction


def _mutual_information_of_samples(samples: Samples | None, bias_correction: bool) -> float:
    pairs = dist.count_samples("samples", samples)
    x_counts: Counter[Hashable] = Counter()
    y_counts: Counter[Hashable] = Counter()
    for pair, count in pairs.items():
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise InputError(f"samples has {pair!r:.40}, which is not a pair; pass pairs (x, y)")
        x_counts[pair[0]] += count
        y_counts[pair[1]] += count
    h_x, h_y, h_xy = (_entropy_of_counts(counts, bias_correction) for counts in (x_counts, y_counts, pairs))
    return h_x + h_y - h_xy if bias_correction else max(0.0, h_x + h_y - h_xy)


def _to_float_if_scalar(value: Array) -> Any:
    """Convert a 0-d array or tensor to float; return any other array unchanged."""
    if getattr(value, "ndim", 0):
        return value
    return float(value.detach() if is_tensor(value) else value)
