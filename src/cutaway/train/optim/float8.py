"""float8 training: the linear layers of blocks compute their matrix products in fp8, with torchao.

    y = x·Wᵀ        ∂x = ∂y·W        ∂W = ∂yᵀ·x

Both operands of each product are divided by scales, so that their largest value is the largest fp8 value, and rounded
to fp8; the product is multiplied by the scales. Weights, gradients and optimizer state stay in fp32.
"""

from dataclasses import replace
from importlib.util import find_spec

import torch
from torch import nn

from cutaway.errors import InputError
from cutaway.model import Transformer
from cutaway.size.precision import FLOAT8_ALIGNMENT
from cutaway.train.recipe.schema import Float8Config


def check_float8(config: Float8Config, device: torch.device) -> None:
    """Raise InputError if torchao is not installed, or if the device has no fp8 matrix products."""
    check_torchao_installed()
    if not config.emulate and not has_fp8_products(device):
        raise InputError(
            f"training.precision = 'float8' needs a GPU with fp8 matrix products (NVIDIA: compute capability 8.9 or"
            f" higher, as L4, H100, B200), which {_device_name(device)} does not have; use training.precision = 'bf16',"
            " or set training.float8.emulate = true to compute with the same rounding, more slowly than in bf16"
        )


def check_torchao_installed() -> None:
    """Raise InputError if torchao is not installed."""
    if find_spec("torchao") is None:
        raise InputError(
            "training.precision = 'float8' needs the package torchao, which is not installed; pip install"
            " 'cutaway[float8]', or use training.precision = 'bf16'"
        )


def has_fp8_products(device: torch.device) -> bool:
    """Whether the device is a GPU with fp8 matrix products."""
    minimum = (8, 9) if torch.version.hip is None else (9, 4)
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= minimum


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"the device '{device}'"


def convert_to_float8(model: Transformer, config: Float8Config) -> None:
    """Replace the linear layers of all blocks by `Float8Linear` layers with the same parameters, in place.

    Other matrix products stay in the autocast dtype: those of embeddings and heads, of routers and experts, and of
    layers with a size that is no multiple of 16. Names and values of the state dict do not change.
    """
    check_torchao_installed()
    if not sum(convert_linear_layers(stack.blocks, config) for stack in model.stacks.values()):
        raise InputError(
            "training.precision = 'float8' has no effect, because no linear layer of a block has an input and an output"
            " size that are multiples of 16; change the sizes of the model, or use training.precision = 'bf16'"
        )


def convert_linear_layers(module: nn.Module, config: Float8Config) -> int:
    """Replace the aligned linear layers in a module by `Float8Linear` layers, in place, and return their number."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear as TorchAOFloat8Linear

    from cutaway.train.optim.float8_linear import Float8Linear

    torchao_config = replace(Float8LinearConfig.from_recipe_name(config.recipe_name), emulate=config.emulate)
    convert_to_float8_training(module, module_filter_fn=_is_aligned, config=torchao_config)
    layers = [layer for layer in module.modules() if type(layer) is TorchAOFloat8Linear]
    for layer in layers:
        layer.__class__ = Float8Linear
        layer.train(module.training)  # a new module is in training mode
    return len(layers)


def _is_aligned(layer: nn.Module, name: str) -> bool:
    assert isinstance(layer, nn.Linear)
    return layer.in_features % FLOAT8_ALIGNMENT == 0 and layer.out_features % FLOAT8_ALIGNMENT == 0
