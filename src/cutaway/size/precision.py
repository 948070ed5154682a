"""How numbers are stored and computed: bytes of a weight, of an activation, of a cached key."""

from dataclasses import dataclass, replace
from math import prod
from typing import Any

from cutaway.errors import InputError
from cutaway.size.parallel import ParallelDims
from cutaway.size.shape_pass import ExecutionConfig


@dataclass(frozen=True)
class Precision:
    """One choice of `--dtype`. What is not a matrix of a layer (tables, norms, biases) has `unquantized_bytes`."""

    name: str
    weight_bits: int
    """Of a weight in a layer's matrix."""
    unquantized_bytes: int
    """Bytes of any other weight, and of a gradient."""
    compute_bytes: int
    """Bytes of an activation."""
    scale_granularity: str = "none"
    """'per_channel': two bytes for each row of a matrix; 'per_group': two for each INT4_GROUP_SIZE weights of a row;
    'per_tensor': four for each matrix."""
    autocast: bool = False
    note: str = ""

    @property
    def can_train(self) -> bool:
        return self.weight_bits == 8 * self.unquantized_bytes

    def tensor_bytes(self, shape: tuple[int, ...], *, quantizable: bool) -> int:
        """What one tensor takes."""
        if not quantizable or self.weight_bits == 8 * self.unquantized_bytes:
            return prod(shape) * self.unquantized_bytes
        rows, width = prod(shape[:-1]), shape[-1]
        scale = {
            "per_channel": 2 * rows,
            "per_group": 2 * rows * -(-width // INT4_GROUP_SIZE),
            "per_tensor": 4 * prod(shape[:-2]),
            "none": 0,
        }
        return -(-rows * width * self.weight_bits // 8) + scale[self.scale_granularity]

    def execution_config(self, parallel_dims: ParallelDims, **options: Any) -> ExecutionConfig:
        """How a pass in these numbers is computed. Sharded weights are gathered as narrow as they are used (FSDP's
        mixed-precision policy), so that autocast has nothing left to do."""
        alone = ExecutionConfig(self.unquantized_bytes, self.compute_bytes, self.autocast, **options)
        alone = replace(
            alone, dp_replicate=parallel_dims.dp_replicate, dp_shard=parallel_dims.dp_shard, tp=parallel_dims.tp
        )
        alone = replace(alone, resid_in_compute_dtype=alone.resid_in_compute_dtype and self.autocast)
        if not alone.uses_fsdp:
            return alone
        return replace(alone, weight_itemsize=self.compute_bytes, autocast=False, grad_itemsize=self.unquantized_bytes)


INT4_GROUP_SIZE = 128
"""Weights that share a scale in int4."""

PRECISIONS = {
    each.name: each
    for each in (
        Precision("fp32", 32, 4, 4),
        Precision("bf16", 16, 2, 2),
        Precision("fp16", 16, 2, 2),
        Precision("mixed", 32, 4, 2, autocast=True, note="weights in fp32, products in bf16 (autocast)"),
        Precision(
            "fp8", 8, 2, 2, "per_tensor", note="layers' matrices in fp8 with one fp32 scale each, the rest in bf16"
        ),
        Precision(
            "int8", 8, 2, 2, "per_channel", note="layers' matrices in int8 with a 16-bit scale a row, the rest in bf16"
        ),
        Precision(
            "int4",
            4,
            2,
            2,
            "per_group",
            note=f"layers' matrices in int4, a 16-bit scale for {INT4_GROUP_SIZE}, the rest in bf16",
        ),
    )
}


def get_precision(name: str) -> Precision:
    """The choice of this name."""
    if not isinstance(name, str) or name not in PRECISIONS:
        raise InputError(f"dtype {name!r} is not known; choose one of {', '.join(PRECISIONS)}")
    return PRECISIONS[name]


KV_CACHE_DTYPES = {"fp32": (4, 0), "bf16": (2, 0), "fp16": (2, 0), "fp8": (1, 0), "int8": (1, 2), "int4": (0.5, 2)}
"""(bytes a value, bytes of a scale for each head's vector) in a KV cache."""


def kv_vector_bytes(dtype: str, width: int) -> int:
    """Bytes of one head's key or value in a cache."""
    value, scale = KV_CACHE_DTYPES[dtype]
    return -(-int(2 * value) * width // 2) + scale
