"""Validated distributions for the measures of information, from probabilities, logits or samples."""

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cutaway.errors import InputError
from cutaway.evaluate.functional import NATS_PER_UNIT, array_namespace, is_tensor, log, log_softmax

ArrayLike: TypeAlias = Iterable[Any]
"""Probabilities or logits as a list, an array, a tensor or another iterable, nested for several distributions."""
Samples: TypeAlias = Iterable[Hashable]
"""Observed outcomes."""
Array: TypeAlias = Any
"""A numpy array or a tensor. The same expressions work for both, and torch is not imported here."""
_SUM_TOLERANCE = 1e-3
"""Allowed deviation of Σ p from 1, because 16-bit dtypes round. Probabilities are then divided by their sum."""


class Distribution(NamedTuple):
    """Probabilities along the last axis, and their logs, which stay finite where the softmax underflows to 0."""

    p: Array
    log_p: Array


def require_exactly_one(quantity: str, **arguments: object) -> str:
    """Return the name of the one argument that is not None. Raise if none or several are set."""
    names = [name for name, value in arguments.items() if value is not None]
    if len(names) != 1:
        problem = f"{' and '.join(names)} are set together" if names else "none is set"
        raise InputError(f"{quantity} takes exactly one of {', '.join(arguments)}, but {problem}; pass one of them")
    return names[0]


def parse_unit(unit: str) -> float:
    """Return the number of nats in one unit ('bits' or 'nats')."""
    if unit not in NATS_PER_UNIT:
        raise InputError(f"unit is {unit!r:.40}; use 'bits' or 'nats'")
    return NATS_PER_UNIT[unit]


class Operand(NamedTuple):
    """A distribution given to a measure such as `kl_divergence`, as probabilities `p`, logits or samples."""

    name: str
    p: ArrayLike | None
    logits: ArrayLike | None
    samples: Samples | None = None

    def check(self, **alternatives: object) -> None:
        """Raise unless exactly one of `p`, `logits`, `samples` and the alternatives is set (not None)."""
        fields = {"": self.p, "_logits": self.logits, "_samples": self.samples}
        require_exactly_one(self.name, **alternatives, **{self.name + end: value for end, value in fields.items()})

    def distribution(self) -> Distribution:
        if self.logits is not None:
            return from_logits(f"{self.name}_logits", self.logits)
        return from_probabilities(self.name, self.p)

    def counts(self) -> Counter[Hashable]:
        return count_samples(f"{self.name}_samples", self.samples)


def from_probabilities(name: str, values: ArrayLike | None) -> Distribution:
    """Check that probabilities sum to 1 along the last axis, and normalize them."""
    p = as_float_array(name, values, "probabilities")
    # The condition is negated, so that NaN is invalid too.
    _check_no_element(name, p, ~((p >= 0) & (p < math.inf)), "a probability is a number from 0 to 1")
    total = p.sum(-1, keepdims=True)
    wrong = abs(total - 1) > _SUM_TOLERANCE
    if bool(wrong.any()):
        raise InputError(f"{name} sums to {float(total[wrong][0]):.6g}, not to 1; divide it by its sum")
    p = p / total
    return Distribution(p, log(p))


def from_logits(name: str, values: ArrayLike) -> Distribution:
    """Softmax of logits. A logit of −∞ excludes an outcome, and at least one logit must be finite."""
    x = as_float_array(name, values, "logits")
    _check_no_element(name, x, ~(x < math.inf), "a logit is a finite number, or −inf for an excluded outcome")
    if bool((x == -math.inf).all(-1).any()):
        raise InputError(f"{name} is −inf for every outcome; pass at least one finite logit")
    log_p = log_softmax(x)
    return Distribution(array_namespace(x).exp(log_p), log_p)


def _check_no_element(name: str, x: Array, invalid: Array, reason: str) -> None:
    """Raise InputError that names the first element of x for which `invalid` is True, if there is one."""
    if not bool(invalid.any()):
        return
    index = [int(i) for i in array_namespace(x).argwhere(invalid)[0]]
    raise InputError(f"{name}[{', '.join(map(str, index))}] is {float(x[tuple(index)])}; {reason}")


def as_float_array(name: str, values: ArrayLike | None, description: str) -> Array:
    """Convert `values` to a float64 array, or a tensor to at least float32. The last axis is over the outcomes."""
    array: Array = values
    if is_tensor(values):
        torch = array_namespace(values)
        array = array.to(torch.promote_types(array.dtype, torch.float32))
    else:
        array = as_numpy(name, values, description)
    if not array.ndim:
        raise InputError(f"{name} is a {type(values).__name__}; pass a list, an array or a tensor of {description}")
    if not array.shape[-1] or not math.prod(array.shape):
        raise InputError(f"{name} is empty; pass {description}, one per outcome")
    return array


