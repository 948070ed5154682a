"""softmax(q·kᵀ·scale + mask)·v, computed three ways behind one interface and held equal by tests."""

from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from cutaway.errors import KernelError
from cutaway.model.masks import View
from cutaway.model.positions import ScoreBias

Queries = Float[Tensor, "B T H D"]
Keys = Float[Tensor, "B S G D"]
Values = Float[Tensor, "B S G E"]
Mixed = Float[Tensor, "B T H E"]
Sink = Float[Tensor, " H"] | None
Scores = Float[Tensor, "B H T S"]


class Kernel(nn.Module):
    """Turns q, k and v into z. `prepare` draws what the kernel needs of a View once for all layers that share it."""

    name: ClassVar[str]
    can: ClassVar[frozenset[str]]
    """Of 'softcap' and 'sink', what it computes; asking for the rest is an error, never a silent drop."""

    def __init__(self, scale: float, softcap: float | None = None, dropout: float = 0.0, *, sink: bool = False) -> None:
        super().__init__()
        self.scale, self.softcap, self.dropout, self.sink = scale, softcap, dropout, sink
        needs = {name for name, asked in (("softcap", softcap is not None), ("sink", sink)) if asked}
        if missing := needs - self.can:
            able = ", ".join(name for name, kernel in KERNELS.items() if needs <= kernel.can)
            raise KernelError(f"kernel '{self.name}' cannot compute {' and '.join(sorted(missing))}; these can: {able}")

    def prepare(self, view: View, bias: ScoreBias | None, dtype: torch.dtype) -> Any:
        """What `forward` takes as `plan`."""
        raise NotImplementedError

    def forward(self, q: Queries, k: Keys, v: Values, plan: Any, sink: Sink = None) -> Mixed:
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"scale={self.scale:.4g}, softcap={self.softcap}, dropout={self.dropout}"


class DrawnMask(NamedTuple):
    """A mask and bias drawn out in full."""

    visible: Bool[Tensor, "#B 1 T S"]
    blind: Bool[Tensor, "#B 1 T 1"]
    bias: Float[Tensor, "#B H T S"] | None


class Softmax(nn.Module):
    """Scores in, pattern out: rows sum to 1, or less where a sink takes a share; a blind query's row is zero."""

    def forward(self, scores: Scores, blind: Bool[Tensor, "#B 1 T 1"], sink: Sink) -> Scores:
        wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if sink is not None:
            column = sink.to(wide.dtype)[:, None, None].expand(*wide.shape[:-1], 1)
            wide = torch.cat((wide, column), -1)
        pattern = wide.softmax(-1)[..., : scores.shape[-1]]
        return pattern.masked_fill(blind, 0.0).to(scores.dtype)


class Explicit(Kernel):
    """The equation as written, with scores and pattern in the open. The reference for the others."""

    name = "explicit"
    can = frozenset({"softcap", "sink"})

    def __init__(self, scale: float, softcap: float | None = None, dropout: float = 0.0, *, sink: bool = False) -> None:
        super().__init__(scale, softcap, dropout, sink=sink)
        self.softmax = Softmax()

    def prepare(self, view: View, bias: ScoreBias | None, dtype: torch.dtype) -> DrawnMask:
        return DrawnMask(
            *view.visible(), None if bias is None else bias.dense(view.q.position, view.k.position).to(dtype)
        )

    def forward(self, q: Queries, k: Keys, v: Values, plan: DrawnMask, sink: Sink = None) -> Mixed:
        group = q.shape[2] // k.shape[2]  # query heads that share a key head
        k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
        scores = torch.einsum("bthd,bshd->bhts", q * self.scale, k)
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if plan.bias is not None:
            scores = scores + plan.bias
        pattern = self.softmax(scores.masked_fill(~plan.visible, float("-inf")), plan.blind, sink)
        pattern = F.dropout(pattern, self.dropout, self.training)
        return torch.einsum("bhts,bshe->bthe", pattern, v)


class SdpaPlan(NamedTuple):
    """A mask for PyTorch's fused attention: none, causal by name, or drawn (as a bias, if there is one)."""

    causal: bool
    mask: Tensor | None
    blind: Bool[Tensor, "#B 1 T 1"] | None


