"""Speed-ups of a training step: fused projections (QKV, gate and up), and on a GPU torch.compile of blocks.

Both apply only inside a context manager that the training step enters. Evaluation, sampling and export use the
unchanged model.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from types import MethodType
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch.nn.functional as F
from torch import Tensor, nn

from cutaway.device import has_triton
from cutaway.model import Transformer
from cutaway.model.activation_checkpointing import ActivationCheckpointing, run_block
from cutaway.model.activations import ACTIVATIONS, gelu_tanh
from cutaway.model.attention import LayerContext, MultiHead
from cutaway.model.ffn import MLP, GatedMLP
from cutaway.model.layers import Linear
from cutaway.model.rope import Rope
from cutaway.model.stack import Stack
from cutaway.train.kernels.lora import FusedLoRALinear, can_fuse_lora, update_matrices

GELU_ACTIVATIONS = (F.gelu, gelu_tanh)
BLOCKS_PER_GRAPH = 16
"""Maximum number of blocks per compiled graph. Within a graph, a residual addition fuses with the next block's norm."""

RECOMPUTE_POINTWISE = {
    "ban_recompute_materialized_backward": False,
    "ban_recompute_used_far_apart": False,
    "ban_recompute_long_fusible_chains": False,
}
"""Settings of PyTorch's partitioner for adapters. It then recomputes norms and act(gate)·up in the backward pass, which
are inputs of A only, instead of storing them. The matrix products with the frozen weights need no inputs."""


def compile_for_training(
    model: Transformer, compile_blocks: bool | None, *, single_process: bool = True
) -> Callable[[], AbstractContextManager[None]]:
    """Return a function that creates a context in which a step runs with compiled blocks and fused projections.

    If `compile_blocks` is None, blocks are compiled on a GPU only. On a CPU, one process fuses QKV in any case.
    """
    is_compiled = model.device.type == "cuda" if compile_blocks is None else compile_blocks
    if not is_compiled and (compile_blocks is False or model.device.type != "cpu" or not single_process):
        return nullcontext
    replaced_methods = _find_fusible_modules(model) if is_compiled else _find_plain_qkv(model)
    for stack in model.stacks.values() if is_compiled else ():
        if single_process:
            replaced_methods[stack] = {"run_blocks": _compile_stack(stack)}
        else:  # blocks are compiled one by one, because ranks communicate between blocks
            replaced_methods |= {
                block: {"_compiled_call_impl": torch.compile(block._call_impl)} for block in stack.blocks
            }

    fused_lora = [methods["fused_lora"] for methods in replaced_methods.values() if "fused_lora" in methods]

    @contextmanager
    def compiled_context() -> Iterator[None]:
        recompute = functorch_config.patch(RECOMPUTE_POINTWISE) if fused_lora else nullcontext()
        try:
            if fused_lora:
                update_matrices(fused_lora)
            for module, methods in replaced_methods.items():
                for name, method in methods.items():
                    setattr(module, name, method)
            with recompute:
                yield
        finally:
            for module, methods in replaced_methods.items():
                for name in methods:
                    delattr(module, name)

    return compiled_context