def as_numpy(name: str, values: Array, description: str) -> NDArray[np.float64]:
    if isinstance(values, str | bytes) or not (hasattr(values, "__array__") or isinstance(values, Iterable)):
        raise InputError(f"{name} is a {type(values).__name__}; pass a list, an array or a tensor of {description}")
    try:
        array = np.asarray(values if hasattr(values, "__array__") or isinstance(values, Sequence) else list(values))
    except ValueError:
        raise InputError(f"{name} has rows of different lengths; pass rows of equal length") from None
    if array.dtype.kind in "fiub":
        return array.astype(np.float64)
    try:
        if array.dtype.kind != "O":
            raise TypeError(f"dtype {array.dtype.name}")
        return np.array([float(item) for item in array.flat]).reshape(array.shape)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{name} has an element that is not a number ({error}); pass {description}") from None


def resolve_pair(p: Operand, q: Operand) -> tuple[Distribution, Distribution]:
    """Convert two operands to distributions over the same outcomes in the same order."""
    p.check()
    q.check()
    if p.samples is not None and q.samples is not None:
        p_counts, q_counts = p.counts(), q.counts()
        outcomes = dict.fromkeys((*p_counts, *q_counts))
        return from_counts(p_counts[item] for item in outcomes), from_counts(q_counts[item] for item in outcomes)
    if p.samples is not None:
        q_dist = q.distribution()
        return _match_backends(_from_class_samples(p, q_dist), q_dist)
    p_dist = p.distribution()
    return _match_backends(p_dist, q.distribution() if q.samples is None else _from_class_samples(q, p_dist))


def _match_backends(p: Distribution, q: Distribution) -> tuple[Distribution, Distribution]:
    """Check that the shapes of p and q broadcast. If either is a tensor, convert both to tensors on the same device."""
    if p.p.shape[-1] != q.p.shape[-1]:
        raise InputError(f"p has {p.p.shape[-1]} outcomes and q {q.p.shape[-1]}; pass the same outcomes for both")
    try:
        np.broadcast_shapes(p.p.shape, q.p.shape)
    except ValueError:
        shapes = f"p has shape {tuple(p.p.shape)} and q {tuple(q.p.shape)}"
        raise InputError(f"{shapes}, which do not broadcast; pass equal leading axes") from None
    if is_tensor(q.p):
        return _to_tensors(p, q), q
    return (p, _to_tensors(q, p)) if is_tensor(p.p) else (p, q)


def _to_tensors(distribution: Distribution, reference: Distribution) -> Distribution:
    torch = array_namespace(reference.p)
    return Distribution(*(torch.as_tensor(array, device=reference.p.device) for array in distribution))


# Samples


def count_samples(name: str, samples: Array) -> Counter[Hashable]:
    """Count each outcome. Each row of a 2-D array is one outcome."""
    outcomes = samples.tolist() if hasattr(samples, "tolist") else samples
    if isinstance(outcomes, bytes) or not isinstance(outcomes, Iterable):
        raise InputError(f"{name} is a {type(samples).__name__}; pass a sequence of observed outcomes")
    try:
        counts = Counter(tuple(item) if isinstance(item, list) else item for item in outcomes)
    except TypeError as error:
        raise InputError(f"{name} cannot be counted ({error}); pass numbers, strings or tuples") from None
    if not counts:
        raise InputError(f"{name} is empty; pass at least one observed outcome")
    return counts


def from_counts(counts: Iterable[int]) -> Distribution:
    """Return the relative frequency of each outcome (plug-in estimate)."""
    frequencies = np.array(list(counts), np.float64)
    p = frequencies / frequencies.sum()
    return Distribution(p, log(p))


def _from_class_samples(operand: Operand, reference: Distribution) -> Distribution:
    """Return the distribution of samples, which are outcome indices of the reference distribution."""
    outcomes = reference.p.shape[-1]
    counts = operand.counts()
    for sample in counts:
        if isinstance(sample, bool) or not isinstance(sample, int) or not 0 <= sample < outcomes:
            raise InputError(f"{operand.name}_samples has {sample!r:.40}; pass outcome indices, 0 to {outcomes - 1}")
    return from_counts(counts[index] for index in range(outcomes))


def log_prob_of_class(target: Array, q: Distribution) -> Array:
    """Return log q(target) in nats for each distribution of q. `target` is one class index, or one per distribution."""
    outcomes, shape = q.p.shape[-1], tuple(q.p.shape[:-1])
    classes = target.detach().cpu().numpy() if is_tensor(target) else np.asarray(target)
    if classes.dtype.kind not in "iu":
        raise InputError(f"target is {target!r:.40}; pass the index of the true class, or an array of indices")
    if classes.shape and classes.shape != shape:
        raise InputError(f"target has shape {classes.shape} and q's leading axes {shape}; pass equal shapes")
    if classes.min(initial=0) < 0 or classes.max(initial=0) >= outcomes:
        raise InputError(f"target has classes from {classes.min()} to {classes.max()}; pass 0 to {outcomes - 1}")
    indices = np.broadcast_to(classes, shape).reshape(-1).astype(np.int64)
    return q.log_p.reshape(-1, outcomes)[np.arange(len(indices)), indices].reshape(shape)
