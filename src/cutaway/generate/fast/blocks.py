"""A decoder's blocks for single steps on a GPU: the same two lines, in seven kernels."""

import copy
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from cutaway.generate.cache import PagedLayer, Rows
from cutaway.generate.fast.attend import Heads, attend
from cutaway.generate.fast.products import ACTS, MOST_ROWS, Norm, parts_of_product, product, settle
from cutaway.generate.fast.weights import Weight, joined, packed
from cutaway.model import Transformer
from cutaway.model.activations import ACTIVATIONS
from cutaway.model.attention import HeadNorm, MultiHead, Scene
from cutaway.model.block import ParallelBlock
from cutaway.model.ffn import Gated, Plain
from cutaway.model.kernels import Kernel
from cutaway.model.masks import View
from cutaway.model.norms import LayerNorm, RMSNorm
from cutaway.model.positions import Alibi, ScoreBias
from cutaway.model.rope import Rope
from cutaway.model.stack import Stack

NAMES = {function: name for name, function in ACTIVATIONS.items()}


class InPages(Kernel):
    """Reads the cache itself, so nothing is drawn and nothing gathered: its plan is the queries' positions."""

    name = "in pages"
    can = frozenset({"softcap", "sink"})

    def prepare(self, view: View, bias: ScoreBias | None, dtype: torch.dtype) -> Tensor:
        return view.q.position.expand(-1, 1)[:, 0].contiguous()


class FastAttention:
    """z = softmax(q·kᵀ)·v and o(z), one token a row: norm and q, k, v in a product; turn and keep; attend; o."""

    def __init__(self, f: MultiHead, norm: nn.Module, heads: Heads, *, bits: int | None) -> None:
        self.norm, self.heads = norm_of(norm), heads
        self.first = packed(joined(f.q, f.k, f.v), bits)
        self.last = packed(joined(f.o), bits)

    def inner(self, x: Tensor, norm: Norm | None, scene: Scene) -> Tensor:
        """All but the last product."""
        layer, step, position = scene.cache, scene.step, scene.plan
        assert isinstance(layer, PagedLayer)
        assert step is not None
        cos = sin = None
        if scene.rotate is not None:
            cos, sin = scene.rotate.cos.contiguous(), scene.rotate.sin.contiguous()
        return attend(
            product(x, self.first, norm=norm),
            self.heads,
            layer.keys,
            layer.values,
            layer.slots,
            layer.names,
            step.slot,
            position,
            cos,
            sin,
            self.last,
        )


class FastFFN:
    """down(act(up(x))), or with a gate; the norm before and the activation between are part of the products."""

    def __init__(self, f: Plain | Gated, norm: nn.Module, *, bits: int | None) -> None:
        self.norm, self.act = norm_of(norm), NAMES[f.act]
        self.gated = isinstance(f, Gated)
        self.first = packed(joined(f.gate, f.up) if isinstance(f, Gated) else joined(f.up), bits)  # type: ignore[arg-type]
        self.last = packed(joined(f.down), bits)  # type: ignore[arg-type]

    def inner(self, x: Tensor, norm: Norm | None) -> Tensor:
        """All but the last product."""
        return product(x, self.first, norm=norm, act=self.act, gated=self.gated, into=self.last)


class Relay:
    """Hands a stream's norm, which was computed when the stream was, to the sublayer that asks for just that."""

    def __init__(self) -> None:
        self.kept: tuple[Tensor, Norm, Tensor] | None = None

    def take(self, x: Tensor, norm: Norm | None) -> Tensor | None:
        kept, self.kept = self.kept, None
        return kept[2] if kept is not None and kept[0] is x and kept[1] is norm else None


class FastBlock(nn.Module):
    """A block whose sublayers are fast where they can be."""

    def __init__(self, block: Any, attention: FastAttention | None, ffn: FastFFN | None, relay: Relay) -> None:
        super().__init__()
        self.block, self.fast_attention, self.fast_ffn, self.relay = block, attention, ffn, relay
        self.attn, self.cross = block.attn, getattr(block, "cross", None)
        self.following: FastAttention | None = None
        """What the next block begins with."""

    def forward(self, x: Tensor, scene: Scene) -> Tensor:
        block, attention, ffn = self.block, self.fast_attention, self.fast_ffn
        if isinstance(block, ParallelBlock):
            h = x if attention is not None else block.norm(x)
            both = self.line(x, x if attention is not None else h, block.attn, attention, None, scene)
            return self.line(both, x if ffn is not None else h, block.ffn, ffn, self.following)
        after = ffn if block.cross is None and plain(block.after_attn) else None
        x = block.after_attn(self.line(block.carry(x), x, block.attn, attention, after, scene))
        if block.cross is not None:
            x = block.after_cross(block.carry(x) + block.cross(x, scene))
        return block.after_ffn(self.line(block.carry(x), x, block.ffn, ffn, self.following))

    def line(self, carried: Tensor, x: Tensor, branch: Any, fast: Any, after: Any, *given: Any) -> Tensor:
        """carried + what the branch makes of x; `after` is the fast sublayer that comes next, if one does."""
        if fast is None:
            return carried + branch(x, *given)
        h = self.relay.take(x, fast.norm)
        z = fast.inner(x[:, 0], fast.norm, *given) if h is None else fast.inner(h, None, *given)
        if not plain(branch.norm_out) or branch.scale != 1.0:
            return carried + branch.norm_out(product(z, fast.last).unsqueeze(1)) * branch.scale
        if len(x) == 1:  # norms are part of the next product, or cheap
            return product(z, fast.last, residual=carried[:, 0].contiguous()).unsqueeze(1)
        norm, into = (None, None) if after is None else (after.norm, after.first)
        total, h = settle(carried[:, 0].contiguous(), parts_of_product(z, fast.last), norm, into)
        total = total.unsqueeze(1)
        if norm is not None:
            self.relay.kept = total, norm, h
        return total


