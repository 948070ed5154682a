"""A decoder's blocks for single steps on a GPU: the same two lines, in seven kernels."""

import copy
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from cutaway.generate.engine.kv_cache import BatchKVCache, PagedLayerCache
from cutaway.generate.fast.gpu_linear import (
    ACTIVATION_IDS,
    MAX_ROWS,
    NormParams,
    fused_add_norm,
    fused_linear,
    split_k_linear,
)
from cutaway.generate.fast.packed_weights import LinearWeight, concat_linears, pack_weight
from cutaway.generate.fast.paged_attention import AttentionParams, paged_attention
from cutaway.model import Transformer
from cutaway.model.activations import ACTIVATIONS
from cutaway.model.attention import LayerContext, MultiHead, QueryKeyNorm
from cutaway.model.block import ParallelBlock
from cutaway.model.ffn import MLP, GatedMLP
from cutaway.model.kernels import Kernel
from cutaway.model.masks import MaskSpec
from cutaway.model.norms import LayerNorm, RMSNorm
from cutaway.model.positions import Alibi, ScoreBias
from cutaway.model.rope import Rope
from cutaway.model.stack import Stack

ACTIVATION_NAMES = {function: name for name, function in ACTIVATIONS.items()}


class PagedAttentionKernel(Kernel):
    """Reads the cache itself, so nothing is drawn and nothing gathered: its plan is the queries' positions."""

    name = "paged"
    supports = frozenset({"softcap", "sink"})

    def prepare_mask(self, mask_spec: MaskSpec, bias: ScoreBias | None, dtype: torch.dtype) -> Tensor:
        return mask_spec.q.position.expand(-1, 1)[:, 0].contiguous()


class FastAttention:
    """z = softmax(q·kᵀ)·v and o(z), one token a row: norm and q, k, v in a product; turn and keep; attend; o."""

    def __init__(self, attention: MultiHead, norm: nn.Module, params: AttentionParams, *, bits: int | None) -> None:
        self.norm, self.params = _norm_params(norm), params
        self.in_weight = pack_weight(concat_linears(attention.q, attention.k, attention.v), bits)
        self.out_weight = pack_weight(concat_linears(attention.o), bits)

    def forward_before_out_proj(self, x: Tensor, norm: NormParams | None, context: LayerContext) -> Tensor:
        """All but the last product."""
        layer, step, position = context.cache, context.slot_mapping, context.prepared_mask
        assert isinstance(layer, PagedLayerCache)
        assert step is not None
        cos = sin = None
        if context.rotate is not None:
            cos, sin = context.rotate.cos.contiguous(), context.rotate.sin.contiguous()
        return paged_attention(
            fused_linear(x, self.in_weight, norm=norm),
            self.params,
            layer.keys,
            layer.values,
            layer.num_slots,
            layer.page_table,
            step.slots,
            position,
            cos,
            sin,
            self.out_weight,
        )


class FastFFN:
    """down(act(up(x))), or with a gate; the norm before and the activation between are part of the products."""

    def __init__(self, ffn: MLP | GatedMLP, norm: nn.Module, *, bits: int | None) -> None:
        self.norm, self.act = _norm_params(norm), ACTIVATION_NAMES[ffn.act]
        self.gated = isinstance(ffn, GatedMLP)
        first = (ffn.gate, ffn.up) if isinstance(ffn, GatedMLP) else (ffn.up,)
        self.in_weight = pack_weight(concat_linears(*first), bits)
        self.out_weight = pack_weight(concat_linears(ffn.down), bits)  # type: ignore[arg-type]

    def forward_before_out_proj(self, x: Tensor, norm: NormParams | None) -> Tensor:
        """All but the last product."""
        return fused_linear(x, self.in_weight, norm=norm, act=self.act, gated=self.gated, next_weight=self.out_weight)


class PrecomputedNorm:
    """Hands a stream's norm, which was computed when the stream was, to the sublayer that asks for just that."""

    def __init__(self) -> None:
        self.entry: tuple[Tensor, NormParams, Tensor] | None = None

    def pop(self, x: Tensor, norm: NormParams | None) -> Tensor | None:
        kept, self.entry = self.entry, None
        return kept[2] if kept is not None and kept[0] is x and kept[1] is norm else None


