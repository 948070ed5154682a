"""LoRA layers with the same input as one operation, whose low-rank terms are columns of the wide matrix products.

    y_i = W_i·x + s_i·B_i·A_i·x = [W_i | 0 B_i 0]·[x; s_1·A_1·x; s_2·A_2·x …]

The frozen weight and B are stored in one matrix, so that a layer takes one wide product, and no product with B and no
addition of its own. In the backward pass, the product of the gradient with this matrix contains the gradient of s·A·x.
A quantized weight is dequantized into such a matrix, in the forward and in the backward pass.

The backward pass needs x, which compiled steps recompute, and A·x. Without the factor s in [x; s·A·x], a compiled
product would write A·x to its columns of this matrix, and the stored view A·x would keep the whole matrix in memory.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from cutaway.model.adapters.lora import LoRALinear, LoRAQuantizedLinear

RANK_MULTIPLE = 16
"""The number of columns of B is padded to a multiple, so that rows of the stored matrix stay aligned."""


def can_fuse_lora(*layers: nn.Module) -> bool:
    """Whether the layers have active LoRA adapters without dropout and DoRA, on a frozen base without biases."""
    for layer in layers:
        if type(layer) not in (LoRALinear, LoRAQuantizedLinear) or type(layer) is not type(layers[0]):
            return False
        if layer.bias is not None or (type(layer) is LoRALinear and layer.weight.requires_grad):
            return False
        if layer.active is None or layer.active.magnitude is not None or layer.active.dropout:
            return False
    return True


class FusedLoRALinear:
    """The LoRA layers `layers`, which have the same input. Their frozen weights become views of the stored matrices.

    With `concat`, the outputs of all layers are computed by one product (q, k and v, of which k and v are narrow),
    unless they are quantized.
    """

    def __init__(self, *layers: LoRALinear | LoRAQuantizedLinear, concat: bool = False) -> None:
        self.layers, self.name = layers, layers[0].active_adapter or ""
        self.in_features: int = layers[0].in_features
        self.sizes = [layer.out_features for layer in layers]
        self.ranks: list[int] = [adapter.rank for adapter in self.adapters]
        num_columns = -(-sum(self.ranks) // RANK_MULTIPLE) * RANK_MULTIPLE
        is_quantized = isinstance(layers[0], LoRAQuantizedLinear)
        groups = [layers] if concat and not is_quantized else [(layer,) for layer in layers]
        self.matrices: list[Tensor] = []
        """[W | B] of each product; only [B] if the weights are quantized."""
        self.lora_b_columns: list[Tensor] = []
        """Views of the columns of B, one per layer."""
        column, ranks = 0, iter(self.ranks)
        for group in groups:
            num_rows, num_inputs = sum(layer.out_features for layer in group), 0 if is_quantized else self.in_features
            first = group[0]
            dtype = first.dtype if isinstance(first, LoRAQuantizedLinear) else first.weight.dtype
            device = self.adapters[0].lora_b.device
            matrix = torch.zeros(num_rows, num_inputs + num_columns, dtype=dtype, device=device)
            row = 0
            for layer in group:
                rows = slice(row, row + layer.out_features)
                rank = next(ranks)
                if not is_quantized:
                    matrix[rows, :num_inputs] = layer.weight.detach()
                    layer.weight.data = matrix[rows, :num_inputs]  # so that no weight is stored twice
                self.lora_b_columns.append(matrix[rows, num_inputs + column : num_inputs + column + rank])
                row, column = rows.stop, column + rank
            self.matrices.append(matrix)

    @property
    def adapters(self) -> list[Any]:
        return [layer.adapters[self.name] for layer in self.layers]

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """Output of each layer."""
        device_type = x.device.type
        dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else x.dtype
        flat = x.to(dtype).reshape(-1, self.in_features)
        if self.layers[0].active_adapter is None:  # adapters are disabled
            outputs = [flat @ matrix[:, : self.in_features].T for matrix in self.build_matrices(dtype)]
        else:
            lora_a = torch.cat([adapter.lora_a for adapter in self.adapters])
            lora_b = [adapter.lora_b for adapter in self.adapters]
            scalings = [adapter.scaling for adapter in self.adapters]
            outputs = _FusedLoRA.apply(flat, lora_a, self, scalings, *lora_b)
        if len(outputs) < len(self.layers):
            outputs = outputs[0].split(self.sizes, -1)
        return tuple(output.view(*x.shape[:-1], -1) for output in outputs)

    def build_matrices(self, dtype: torch.dtype, grads: Sequence[Tensor | None] = ()) -> list[Tensor]:
        """[W | B] of each product, in the given dtype. `grads`: in the backward pass, the gradient of each output."""
        if not isinstance(self.layers[0], LoRAQuantizedLinear):
            return [matrix.to(dtype) for matrix in self.matrices]
        matrices = []
        for layer, columns, grad in zip(self.layers, self.matrices, grads or [None] * len(self.layers), strict=True):
            assert isinstance(layer, LoRAQuantizedLinear)
            matrices.append(layer.dequantize(dtype, columns=columns, after=grad))
        return matrices


@torch.no_grad()
def update_matrices(fused_layers: Sequence[FusedLoRALinear]) -> None:
    """Copy the current B of all layers into the stored matrices. This must be called after every optimizer step."""
    columns = [columns for fused in fused_layers for columns in fused.lora_b_columns]
    torch._foreach_copy_(columns, [adapter.lora_b for fused in fused_layers for adapter in fused.adapters])


class _FusedLoRA(torch.autograd.Function):
    """Products of [x | s·x·Aᵀ] with each matrix. The gradients of the B of a product with several layers are blocks."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        lora_a: Tensor,
        fused: FusedLoRALinear,
        scalings: list[float],
        *lora_b: Tensor,
    ) -> tuple[Tensor, ...]:
        matrices, ranks = fused.build_matrices(x.dtype), fused.ranks
        padding = matrices[0].shape[1] - x.shape[1] - len(lora_a)
        low_rank = x @ lora_a.to(x.dtype).T  # (N, R)
        parts = [x, _scale(low_rank, ranks, scalings), *([x.new_zeros(len(x), padding)] if padding else [])]
        extended = torch.cat(parts, -1)  # (N, in + R)
        ctx.save_for_backward(x, low_rank, lora_a, *lora_b)
        ctx.fused, ctx.scalings = fused, scalings
        return tuple(extended @ matrix.T for matrix in matrices)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, low_rank, lora_a, *lora_b = ctx.saved_tensors
        num_inputs, rank, ranks = lora_a.shape[1], len(lora_a), ctx.fused.ranks
        dtype = x.dtype
        matrices = ctx.fused.build_matrices(dtype, grads)
        # (N, in + R) per product. Sums are additions instead of addmm, because they fuse with the next operations.
        parts = [grad @ matrix for grad, matrix in zip(grads, matrices, strict=True)]
        grad_extended = functools.reduce(torch.add, parts)
        # (N, R): gradient of A·x
        grad_low_rank = _scale(grad_extended[:, num_inputs : num_inputs + rank], ranks, ctx.scalings)
        grad_x = grad_extended[:, :num_inputs] + grad_low_rank @ lora_a.to(dtype)
        grad_a = (grad_low_rank.T @ x).to(lora_a.dtype)
        grads_b, column, row = [], 0, 0
        joint = grads[0].T @ low_rank if len(grads) == 1 else None  # (out, R): the gradients of all B are blocks of it
        for index, b in enumerate(lora_b):
            columns = slice(column, column + ranks[index])
            grad_b = grads[index].T @ low_rank[:, columns] if joint is None else joint[row : row + len(b), columns]
            grads_b.append(grad_b.to(b.dtype) * ctx.scalings[index])
            column, row = columns.stop, row + len(b)
        return grad_x, grad_a, None, None, *grads_b


def _scale(low_rank: Tensor, ranks: list[int], scalings: list[float]) -> Tensor:
    """Multiply the columns of each layer by its scaling."""
    if len(set(scalings)) == 1:
        return low_rank * scalings[0]
    parts = low_rank.split(ranks, -1)
    return torch.cat([part * scaling for part, scaling in zip(parts, scalings, strict=True)], -1)
