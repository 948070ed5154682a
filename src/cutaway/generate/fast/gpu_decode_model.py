"""GPU decode model: Transformer blocks for one token per row, in seven Triton kernels per block.

In prefill steps the rows are all tokens of the batch, cuBLAS computes the products, and attention is that of
prefill_attention.py. A mixture of experts takes five kernels: see gpu_moe.py. Latent attention takes six, or five with
one row of up to 2,048 slots, and decode steps only: see latent_attention.py.

A block computes x + o(attention(norm(x))), then x + down(act(up(norm(x)))). Kernels: norm + qkv; RoPE + cache write;
attention over splits of the slots; combination of the splits; o; norm + up (with gate and activation); down. With
several rows, the output projections are split along K, and one more kernel adds the splits and the residual and
computes the next norm.
"""

import copy
from itertools import pairwise
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from cutaway.eval_mode import iter_modules
from cutaway.generate.engine.kv_cache import BatchKVCache, PagedLayerCache
from cutaway.generate.fast.gpu_linear import (
    ACTIVATION_IDS,
    ACTIVATION_NAMES,
    MAX_ROWS,
    NormParams,
    fused_add_norm,
    fused_linear,
    split_k_linear,
)
from cutaway.generate.fast.gpu_moe import FastMoE, is_fast_moe
from cutaway.generate.fast.latent_attention import LatentAttentionParams, latent_attention
from cutaway.generate.fast.paged_attention import AttentionParams, paged_attention
from cutaway.generate.fast.quantized_weights import AnyLinearWeight, concat_linears, linear_weight, pack_weight
from cutaway.model import Transformer
from cutaway.model.attention import LatentAttention, LayerContext, MultiHead, QueryKeyNorm
from cutaway.model.block import ParallelBlock
from cutaway.model.ffn import MLP, GatedMLP
from cutaway.model.kernels import Kernel
from cutaway.model.masks import MaskSpec
from cutaway.model.moe import MixtureOfExperts
from cutaway.model.norms import LayerNorm, RMSNorm
from cutaway.model.positions import Alibi, ScoreBias
from cutaway.model.rope import Rope
from cutaway.model.stack import Stack
from cutaway.quantization.quantized_tensor import CUDAQuantizedTensor, QuantizedTensor

T = TypeVar("T", bound=Transformer)
M = TypeVar("M", bound=nn.Module)


class PagedAttentionKernel(Kernel):
    """Attention that reads keys and values from the paged cache, without a mask tensor and without a gathered copy.

    The prepared mask is the position of each row's query, (B,). The query attends to positions up to its own, in the
    sliding window if the layer has one.
    """

    name = "paged"
    supports = frozenset({"softcap", "sink"})

    def prepare_mask(self, mask_spec: MaskSpec, bias: ScoreBias | None, dtype: torch.dtype) -> Tensor:
        return mask_spec.q.position.expand(-1, 1)[:, 0].contiguous()


class FastAttention:
    """Attention sublayer for one token per row: norm + qkv, RoPE + cache write, paged attention, output projection."""

    def __init__(self, norm: nn.Module, params: AttentionParams, *, bits: int | None) -> None:
        self.norm, self.params = _norm_params(norm), params
        attention = params.attention
        self.in_weight = pack_weight(concat_linears(attention.q, attention.k, attention.v), bits)
        self.out_weight = pack_weight(concat_linears(attention.o), bits)

    def forward_before_out_proj(self, x: Tensor, norm: NormParams | None, context: LayerContext) -> Tensor:
        """Return z, the input of the output projection: see `paged_attention`.

        x: (M, d). If `norm` is None, x is not normalized here, and may be in the layout that a product with `in_weight`
        reads."""
        layer, slots = _cache_slots(context)
        cos = sin = None
        if context.rotate is not None:
            cos, sin = context.rotate.cos.contiguous(), context.rotate.sin.contiguous()
        qkv = fused_linear(x, self.in_weight, norm=norm)
        return paged_attention(qkv, self.params, layer, slots, context.prepared_mask, cos, sin, self.out_weight)