def plain(norm: nn.Module) -> bool:
    return isinstance(norm, nn.Identity)


def quick(model: Transformer, bits: int | None = None) -> Transformer:
    """The model again, over the same weights, for steps of one token in up to MOST_ROWS rows.

    `bits`: 8 or 4 to round the matrices of layers and head; those are held beside the model's own.
    """
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    again = copy.deepcopy(model, shared)
    stack = again.stacks["decoder"]
    made: dict[int, FastBlock] = {}
    relay = Relay()
    for layer, block in enumerate(stack.blocks):
        if id(block) not in made:
            made[id(block)] = quick_block(stack, layer, block, bits, relay)
        stack.blocks[layer] = made[id(block)]
    for block, following in pairwise(made.values()):
        if following.fast_attention is not None and not isinstance(following.block, ParallelBlock):
            block.following = following.fast_attention
    head: Any = again.head
    if head.transform is None:
        weight = packed(Weight(head.matrix.weight.data, head.bias), bits)
        norm = norm_of(stack.final_norm)
        again.head = FastHead(head, weight, norm)
        if norm is not None:
            stack.final_norm = nn.Identity()
    return again


class FastHead(nn.Module):
    """logits = cap(scale · (norm(x)·Eᵀ + b)), in fp32; the final norm is a part of the product."""

    def __init__(self, head: Any, weight: Weight, norm: Norm | None) -> None:
        super().__init__()
        self.weight, self.norm, self.scale, self.softcap = weight, norm, head.scale, head.softcap

    def forward(self, x: Tensor) -> Tensor:
        logits = product(x[:, 0], self.weight, norm=self.norm, dtype=torch.float32).unsqueeze(1)
        logits = logits if self.scale == 1.0 else logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def quick_block(stack: Stack, layer: int, block: Any, bits: int | None, relay: Relay) -> FastBlock:
    parallel = isinstance(block, ParallelBlock)
    shared = block.norm if parallel and not isinstance(block.norm, nn.Identity) else None
    heads = heads_of(stack, layer, block.attn.f)
    attention = ffn = None
    if heads is not None and can_norm(shared or block.attn.norm_in):
        attention = FastAttention(block.attn.f, shared or block.attn.norm_in, heads, bits=bits)
        kernel = block.attn.f.kernel
        block.attn.f.kernel = InPages(kernel.scale, kernel.softcap, sink=kernel.sink)
    if (
        type(block.ffn.f) in (Plain, Gated)
        and NAMES.get(block.ffn.f.act) in ACTS
        and isinstance(block.ffn.f.up, nn.Linear)
        and can_norm(shared or block.ffn.norm_in)
    ):
        ffn = FastFFN(block.ffn.f, shared or block.ffn.norm_in, bits=bits)
    if parallel and (attention is None or ffn is None):
        attention = ffn = None
    return FastBlock(block, attention, ffn, relay)


def heads_of(stack: Stack, layer: int, f: nn.Module) -> Heads | None:
    """What the attention kernel needs to know, or None if it cannot do this layer."""
    if type(f) is not MultiHead or f.clip is not None:
        return None
    name = stack.position_of[layer]
    position = dict(stack.positions.items()).get(name)
    norms = (f.q_norm, f.k_norm)
    plain = all(isinstance(norm, nn.Identity) for norm in norms)
    normed = all(
        isinstance(norm, HeadNorm) and not norm.full and isinstance(norm.norm, RMSNorm) and norm.norm.weight.ndim == 1
        for norm in norms
    )
    if not (plain or normed) or f.q.weight.dtype == torch.float64:
        return None
    pairs, interleaved, slope = 0, False, None
    if isinstance(position, Rope):
        pairs, interleaved = position.width // 2, position.interleaved
    elif isinstance(position, Alibi) and not position.rounded:
        slope = (position.slope * position.scale).float().contiguous()
    elif position is not None:
        return None
    q, k = (getattr(norm, "norm", None) for norm in norms)
    return Heads(
        heads=f.heads,
        kv_heads=f.kv_heads,
        width=f.d_head,
        scale=f.kernel.scale,
        softcap=f.kernel.softcap,
        window=stack.windows[layer],
        pairs=pairs,
        interleaved=interleaved,
        q_gain=None if q is None else q.weight,
        k_gain=None if k is None else k.weight,
        eps=0.0 if q is None else q.eps,
        unit_offset=q is not None and q.unit_offset,
        sink=f.sink,
        slope=slope,
    )


def can_norm(norm: nn.Module) -> bool:
    known = isinstance(norm, RMSNorm) or (isinstance(norm, LayerNorm) and norm.weight is not None)
    return known or isinstance(norm, nn.Identity)


def norm_of(norm: nn.Module) -> Norm | None:
    if isinstance(norm, RMSNorm):
        return Norm(norm.weight, None, norm.eps, centred=False, unit_offset=norm.unit_offset)
    if isinstance(norm, LayerNorm) and norm.weight is not None:
        return Norm(norm.weight, norm.bias, norm.eps, centred=True)
    return None


def can_quicken(model: Transformer, cache: Rows) -> bool:
    """Whether `quick` is of use: on a GPU, for numbers that its kernels know."""
    return model.device.type == "cuda" and model.dtype != torch.float64 and cache.batch <= MOST_ROWS
