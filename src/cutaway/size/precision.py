"""Precisions (`--dtype`): number of bytes of weights, activations and KV cache entries, with quantization scales."""

from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import Literal

from cutaway.errors import InputError
from cutaway.quantization.format_table import BLOCK_FORMATS, BlockFormat

MatrixKind = Literal["layer", "experts", "embedding", "output"]
"""Kinds of matrices, as far as quantization distinguishes them. An embedding table that is also the matrix of the LM
head is 'output'."""


@dataclass(frozen=True)
class Precision:
    """Sizes of weights, gradients and activations for one value of `--dtype`.

    Weights other than the quantized matrices (norms, biases and others) use `unquantized_bytes`."""

    name: str
    weight_bits: float
    """Bits per weight of a layer matrix, without scales."""
    unquantized_bytes: int
    """Bytes per element of other weights and of gradients."""
    compute_bytes: int
    """Bytes per activation element."""
    scale_granularity: str = "none"
    """Size of the quantization scales. 'per_channel': 2 bytes per row of a matrix. 'per_group': 2 bytes per
    _INT4_GROUP_SIZE weights of a row. 'per_tensor': 4 bytes per matrix."""
    autocast: bool = False
    note: str = ""
    quantized_kinds: tuple[MatrixKind, ...] = ("layer", "experts")
    """Kinds of matrices that are quantized."""
    block_format: BlockFormat | None = None
    """Block format of the quantized matrices; None for the sizes by `scale_granularity`."""
    stored_bits: tuple[tuple[MatrixKind, Fraction], ...] = ()
    """Average bits per weight of a file by kind of matrix, in place of `block_format`."""
    stored_as: str = ""
    """How a file stores the quantized weights, if the precision was read from it, as in "in q4_k, q6_k"."""
    compute_dtype: str = ""
    """The dtype whose peak rate applies to matmuls, if it is not `name`."""
    float8: bool = False
    """Whether the linear layers of blocks compute in fp8 in training. The other matmuls are in `compute_dtype`."""

    @property
    def is_quantized(self) -> bool:
        """Whether layer matrices take fewer bits than other weights."""
        return self.weight_bits < 8 * self.unquantized_bytes

    @property
    def can_train(self) -> bool:
        return not self.is_quantized

    @property
    def rate_dtype(self) -> str:
        """The dtype with which the peak rate of a device is looked up."""
        return self.compute_dtype or self.name

    def tensor_bytes(self, shape: tuple[int, ...], kind: MatrixKind | None = None) -> int:
        """Number of bytes of a weight of this shape; if matrices of its kind are quantized, with the scales."""
        if kind is not None and self.stored_bits:
            return round(prod(shape) * dict(self.stored_bits)[kind] / 8)
        if kind not in self.quantized_kinds or not self.is_quantized:
            return prod(shape) * self.unquantized_bytes
        rows, width = prod(shape[:-1]), shape[-1]
        if self.block_format is not None:
            block_format = _format_of_width(self.block_format, width)
            if block_format is None:
                return rows * width * self.unquantized_bytes
            return rows * width // block_format.block_size * block_format.num_bytes
        scale = {
            "per_channel": 2 * rows,
            "per_group": 2 * rows * -(-width // _INT4_GROUP_SIZE),
            "per_tensor": 4 * prod(shape[:-2]),
            "none": 0,
        }
        return -(-rows * width * int(self.weight_bits) // 8) + scale[self.scale_granularity]


_FORMATS_OF_OTHER_WIDTHS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""Formats of GGUF files for rows that are no multiple of 256 columns, as in llama.cpp."""


def _format_of_width(block_format: BlockFormat, width: int) -> BlockFormat | None:
    """The format of a matrix with rows of this width; None if it is not quantized."""
    while width % block_format.block_size:
        name = _FORMATS_OF_OTHER_WIDTHS.get(block_format.name)
        if name is None:
            return None
        block_format = BLOCK_FORMATS[name]
    return block_format


_INT4_GROUP_SIZE = 128
"""Number of weights per scale in int4."""
FLOAT8_ALIGNMENT = 16
"""In float8 training, layers whose input and output sizes are multiples of this number have fp8 products."""
_LAYERS_IN = "layer matrices in {}, the rest in bf16"

PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision("fp32", 32, 4, 4),
        Precision("bf16", 16, 2, 2),
        Precision("fp16", 16, 2, 2),
        Precision("mixed", 32, 4, 2, autocast=True, note="weights in fp32, matmuls in bf16 (autocast)"),
        Precision(
            "float8",
            32,
            4,
            2,
            autocast=True,
            note="weights in fp32, linear layers of blocks in fp8 in training, other matmuls in bf16 (autocast)",
            compute_dtype="mixed",
            float8=True,
        ),
        Precision("fp8", 8, 2, 2, "per_tensor", note=_LAYERS_IN.format("fp8 with one fp32 scale each")),
        Precision("int8", 8, 2, 2, "per_channel", note=_LAYERS_IN.format("int8 with one 16-bit scale per row")),
        Precision("int4", 4, 2, 2, "per_group", note=_LAYERS_IN.format("int4 with one 16-bit scale per 128 weights")),
    )
}


ALL_MATRICES: tuple[MatrixKind, ...] = ("layer", "experts", "embedding", "output")
_QUANTIZED_KINDS: dict[str, tuple[MatrixKind, ...]] = {
    "MXFP4": ("experts",),
    "INT4_G128": ("layer", "experts"),
    "NF4": ("layer", "experts"),
    "FP8_G128": ("layer", "experts"),
    "INT8_G32": ("layer", "experts"),
}
"""Kinds of matrices that checkpoints store in a format. Those of GGUF store all matrices in it."""


def _block_precision(block_format: BlockFormat) -> Precision:
    """Precision of a model whose matrices are in a block format."""
    name = block_format.name
    return Precision(
        name.lower(),
        block_format.bits_per_weight,
        2,
        2,
        quantized_kinds=_QUANTIZED_KINDS.get(name, ALL_MATRICES),
        block_format=block_format,
        compute_dtype="fp8" if name.startswith("FP8") else "int8",
    )


BLOCK_PRECISIONS = {name.lower(): _block_precision(block_format) for name, block_format in BLOCK_FORMATS.items()}


def get_precision(name: str) -> Precision:
    """Look up a precision by the value of `--dtype`; raise if it is not known."""
    key = name.lower() if isinstance(name, str) else ""
    precision = PRECISIONS.get(key) or BLOCK_PRECISIONS.get(key)
    if precision is None:
        raise InputError(f"dtype {name!r} is not known; use one of {', '.join([*PRECISIONS, *BLOCK_PRECISIONS])}")
    return precision


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
