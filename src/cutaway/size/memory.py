"""Bytes on one device: what is held at the fullest moment of serving, and of a step of training."""

from dataclasses import dataclass

from cutaway.config.transformer import Config
from cutaway.errors import InputError
from cutaway.size.cache import KVCache
from cutaway.size.numbers import Numbers
from cutaway.size.optimizers import optimizer_bytes
from cutaway.size.parallel import Devices
from cutaway.size.tensors import stored, tensors
from cutaway.size.walk import Pass

WORKSPACE = 64 << 20
"""What PyTorch's matrix library takes on a GPU for itself (cuBLAS and cuBLASLt on Hopper; less on older ones)."""
PIECE = 8192
"""Tokens that are read at once when serving; longer prompts are read in pieces."""


@dataclass(frozen=True)
class Memory:
    """`parts` are alive together at the fullest moment and add up to the total; `whole` are sizes by themselves."""

    parts: dict[str, int]
    whole: dict[str, int]
    fullest: str
    """When that is."""

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def serving(config: Config, numbers: Numbers, cache: KVCache, reading: Pass, *, on_gpu: bool) -> Memory:
    """Weights, cache and what reading a piece of a prompt needs beside them. `config` is one device's share."""
    weights = stored(config, numbers).bytes
    parts = {"weights": weights, "kv cache": cache.bytes}
    parts |= {"activations": reading.peak - reading.logits, "logits": reading.logits}
    parts |= {"workspace": WORKSPACE} if on_gpu else {}
    whole = {
        "weights": weights,
        "kv cache": cache.bytes,
        "kv cache without windows": cache.unwindowed,
        "kv cache a token": cache.token,
        "activations": reading.peak,
        "logits": reading.logits,
    }
    if cache.expanded != cache.unwindowed:
        whole["kv cache expanded"] = cache.expanded
    return Memory({name: size for name, size in parts.items() if size}, whole, "reading the prompt")


def training(
    config: Config, numbers: Numbers, optimizer: str, step: Pass, *, on_gpu: bool, devices: Devices | None = None
) -> Memory:
    """Weights and states stay; activations and gradients come and go. `config` is one device's share."""
    if not numbers.trains:
        raise InputError(f"dtype {numbers.name} is for serving; train in fp32, bf16, fp16 or mixed")
    devices = devices or Devices()
    held = [each.shard(devices.shards) for each in tensors(config)]
    weights = sum(each.bytes(numbers) for each in held)
    state = optimizer_bytes(optimizer, held, numbers.other)
    gradients = step.gradients
    moments = dict(step.at_peak)
    fullest = "start of the way back" if moments.get("gradients", 0) < gradients // 2 else "end of the way back"
    if gradients + step.after > step.peak:
        moments, fullest = {"gradients": gradients, "logits": step.after}, "the optimizer's step"
    if devices.copies > 1 and devices.shards == devices.tensor == 1:
        moments["gradients"] = gradients  # they live in the buckets that are sent
    parts = {"weights": weights, "optimizer": state, **moments}
    parts |= {"workspace": WORKSPACE} if on_gpu else {}
    whole = {
        "weights": weights,
        "gradients": gradients,
        "optimizer": state,
        "activations": step.kept_bytes,
        "logits": step.logits,
    }
    return Memory({name: size for name, size in parts.items() if size}, whole, fullest)


def pieces(batch: int, context: int, source: int, *, whole: bool) -> list[tuple[int, int, int, int]]:
    """Ways in which prompts are read: (sequences, tokens of each, tokens before, tokens of a source) at once.

    An encoder reads a text whole. The fullest way counts: many short sequences may need more than a few long ones.
    """
    longest = max(context, source)
    rows = min(batch, max(1, PIECE // longest))
    length = context if whole else min(context, PIECE)
    ways = [(rows, length, context - length, source)]
    if length < context:
        ways.append((rows, length, 0, source))  # the first piece, before which a source is read
    for several in {rows + 1, 1 << rows.bit_length()}:
        if several <= min(batch, PIECE):
            shorter = PIECE // several
            ways.append((several, min(context, shorter), 0, min(source, shorter)))
    return ways
