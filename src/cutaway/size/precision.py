"""Precisions (`--dtype`): bytes of weights, activations and KV cache entries, with quantization scales."""

from dataclasses import dataclass, replace
from math import prod
from typing import Any

from cutaway.errors import InputError
from cutaway.size.parallel import ParallelDims
from cutaway.size.shape_pass import ExecutionConfig


@dataclass(frozen=True)
class Precision:
    """One value of `--dtype`. Tensors other than layer matrices (embeddings, norms, biases) use `unquantized_bytes`."""

    name: str
    weight_bits: int
    """Bits per weight of a layer matrix."""
    unquantized_bytes: int
    """Bytes per element of other weights and of gradients."""
    compute_bytes: int
    """Bytes per activation element."""
    scale_granularity: str = "none"
    """'per_channel': 2 bytes per row of a matrix; 'per_group': 2 bytes per INT4_GROUP_SIZE weights of a row;
    'per_tensor': 4 bytes per matrix."""
    autocast: bool = False
    note: str = ""

    @property
    def can_train(self) -> bool:
        return self.weight_bits == 8 * self.unquantized_bytes

    def tensor_bytes(self, shape: tuple[int, ...], *, quantizable: bool) -> int:
        """Bytes of one tensor, including quantization scales."""
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
        """Build the `ExecutionConfig` of a pass. With FSDP, weights are all-gathered in the compute dtype (its
        mixed-precision policy), which replaces autocast."""
        config = ExecutionConfig(self.unquantized_bytes, self.compute_bytes, self.autocast, **options)
        config = replace(
            config, dp_replicate=parallel_dims.dp_replicate, dp_shard=parallel_dims.dp_shard, tp=parallel_dims.tp
        )
        config = replace(config, resid_in_compute_dtype=config.resid_in_compute_dtype and self.autocast)
        if not config.uses_fsdp:
            return config
        return replace(config, weight_itemsize=self.compute_bytes, autocast=False, grad_itemsize=self.unquantized_bytes)


INT4_GROUP_SIZE = 128
"""Weights per scale in int4."""

PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision("fp32", 32, 4, 4),
        Precision("bf16", 16, 2, 2),
        Precision("fp16", 16, 2, 2),
        Precision("mixed", 32, 4, 2, autocast=True, note="weights in fp32, matmuls in bf16 (autocast)"),
        Precision(
            "fp8", 8, 2, 2, "per_tensor", note="layer matrices in fp8 with one fp32 scale each, the rest in bf16"
        ),
        Precision(
            "int8",
            8,
            2,
            2,
            "per_channel",
            note="layer matrices in int8 with one 16-bit scale per row, the rest in bf16",
        ),
        Precision(
            "int4",
            4,
            2,
            2,
            "per_group",
            note=f"layer matrices in int4 with one 16-bit scale per {INT4_GROUP_SIZE} weights, the rest in bf16",
        ),
    )
}


def get_precision(name: str) -> Precision:
    """Look up a precision by name."""
    if not isinstance(name, str) or name not in PRECISIONS:
        raise InputError(f"dtype {name!r} is not known; use one of {', '.join(PRECISIONS)}")
    return PRECISIONS[name]


KV_CACHE_DTYPES = {"fp32": (4, 0), "bf16": (2, 0), "fp16": (2, 0), "fp8": (1, 0), "int8": (1, 2), "int4": (0.5, 2)}
"""(bytes per element, bytes of the scale per head vector) in a KV cache."""


def kv_vector_bytes(dtype: str, width: int) -> int:
    """Bytes of one head's key or value vector in the cache."""
    value, scale = KV_CACHE_DTYPES[dtype]
    return -(-int(2 * value) * width // 2) + scale
