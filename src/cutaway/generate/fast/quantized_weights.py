"""Weights of the GPU decode kernels: concatenated linear layers, int8 and int4 quantization, 32-bit packing."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn

from cutaway.errors import InputError, WeightError
from cutaway.quantization.cuda_weights import CUDAWeight, can_concat, concat_weights
from cutaway.quantization.quantized_tensor import CUDAQuantizedTensor

GROUP_SIZE = 128
"""Number of weights per scale in int4."""


@dataclass(frozen=True)
class LinearWeight:
    """Weight matrix (out_features, in_features), packed or not.

    Packed `values` are 32-bit words, (out_features, in_features · bits / 32). Their `scale` is (out_features,) for int8
    and (out_features, in_features / GROUP_SIZE) for int4.
    """

    values: Tensor
    bias: Tensor | None = None
    scale: Tensor | None = None
    bits: int = 16
    original_dtype: torch.dtype = torch.bfloat16
    """dtype before packing."""

    @property
    def out_features(self) -> int:
        return len(self.values)

    @property
    def values_per_word(self) -> int:
        """Number of weights per 32-bit word; 1 if the weights are not packed."""
        return 1 if self.scale is None else 32 // self.bits


@dataclass(frozen=True)
class PackedLinearWeight:
    """Weight matrix of a quantized checkpoint: parts of rows, which have different formats or are plain."""

    parts: tuple[CUDAWeight | Tensor, ...]
    bias: Tensor | None
    scale = None
    values_per_word = 1
    """As of an unpacked `LinearWeight`: the products read plain activations."""

    @property
    def sizes(self) -> list[int]:
        """Number of rows of each part."""
        return [part.rows if isinstance(part, CUDAWeight) else len(part) for part in self.parts]

    @property
    def out_features(self) -> int:
        return sum(self.sizes)

    @property
    def reorders_columns(self) -> bool:
        """Whether products reorder x after the norm: see `CUDAWeight.column_order`."""
        return any(isinstance(part, CUDAWeight) and part.column_order is not None for part in self.parts)


AnyLinearWeight: TypeAlias = LinearWeight | PackedLinearWeight


def linear_weight(weight: Tensor, bias: Tensor | None) -> AnyLinearWeight:
    """Weight of one layer."""
    if isinstance(weight, CUDAQuantizedTensor):
        return PackedLinearWeight((weight.packed,), bias)
    return LinearWeight(weight.data, None if bias is None else bias.data)


def concat_linears(*layers: nn.Linear) -> AnyLinearWeight:
    """Concatenate the layers' weights and biases along the output dimension.

    The layers' own weights and biases become views of the result, so that nothing is stored twice and later changes of
    their values apply to both.
    """
    if len(layers) == 1:
        return linear_weight(layers[0].weight, layers[0].bias)
    if any(isinstance(layer.weight, CUDAQuantizedTensor) for layer in layers):
        return _concat_packed(layers)
    weight = _concat([layer.weight for layer in layers])
    if all(layer.bias is None for layer in layers):
        return LinearWeight(weight)
    biases = [layer.bias if layer.bias is not None else weight.new_zeros(layer.out_features) for layer in layers]
    return LinearWeight(weight, _concat(biases))


@torch.no_grad()
def _concat_packed(layers: Sequence[nn.Linear]) -> PackedLinearWeight:
    """Concatenate packed weights. Neighbors of the same layout become one part."""
    parts: list[CUDAWeight | Tensor] = []
    for _, group in groupby(layers, key=lambda layer: _layout(layer.weight)):
        same = list(group)
        tensors = [layer.weight for layer in same]
        packed = [tensor.packed for tensor in tensors if isinstance(tensor, CUDAQuantizedTensor)]
        if len(packed) < len(tensors) or not can_concat(packed):
            parts += packed or [tensor.data for tensor in tensors]
            continue
        whole = concat_weights(packed)
        parts.append(whole)
        for layer, part in zip(same, whole.split_rows([len(each) for each in tensors]), strict=True):
            old = layer.weight
            assert isinstance(old, CUDAQuantizedTensor)
            layer.weight = nn.Parameter(CUDAQuantizedTensor(part, old.format, old.dtype), requires_grad=False)
    if all(layer.bias is None for layer in layers):
        return PackedLinearWeight(tuple(parts), None)
    first = next(layer.bias for layer in layers if layer.bias is not None)
    biases = [first.new_zeros(layer.out_features) if layer.bias is None else layer.bias for layer in layers]
    return PackedLinearWeight(tuple(parts), _concat(biases))


def _layout(weight: Tensor) -> object:
    return weight.packed.layout if isinstance(weight, CUDAQuantizedTensor) else None


@torch.no_grad()
def _concat(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors along dim 0, and make them views of the result, unless they already are."""
    first = tensors[0].data
    if _are_concatenated(tensors):
        return first.as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride())
    result = torch.cat([tensor.data for tensor in tensors])
    for tensor, part in zip(tensors, result.split(list(map(len, tensors))), strict=True):
        tensor.data = part
    return result


