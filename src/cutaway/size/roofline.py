"""How fast it can be: a pass takes at least as long as its products take at the device's peak, and at least as long as
the bytes that it must move take at the memory's bandwidth."""

from collections.abc import Callable
from dataclasses import dataclass

from cutaway.config.transformer import Config
from cutaway.size.flops import Flops
from cutaway.size.hardware import Hardware
from cutaway.size.numbers import Numbers
from cutaway.size.tensors import tensors

KERNEL, EAGER = 4e-6, 40e-6
"""Seconds beside its work that an operation takes in a compiled graph, and started one by one from Python on a slow
host: small models and small batches wait for these, not for the device."""

LARGEST_BATCH = 2**20


@dataclass(frozen=True)
class Efficiency:
    """Shares of the bound that implementations reach: the best, and a plain one."""

    best: float
    plain: float
    source: str = "what good and plain implementations reach on data-centre GPUs"


EFFICIENCY = {"prefill": Efficiency(0.85, 0.3), "decode": Efficiency(0.92, 0.35), "train": Efficiency(0.7, 0.15)}


@dataclass(frozen=True)
class Work:
    """What a pass must do on one device."""

    name: str
    flops: int
    """Over the pairs that see each other: the least."""
    bytes: int
    """The least that must be read and written."""
    tokens: int
    """Tokens that come out of it, on all devices."""
    launches: int
    likely_bytes: int
    """With as many experts as tokens reach on average."""


@dataclass(frozen=True)
class Bound:
    """Seconds that nothing can beat, and those to expect."""

    name: str
    compute: float
    bandwidth: float
    ridge: float
    """FLOPs a byte above which the device's arithmetic binds."""
    intensity: float
    tokens: int
    fastest: float
    slowest: float
    """From the best to a plain implementation, without waiting for Python (compiled, or in a CUDA graph)."""
    eager: float
    """At most, when PyTorch starts every operation by itself."""
    efficiency: Efficiency

    @property
    def seconds(self) -> float:
        return max(self.compute, self.bandwidth)

    @property
    def binds(self) -> str:
        return "compute" if self.compute >= self.bandwidth else "bandwidth"

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def bound(work: Work, device: Hardware, numbers: Numbers, efficiency: Efficiency) -> Bound:
    rate = device.rate(numbers.name)
    compute, bandwidth = work.flops / rate, work.bytes / device.bandwidth
    likely = max(compute, work.likely_bytes / device.bandwidth)
    plain = likely / efficiency.plain
    return Bound(
        name=work.name,
        compute=compute,
        bandwidth=bandwidth,
        ridge=rate / device.bandwidth,
        intensity=work.flops / work.bytes,
        tokens=work.tokens,
        fastest=likely / efficiency.best,
        slowest=plain + work.launches * KERNEL,
        eager=plain + work.launches * EAGER,
        efficiency=efficiency,
    )


def weights_read(config: Config, numbers: Numbers, tokens: int, *, decoding: bool = False, likely: bool = False) -> int:
    """Bytes of weights that a pass over `tokens` tokens reads: looked-up rows only, and of a mixture the experts that
    some token reaches: at least one token's, or as many as tokens that choose freely reach on average."""
    total = 0.0
    for each in tensors(config):
        if decoding and len(config.stacks) == 2 and for_source(each.name):
            continue
        size = each.bytes(numbers)
        if each.looked_up:
            size = size * min(tokens, each.shape[0]) // each.shape[0]
        if each.share is not None:
            chosen, experts = each.share
            total += size * (1 - (1 - chosen / experts) ** tokens if likely else chosen / experts)
        else:
            total += size
    return int(total)


def for_source(name: str) -> bool:
    """Used once a source, not at each step: the encoder, and the keys and values of cross-attention."""
    return name.startswith(("encoder", "source")) or ".cross.k" in name or ".cross.v" in name


def decode_work(
    config: Config, numbers: Numbers, flops: Flops, *, batch: int, cache: int, logits: int, launches: int, devices: int
) -> Work:
    """One token more of each sequence: all weights and the whole cache are read for it."""
    least, likely = (weights_read(config, numbers, batch, decoding=True, likely=each) for each in (False, True))
    beside = cache + logits
    return Work("decode", flops.total_seen, least + beside, batch * devices, launches, likely + beside)


def prefill_work(
    config: Config, numbers: Numbers, flops: Flops, *, tokens: int, cache: int, launches: int, devices: int
) -> Work:
    """Reading prompts: weights once, and the cache is written."""
    least, likely = (weights_read(config, numbers, tokens, likely=each) for each in (False, True))
    return Work("prefill", flops.total_seen, least + cache, tokens * devices, launches, likely + cache)


def train_work(
    flops: Flops, *, weights: int, gradients: int, state: int, tokens: int, launches: int, devices: int
) -> Work:
    """A step: weights are read there and back, gradients written and read, weights and state read and written."""
    moved = 3 * weights + 2 * gradients + 2 * state
    return Work("train", flops.total_seen, moved, tokens * devices, launches, moved)


def turning_batch(work_at: Callable[[int], Work], ridge: float) -> int | None:
    """The smallest batch at which decoding waits for arithmetic; None if it never does, since every sequence brings a
    cache of its own to read. Of a mixture, the experts count that tokens reach on average."""
    low, high = 0, 1
    while (work := work_at(high)).flops < ridge * work.likely_bytes:
        low, high = high, 2 * high
        if high > LARGEST_BATCH:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        work = work_at(middle)
        low, high = (middle, high) if work.flops < ridge * work.likely_bytes else (low, middle)
    return high