class FastLatentAttention:
    """Latent attention sublayer for one token per row: norm + first products of q and kv, `latent_attention`, output
    projection. A query latent has its norm and second product in between."""

    def __init__(self, norm: nn.Module, params: LatentAttentionParams, *, bits: int | None) -> None:
        self.norm, self.params = _norm_params(norm), params
        attention = params.attention
        q_in: Any = attention.q
        self.q_norm: NormParams | None = None
        self.q_up: AnyLinearWeight | None = None
        """Norm and second product of the query latent, if there is one."""
        if not isinstance(q_in, nn.Linear):
            q_in, q_norm, q_up = q_in
            self.q_norm, self.q_up = _norm_params(q_norm), pack_weight(concat_linears(q_up), bits)
        self.in_weight = pack_weight(concat_linears(q_in, attention.kv_down), bits)
        self.out_weight = pack_weight(concat_linears(attention.o), bits)
        self.kv_width = attention.kv_down.out_features

    def forward_before_out_proj(self, x: Tensor, norm: NormParams | None, context: LayerContext) -> Tensor:
        """Return z, the input of the output projection: see `FastAttention`."""
        layer, slots = _cache_slots(context)
        assert context.rotate is not None
        cos, sin = context.rotate.cos.contiguous(), context.rotate.sin.contiguous()
        y = fused_linear(x, self.in_weight, norm=norm)
        q, kv = y[:, : -self.kv_width], y[:, -self.kv_width :]
        if self.q_up is not None:
            q = fused_linear(q, self.q_up, norm=self.q_norm)
        return latent_attention(q, kv, self.params, layer, slots, context.prepared_mask, cos, sin, self.out_weight)


def _cache_slots(context: LayerContext) -> tuple[PagedLayerCache, Tensor]:
    """Cache of a layer, and the flat slots of the new tokens."""
    assert isinstance(context.cache, PagedLayerCache)
    assert context.slot_mapping is not None
    return context.cache, context.slot_mapping.slots


class FastFFN:
    """FFN sublayer: down(act(up(h))), or down(act(gate(h)) · up(h)), for h = norm(x).

    With one row and unpacked weights, one kernel computes everything before `down`.
    """

    def __init__(self, ffn: MLP | GatedMLP, norm: nn.Module, *, bits: int | None) -> None:
        self.norm, self.act = _norm_params(norm), ACTIVATION_NAMES[ffn.act]
        self.gated = isinstance(ffn, GatedMLP)
        in_linears = (ffn.gate, ffn.up) if isinstance(ffn, GatedMLP) else (ffn.up,)
        self.in_weight = pack_weight(concat_linears(*in_linears), bits)
        self.out_weight = pack_weight(concat_linears(ffn.down), bits)  # type: ignore[arg-type]

    def forward_before_out_proj(self, x: Tensor, norm: NormParams | None) -> Tensor:
        """Return the input of the projection `down`, in the layout that a product with `out_weight` reads.

        x: (M, d). If `norm` is None, x is not normalized here, and may be in the layout that a product with `in_weight`
        reads."""
        return fused_linear(x, self.in_weight, norm=norm, act=self.act, gated=self.gated, next_weight=self.out_weight)


class PrecomputedNorm:
    """Normalized residual stream for the next sublayer, computed by the kernel that added to the residual stream.

    `entry` is (residual stream, norm, normalized values). `pop` returns the values only for exactly this tensor and
    norm; otherwise it returns None, and the sublayer computes its own norm.
    """

    def __init__(self) -> None:
        self.entry: tuple[Tensor, NormParams, Tensor] | None = None

    def pop(self, x: Tensor, norm: NormParams | None) -> Tensor | None:
        entry, self.entry = self.entry, None
        return entry[2] if entry is not None and entry[0] is x and entry[1] is norm else None


class _FastBranch(nn.Module):
    """What `Stack` reads of an attention branch: its kernel and the shape of its cache."""

    f: Any

    def __init__(self, attention: MultiHead | LatentAttention) -> None:
        super().__init__()
        kernel = attention.kernel
        self.f = nn.Module()
        self.f.kernel = PagedAttentionKernel(kernel.scale, kernel.softcap, sink=kernel.sink)
        self.f.cache_shape = attention.cache_shape


