"""Measures of information: of distributions, of logits, or of samples; in bits, or in nats.

A distribution is a list, an array or a tensor of probabilities, and logits are what softmax makes one of. Arrays and
tensors of more axes hold one along the last: the answer has the others' shape. Of one distribution it is a float.

    cross-entropy = entropy + divergence        H(P, Q) = H(P) + KL(P ‖ Q)
"""

import math
from typing import Any

import numpy as np

from cutaway.errors import InputError
from cutaway.measure import equations
from cutaway.measure.equations import is_tensor, maths_of
from cutaway.measure.given import Shares, both, chosen, counted, numbers, of_counts, of_logits, one, only, unit_of
from cutaway.measure.given import probabilities as shares_of


def entropy(
    p: Any = None, *, logits: Any = None, samples: Any = None, corrected: bool = False, unit: str = "bits"
) -> Any:
    """H(P) = −Σ p·log p: what telling one outcome takes on average, at best.

    Of samples it is the plug-in estimate, which is too low while samples are few; `corrected` adds Miller and Madow's
    (outcomes seen − 1) / 2·samples nats, most of what is missing.
    """
    size = unit_of(unit)
    if only("entropy", p=p, logits=logits, samples=samples) == "samples":
        return _of_counts(list(counted("samples", samples).values()), corrected) / size
    if corrected:
        raise InputError("only an estimate from samples can be corrected; leave `corrected` out, or give samples")
    found = shares_of("p", p) if logits is None else of_logits("logits", logits)
    return _told(equations.cross_entropy(*found) / size)


def cross_entropy(
    p: Any = None,
    q: Any = None,
    *,
    true: Any = None,
    p_logits: Any = None,
    q_logits: Any = None,
    p_samples: Any = None,
    q_samples: Any = None,
    unit: str = "bits",
) -> Any:
    """H(P, Q) = −Σ p·log q: what it takes when P is true and Q is believed; infinite where Q rules out what is.

    Instead of P, `true` may be the number of the class that came, or an array of them: −log q(true).
    Samples beside a distribution are numbers of its outcomes; beside samples they may be anything.
    """
    size = unit_of(unit)
    return _told(_cross(p, q, true, p_logits, q_logits, p_samples, q_samples) / size)


def perplexity(
    p: Any = None,
    q: Any = None,
    *,
    true: Any = None,
    p_logits: Any = None,
    q_logits: Any = None,
    p_samples: Any = None,
    q_samples: Any = None,
) -> Any:
    """2^H(P), or 2^H(P, Q), in bits: among how many equally likely outcomes one would be as uncertain."""
    if q is None and q_logits is None and q_samples is None and true is None:
        nats = entropy(p, logits=p_logits, samples=p_samples, unit="nats")
    else:
        nats = _cross(p, q, true, p_logits, q_logits, p_samples, q_samples)
    with np.errstate(over="ignore"):
        return _told(maths_of(nats).exp(nats))


def kl(
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
    size = unit_of(unit)
    mine, theirs = both(p, q, p_logits, q_logits, p_samples, q_samples)
    return _told(equations.kl(mine.p, mine.log_p, theirs.log_p) / size)


def mutual_information(joint: Any = None, *, samples: Any = None, corrected: bool = False, unit: str = "bits") -> Any:
    """I(X; Y) = KL(P(x, y) ‖ P(x)·P(y)): what knowing one tells of the other. `joint` has a row for each x.

    `samples` are pairs (x, y). Their plug-in estimate H(X) + H(Y) − H(X, Y) is too high while they are few: of
    unrelated things it is not 0. `corrected` takes Miller and Madow's correction of each entropy, and may be below 0.
    """
    size = unit_of(unit)
    if only("mutual information", joint=joint, samples=samples) == "samples":
        return _of_pairs(samples, corrected) / size
    if corrected:
        raise InputError("only an estimate from samples can be corrected; leave `corrected` out, or give samples")
    table = numbers("joint", joint, "probabilities")
    if table.ndim < 2:
        raise InputError("joint is one row; give a table with one row for each x")
    flat = shares_of("joint", table.reshape(*table.shape[:-2], -1))
    table = flat.p.reshape(table.shape)
    apart = equations.log(table.sum(-1))[..., :, None] + equations.log(table.sum(-2))[..., None, :]
    return _told(equations.kl(flat.p, flat.log_p, apart.reshape(flat.p.shape)) / size)


def bits_per_byte(nats: float, bytes: float) -> float:
    """Surprise by length in UTF-8, of a text or of a mean token: comparable between tokenizers, as loss is not."""
    if bytes < 0:
        raise InputError(f"bytes is {bytes}; give the length of the text that was told")
    return nats / math.log(2) / bytes if bytes else math.inf


def _cross(p: Any, q: Any, true: Any, p_logits: Any, q_logits: Any, p_samples: Any, q_samples: Any) -> Any:
    """In nats."""
    if true is None:
        mine, theirs = both(p, q, p_logits, q_logits, p_samples, q_samples)
        return equations.cross_entropy(mine.p, theirs.log_p)
    only("what is true", true=true, p=p, p_logits=p_logits, p_samples=p_samples)
    if only("q", q=q, q_logits=q_logits, q_samples=q_samples) == "q_samples":
        raise InputError("a class is told by its number, and samples have none; give q or q_logits")
    return 0.0 - chosen(true, one("q", q, q_logits))


def _of_counts(counts: list[int], corrected: bool) -> float:
    """Nats."""
    shares: Shares = of_counts(counts)
    return float(equations.cross_entropy(*shares)) + ((len(counts) - 1) / (2 * sum(counts)) if corrected else 0.0)


def _of_pairs(samples: Any, corrected: bool) -> float:
    pairs = counted("samples", samples)
    x: dict[Any, int] = {}
    y: dict[Any, int] = {}
    for pair, count in pairs.items():
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise InputError(f"samples has {pair!r:.40}, which is no pair; give (x, y) as they came together")
        x[pair[0]], y[pair[1]] = x.get(pair[0], 0) + count, y.get(pair[1], 0) + count
    own, other, together = (_of_counts(list(each.values()), corrected) for each in (x, y, pairs))
    found = own + other - together
    return found if corrected else max(0.0, found)


def _told(value: Any) -> Any:
    """A float, if it is one number."""
    if getattr(value, "ndim", 0):
        return value
    return float(value.detach() if is_tensor(value) else value)
