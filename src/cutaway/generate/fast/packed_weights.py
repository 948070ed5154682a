"""Matrices as fast products want them: those of several layers end to end, and packed into fewer bits where asked."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from cutaway.errors import InputError

GROUP_SIZE = 128
"""Weights that share a scale in int4."""


@dataclass(frozen=True)
class LinearWeight:
    """A matrix (rows, width); packed, `values` holds words of 32 bits and `scale` one number a row or a group."""

    values: Tensor
    bias: Tensor | None = None
    scale: Tensor | None = None
    bits: int = 16
    original_dtype: torch.dtype = torch.bfloat16
    """The dtype that packed values had."""

    @property
    def out_features(self) -> int:
        return len(self.values)

    @property
    def values_per_word(self) -> int:
        """Weights in a word; 1 if they are not packed."""
        return 1 if self.scale is None else 32 // self.bits

    @property
    def num_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (self.values, self.bias, self.scale) if x is not None)


def concat_linears(*layers: nn.Linear) -> LinearWeight:
    """The layers' matrices end to end. The layers' own weights become views of it, so nothing is held twice."""
    with torch.no_grad():
        if len(layers) == 1:
            values = layers[0].weight.data
        else:
            values = torch.cat([layer.weight for layer in layers])
            start = 0
            for layer in layers:
                layer.weight.data = values[start : start + layer.out_features]
                start += layer.out_features
        return LinearWeight(values, _concat_biases(layers, values))


def _concat_biases(layers: Sequence[nn.Linear], values: Tensor) -> Tensor | None:
    if all(layer.bias is None for layer in layers):
        return None
    return torch.cat([values.new_zeros(each.out_features) if each.bias is None else each.bias for each in layers])


def pack_weight(weight: LinearWeight, bits: int | None) -> LinearWeight:
    """Rounded to 255 steps a row, or to 15 steps a group of GROUP_SIZE; as it is where it cannot be packed."""
    if bits is None:
        return weight
    if bits not in (4, 8):
        raise InputError(f"bits is {bits!r}; weights can be packed into 8 or 4")
    rows, width = weight.values.shape
    if width % (4 if bits == 8 else GROUP_SIZE):
        return weight
    scale, rounded = quantize(weight.values, bits)
    if bits == 8:
        numbers = rounded.to(torch.int8)
    else:  # eight of them make a word: the first four are its bytes' low halves
        low, high = (rounded + 8).to(torch.uint8).view(rows, -1, 2, 4).unbind(2)
        numbers = (low | high << 4).flatten(1)
    return LinearWeight(numbers.contiguous().view(torch.int32), weight.bias, scale, bits, weight.values.dtype)


def quantize(values: Float[Tensor, "n k"], bits: int) -> tuple[Float[Tensor, "n *g"], Float[Tensor, "n k"]]:
    """Scales and whole numbers: values ≈ scale · number, as near as steps of that size allow."""
    most = (1 << (bits - 1)) - 1
    wide = values.float()
    if bits == 8:
        scale = (wide.abs().amax(-1) / most).clamp(min=1e-12)
        return scale, (wide / scale.unsqueeze(-1)).round().clamp(-most, most)
    groups = wide.unflatten(-1, (-1, GROUP_SIZE))
    scale = (groups.abs().amax(-1) / most).clamp(min=1e-12).to(torch.float16).clamp(min=6e-8)
    return scale, (groups / scale.float().unsqueeze(-1)).round().clamp(-most - 1, most).flatten(-2)


def dequantize(weight: LinearWeight) -> Float[Tensor, "n k"]:
    """What packed weights stand for."""
    assert weight.scale is not None
    if weight.bits == 8:
        numbers = weight.values.view(torch.int8).float()
    else:
        halves = weight.values.view(torch.uint8).unflatten(-1, (-1, 1, 4))
        numbers = torch.cat((halves & 15, halves >> 4), -2).flatten(1).float() - 8
    if weight.scale.ndim == 1:
        return numbers * weight.scale.unsqueeze(-1)
    return (numbers.unflatten(-1, (-1, GROUP_SIZE)) * weight.scale.float().unsqueeze(-1)).flatten(1)