class FastBlock(nn.Module):
    """Transformer block that uses the fast sublayers where they support the configuration."""

    def __init__(
        self,
        block: Any,
        attention: FastAttention | FastLatentAttention | None,
        ffn: FastFFN | FastMoE | None,
        precomputed_norm: PrecomputedNorm,
    ) -> None:
        super().__init__()
        self.block, self.fast_attention, self.fast_ffn, self.precomputed_norm = block, attention, ffn, precomputed_norm
        self.attn, self.cross = block.attn, getattr(block, "cross", None)
        if attention is not None:  # `Stack` takes the kernel of a layer from here
            self.attn = _FastBranch(block.attn.f)
        self.next_attention: FastAttention | FastLatentAttention | None = None
        """Attention of the next block, whose norm this block's last kernel can compute."""

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        block, attention, ffn = self.block, self.fast_attention, self.fast_ffn
        if isinstance(block, ParallelBlock):
            h = x if attention is not None else block.norm(x)  # both sublayers are fast (fused norm), or neither is
            after_attn = self._residual_branch(x, h, block.attn, attention, None, context)
            return self._residual_branch(after_attn, h, block.ffn, ffn, self.next_attention)
        next_sublayer = ffn if block.cross is None and _is_identity(block.norm_after_attn) else None
        x = block.norm_after_attn(
            self._residual_branch(
                block.skip_connection(x, block.attn), x, block.attn, attention, next_sublayer, context
            )
        )
        if block.cross is not None:
            x = block.norm_after_cross(block.skip_connection(x, block.cross) + block.cross(x, context))
        return block.norm_after_ffn(
            self._residual_branch(block.skip_connection(x, block.ffn), x, block.ffn, ffn, self.next_attention)
        )

    def _residual_branch(
        self,
        residual: Tensor,
        x: Tensor,
        branch: Any,
        fast: FastAttention | FastLatentAttention | FastFFN | FastMoE | None,
        next_sublayer: FastAttention | FastLatentAttention | FastFFN | FastMoE | None,
        *args: Any,
    ) -> Tensor:
        """Return residual + branch(x).

        `fast`: the fast sublayer that computes branch(x), or None to call `branch`.
        `next_sublayer`: the sublayer that reads this sum, and whose norm the kernel of the sum also computes."""
        if fast is None or (isinstance(fast, FastMoE) and len(x) > MAX_ROWS):
            return residual + branch(x, *args)
        h = self.precomputed_norm.pop(x, fast.norm)
        inputs = (x[:, 0], fast.norm) if h is None else (h, None)
        has_norm_out = not _is_identity(branch.norm_out) or branch.scale != 1.0
        if isinstance(fast, FastMoE):
            terms = fast.partial_sums(*inputs)
            if has_norm_out:
                return residual + branch.norm_out(terms.sum(0).to(x.dtype).unsqueeze(1)) * branch.scale
        else:
            z = fast.forward_before_out_proj(*inputs, *args)
            if has_norm_out:
                return residual + branch.norm_out(fused_linear(z, fast.out_weight).unsqueeze(1)) * branch.scale
            if len(x) == 1:  # the norm is fused into the next GEMV; with packed weights it is a cheap kernel of its own
                return fused_linear(z, fast.out_weight, residual=residual[:, 0].contiguous()).unsqueeze(1)
            terms = split_k_linear(z, fast.out_weight)
        norm, next_weight = (None, None) if next_sublayer is None else (next_sublayer.norm, next_sublayer.in_weight)
        total, h = fused_add_norm(residual[:, 0].contiguous(), terms, norm, next_weight)
        total = total.unsqueeze(1)
        if norm is not None:
            self.precomputed_norm.entry = total, norm, h
        return total


def _is_identity(norm: nn.Module) -> bool:
    return isinstance(norm, nn.Identity)


def build_gpu_decode_model(model: T, bits: int | None = None) -> T:
    """Build a variant of the model for decode steps of up to MAX_ROWS rows, which shares the model's weights.

    `bits`: 8 or 4 to quantize the linear layers and the head. The original weights stay in memory.
    """
    decode_model = _shallow_copy(model)
    stack = decode_model.decoder = _shallow_copy(model.stacks["decoder"])
    stack.blocks = nn.ModuleList(stack.blocks)
    fast_blocks: dict[int, FastBlock] = {}
    precomputed_norm = PrecomputedNorm()
    for layer, block in enumerate(stack.blocks):
        if id(block) not in fast_blocks:  # blocks may be shared between layers (ALBERT)
            fast_blocks[id(block)] = _build_fast_block(stack, layer, block, bits, precomputed_norm)
        stack.blocks[layer] = fast_blocks[id(block)]
    for block, next_block in pairwise(fast_blocks.values()):
        if next_block.fast_attention is not None and not isinstance(next_block.block, ParallelBlock):
            block.next_attention = next_block.fast_attention
    head: Any = decode_model.head
    if head.transform is None:
        weight = pack_weight(linear_weight(head.matrix.weight, head.bias), bits)
        norm = _norm_params(stack.final_norm)
        decode_model.head = FastHead(head, weight, norm)  # type: ignore[assignment]
        if norm is not None:
            stack.final_norm = nn.Identity()
    return decode_model


