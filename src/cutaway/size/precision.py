"""Precisions (`--dtype`): number of bytes of weights, activations and KV cache entries, with quantization scales."""

from dataclasses import dataclass
from math import prod

from cutaway.errors import InputError


@dataclass(frozen=True)
class Precision:
    """Sizes of weights, gradients and activations for one value of `--dtype`.

    Weights other than layer matrices (embeddings, norms, biases) use `unquantized_bytes`."""

    name: str
    weight_bits: int
    """Bits per weight of a layer matrix."""
    unquantized_bytes: int
    """Bytes per element of other weights and of gradients."""
    compute_bytes: int
    """Bytes per activation element."""
    scale_granularity: str = "none"
    """Size of the quantization scales. 'per_channel': 2 bytes per row of a matrix. 'per_group': 2 bytes per
    _INT4_GROUP_SIZE weights of a row. 'per_tensor': 4 bytes per matrix."""
    autocast: bool = False
    note: str = ""

    @property
    def is_quantized(self) -> bool:
        """Whether layer matrices take fewer bits than other weights."""
        return self.weight_bits < 8 * self.unquantized_bytes

    @property
    def can_train(self) -> bool:
        return not self.is_quantized

    def tensor_bytes(self, shape: tuple[int, ...], *, quantizable: bool) -> int:
        """Number of bytes of a weight of this shape; if it is quantized, including its quantization scales."""
        if not quantizable or self.weight_bits == 8 * self.unquantized_bytes:
            return prod(shape) * self.unquantized_bytes
        rows, width = prod(shape[:-1]), shape[-1]
        scale = {
            "per_channel": 2 * rows,
            "per_group": 2 * rows * -(-width // _INT4_GROUP_SIZE),
            "per_tensor": 4 * prod(shape[:-2]),
            "none": 0,
        }
        return -(-rows * width * self.weight_bits // 8) + scale[self.scale_granularity]


_INT4_GROUP_SIZE = 128
"""Number of weights per scale in int4."""
_LAYERS_IN = "layer matrices in {}, the rest in bf16"

PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision("fp32", 32, 4, 4),
        Precision("bf16", 16, 2, 2),
        Precision("fp16", 16, 2, 2),
        Precision("mixed", 32, 4, 2, autocast=True, note="weights in fp32, matmuls in bf16 (autocast)"),
        Precision("fp8", 8, 2, 2, "per_tensor", note=_LAYERS_IN.format("fp8 with one fp32 scale each")),
        Precision("int8", 8, 2, 2, "per_channel", note=_LAYERS_IN.format("int8 with one 16-bit scale per row")),
        Precision("int4", 4, 2, 2, "per_group", note=_LAYERS_IN.format("int4 with one 16-bit scale per 128 weights")),
    )
}


def get_precision(name: str) -> Precision:
    """Look up a precision by the value of `--dtype`; raise if it is not known."""
    if not isinstance(name, str) or name not in PRECISIONS:
        raise InputError(f"dtype {name!r} is not known; use one of {', '.join(PRECISIONS)}")
    return PRECISIONS[name]


ADAPTER_PRECISION = Precision(
    "mixed", 16, 2, 2, autocast=True, note="frozen weights and matmuls in bf16 (autocast), adapters in fp32"
)
"""The precision 'mixed' if only adapters are trained."""


def get_adapter_precision(name: str) -> Precision:
    """Look up the precision of training adapters on a frozen base."""
    if name == "mixed":
        return ADAPTER_PRECISION
    if name == "fp32":
        return PRECISIONS[name]
    get_precision(name)
    raise InputError(
        f"dtype {name} is not a precision of adapter training; use mixed (frozen weights in bf16, adapters in fp32), or"
        " fp32; to quantize the frozen weights, use quantization 'nf4' or 'int8'"
    )


KV_CACHE_DTYPES = {"fp32": (4, 0), "bf16": (2, 0), "fp16": (2, 0), "fp8": (1, 0), "int8": (1, 2), "int4": (0.5, 2)}
"""KV cache dtypes: (bytes per element, bytes of the scale that each key or value vector of a head has)."""


def kv_vector_bytes(dtype: str, width: int) -> int:
    """Number of bytes of a key or value vector of `width` elements in the KV cache, including its scale."""
    value, scale = KV_CACHE_DTYPES[dtype]
    return -(-int(2 * value) * width // 2) + scale