def _are_concatenated(tensors: Sequence[Tensor]) -> bool:
    """Whether the tensors are already views of one tensor, one after the other."""
    return all(
        first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        and first.is_contiguous()
        and second.is_contiguous()
        and first.data_ptr() + first.nbytes == second.data_ptr()
        for first, second in pairwise(tensors)
    )


def pack_weight(weight: AnyLinearWeight, bits: int | None) -> AnyLinearWeight:
    """Quantize and pack a matrix: int8 with one scale per row, or int4 with one scale per GROUP_SIZE weights of a row.

    A matrix is returned unchanged if its in_features is not a multiple of 4 (int8) or GROUP_SIZE (int4), or if `bits`
    is None.
    """
    if bits is None or isinstance(weight, PackedLinearWeight):
        return weight
    if bits not in (4, 8):
        raise InputError(f"bits is {bits!r}; use 8 or 4")
    rows, width = weight.values.shape
    if width % (4 if bits == 8 else GROUP_SIZE):
        return weight
    scale, integers = quantize(weight.values, bits)
    if bits == 8:
        packed = integers.to(torch.int8)
    else:  # a 32-bit word holds 8 values, each plus 8: values 0-3 in the low nibbles of its bytes, 4-7 in the high ones
        low, high = (integers + 8).to(torch.uint8).view(rows, -1, 2, 4).unbind(2)
        packed = (low | high << 4).flatten(1)
    return LinearWeight(packed.contiguous().view(torch.int32), weight.bias, scale, bits, weight.values.dtype)


def quantize(values: Float[Tensor, "n k"], bits: int) -> tuple[Float[Tensor, " n *g"], Float[Tensor, "n k"]]:
    """Return (scales, integers) with values ≈ scale · integer, rounded to the nearest integer.

    int8 has one scale per row and integers from −127 to 127. int4 has one scale per GROUP_SIZE values of a row and
    integers from −8 to 7. Raise if a value is NaN or infinite."""
    max_int = (1 << (bits - 1)) - 1
    values_fp32 = values.float()
    groups = values_fp32 if bits == 8 else values_fp32.unflatten(-1, (-1, GROUP_SIZE))
    max_abs = groups.abs().amax(-1)
    if not torch.isfinite(max_abs).all():
        raise WeightError(
            "the weights contain NaN or infinity, which integers cannot represent; load the weights again, or leave out"
            " weight_bits"
        )
    scale = (max_abs / max_int).clamp(min=1e-30)  # above 0, also for rows of zeros
    if bits == 8:
        return scale, (groups / scale.unsqueeze(-1)).round().clamp(-max_int, max_int)
    scale = scale.to(torch.float16).clamp(min=6e-8)
    return scale, (groups / scale.float().unsqueeze(-1)).round().clamp(-max_int - 1, max_int).flatten(-2)