_decode_models: WeakKeyDictionary[Transformer, tuple[object, Transformer]] = WeakKeyDictionary()
"""Variants without quantization of models, and the fingerprints of the models from which they were built."""


def get_gpu_decode_model(model: T) -> T:
    """The variant of `build_gpu_decode_model`, built again only if modules or weights of the model were replaced."""
    known, decode_model = _decode_models.get(model, (None, model))
    if known != _fingerprint(model):
        decode_model = build_gpu_decode_model(model)
        _decode_models[model] = _fingerprint(model), decode_model  # building it moved weights that are concatenated
    return cast(T, decode_model)


def _fingerprint(model: nn.Module) -> list[object]:
    """What changes if modules or weights of a model are replaced."""
    fingerprint: list[object] = []
    for module in iter_modules(model):
        fingerprint += [id(module), vars(module).get("eps")]
        for each in module._parameters.values():
            packed = each.packed.codes if isinstance(each, CUDAQuantizedTensor) else each
            fingerprint.append(None if packed is None else packed.data_ptr())
    return fingerprint


def _shallow_copy(module: M) -> M:
    """Copy of a module, in evaluation mode, with the same parameters and submodules. Others can be assigned to it."""
    new = copy.copy(module)
    vars(new).update(_modules=dict(module._modules), training=False)
    return new


class FastHead(nn.Module):
    """logits = softcap(scale · (norm(x)·Eᵀ + b)) in fp32, with the final norm fused into the product."""

    def __init__(self, head: Any, weight: AnyLinearWeight, norm: NormParams | None) -> None:
        super().__init__()
        self.weight, self.norm, self.scale, self.softcap = weight, norm, head.scale, head.softcap

    def forward(self, x: Tensor) -> Tensor:
        logits = fused_linear(x[:, 0], self.weight, norm=self.norm, dtype=torch.float32).unsqueeze(1)
        logits = logits if self.scale == 1.0 else logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def _build_fast_block(
    stack: Stack, layer: int, block: Any, bits: int | None, precomputed_norm: PrecomputedNorm
) -> FastBlock:
    parallel = isinstance(block, ParallelBlock)
    shared_norm = block.norm if _has_shared_norm(block) else None
    params = _attention_params(stack, layer, block.attn.f)
    attention: FastAttention | FastLatentAttention | None = None
    ffn: FastFFN | FastMoE | None = None
    if params is not None and _is_supported_norm(shared_norm or block.attn.norm_in):
        fast_class: Any = FastAttention if isinstance(params, AttentionParams) else FastLatentAttention
        attention = fast_class(shared_norm or block.attn.norm_in, params, bits=bits)
    if _is_fast_ffn(block.ffn, shared_norm or block.ffn.norm_in):
        ffn = FastFFN(block.ffn.f, shared_norm or block.ffn.norm_in, bits=bits)
    elif is_fast_moe(block.ffn.f) and _is_supported_norm(block.ffn.norm_in) and not parallel:
        ffn = FastMoE(block.ffn.f, _norm_params(block.ffn.norm_in))
    if parallel and (attention is None or ffn is None):
        attention = ffn = None
    return FastBlock(block, attention, ffn, precomputed_norm)


def _has_shared_norm(block: Any) -> bool:
    return isinstance(block, ParallelBlock) and not isinstance(block.norm, nn.Identity)


def _is_fast_ffn(branch: Any, norm: nn.Module) -> bool:
    """Whether `FastFFN` supports the FFN of a branch and the norm before it."""
    return (
        type(branch.f) in (MLP, GatedMLP)
        and ACTIVATION_NAMES.get(branch.f.act) in ACTIVATION_IDS
        and isinstance(branch.f.up, nn.Linear)
        and _is_supported_norm(norm)
    )


