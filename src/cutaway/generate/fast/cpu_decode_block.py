"""Transformer blocks of CPU decode steps as one call of a C kernel each.

A decode step of a small model consists of hundreds of operations on a few thousand numbers, and PyTorch takes longer to
start them than to compute them. The weights are those of the model, in fp32 or in a block format.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from cutaway.cpu_kernels.library import Linear, load_cpu_kernels
from cutaway.generate.engine.kv_cache import BatchKVCache, PagedLayerCache
from cutaway.model import Transformer
from cutaway.model.activations import ACTIVATIONS
from cutaway.model.attention import LayerContext, MultiHead
from cutaway.model.block import Block, ParallelBlock
from cutaway.model.ffn import MLP, GatedMLP
from cutaway.model.kernels import Kernel
from cutaway.model.layers import Linear as LinearLayer
from cutaway.model.masks import MaskSpec
from cutaway.model.norms import LayerNorm, RMSNorm
from cutaway.model.positions import Alibi, ScoreBias
from cutaway.model.rope import Rope
from cutaway.model.stack import Stack
from cutaway.quantization.quantized_tensor import QuantizedTensor, linear_argument

_ACTIVATION_IDS = {
    ACTIVATIONS[name]: index for index, name in enumerate(("silu", "gelu_tanh", "gelu", "relu", "relu2"), 1)
}
"""Numbers of the activations in decode.c."""


class _Norm(ctypes.Structure):
    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("kind", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("offset", ctypes.c_float),
    )


class _Attention(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("cos", "sin", "slopes", "sinks", "keys", "values")),
        *((name, ctypes.c_void_p) for name in ("page_table", "slots", "positions")),
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "d_head", "rotary_pairs", "window", "num_slots")),
        *((name, ctypes.c_int64) for name in ("page_size", "pages_per_row", "interleaved")),
        ("q_norm", _Norm),
        ("k_norm", _Norm),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


class _Branch(ctypes.Structure):
    _fields_ = (*((name, _Norm) for name in ("norm_in", "norm_out", "norm_after")), ("scale", ctypes.c_float))


class _Block(ctypes.Structure):
    _fields_ = (
        ("attn", _Branch),
        ("ffn", _Branch),
        *((name, Linear) for name in ("q", "k", "v", "o", "gate", "up", "down")),
        ("attention", _Attention),
        *((name, ctypes.c_int64) for name in ("d_model", "activation", "is_gated", "is_parallel")),
    )


class PositionKernel(Kernel):
    """Stands for the attention of a C kernel: the prepared mask is the position of each row's query."""

    name = "position"
    supports = frozenset({"softcap", "sink"})

    def prepare_mask(self, mask_spec: MaskSpec, bias: ScoreBias | None, dtype: torch.dtype) -> Tensor:
        return mask_spec.q.position[:, 0].contiguous()


class _DecodeAttention(nn.Module):
    """What `Stack` reads of an attention branch: its kernel and the shape of its cache."""

    f: Any

    def __init__(self, attention: MultiHead) -> None:
        super().__init__()
        kernel = attention.kernel
        self.f = nn.Module()
        self.f.kernel = PositionKernel(kernel.scale, kernel.softcap, sink=kernel.sink)
        self.f.cache_shape = attention.cache_shape


class CPUDecodeBlock(nn.Module):
    """Arguments of a Transformer block for one new token per row. `CPUDecodeStack` runs it."""

    def __init__(self, block: Any, arguments: _Block, tensors: list[Tensor]) -> None:
        super().__init__()
        self.attn, self.arguments = _DecodeAttention(block.attn.f), arguments
        self.tensors = tensors
        """Tensors that the arguments point to."""

    def set_context(self, context: LayerContext) -> list[Tensor]:
        """Set the arguments that change in each step. Returns the tensors that they point to."""
        cache, slot_mapping, positions = context.cache, context.slot_mapping, context.prepared_mask
        assert isinstance(cache, PagedLayerCache)
        assert slot_mapping is not None
        attention, keys, slots, table = (
            self.arguments.attention,
            cache.keys.values,
            slot_mapping.slots,
            cache.page_table,
        )
        used = [slots, table, positions]
        attention.keys, attention.values = keys.data_ptr(), cache.values.values.data_ptr()
        attention.slots, attention.positions = slots.data_ptr(), positions.data_ptr()
        attention.page_table, attention.pages_per_row = table.data_ptr(), table.shape[1]
        attention.num_slots, attention.page_size = cache.num_slots, keys.shape[1]
        if context.rotate is not None:
            cos, sin = context.rotate.cos.contiguous(), context.rotate.sin.contiguous()
            attention.cos, attention.sin = cos.data_ptr(), sin.data_ptr()
            used += [cos, sin]
        assert slots.is_contiguous()
        assert table.is_contiguous()
        return used


