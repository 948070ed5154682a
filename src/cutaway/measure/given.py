"""What a measure is asked about, as arrays: probabilities that sum to 1, logits, or samples that are counted."""

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from cutaway.errors import InputError
from cutaway.measure.equations import UNITS, is_tensor, log, log_softmax, maths_of

NEAR = 1e-3
"""How far from 1 probabilities may sum: those of 16-bit numbers miss it. They are divided by their sum."""


class Shares(NamedTuple):
    """Distributions along the last axis. The log is kept beside them: of logits far apart it says more than they do."""

    p: Any
    log_p: Any


def only(of: str, **given: Any) -> str:
    """The name of the one that was given."""
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        why = f"{' and '.join(names)} were given together" if names else "nothing was given"
        raise InputError(f"{of} is measured by one of {', '.join(given)}, and {why}; give one of them")
    return names[0]


def unit_of(unit: str) -> float:
    if unit not in UNITS:
        raise InputError(f"unit is {unit!r:.40}; give 'bits' or 'nats'")
    return UNITS[unit]


def one(name: str, p: Any, logits: Any) -> Shares:
    return probabilities(name, p) if logits is None else of_logits(f"{name}_logits", logits)


def probabilities(name: str, given: Any) -> Shares:
    """Probabilities that sum to 1 along the last axis."""
    p = numbers(name, given, "probabilities")
    refuse(name, p, ~((p >= 0) & (p < math.inf)), "a probability is a number from 0 to 1")  # NaN is not either
    total = p.sum(-1, keepdims=True)
    wrong = abs(total - 1) > NEAR
    if bool(wrong.any()):
        raise InputError(f"{name} sums to {float(total[wrong][0]):.6g}; probabilities sum to 1, so divide by their sum")
    p = p / total
    return Shares(p, log(p))


def of_logits(name: str, given: Any) -> Shares:
    """Softmax of logits; −∞ rules an outcome out, but not all of them."""
    x = numbers(name, given, "logits")
    refuse(name, x, ~(x < math.inf), "a logit is a number, or −inf for what cannot be")
    if bool((x == -math.inf).all(-1).any()):
        raise InputError(f"{name} is −inf for every outcome; leave one that can be")
    log_p = log_softmax(x)
    return Shares(maths_of(x).exp(log_p), log_p)


def refuse(name: str, x: Any, bad: Any, why: str) -> None:
    if not bool(bad.any()):
        return
    place = [int(each) for each in maths_of(x).argwhere(bad)[0]]
    raise InputError(f"{name}[{', '.join(map(str, place))}] is {float(x[tuple(place)])}; {why}")


def numbers(name: str, given: Any, what: str) -> Any:
    """An array of 64 bits, or a tensor of at least 32; its last axis has the outcomes."""
    if is_tensor(given):
        torch = maths_of(given)
        found = given.to(torch.promote_types(given.dtype, torch.float32))
    else:
        found = array(name, given, what)
    if not found.ndim:
        raise InputError(f"{name} is a {type(given).__name__}; give a list, an array or a tensor of {what}")
    if not found.shape[-1] or not math.prod(found.shape):
        raise InputError(f"{name} is empty; give {what}, one for each outcome")
    return found


def array(name: str, given: Any, what: str) -> Any:
    if isinstance(given, str | bytes) or not (hasattr(given, "__array__") or isinstance(given, Iterable)):
        raise InputError(f"{name} is a {type(given).__name__}; give a list, an array or a tensor of {what}")
    try:
        found = np.asarray(given if hasattr(given, "__array__") or isinstance(given, Sequence) else list(given))
    except ValueError:
        raise InputError(f"{name} has rows of different lengths; give a table with as many in each row") from None
    if found.dtype.kind in "fiub":
        return found.astype(np.float64)
    try:
        if found.dtype.kind != "O":
            raise TypeError(f"its items are {found.dtype.name}")
        return np.array([float(each) for each in found.flat]).reshape(found.shape)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{name} holds what is no number ({error}); give {what}") from None