class FastBlock(nn.Module):
    """A block whose sublayers are fast where they can be."""

    def __init__(
        self, block: Any, attention: FastAttention | None, ffn: FastFFN | None, precomputed_norm: PrecomputedNorm
    ) -> None:
        super().__init__()
        self.block, self.fast_attention, self.fast_ffn, self.precomputed_norm = block, attention, ffn, precomputed_norm
        self.attn, self.cross = block.attn, getattr(block, "cross", None)
        self.next_attention: FastAttention | None = None
        """What the next block begins with."""

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        block, attention, ffn = self.block, self.fast_attention, self.fast_ffn
        if isinstance(block, ParallelBlock):
            h = x if attention is not None else block.norm(x)
            both = self._residual_branch(x, x if attention is not None else h, block.attn, attention, None, context)
            return self._residual_branch(both, x if ffn is not None else h, block.ffn, ffn, self.next_attention)
        after = ffn if block.cross is None and _is_identity(block.norm_after_attn) else None
        x = block.norm_after_attn(self._residual_branch(block.scale_skip(x), x, block.attn, attention, after, context))
        if block.cross is not None:
            x = block.norm_after_cross(block.scale_skip(x) + block.cross(x, context))
        return block.norm_after_ffn(self._residual_branch(block.scale_skip(x), x, block.ffn, ffn, self.next_attention))

    def _residual_branch(
        self,
        residual: Tensor,
        x: Tensor,
        branch: Any,
        fast: FastAttention | FastFFN | None,
        next_sublayer: FastAttention | FastFFN | None,
        *args: Any,
    ) -> Tensor:
        """residual + what the branch makes of x; `next_sublayer` is the fast sublayer that comes next, if one does."""
        if fast is None:
            return residual + branch(x, *args)
        h = self.precomputed_norm.pop(x, fast.norm)
        z = (
            fast.forward_before_out_proj(x[:, 0], fast.norm, *args)
            if h is None
            else fast.forward_before_out_proj(h, None, *args)
        )
        if not _is_identity(branch.norm_out) or branch.scale != 1.0:
            return residual + branch.norm_out(fused_linear(z, fast.out_weight).unsqueeze(1)) * branch.scale
        if len(x) == 1:  # norms are part of the next product, or cheap
            return fused_linear(z, fast.out_weight, residual=residual[:, 0].contiguous()).unsqueeze(1)
        norm, into = (None, None) if next_sublayer is None else (next_sublayer.norm, next_sublayer.in_weight)
        total, h = fused_add_norm(residual[:, 0].contiguous(), split_k_linear(z, fast.out_weight), norm, into)
        total = total.unsqueeze(1)
        if norm is not None:
            self.precomputed_norm.entry = total, norm, h
        return total


def _is_identity(norm: nn.Module) -> bool:
    return isinstance(norm, nn.Identity)


def build_gpu_decode_model(model: Transformer, bits: int | None = None) -> Transformer:
    """The model again, over the same weights, for steps of one token in up to MAX_ROWS rows.

    `bits`: 8 or 4 to round the matrices of layers and head; those are held beside the model's own.
    """
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    again = copy.deepcopy(model, shared)
    stack = again.stacks["decoder"]
    made: dict[int, FastBlock] = {}
    relay = PrecomputedNorm()
    for layer, block in enumerate(stack.blocks):
        if id(block) not in made:
            made[id(block)] = _build_fast_block(stack, layer, block, bits, relay)
        stack.blocks[layer] = made[id(block)]
    for block, following in pairwise(made.values()):
        if following.fast_attention is not None and not isinstance(following.block, ParallelBlock):
            block.next_attention = following.fast_attention
    head: Any = again.head
    if head.transform is None:
        weight = pack_weight(LinearWeight(head.matrix.weight.data, head.bias), bits)
        norm = _norm_params(stack.final_norm)
        again.head = FastHead(head, weight, norm)
        if norm is not None:
            stack.final_norm = nn.Identity()
    return again


