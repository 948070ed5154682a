"""How numbers are stored and computed: bytes of a weight, of an activation, of a cached key."""

from dataclasses import dataclass, replace
from math import prod
from typing import Any

from cutaway.errors import InputError
from cutaway.size.parallel import Devices
from cutaway.size.walk import Setting


@dataclass(frozen=True)
class Numbers:
    """One choice of `--dtype`. What is not a matrix of a layer (tables, norms, biases) has the width `other`."""

    name: str
    bits: int
    """Of a weight in a layer's matrix."""
    other: int
    """Bytes of any other weight, and of a gradient."""
    compute: int
    """Bytes of an activation."""
    scales: str = "none"
    """'row': two bytes for each row of a matrix; 'group': two for each GROUP weights of a row; 'matrix': four each."""
    autocast: bool = False
    note: str = ""

    @property
    def trains(self) -> bool:
        return self.bits == 8 * self.other

    def bytes_of(self, shape: tuple[int, ...], *, matrix: bool) -> int:
        """What one tensor takes."""
        if not matrix or self.bits == 8 * self.other:
            return prod(shape) * self.other
        rows, width = prod(shape[:-1]), shape[-1]
        scale = {"row": 2 * rows, "group": 2 * rows * -(-width // GROUP), "matrix": 4 * prod(shape[:-2]), "none": 0}
        return -(-rows * width * self.bits // 8) + scale[self.scales]

    def setting(self, devices: Devices, **how: Any) -> Setting:
        """How a pass in these numbers is computed. Sharded weights are gathered as narrow as they are used (FSDP's
        mixed-precision policy), so that autocast has nothing left to do."""
        alone = Setting(self.other, self.compute, self.autocast, **how)
        alone = replace(alone, copies=devices.copies, sharers=devices.shards, tensor=devices.tensor)
        alone = replace(alone, narrow=alone.narrow and self.autocast)
        if not alone.gathers:
            return alone
        return replace(alone, weights=self.compute, autocast=False, gradient=self.other)


GROUP = 128
"""Weights that share a scale in int4."""

NUMBERS = {
    each.name: each
    for each in (
        Numbers("fp32", 32, 4, 4),
        Numbers("bf16", 16, 2, 2),
        Numbers("fp16", 16, 2, 2),
        Numbers("mixed", 32, 4, 2, autocast=True, note="weights in fp32, products in bf16 (autocast)"),
        Numbers("fp8", 8, 2, 2, "matrix", note="layers' matrices in fp8 with one fp32 scale each, the rest in bf16"),
        Numbers("int8", 8, 2, 2, "row", note="layers' matrices in int8 with a 16-bit scale a row, the rest in bf16"),
        Numbers(
            "int4", 4, 2, 2, "group", note=f"layers' matrices in int4, a 16-bit scale for {GROUP}, the rest in bf16"
        ),
    )
}


def numbers(name: str) -> Numbers:
    """The choice of this name."""
    if not isinstance(name, str) or name not in NUMBERS:
        raise InputError(f"dtype {name!r} is not known; choose one of {', '.join(NUMBERS)}")
    return NUMBERS[name]


CACHED = {"fp32": (4, 0), "bf16": (2, 0), "fp16": (2, 0), "fp8": (1, 0), "int8": (1, 2), "int4": (0.5, 2)}
"""(bytes a value, bytes of a scale for each head's vector) in a KV cache."""


def cached_vector(dtype: str, width: int) -> int:
    """Bytes of one head's key or value in a cache."""
    value, scale = CACHED[dtype]
    return -(-int(2 * value) * width // 2) + scale