def _compile_stack(stack: Stack) -> Callable[[Tensor, list[LayerContext]], Tensor]:
    """Return a compiled `run_blocks` for a stack. Blocks are compiled in groups, and groups of equal structure once.

    Blocks with activation checkpointing are compiled one by one. Their inputs are stored in any case, and one block
    compiles faster than a group.
    """
    blocks, modes = list(stack.blocks), stack.activation_checkpointing
    num_checkpointed = sum(mode != "none" for mode in modes)
    num_others = len(blocks) - num_checkpointed
    num_groups = -(-num_others // BLOCKS_PER_GRAPH)
    group_ends = [num_checkpointed + num_others * group // num_groups for group in range(1, num_groups + 1)]
    ends = [*range(num_checkpointed + 1), *group_ends]
    compiled = torch.compile(_run_blocks)

    def run_blocks(x: Tensor, contexts: list[LayerContext]) -> Tensor:
        for start, end in pairwise(ends):
            norm = stack.final_norm if end == len(blocks) else None
            x = compiled(modes[start], blocks[start:end], x, contexts[start:end], norm)
        return x

    return run_blocks


def _run_blocks(
    mode: ActivationCheckpointing,
    blocks: list[nn.Module],
    x: Tensor,
    contexts: list[LayerContext],
    norm: nn.Module | None,
) -> Tensor:
    for block, context in zip(blocks, contexts, strict=True):
        x = run_block(mode, block, x, context)
    return x if norm is None else norm(x)


def _find_fusible_modules(model: Transformer) -> dict[nn.Module, dict[str, Any]]:
    """Map each module whose projections can be fused to its replacement methods, by method name."""
    replaced_methods = _find_plain_qkv(model)
    changes_qk = _find_attention_that_changes_qk(model)
    has_kernels = has_triton() and model.device.type == "cuda"
    for name, module in model.named_modules():
        # Projections that are tensor-parallel, or that have an adapter, are of another type and are not fused.
        if type(module) is MultiHead and can_fuse_lora(module.q, module.k, module.v):
            fused = FusedLoRALinear(module.q, module.k, module.v, concat=True)  # type: ignore[arg-type]  # checked above
            replaced_methods[module] = {"fused_lora": fused, "project_qkv": MethodType(_fused_lora_qkv, module)}
            replaced_methods[module]["copy_values"] = module in changes_qk and len(fused.matrices) == 1
        elif isinstance(module, GatedMLP) and can_fuse_lora(module.gate, module.up):
            fused = FusedLoRALinear(module.gate, module.up)  # type: ignore[arg-type]  # checked above
            replaced_methods[module] = {"fused_lora": fused, "project_gate_up": MethodType(_fused_lora_gate_up, module)}
        elif can_fuse_lora(module) and name.rpartition(".")[2] in ("o", "down"):
            fused = FusedLoRALinear(module)  # checked above
            replaced_methods[module] = {"fused_lora": fused, "forward": MethodType(_fused_lora_forward, module)}
        elif not has_kernels:
            continue
        elif type(module) is GatedMLP and module.act is ACTIVATIONS["silu"] and _are_plain(module.gate, module.up):
            project_gate_up = MethodType(_fused_gate_up, module)
            replaced_methods[module] = {"project_gate_up": project_gate_up, "apply_gate": _fused_swiglu}
        elif type(module) is MLP and module.act in GELU_ACTIVATIONS and _are_plain(module.up):
            replaced_methods[module] = {"forward": MethodType(_fused_gelu_mlp, module)}
    return replaced_methods


def _find_plain_qkv(model: Transformer) -> dict[nn.Module, dict[str, Any]]:
    """As `_find_fusible_modules`, for attention without adapters."""
    changes_qk = _find_attention_that_changes_qk(model)
    return {
        module: {"project_qkv": MethodType(_fused_qkv, module), "copy_values": module in changes_qk}
        for module in model.modules()
        if type(module) is MultiHead and _are_plain(module.q, module.k, module.v)
    }


def _find_attention_that_changes_qk(model: Transformer) -> set[nn.Module]:
    """Attention modules that compute other queries and keys, by QK-norm or RoPE, from the projected ones."""
    modules = set()
    for stack in model.stacks.values():
        for block, key in zip(stack.blocks, stack.layer_position_keys, strict=True):
            attention: Any = block.attn.f  # type: ignore[union-attr]
            has_rope = key in stack.positions and isinstance(stack.positions[key], Rope)
            if has_rope or not isinstance(getattr(attention, "q_norm", None), nn.Identity):
                modules.add(attention)
    return modules


def _are_plain(*layers: nn.Module) -> bool:
    return all(type(layer) is Linear for layer in layers)


def _fused_qkv(self: MultiHead, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Project queries, keys and values with one matrix product."""
    sizes = [layer.out_features for layer in (self.q, self.k, self.v)]
    return _split_qkv(self, *torch.split(_fused_linear(x, self.q, self.k, self.v), sizes, -1))


def _fused_lora_qkv(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Project queries, keys and values, with their adapters, with one matrix product."""
    return _split_qkv(self, *self.fused_lora(x))


def _split_qkv(self: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split the columns of [q | k | v] into heads.

    With `copy_values`, values are copied. As a view, they would keep the columns of q and k in memory for the backward
    pass, beside the queries and keys after RoPE or QK-norm.
    """
    values = self.split_heads(v)
    values = values.contiguous() if self.copy_values else values
    return self.q_norm(self.split_heads(q)), self.k_norm(self.split_heads(k)), values


def _fused_lora_gate_up(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gate and up projections, with their adapters."""
    gate, up = self.fused_lora(x)
    return gate, up


def _fused_lora_forward(self: Any, x: Tensor) -> Tensor:
    """Compute a linear layer with its adapter."""
    (y,) = self.fused_lora(x)
    return y


def _fused_gate_up(self: Any, x: Tensor) -> tuple[Tensor]:
    """Compute the gate and up projections with one matrix product. They are concatenated in the last dimension."""
    return (_fused_linear(x, self.gate, self.up),)


def _fused_swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) · up. `gate_up` contains gate and up, concatenated in the last dimension."""
    from cutaway.train.kernels.activations import SwiGLU

    output: Tensor = SwiGLU.apply(gate_up.flatten(0, -2))
    return output.view(*gate_up.shape[:-1], -1)


def _fused_gelu_mlp(self: MLP, x: Tensor) -> Tensor:
    """Compute down(gelu(up(x))), with the up projection and GELU in one autograd function."""
    from cutaway.train.kernels.activations import LinearGELU

    device_type = x.device.type
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else x.dtype
    weight, bias = self.up.weight.to(dtype), None if self.up.bias is None else self.up.bias.to(dtype)
    rows: Tensor = LinearGELU.apply(x.to(dtype).flatten(0, -2), weight, bias, self.act is gelu_tanh)
    hidden = rows.view(*x.shape[:-1], -1)
    return self.down(F.dropout(hidden, self.dropout, self.training))


def _fused_linear(x: Tensor, *layers: nn.Linear) -> Tensor:
    """Apply several linear layers with one matrix product; the outputs are concatenated in the last dimension.

    Autocast copies the weights to bf16 in any case, so concatenating them costs nothing more.
    """
    weight = torch.cat([layer.weight for layer in layers])
    bias = None
    if any(layer.bias is not None for layer in layers):
        biases = [x.new_zeros(layer.out_features) if layer.bias is None else layer.bias for layer in layers]
        bias = torch.cat([each.to(weight.dtype) for each in biases])
    return F.linear(x, weight, bias)
