"""Shape pass of `model/adapters/`: LoRA layers on a frozen, possibly quantized base."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil

from cutaway.size.shape_pass.tensor import WeightKey

_NF4_BLOCK, _NF4_SCALE_BLOCK = 64, 256
"""Number of weights per scale, and of scales per second-level scale."""
_CPU_DEQUANTIZATION_BYTES = {"nf4": 12, "int8": 8}
"""Bytes per weight that dequantization on a CPU allocates at its peak, for intermediate values in fp32."""


@dataclass(frozen=True)
class LayerAdapter:
    """LoRA adapter of one layer."""

    rank: int
    dropout: float = 0.0
    use_dora: bool = False


@dataclass(frozen=True, eq=False)
class FrozenBase:
    """A frozen base model with adapters: the adapter of each layer, and the quantization of the frozen weights."""

    adapters: Mapping[WeightKey, LayerAdapter] = field(default_factory=dict)
    quantization: str | None = None
    """'nf4' or 'int8', which apply to the linear layers outside the head; None: the base is not quantized."""
    adapter_itemsize: int = 4

    @property
    def is_fusible(self) -> bool:
        """Whether compiled steps fuse the adapters with the frozen weights (`train/kernels/lora.py`)."""
        return not any(adapter.dropout or adapter.use_dora for adapter in self.adapters.values())

    def adapter_of(self, key: WeightKey) -> LayerAdapter | None:
        """Adapter of a linear layer. An output matrix that is tied to an adapted embedding table has none."""
        return self.adapters.get(key) if key[0] in ("encoder", "decoder") else None

    def quantization_of(self, key: WeightKey) -> str | None:
        """Quantization of the weight of a linear layer (tape.linear)."""
        is_linear_in_stack = key[0] in ("encoder", "decoder") and key[-1] != "router"
        return self.quantization if is_linear_in_stack else None


def quantized_bytes(numel: int, rows: int, kind: str) -> int:
    """Number of bytes of a quantized weight with its scales. `rows`: number of rows of the matrix."""
    if kind == "int8":
        return numel + 4 * rows
    num_scales = numel // _NF4_BLOCK
    return numel // 2 + num_scales + 4 * ceil(num_scales / _NF4_SCALE_BLOCK) + 4


def dequantization_bytes(numel: int, kind: str, itemsize: int, device: str) -> int:
    """Number of bytes at the peak of dequantizing a weight, including the result."""
    if device == "cpu":
        return numel * _CPU_DEQUANTIZATION_BYTES[kind]
    return numel * itemsize  # one kernel