class FastHead(nn.Module):
    """logits = cap(scale · (norm(x)·Eᵀ + b)), in fp32; the final norm is a part of the product."""

    def __init__(self, head: Any, weight: LinearWeight, norm: NormParams | None) -> None:
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
    shared = block.norm if parallel and not isinstance(block.norm, nn.Identity) else None
    heads = _attention_params(stack, layer, block.attn.f)
    attention = ffn = None
    if heads is not None and _is_supported_norm(shared or block.attn.norm_in):
        attention = FastAttention(block.attn.f, shared or block.attn.norm_in, heads, bits=bits)
        kernel = block.attn.f.kernel
        block.attn.f.kernel = PagedAttentionKernel(kernel.scale, kernel.softcap, sink=kernel.sink)
    if (
        type(block.ffn.f) in (MLP, GatedMLP)
        and ACTIVATION_NAMES.get(block.ffn.f.act) in ACTIVATION_IDS
        and isinstance(block.ffn.f.up, nn.Linear)
        and _is_supported_norm(shared or block.ffn.norm_in)
    ):
        ffn = FastFFN(block.ffn.f, shared or block.ffn.norm_in, bits=bits)
    if parallel and (attention is None or ffn is None):
        attention = ffn = None
    return FastBlock(block, attention, ffn, precomputed_norm)


def _attention_params(stack: Stack, layer: int, attention: nn.Module) -> AttentionParams | None:
    """What the attention kernel needs to know, or None if it cannot do this layer."""
    if type(attention) is not MultiHead or attention.clip_qkv is not None:
        return None
    name = stack.layer_position_keys[layer]
    position = dict(stack.positions.items()).get(name)
    norms = (attention.q_norm, attention.k_norm)
    plain = all(isinstance(norm, nn.Identity) for norm in norms)
    normed = all(
        isinstance(norm, QueryKeyNorm)
        and not norm.over_all_heads
        and isinstance(norm.norm, RMSNorm)
        and norm.norm.weight.ndim == 1
        for norm in norms
    )
    if not (plain or normed) or attention.q.weight.dtype == torch.float64:
        return None
    pairs, interleaved, slope = 0, False, None
    if isinstance(position, Rope):
        pairs, interleaved = position.rotary_dim // 2, position.interleaved
    elif isinstance(position, Alibi) and not position.round_to_bf16:
        slope = (position.slope * position.scale).float().contiguous()
    elif position is not None:
        return None
    q, k = (getattr(norm, "norm", None) for norm in norms)
    return AttentionParams(
        num_heads=attention.heads,
        kv_heads=attention.kv_heads,
        d_head=attention.d_head,
        scale=attention.kernel.scale,
        softcap=attention.kernel.softcap,
        window=stack.windows[layer],
        rotary_pairs=pairs,
        interleaved=interleaved,
        q_norm_weight=None if q is None else q.weight,
        k_norm_weight=None if k is None else k.weight,
        eps=0.0 if q is None else q.eps,
        unit_offset=q is not None and q.unit_offset,
        sink=attention.sink,
        alibi_slope=slope,
    )


def _is_supported_norm(norm: nn.Module) -> bool:
    known = isinstance(norm, RMSNorm) or (isinstance(norm, LayerNorm) and norm.weight is not None)
    return known or isinstance(norm, nn.Identity)


def _norm_params(norm: nn.Module) -> NormParams | None:
    if isinstance(norm, RMSNorm):
        return NormParams(norm.weight, None, norm.eps, centered=False, unit_offset=norm.unit_offset)
    if isinstance(norm, LayerNorm) and norm.weight is not None:
        return NormParams(norm.weight, norm.bias, norm.eps, centered=True)
    return None


def can_build_gpu_decode_model(model: Transformer, cache: BatchKVCache) -> bool:
    """Whether `build_gpu_decode_model` is of use: on a GPU, for numbers that its kernels know."""
    return model.device.type == "cuda" and model.dtype != torch.float64 and cache.batch_size <= MAX_ROWS