class Sdpa(Kernel):
    """PyTorch's fused attention; the mask is drawn only where it is not plainly causal or full."""

    name = "sdpa"
    can = frozenset()

    def prepare(self, view: View, bias: ScoreBias | None, dtype: torch.dtype) -> SdpaPlan:
        if bias is None and view.shape is not None:
            return SdpaPlan(view.shape == "causal", None, None)
        mask, blind = view.visible()
        if bias is not None:
            mask = bias.dense(view.q.position, view.k.position).to(dtype).masked_fill(~mask, float("-inf"))
        return SdpaPlan(False, mask, blind)

    def forward(self, q: Queries, k: Keys, v: Values, plan: SdpaPlan, sink: Sink = None) -> Mixed:
        z = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=plan.mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=plan.causal,
            scale=self.scale,
            enable_gqa=q.shape[2] != k.shape[2],
        )
        return (z if plan.blind is None else z.masked_fill(plan.blind, 0.0)).transpose(1, 2)


class FlexPlan(NamedTuple):
    """A block mask and what is added to each score, as functions of (batch, head, query, key)."""

    mask: BlockMask
    add: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None
    blind: Bool[Tensor, "#B 1 T 1"]


class Flex(Kernel):
    """PyTorch's flex attention: the rules compiled into a tiled kernel that skips blocks nobody sees."""

    name = "flex"
    can = frozenset({"softcap", "sink"})

    def prepare(self, view: View, bias: ScoreBias | None, dtype: torch.dtype) -> FlexPlan:
        q, k = view.q, view.k
        rows = max(len(q.position), len(k.position))
        add = None if bias is None else lambda b, h, i, j: bias.at(q.at(b, i).position, k.at(b, j).position, h)
        mask = create_block_mask(
            lambda b, h, i, j: view.sees(q.at(b, i), k.at(b, j)),
            rows,
            None,
            q.position.shape[-1],
            k.position.shape[-1],
            device=q.position.device.type,
        )
        return FlexPlan(mask, add, view.visible()[1])

    def forward(self, q: Queries, k: Keys, v: Values, plan: FlexPlan, sink: Sink = None) -> Mixed:
        if self.training and self.dropout > 0:
            raise KernelError(
                "kernel 'flex' cannot drop out attention weights; set the attention's dropout to 0 to train"
            )
        if (
            q.device.type == "cpu"
            and torch.is_grad_enabled()
            and (q.requires_grad or k.requires_grad or v.requires_grad)
        ):
            raise KernelError(
                "kernel 'flex' has no backward pass on the CPU; use 'sdpa' or 'explicit', or torch.no_grad()"
            )
        if q.device.type != "cpu" and min(q.shape[-1], v.shape[-1]) < 16:
            raise KernelError(
                f"kernel 'flex' needs heads at least 16 wide, not {min(q.shape[-1], v.shape[-1])}; use 'sdpa'"
            )
        cap, add = self.softcap, plan.add

        def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            s = s if cap is None else cap * torch.tanh(s / cap)
            return s if add is None else s + add(b, h, i, j)

        bare = q.device.type == "cpu" or torch.compiler.is_compiling()
        attend: Any = flex_attention if bare else compiled_flex()
        z, aux = attend(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            score_mod=None if cap is None and add is None else score,
            block_mask=plan.mask,
            scale=self.scale,
            enable_gqa=q.shape[2] != k.shape[2],
            return_aux=AuxRequest(lse=True),
            kernel_options={
                "FORCE_USE_FLEX_ATTENTION": True
            },  # its other kernel, for short queries, lacks fp32 with GQA
        )
        if sink is not None:  # one more term in the softmax's sum: z · e^lse / (e^lse + e^sink)
            z = z * torch.sigmoid(aux.lse - sink[:, None]).unsqueeze(-1).to(z.dtype)
        return z.masked_fill(plan.blind, 0.0).transpose(1, 2)


@cache
def compiled_flex() -> Callable[..., Any]:
    """Flex attention is fast only when compiled; it is compiled once."""
    return torch.compile(flex_attention)


KERNELS: dict[str, type[Kernel]] = {kernel.name: kernel for kernel in (Sdpa, Explicit, Flex)}


def make_kernel(
    name: str, *, scale: float, softcap: float | None = None, dropout: float = 0.0, sink: bool = False
) -> Kernel:
    """The kernel of this name; 'auto' is the first of sdpa and explicit that can do what is asked."""
    if name == "auto":
        name = "sdpa" if softcap is None and not sink else "explicit"
    if name not in KERNELS:
        raise KernelError(f"there is no kernel '{name}'; use one of auto, {', '.join(KERNELS)}")
    return KERNELS[name](scale, softcap, dropout, sink=sink)
