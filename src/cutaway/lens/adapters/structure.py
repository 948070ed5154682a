"""Structure of another library's model: a cutaway model on the meta device with the weights that analyses read.

These are the final norm, the head, the output projections of attention and FFN, the norms after them, and position
embeddings. They share storage with the other model, except for merged adapters (PEFT).
"""

import re
from copy import deepcopy

import torch
from torch import Tensor, nn

from cutaway.families.load_plan import TensorConversion
from cutaway.model import Transformer
from cutaway.model.head import LMHead
from cutaway.model.positions import SinusoidalPosition

_READ_WEIGHTS = re.compile(
    r"head\..*|(en|de)coder\.(final_norm|embed\.position|blocks\.\d+\.(attn|cross|ffn)\.(norm_out|f\.(o|down)))\..*"
)
"""Names of the cutaway parameters that analyses read."""


def share_weights(structure: Transformer, modules: dict[str, nn.Module], steps: list[TensorConversion]) -> None:
    """Set the weights that analyses read to views of the other model's weights.

    `steps` are the conversions of the family's weight mapping, and `modules` the other model's modules by path.
    Weights that are not found stay on the meta device.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in structure.state_dict(keep_vars=True).items()}
    for step in steps:
        wanted = [name for name in step.model_keys if _is_read(structure, name)]
        tensors = [_find_tensor(modules, key) for key in step.checkpoint_keys] if wanted else []
        if not wanted or any(tensor is None or not tensor.is_floating_point() for tensor in tensors):
            continue
        found = [tensor for tensor in tensors if tensor is not None]
        converted = step.op.to_model(found, [shapes[name] for name in step.model_keys], step.d_head)
        for name, tensor in zip(step.model_keys, converted, strict=True):
            if name in wanted:
                set_tensor(structure, name, tensor)
    for position in (stack.embed.position for stack in structure.stacks.values()):
        if isinstance(position, SinusoidalPosition) and position.table is None:  # computed, not in a checkpoint
            position.encoding = position.encode(position.num_positions)


def _is_read(structure: Transformer, name: str) -> bool:
    head = getattr(structure, "head", None)
    is_tied = isinstance(head, LMHead) and any(head.matrix is stack.embed.token for stack in structure.stacks.values())
    return _READ_WEIGHTS.fullmatch(name) is not None or (is_tied and name.endswith(".embed.token.weight"))


def set_tensor(structure: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace a parameter or buffer of the structure, without a copy."""
    path, _, leaf = name.rpartition(".")
    owner = structure.get_submodule(path)
    if leaf in owner._buffers:
        owner._buffers[leaf] = tensor.detach()
    else:
        owner._parameters[leaf] = nn.Parameter(tensor.detach(), requires_grad=False)


def _find_tensor(modules: dict[str, nn.Module], key: str) -> Tensor | None:
    """Return the tensor of a checkpoint key in the other model, with active adapters merged."""
    path, _, leaf = key.rpartition(".")
    module = modules.get(path)
    tensor = None if module is None else getattr(merge_adapters(module), leaf, None)
    return tensor.detach() if isinstance(tensor, Tensor) else None


def merge_adapters(module: nn.Module) -> nn.Module:
    """Return the module, or for a PEFT layer a module with the weights of the base layer and the active adapters."""
    saved = getattr(module, "modules_to_save", None)  # a fully trained copy of the module
    if isinstance(saved, nn.ModuleDict):
        active = [name for name in getattr(module, "active_adapters", ()) if name in saved]
        original = getattr(module, "original_module", module)
        return saved[active[0]] if active and not getattr(module, "disable_adapters", False) else original
    base = getattr(module, "base_layer", None)
    if not isinstance(base, nn.Module):
        return module
    if getattr(module, "disable_adapters", False) or getattr(module, "merged", False):
        return base
    copied = deepcopy(module)
    with torch.no_grad():
        copied.merge()  # type: ignore[operator]
    merged = copied.base_layer
    assert isinstance(merged, nn.Module)
    return merged