def both(p: Any, q: Any, p_logits: Any, q_logits: Any, p_samples: Any, q_samples: Any) -> tuple[Shares, Shares]:
    """Two distributions over the same outcomes, in one order."""
    only("p", p=p, p_logits=p_logits, p_samples=p_samples)
    only("q", q=q, q_logits=q_logits, q_samples=q_samples)
    if p_samples is not None and q_samples is not None:
        mine, theirs = counted("p_samples", p_samples), counted("q_samples", q_samples)
        every = dict.fromkeys((*mine, *theirs))
        return of_counts([mine[each] for each in every]), of_counts([theirs[each] for each in every])
    if p_samples is not None:
        other = one("q", q, q_logits)
        return alike(by_number("p_samples", p_samples, other), other)
    mine_ = one("p", p, p_logits)
    return alike(mine_, by_number("q_samples", q_samples, mine_) if q_samples is not None else one("q", q, q_logits))


def alike(p: Shares, q: Shares) -> tuple[Shares, Shares]:
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
    return (as_tensors(p, q), q) if is_tensor(q.p) else (p, as_tensors(q, p)) if is_tensor(p.p) else (p, q)


def as_tensors(shares: Shares, beside: Shares) -> Shares:
    torch = maths_of(beside.p)
    return Shares(*(torch.as_tensor(each, device=beside.p.device) for each in shares))


# Samples


def counted(name: str, given: Any) -> Counter[Hashable]:
    """How often each outcome came; a row of an array is one outcome."""
    found = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(found, bytes) or not isinstance(found, Iterable):
        raise InputError(f"{name} is a {type(given).__name__}; give the outcomes that came, one after the other")
    try:
        counts = Counter(tuple(each) if isinstance(each, list) else each for each in found)
    except TypeError as error:
        raise InputError(f"{name} cannot be counted ({error}); give numbers, texts or tuples") from None
    if not counts:
        raise InputError(f"{name} is empty; give the outcomes that came")
    return counts


def of_counts(counts: Iterable[int]) -> Shares:
    """Plug-in estimate: the share of each outcome is how often it came."""
    every = np.array(list(counts), np.float64)
    p = every / every.sum()
    return Shares(p, log(p))


def by_number(name: str, samples: Any, beside: Shares) -> Shares:
    """Samples that are numbers of outcomes, from 0, as the other distribution has them."""
    outcomes = beside.p.shape[-1]
    counts = counted(name, samples)
    for each in counts:
        if isinstance(each, bool) or not isinstance(each, int) or not 0 <= each < outcomes:
            raise InputError(
                f"{name} has {each!r:.40}; beside a distribution of {outcomes} outcomes give their numbers,"
                f" 0 to {outcomes - 1}"
            )
    return of_counts(counts[number] for number in range(outcomes))


def chosen(true: Any, q: Shares) -> Any:
    """log q of the true class, of each distribution."""
    outcomes, shape = q.p.shape[-1], tuple(q.p.shape[:-1])
    numbers = true.detach().cpu().numpy() if is_tensor(true) else np.asarray(true)
    if numbers.dtype.kind not in "iu":
        raise InputError(f"true is {true!r:.40}; give the number of the true class, from 0, or an array of them")
    if numbers.shape and numbers.shape != shape:
        raise InputError(f"true has the shape {numbers.shape} and q's leading axes {shape}; they must be the same")
    if numbers.min(initial=0) < 0 or numbers.max(initial=0) >= outcomes:
        raise InputError(f"true has classes from {numbers.min()} to {numbers.max()}, and q has 0 to {outcomes - 1}")
    places = np.broadcast_to(numbers, shape).reshape(-1).astype(np.int64)
    return q.log_p.reshape(-1, outcomes)[np.arange(len(places)), places].reshape(shape)
