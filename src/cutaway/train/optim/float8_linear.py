"""Linear layer with fp8 matrix products. This module imports torchao, which is optional."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torchao.float8.float8_linear import Float8Linear as TorchAOFloat8Linear

from cutaway.size.precision import FLOAT8_ALIGNMENT


class Float8Linear(TorchAOFloat8Linear):
    """y = x·Wᵀ + b, with fp8 products in training mode under bf16 autocast, otherwise like any linear layer.

    So evaluations, samples and checks during training compute with the weights that the run exports.
    """

    def forward(self, input: Float[Tensor, "*batch i"]) -> Float[Tensor, "*batch o"]:
        # torchao reads the autocast dtype of CUDA on all devices, so the input is cast here.
        device_type = input.device.type
        x = input
        if torch.is_autocast_enabled(device_type):
            x = x.to(torch.get_autocast_dtype(device_type))
        if not self.training or x.dtype != torch.bfloat16:
            return F.linear(x, self.weight, self.bias)
        rows = x.flatten(0, -2)
        # The weight gradient is a sum over rows, whose number must be a multiple of 16. Rows of zeros change nothing.
        padding = -len(rows) % FLOAT8_ALIGNMENT
        if padding:
            rows = F.pad(rows, (0, 0, 0, padding))
        y: Tensor = super().forward(rows)
        return y[: len(y) - padding].view(*x.shape[:-1], self.out_features)