def _attention_params(stack: Stack, layer: int, attention: nn.Module) -> AttentionParams | LatentAttentionParams | None:
    """Parameters of the attention kernels for a layer, or None if the kernels do not support this layer."""
    if type(attention) is LatentAttention:
        return _latent_attention_params(stack, layer, attention)
    if type(attention) is not MultiHead or attention.clip_qkv is not None:
        return None
    name = stack.layer_position_keys[layer]
    position = dict(stack.positions.items()).get(name)
    norms = (attention.q_norm, attention.k_norm)
    no_norm = all(isinstance(norm, nn.Identity) for norm in norms)
    rms_norm = all(
        isinstance(norm, QueryKeyNorm)
        and not norm.over_all_heads
        and isinstance(norm.norm, RMSNorm)
        and norm.norm.weight.ndim == 1
        for norm in norms
    )
    is_plain = all(isinstance(linear, nn.Linear) for linear in (attention.q, attention.k, attention.v, attention.o))
    if not (no_norm or rms_norm) or not is_plain or attention.q.weight.dtype == torch.float64:
        return None
    rotary_pairs, interleaved, alibi_slope = 0, False, None
    if isinstance(position, Rope):
        rotary_pairs, interleaved = position.rotary_dim // 2, position.interleaved
    elif isinstance(position, Alibi) and not position.round_to_bf16:
        alibi_slope = (position.slope * position.scale).float().contiguous()
    elif position is not None:
        return None
    q_norm, k_norm = (getattr(norm, "norm", None) for norm in norms)
    return AttentionParams(attention, q_norm, k_norm, stack.windows[layer], rotary_pairs, interleaved, alibi_slope)


def _latent_attention_params(stack: Stack, layer: int, attention: LatentAttention) -> LatentAttentionParams | None:
    """See `_attention_params`."""
    q = attention.q
    q_linears = [q[0], q[2]] if isinstance(q, nn.Sequential) else [q]
    linears = [*q_linears, attention.kv_down, attention.kv_up, attention.o]
    is_plain = all(isinstance(linear, nn.Linear) for linear in linears)
    position = stack.positions[stack.layer_position_keys[layer]]
    if not is_plain or attention.kv_up.weight.dtype == torch.float64 or not isinstance(position, Rope):
        return None
    if isinstance(attention.kv_up.weight, QuantizedTensor):  # the kernels read parts of it, for each head
        attention.kv_up.weight = nn.Parameter(attention.kv_up.weight.dequantize(), requires_grad=False)
    return LatentAttentionParams(attention, stack.windows[layer], position.interleaved)


def _is_supported_norm(norm: nn.Module) -> bool:
    has_weight = isinstance(norm, RMSNorm) or (isinstance(norm, LayerNorm) and norm.weight is not None)
    return has_weight or isinstance(norm, nn.Identity)


def _norm_params(norm: nn.Module) -> NormParams | None:
    if isinstance(norm, RMSNorm):
        return NormParams(norm.weight, None, norm.eps, centered=False, unit_offset=norm.unit_offset)
    if isinstance(norm, LayerNorm) and norm.weight is not None:
        return NormParams(norm.weight, norm.bias, norm.eps, centered=True)
    return None


def can_pack_prefill(model: Transformer) -> bool:
    """Whether the attention of all layers runs in the Triton kernels, as prefill steps without padding need it.

    The kernels of latent attention are for decode steps only. RoPE frequencies that depend on the length of the
    sequence need its keys in one pass."""
    stack = model.stacks["decoder"]
    ropes = [position for position in stack.positions.values() if isinstance(position, Rope)]
    if any(rope.switch_length is not None for rope in ropes):
        return False
    return all(_can_pack_attention(stack, layer, block) for layer, block in enumerate(stack.blocks))


def loops_over_experts(model: Transformer) -> bool:
    """Whether a decode model has mixture-of-experts layers without `FastMoE`, which may read counts on the host."""
    blocks = [block for block in model.stacks["decoder"].blocks if isinstance(block, FastBlock)]
    return any(isinstance(block.block.ffn.f, MixtureOfExperts) and block.fast_ffn is None for block in blocks)


def _can_pack_attention(stack: Stack, layer: int, block: Any) -> bool:
    """Whether `_build_fast_block` builds the attention of a block as `FastAttention`."""
    shared_norm = block.norm if _has_shared_norm(block) else None
    is_supported = _is_supported_norm(shared_norm or block.attn.norm_in)
    if isinstance(block, ParallelBlock):
        is_supported = is_supported and _is_fast_ffn(block.ffn, shared_norm or block.ffn.norm_in)
    return is_supported and isinstance(_attention_params(stack, layer, block.attn.f), AttentionParams)


def can_build_gpu_decode_model(model: Transformer, cache: BatchKVCache) -> bool:
    """Whether the Triton kernels support the model's device, its dtype and the batch size of the cache."""
    return model.device.type == "cuda" and model.dtype != torch.float64 and cache.batch_size <= MAX_ROWS
