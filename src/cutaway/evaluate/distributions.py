"""What a measure is taken of, as arrays: probabilities that sum to 1, logits, or samples that are counted."""

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from cutaway.errors import InputError
from cutaway.evaluate.functional import NATS_PER_UNIT, array_namespace, is_tensor, log, log_softmax

SUM_TOLERANCE = 1e-3
"""How far from 1 probabilities may sum: those of 16-bit numbers miss it. They are divided by their sum."""


class Distribution(NamedTuple):
    """Distributions along the last axis. The log is kept beside them: of logits far apart it says more than they do."""

    p: Any
    log_p: Any


def require_exactly_one(quantity: str, **arguments: Any) -> str:
    """The name of the one that was given."""
    names = [name for name, value in arguments.items() if value is not None]
    if len(names) != 1:
        why = f"{' and '.join(names)} were given together" if names else "nothing was given"
        raise InputError(f"{quantity} is measured by one of {', '.join(arguments)}, and {why}; give one of them")
    return names[0]


def parse_unit(unit: str) -> float:
    if unit not in NATS_PER_UNIT:
        raise InputError(f"unit is {unit!r:.40}; give 'bits' or 'nats'")
    return NATS_PER_UNIT[unit]


def resolve_distribution(name: str, p: Any, logits: Any) -> Distribution:
    return from_probabilities(name, p) if logits is None else from_logits(f"{name}_logits", logits)


def from_probabilities(name: str, values: Any) -> Distribution:
    """Probabilities that sum to 1 along the last axis."""
    p = as_float_array(name, values, "probabilities")
    _check_no_element(
        name, p, ~((p >= 0) & (p < math.inf)), "a probability is a number from 0 to 1"
    )  # NaN is not either
    total = p.sum(-1, keepdims=True)
    wrong = abs(total - 1) > SUM_TOLERANCE
    if bool(wrong.any()):
        raise InputError(f"{name} sums to {float(total[wrong][0]):.6g}; probabilities sum to 1, so divide by their sum")
    p = p / total
    return Distribution(p, log(p))


def from_logits(name: str, values: Any) -> Distribution:
    """Softmax of logits; −∞ rules an outcome out, but not all of them."""
    x = as_float_array(name, values, "logits")
    _check_no_element(name, x, ~(x < math.inf), "a logit is a number, or −inf for what cannot be")
    if bool((x == -math.inf).all(-1).any()):
        raise InputError(f"{name} is −inf for every outcome; leave one that can be")
    log_p = log_softmax(x)
    return Distribution(array_namespace(x).exp(log_p), log_p)


def _check_no_element(name: str, x: Any, invalid: Any, reason: str) -> None:
    if not bool(invalid.any()):
        return
    place = [int(each) for each in array_namespace(x).argwhere(invalid)[0]]
    raise InputError(f"{name}[{', '.join(map(str, place))}] is {float(x[tuple(place)])}; {reason}")


def as_float_array(name: str, values: Any, description: str) -> Any:
    """An array of 64 bits, or a tensor of at least 32; its last axis has the outcomes."""
    if is_tensor(values):
        torch = array_namespace(values)
        found = values.to(torch.promote_types(values.dtype, torch.float32))
    else:
        found = as_numpy(name, values, description)
    if not found.ndim:
        raise InputError(f"{name} is a {type(values).__name__}; give a list, an array or a tensor of {description}")
    if not found.shape[-1] or not math.prod(found.shape):
        raise InputError(f"{name} is empty; give {description}, one for each outcome")
    return found


def as_numpy(name: str, values: Any, description: str) -> Any:
    if isinstance(values, str | bytes) or not (hasattr(values, "__array__") or isinstance(values, Iterable)):
        raise InputError(f"{name} is a {type(values).__name__}; give a list, an array or a tensor of {description}")
    try:
        found = np.asarray(values if hasattr(values, "__array__") or isinstance(values, Sequence) else list(values))
    except ValueError:
        raise InputError(f"{name} has rows of different lengths; give a table with as many in each row") from None
    if found.dtype.kind in "fiub":
        return found.astype(np.float64)
    try:
        if found.dtype.kind != "O":
            raise TypeError(f"its items are {found.dtype.name}")
        return np.array([float(each) for each in found.flat]).reshape(found.shape)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{name} holds what is no number ({error}); give {description}") from None


