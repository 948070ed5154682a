"""Measures of information: of distributions, of logits, or of samples; in bits, or in nats.

A distribution is a list, an array or a tensor of probabilities, and logits are what softmax makes one of. Arrays and
tensors of more axes hold one along the last: the answer has the others' shape. Of one distribution it is a float.

    cross-entropy = entropy + divergence        H(P, Q) = H(P) + KL(P ‖ Q)
"""

import math
from typing import Any

import numpy as np

from cutaway.errors import InputError
from cutaway.evaluate import functional
from cutaway.evaluate.distributions import (
    Distribution,
    as_float_array,
    count_samples,
    from_counts,
    from_logits,
    from_probabilities,
    log_prob_of_class,
    parse_unit,
    require_exactly_one,
    resolve_distribution,
    resolve_pair,
)
from cutaway.evaluate.functional import array_namespace, is_tensor


def entropy(
    p: Any = None, *, logits: Any = None, samples: Any = None, bias_correction: bool = False, unit: str = "bits"
) -> Any:
    """H(P) = −Σ p·log p: what telling one outcome takes on average, at best.

    Of samples it is the plug-in estimate, which is too low while samples are few; `bias_correction` adds Miller and
    Madow's (outcomes seen − 1) / 2·samples nats, most of what is missing.
    """
    size = parse_unit(unit)
    if require_exactly_one("entropy", p=p, logits=logits, samples=samples) == "samples":
        return _entropy_of_counts(list(count_samples("samples", samples).values()), bias_correction) / size
    if bias_correction:
        raise InputError("only an estimate from samples can be corrected; leave `bias_correction` out, or give samples")
    found = from_probabilities("p", p) if logits is None else from_logits("logits", logits)
    return _to_float_if_scalar(functional.cross_entropy(*found) / size)


def cross_entropy(
    p: Any = None,
    q: Any = None,
    *,
    target: Any = None,
    p_logits: Any = None,
    q_logits: Any = None,
    p_samples: Any = None,
    q_samples: Any = None,
    unit: str = "bits",
) -> Any:
    """H(P, Q) = −Σ p·log q: what it takes when P is true and Q is believed; infinite where Q rules out what is.

    Instead of P, `target` may be the number of the class that came, or an array of them: −log q(target).
    Samples beside a distribution are numbers of its outcomes; beside samples they may be anything.
    """
    size = parse_unit(unit)
    return _to_float_if_scalar(_cross_entropy_nats(p, q, target, p_logits, q_logits, p_samples, q_samples) / size)


def perplexity(
    p: Any = None,
    q: Any = None,
    *,
    target: Any = None,
    p_logits: Any = None,
    q_logits: Any = None,
    p_samples: Any = None,
    q_samples: Any = None,
) -> Any:
    """2^H(P), or 2^H(P, Q), in bits: among how many equally likely outcomes one would be as uncertain."""
    if q is None and q_logits is None and q_samples is None and target is None:
        nats = entropy(p, logits=p_logits, samples=p_samples, unit="nats")
    else:
        nats = _cross_entropy_nats(p, q, target, p_logits, q_logits, p_samples, q_samples)
    with np.errstate(over="ignore"):
        return _to_float_if_scalar(array_namespace(nats).exp(nats))


def kl_divergence(
    p: Any = None,
    q: Any = None,
    *,
    p_logits: Any = None,
    q_logits: Any = None,
    p_samples: Any = None,
    q_samples: Any = None,
    unit: str = "bits",
) -> Any:
    """KL(P ‖ Q) = Σ p·log(p / q) = H(P, Q) − H(P): what is lost by believing Q. It is no distance: order matters."""
    size = parse_unit(unit)
    mine, theirs = resolve_pair(p, q, p_logits, q_logits, p_samples, q_samples)
    return _to_float_if_scalar(functional.kl_divergence(mine.p, mine.log_p, theirs.log_p) / size)


def mutual_information(
    joint: Any = None, *, samples: Any = None, bias_correction: bool = False, unit: str = "bits"
) -> Any:
    """I(X; Y) = KL(P(x, y) ‖ P(x)·P(y)): what knowing one tells of the other. `joint` has a row for each x.

    `samples` are pairs (x, y). Their plug-in estimate H(X) + H(Y) − H(X, Y) is too high while they are few: of
    unrelated things it is not 0. `bias_correction` takes Miller and Madow's correction of each entropy, and may be
    below 0.
    """
    size = parse_unit(unit)
    if require_exactly_one("mutual information", joint=joint, samples=samples) == "samples":
        return _mutual_information_of_samples(samples, bias_correction) / size
    if bias_correction:
        raise InputError("only an estimate from samples can be corrected; leave `bias_correction` out, or give samples")
    table = as_float_array("joint", joint, "probabilities")
    if table.ndim < 2:
        raise InputError("joint is one row; give a table with one row for each x")
    flat = from_probabilities("joint", table.reshape(*table.shape[:-2], -1))
    table = flat.p.reshape(table.shape)
    apart = functional.log(table.sum(-1))[..., :, None] + functional.log(table.sum(-2))[..., None, :]
    return _to_float_if_scalar(functional.kl_divergence(flat.p, flat.log_p, apart.reshape(flat.p.shape)) / size)


def bits_per_byte(nats: float, num_bytes: float) -> float:
    """Surprise by length in UTF-8, of a text or of a mean token: comparable between tokenizers, as loss is not."""
    if num_bytes < 0:
        raise InputError(f"num_bytes is {num_bytes}; give the length of the text that was told")
    return nats / math.log(2) / num_bytes if num_bytes else math.inf


def _cross_entropy_nats(
    p: Any, q: Any, target: Any, p_logits: Any, q_logits: Any, p_samples: Any, q_samples: Any
) -> Any:
    """In nats."""
    if target is None:
        mine, theirs = resolve_pair(p, q, p_logits, q_logits, p_samples, q_samples)
        return functional.cross_entropy(mine.p, theirs.log_p)
    require_exactly_one("what is true", target=target, p=p, p_logits=p_logits, p_samples=p_samples)
    if require_exactly_one("q", q=q, q_logits=q_logits, q_samples=q_samples) == "q_samples":
        raise InputError("a class is told by its number, and samples have none; give q or q_logits")
    return 0.0 - log_prob_of_class(target, resolve_distribution("q", q, q_logits))


def _entropy_of_counts(counts: list[int], bias_correction: bool) -> float:
    """Nats."""
    shares: Distribution = from_counts(counts)
    return float(functional.cross_entropy(*shares)) + (
        (len(counts) - 1) / (2 * sum(counts)) if bias_correction else 0.0
    )


def _mutual_information_of_samples(samples: Any, bias_correction: bool) -> float:
    pairs = count_samples("samples", samples)
    x: dict[Any, int] = {}
    y: dict[Any, int] = {}
    for pair, count in pairs.items():
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise InputError(f"samples has {pair!r:.40}, which is no pair; give (x, y) as they came together")
        x[pair[0]], y[pair[1]] = x.get(pair[0], 0) + count, y.get(pair[1], 0) + count
    own, other, together = (_entropy_of_counts(list(each.values()), bias_correction) for each in (x, y, pairs))
    found = own + other - together
    return found if bias_correction else max(0.0, found)


def _to_float_if_scalar(value: Any) -> Any:
    """A float, if it is one number."""
    if getattr(value, "ndim", 0):
        return value
    return float(value.detach() if is_tensor(value) else value)