class CPUDecodeStack(Stack):
    """Decoder whose consecutive `CPUDecodeBlock`s are one call."""

    groups: list[list[int]]
    """Consecutive layers that are run together."""

    def run_blocks(self, x: Tensor, contexts: list[LayerContext]) -> Tensor:
        library = load_cpu_kernels()
        assert library is not None
        assert x.shape[1] == 1
        for group in self.groups:
            blocks: list[Any] = [self.blocks[layer] for layer in group]
            if not isinstance(blocks[0], CPUDecodeBlock):
                x = blocks[0](x, contexts[group[0]])
                continue
            used = [block.set_context(contexts[layer]) for block, layer in zip(blocks, group, strict=True)]
            x = x.clone(memory_format=torch.contiguous_format)
            first = ctypes.addressof(blocks[0].arguments)  # those of the others follow: see `use_decode_blocks`
            library.decode_blocks(first, len(blocks), x.data_ptr(), len(x), torch.get_num_threads())
            del used
        return self.final_norm(x)


def can_use_decode_blocks(model: Transformer, cache: BatchKVCache) -> bool:
    """Whether there are C kernels, and model and cache are in fp32 on the CPU. Blocks are checked one by one."""
    if model.device.type != "cpu" or model.dtype != torch.float32 or "encoder" in model.stacks or model.adapters:
        return False
    return all(tensor.dtype == torch.float32 for tensor in cache.kv_tensors()) and load_cpu_kernels() is not None


def use_decode_blocks(stack: Stack) -> CPUDecodeStack:
    """Copy a decoder, with the blocks that the C kernel implements replaced."""
    new = CPUDecodeStack.__new__(CPUDecodeStack)
    vars(new).update(vars(stack), _modules=dict(stack._modules))
    new.blocks = nn.ModuleList(stack.blocks)
    new.groups = []
    array = (_Block * len(stack.blocks))()
    for layer, block in enumerate(stack.blocks):
        tensors: list[Tensor] = []
        arguments = _block_arguments(stack, layer, block, tensors)
        if arguments is not None:
            array[layer] = arguments
            new.blocks[layer] = CPUDecodeBlock(block, array[layer], tensors)
        follows = arguments is not None and layer > 0 and isinstance(new.blocks[layer - 1], CPUDecodeBlock)
        if follows:
            new.groups[-1].append(layer)
        else:
            new.groups.append([layer])
    return new