def resolve_pair(
    p: Any, q: Any, p_logits: Any, q_logits: Any, p_samples: Any, q_samples: Any
) -> tuple[Distribution, Distribution]:
    """Two distributions over the same outcomes, in one order."""
    require_exactly_one("p", p=p, p_logits=p_logits, p_samples=p_samples)
    require_exactly_one("q", q=q, q_logits=q_logits, q_samples=q_samples)
    if p_samples is not None and q_samples is not None:
        mine, theirs = count_samples("p_samples", p_samples), count_samples("q_samples", q_samples)
        every = dict.fromkeys((*mine, *theirs))
        return from_counts([mine[each] for each in every]), from_counts([theirs[each] for each in every])
    if p_samples is not None:
        other = resolve_distribution("q", q, q_logits)
        return _match_backends(_from_class_samples("p_samples", p_samples, other), other)
    mine_ = resolve_distribution("p", p, p_logits)
    return _match_backends(
        mine_,
        _from_class_samples("q_samples", q_samples, mine_)
        if q_samples is not None
        else resolve_distribution("q", q, q_logits),
    )


def _match_backends(p: Distribution, q: Distribution) -> tuple[Distribution, Distribution]:
    """Both as tensors of one device if either is a tensor; their leading axes must fit."""
    if p.p.shape[-1] != q.p.shape[-1]:
        raise InputError(
            f"p has {p.p.shape[-1]} outcomes and q {q.p.shape[-1]}; they must be over the same ones, in one order"
        )
    try:
        np.broadcast_shapes(p.p.shape, q.p.shape)
    except ValueError:
        raise InputError(
            f"p has the shape {tuple(p.p.shape)} and q {tuple(q.p.shape)}; their leading axes must be the same"
        ) from None
    return (_to_tensors(p, q), q) if is_tensor(q.p) else (p, _to_tensors(q, p)) if is_tensor(p.p) else (p, q)


def _to_tensors(distribution: Distribution, reference: Distribution) -> Distribution:
    torch = array_namespace(reference.p)
    return Distribution(*(torch.as_tensor(each, device=reference.p.device) for each in distribution))


# Samples


def count_samples(name: str, samples: Any) -> Counter[Hashable]:
    """How often each outcome came; a row of an array is one outcome."""
    found = samples.tolist() if hasattr(samples, "tolist") else samples
    if isinstance(found, bytes) or not isinstance(found, Iterable):
        raise InputError(f"{name} is a {type(samples).__name__}; give the outcomes that came, one after the other")
    try:
        counts = Counter(tuple(each) if isinstance(each, list) else each for each in found)
    except TypeError as error:
        raise InputError(f"{name} cannot be counted ({error}); give numbers, texts or tuples") from None
    if not counts:
        raise InputError(f"{name} is empty; give the outcomes that came")
    return counts


def from_counts(counts: Iterable[int]) -> Distribution:
    """Plug-in estimate: the share of each outcome is how often it came."""
    every = np.array(list(counts), np.float64)
    p = every / every.sum()
    return Distribution(p, log(p))


def _from_class_samples(name: str, samples: Any, reference: Distribution) -> Distribution:
    """Samples that are numbers of outcomes, from 0, as the other distribution has them."""
    outcomes = reference.p.shape[-1]
    counts = count_samples(name, samples)
    for each in counts:
        if isinstance(each, bool) or not isinstance(each, int) or not 0 <= each < outcomes:
            raise InputError(
                f"{name} has {each!r:.40}; beside a distribution of {outcomes} outcomes give their numbers,"
                f" 0 to {outcomes - 1}"
            )
    return from_counts(counts[number] for number in range(outcomes))


def log_prob_of_class(target: Any, q: Distribution) -> Any:
    """log q of the true class, of each distribution."""
    outcomes, shape = q.p.shape[-1], tuple(q.p.shape[:-1])
    numbers = target.detach().cpu().numpy() if is_tensor(target) else np.asarray(target)
    if numbers.dtype.kind not in "iu":
        raise InputError(f"target is {target!r:.40}; give the number of the true class, from 0, or an array of them")
    if numbers.shape and numbers.shape != shape:
        raise InputError(f"target has the shape {numbers.shape} and q's leading axes {shape}; they must be the same")
    if numbers.min(initial=0) < 0 or numbers.max(initial=0) >= outcomes:
        raise InputError(f"target has classes from {numbers.min()} to {numbers.max()}, and q has 0 to {outcomes - 1}")
    places = np.broadcast_to(numbers, shape).reshape(-1).astype(np.int64)
    return q.log_p.reshape(-1, outcomes)[np.arange(len(places)), places].reshape(shape)