def _block_arguments(stack: Stack, layer: int, block: Any, tensors: list[Tensor]) -> _Block | None:
    """Arguments of a block's kernel; None if it does not implement the block. `tensors` gets those they point to."""
    is_parallel = type(block) is ParallelBlock
    if not is_parallel and (
        type(block) is not Block or block.cross is not None or block.skip_scale != 1.0 or block.norm_skip
    ):
        return None
    attention, ffn = block.attn.f, block.ffn.f
    if type(ffn) not in (MLP, GatedMLP) or ffn.act not in _ACTIVATION_IDS:
        return None
    attention_arguments = _attention_arguments(stack, layer, attention, tensors)
    linears: dict[str, Any] = {name: getattr(attention, name, None) for name in "qkvo"}
    linears |= {
        name: getattr(ffn, name) for name in (("gate", "up", "down") if type(ffn) is GatedMLP else ("up", "down"))
    }
    norms = {
        "attn": (block.norm if is_parallel and _is_norm(block.norm) else block.attn.norm_in, block.attn.norm_out),
        "ffn": (block.norm if is_parallel and _is_norm(block.norm) else block.ffn.norm_in, block.ffn.norm_out),
    }
    if attention_arguments is None or any(type(linear) is not LinearLayer for linear in linears.values()):
        return None
    arguments = _Block(d_model=attention.q.in_features, activation=_ACTIVATION_IDS[ffn.act])
    arguments.attention = attention_arguments
    arguments.is_gated, arguments.is_parallel = type(ffn) is GatedMLP, is_parallel
    orders: list[Tensor] = []
    for name, linear in linears.items():
        # Detached tensors keep the memory if the parameter is moved to other memory, as by `concat_linears`.
        weight: Tensor = linear.weight
        weight = weight.copy_packed() if isinstance(weight, QuantizedTensor) else weight.detach()
        if isinstance(weight, QuantizedTensor) and weight.column_order is not None:
            # The kernel reorders x once for matrices whose orders are one tensor, such as q, k and v.
            order = weight.column_order
            weight.column_order = next((each for each in orders if torch.equal(each, order)), order)
            orders.append(weight.column_order)
        bias: Tensor | None = None if linear.bias is None else linear.bias.detach()
        if not weight.is_contiguous():
            return None
        tensors += [weight] if bias is None else [weight, bias]
        setattr(arguments, name, linear_argument(weight, bias))
    for name, (norm_in, norm_out) in norms.items():
        branch = getattr(arguments, name)
        norm_after = None if is_parallel else getattr(block, f"norm_after_{name}")
        branch.scale = getattr(block, name).scale
        for field, norm in (("norm_in", norm_in), ("norm_out", norm_out), ("norm_after", norm_after)):
            argument = _norm_argument(norm, tensors)
            if argument is None:
                return None
            setattr(branch, field, argument)
    return arguments


def _attention_arguments(stack: Stack, layer: int, attention: Any, tensors: list[Tensor]) -> _Attention | None:
    if type(attention) is not MultiHead or attention.clip_qkv is not None:
        return None
    position = dict(stack.positions.items()).get(stack.layer_position_keys[layer])
    if position is not None and not isinstance(position, Rope | Alibi):
        return None
    arguments = _Attention(heads=attention.heads, kv_heads=attention.kv_heads, d_head=attention.d_head)
    for name in ("q_norm", "k_norm"):
        norm = getattr(getattr(attention, name), "norm", None)
        argument = _norm_argument(norm, tensors)
        if argument is None or (norm is not None and norm.weight.shape != (attention.d_head,)):
            return None
        setattr(arguments, name, argument)
    if isinstance(position, Rope):
        arguments.rotary_pairs, arguments.interleaved = position.rotary_dim // 2, position.interleaved
    elif isinstance(position, Alibi):
        if position.round_to_bf16:
            return None
        tensors.append((position.slope * position.scale).float().contiguous())
        arguments.slopes = tensors[-1].data_ptr()
    if attention.sink is not None:
        tensors.append(attention.sink.detach().contiguous())
        arguments.sinks = tensors[-1].data_ptr()
    arguments.scale, arguments.softcap = attention.kernel.scale, attention.kernel.softcap or 0.0
    arguments.window = stack.windows[layer] or 0
    return arguments


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, RMSNorm | LayerNorm)


def _norm_argument(norm: nn.Module | None, tensors: list[Tensor]) -> _Norm | None:
    """Argument for a norm, or for none. None if the kernel does not implement it."""
    if norm is None or isinstance(norm, nn.Identity):
        return _Norm()
    if not isinstance(norm, RMSNorm | LayerNorm) or (norm.weight is not None and norm.weight.ndim > 1):
        return None
    parameters = [None if each is None else each.detach() for each in (norm.weight, getattr(norm, "bias", None))]
    tensors += [each for each in parameters if each is not None]
    weight, bias = (None if each is None else each.data_ptr() for each in parameters)
    is_rms = isinstance(norm, RMSNorm)
    return _Norm(weight, bias, 1 if is_rms else 2, norm.eps, float(isinstance(norm, RMSNorm) and norm.unit_offset))
