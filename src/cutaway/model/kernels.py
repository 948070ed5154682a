"""Attention kernels with one interface: sdpa, explicit (the reference) and flex. Tests check that they agree."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from cutaway.errors import KernelError
from cutaway.model.masks import MaskRule, MaskSpec, TokenInfo, all_rules_hold
from cutaway.model.positions import ScoreBias

Queries = Float[Tensor, "B T H D"]
Keys = Float[Tensor, "B S G D"]
Values = Float[Tensor, "B S G E"]
HeadOutputs = Float[Tensor, "B T H E"]
Sink = Float[Tensor, " H"] | None
Scores = Float[Tensor, "B H T S"]


class Kernel(nn.Module):
    """Base class of attention kernels, which compute softmax(q·kᵀ·scale + mask)·v.

    `prepare_mask` runs once per forward pass for all layers with the same mask.
    """

    name: ClassVar[str]
    supports: ClassVar[frozenset[str]]
    """Which of 'softcap', 'sink' and 'position scores' the kernel implements.

    Requesting one that is missing raises KernelError."""

    def __init__(
        self,
        scale: float,
        softcap: float | None = None,
        dropout: float = 0.0,
        *,
        sink: bool = False,
        position_scores: bool = False,
    ) -> None:
        super().__init__()
        self.scale, self.softcap, self.dropout, self.sink = scale, softcap, dropout, sink
        self.position_scores = position_scores
        features = {"softcap": softcap is not None, "sink": sink, "position scores": position_scores}
        required = {name for name, is_set in features.items() if is_set}
        if missing := required - self.supports:
            able = ", ".join(name for name, kernel in KERNELS.items() if required <= kernel.supports)
            names = " and ".join(sorted(missing))
            raise KernelError(f"kernel '{self.name}' does not support {names}; use one of: {able}")

    def prepare_mask(self, mask_spec: MaskSpec, bias: ScoreBias | None, dtype: torch.dtype) -> Any:
        """Convert the mask and bias to the form that `forward` takes as `prepared_mask`."""
        raise NotImplementedError

    def forward(self, q: Queries, k: Keys, v: Values, prepared_mask: Any, sink: Sink = None) -> HeadOutputs:
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"scale={self.scale:.4g}, softcap={self.softcap}, dropout={self.dropout}"


def _dense_bias(bias: ScoreBias, mask_spec: MaskSpec, dtype: torch.dtype) -> Float[Tensor, "#B H T S"]:
    """The score bias of all query-key pairs, in the dtype of the scores."""
    return bias.dense_bias(mask_spec.q.position, mask_spec.k.position).to(dtype)


class ProjectedPositions(NamedTuple):
    """Relative position embeddings, projected by a layer to keys and queries and multiplied by the scale (DeBERTa)."""

    rows: Int[Tensor, "#B 1 T S"]
    """δ(i − j): the row of the embeddings for each query and key."""
    k: Float[Tensor, "P H D"] | None
    q: Float[Tensor, "P H D"] | None

    def scores(self, q: Queries, k: Keys) -> Scores:
        """q_i · k^r_δ (content to position) + q^r_δ · k_j (position to content) for each query i and key j."""
        terms = []
        if self.k is not None:
            to_position = torch.einsum("bthd,phd->bhtp", q, self.k)
            terms.append(to_position.gather(-1, self.rows.expand(*to_position.shape[:3], -1)))
        if self.q is not None:
            k = k if k.shape[2] == q.shape[2] else k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
            to_content = torch.einsum("bshd,phd->bhsp", k, self.q)
            terms.append(to_content.gather(-1, self.rows.mT.expand(*to_content.shape[:3], -1)).mT)
        return terms[0] if len(terms) == 1 else terms[0] + terms[1]


class DenseMask(NamedTuple):
    """Prepared mask of the explicit kernel: mask and score bias as dense tensors."""

    visible: Bool[Tensor, "#B 1 T S"]
    fully_masked: Bool[Tensor, "#B 1 T 1"]
    bias: Float[Tensor, "#B H T S"] | None
    relative_positions: "ProjectedPositions | None" = None
    """Set by each layer with disentangled attention."""


class Softmax(nn.Module):
    """Converts scores to the attention pattern. Rows sum to 1, or less with a sink; fully masked rows are zero."""

    def forward(self, scores: Scores, fully_masked: Bool[Tensor, "#B 1 T 1"], sink: Sink) -> Scores:
        scores_fp32 = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if sink is not None:  # one more key, with a learned score and no value
            column = sink.to(scores_fp32.dtype)[:, None, None].expand(*scores_fp32.shape[:-1], 1)
            scores_fp32 = torch.cat((scores_fp32, column), -1)
        pattern = scores_fp32.softmax(-1)[..., : scores.shape[-1]]
        return pattern.masked_fill(fully_masked, 0.0).to(scores.dtype)


class Explicit(Kernel):
    """The attention equation step by step, with tensors for scores and pattern. The reference for the other kernels."""

    name = "explicit"
    supports = frozenset({"softcap", "sink", "position scores"})

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.softmax = Softmax()

    def prepare_mask(self, mask_spec: MaskSpec, bias: ScoreBias | None, dtype: torch.dtype) -> DenseMask:
        return DenseMask(*mask_spec.to_dense(), None if bias is None else _dense_bias(bias, mask_spec, dtype))

    def forward(self, q: Queries, k: Keys, v: Values, prepared_mask: DenseMask, sink: Sink = None) -> HeadOutputs:
        group = q.shape[2] // k.shape[2]  # query heads per key head (GQA)
        k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
        scores = torch.einsum("bthd,bshd->bhts", q * self.scale, k)
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if prepared_mask.bias is not None:
            scores = scores + prepared_mask.bias
        if prepared_mask.relative_positions is not None:
            scores = scores + prepared_mask.relative_positions.scores(q, k)
        scores = scores.masked_fill(~prepared_mask.visible, float("-inf"))
        pattern = self.softmax(scores, prepared_mask.fully_masked, sink)
        pattern = F.dropout(pattern, self.dropout, self.training)
        return torch.einsum("bhts,bshe->bthe", pattern, v)


class SdpaMask(NamedTuple):
    """A mask for scaled_dot_product_attention: `is_causal`, a boolean mask, or a float mask that includes the bias."""

    is_causal: bool
    mask: Tensor | None
    fully_masked: Bool[Tensor, "#B 1 T 1"] | None
    relative_positions: ProjectedPositions | None = None


class Sdpa(Kernel):
    """torch.nn.functional.scaled_dot_product_attention. Causal and full masks are not materialized."""

    name = "sdpa"
    supports = frozenset({"position scores"})

    def prepare_mask(self, mask_spec: MaskSpec, bias: ScoreBias | None, dtype: torch.dtype) -> SdpaMask:
        if bias is None and mask_spec.structure is not None and not self.position_scores:
            return SdpaMask(mask_spec.structure == "causal", None, None)
        mask, fully_masked = mask_spec.to_dense()
        if bias is not None:
            mask = _dense_bias(bias, mask_spec, dtype).masked_fill(~mask, float("-inf"))
        return SdpaMask(False, mask, fully_masked)

    def forward(self, q: Queries, k: Keys, v: Values, prepared_mask: SdpaMask, sink: Sink = None) -> HeadOutputs:
        mask = prepared_mask.mask
        if prepared_mask.relative_positions is not None and mask is not None:
            mask = torch.where(mask, prepared_mask.relative_positions.scores(q, k), float("-inf"))
        z = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=prepared_mask.is_causal,
            scale=self.scale,
            enable_gqa=q.shape[2] != k.shape[2],
        )
        if prepared_mask.fully_masked is not None:
            z = z.masked_fill(prepared_mask.fully_masked, 0.0)
        return z.transpose(1, 2)


def shape_agnostic_sdpa() -> AbstractContextManager[None]:
    """Context manager in which SDPA does not use the cuDNN backend.

    cuDNN builds a plan for every new shape, which takes longer than the attention itself. Prompts have many
    lengths, and every decoding step has one more key.
    """
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


MIN_FLEX_HEAD_DIM = 16
"""Smallest head dimension of flex attention on a GPU."""


class FlexMask(NamedTuple):
    """Prepared mask of flex: block mask, and score bias as a function of (batch, head, query index, key index)."""

    block_mask: BlockMask
    score_bias: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None


class Flex(Kernel):
    """torch.nn.attention.flex_attention: compiles mask and bias into a tiled kernel that skips fully masked blocks.

    No mask of all query-key pairs is materialized on an accelerator. The output of fully masked queries is zero.
    """

    name = "flex"
    supports = frozenset({"softcap", "sink"})

    def prepare_mask(self, mask_spec: MaskSpec, bias: ScoreBias | None, dtype: torch.dtype) -> FlexMask:
        q, k = mask_spec.q, mask_spec.k
        if bias is None:
            return FlexMask(_build_block_mask(mask_spec), None)

        def score_bias(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return bias.elementwise_bias(q.get_token(b, i).position, k.get_token(b, j).position, h)

        return FlexMask(_build_block_mask(mask_spec), score_bias)

    def forward(self, q: Queries, k: Keys, v: Values, prepared_mask: FlexMask, sink: Sink = None) -> HeadOutputs:
        if self.training and self.dropout > 0:
            raise KernelError("kernel 'flex' does not support dropout on attention weights; set attention.dropout to 0")
        needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        if q.device.type == "cpu" and needs_grad:
            raise KernelError("kernel 'flex' has no backward pass on the CPU; use 'sdpa', or torch.no_grad()")
        d_head = min(q.shape[-1], v.shape[-1])
        if q.device.type != "cpu" and d_head < MIN_FLEX_HEAD_DIM:
            raise KernelError(
                f"kernel 'flex' needs a head dimension of at least {MIN_FLEX_HEAD_DIM}, not {d_head}; use 'sdpa'"
            )
        cap, add = self.softcap, prepared_mask.score_bias

        def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            s = s if cap is None else cap * torch.tanh(s / cap)
            return s if add is None else s + add(b, h, i, j)

        z, aux = _compile_unless_compiling(flex_attention, q.device)(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            score_mod=None if cap is None and add is None else score,
            block_mask=prepared_mask.block_mask,
            scale=self.scale,
            enable_gqa=q.shape[2] != k.shape[2],
            return_aux=AuxRequest(lse=True),
            # The flex decoding kernel, which is chosen for short queries, does not support fp32 with GQA.
            kernel_options={"FORCE_USE_FLEX_ATTENTION": True},
        )
        if sink is not None:  # one more term in the softmax denominator: z · e^lse / (e^lse + e^sink)
            z = z * torch.sigmoid(aux.lse - sink[:, None]).unsqueeze(-1).to(z.dtype)
        return z.transpose(1, 2)


def _build_block_mask(mask_spec: MaskSpec) -> BlockMask:
    """Build a block mask: which blocks of 128 × 128 query-key pairs have visible pairs, and which no masked pairs."""
    q, k = mask_spec.q, mask_spec.k
    device, num_queries, num_keys = q.position.device, q.position.shape[-1], k.position.shape[-1]
    if q.is_sequential and k.is_sequential and not torch.compiler.is_compiling():
        return _sequential_block_mask(mask_spec.rules, num_queries, num_keys, device)

    def is_visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return all_rules_hold(mask_spec.rules, q.get_token(b, i), k.get_token(b, j))

    rows = max(len(q.position), len(k.position))
    create = _compile_unless_compiling(create_block_mask, device)
    return create(is_visible, rows, None, num_queries, num_keys, device=device)


@lru_cache(maxsize=64)
def _sequential_block_mask(
    rules: tuple[MaskRule, ...], num_queries: int, num_keys: int, device: torch.device
) -> BlockMask:
    """Block mask of queries and keys at positions 0, 1, 2 …, cached because it is the same in every forward pass."""

    def is_visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return all_rules_hold(rules, TokenInfo(i), TokenInfo(j))

    create = _compile_unless_compiling(create_block_mask, device)
    return create(is_visible, None, None, num_queries, num_keys, device=device)


def _compile_unless_compiling(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Return `function` compiled, because in eager mode it materializes all query-key pairs.

    On the CPU, and inside torch.compile, `function` is returned unchanged.
    """
    return function if device.type == "cpu" or torch.compiler.is_compiling() else _compile_once(function)


@cache
def _compile_once(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


class ExplicitOrFlex(Explicit):
    """Explicit attention, and on a GPU without gradients flex attention where the scores would need much memory.

    'auto' builds it for models with a soft-cap or sinks. For short sequences, explicit attention needs no compilation.
    """

    name = "auto"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.flex = Flex(*args, **options)

    def prepare_mask(self, mask_spec: MaskSpec, bias: ScoreBias | None, dtype: torch.dtype) -> Any:
        if self._uses_flex(mask_spec.q.position, mask_spec.k.position):
            return self.flex.prepare_mask(mask_spec, bias, dtype)
        return super().prepare_mask(mask_spec, bias, dtype)

    def _uses_flex(self, q_position: Int[Tensor, "#B T"], k_position: Int[Tensor, "#B S"]) -> bool:
        num_queries, has_dropout = q_position.shape[-1], self.training and self.dropout > 0
        num_pairs = max(len(q_position), len(k_position)) * num_queries * k_position.shape[-1]
        is_large = num_queries >= MIN_FLEX_QUERIES and num_pairs > MAX_EXPLICIT_PAIRS
        return is_large and _can_compile(q_position.device) and not torch.is_grad_enabled() and not has_dropout

    def forward(self, q: Queries, k: Keys, v: Values, prepared_mask: Any, sink: Sink = None) -> HeadOutputs:
        if isinstance(prepared_mask, FlexMask):
            return self.flex(q, k, v, prepared_mask, sink)
        return super().forward(q, k, v, prepared_mask, sink)


MAX_EXPLICIT_PAIRS, MIN_FLEX_QUERIES = 2**22, 128
"""Limit of the number of query-key pairs of a batch above which `ExplicitOrFlex` uses flex attention. The tensors of
explicit attention need about 10 bytes per pair and head in bf16. A tile of flex attention has 128 queries, so that
decode steps, which also have few pairs per row, do not use it."""


def _can_compile(device: torch.device) -> bool:
    return device.type == "cuda" and find_spec("triton") is not None


KERNELS: dict[str, type[Kernel]] = {kernel.name: kernel for kernel in (Sdpa, Explicit, Flex)}


def build_kernel(
    name: str, *, softcap: float | None = None, sink: bool = False, d_head: int = 0, **options: Any
) -> Kernel:
    """Build a kernel by name. 'auto' is sdpa, or where softcap or a sink is needed, explicit or flex (by size)."""
    if name == "auto" and (softcap is not None or sink):
        has_flex = d_head >= MIN_FLEX_HEAD_DIM and not options.get("position_scores")
        return (ExplicitOrFlex if has_flex else Explicit)(softcap=softcap, sink=sink, **options)
    name = "sdpa" if name == "auto" else name
    if not isinstance(name, str) or name not in KERNELS:
        raise KernelError(f"unknown kernel {name!r}; use one of auto, {', '.join(KERNELS)}")
    return KERNELS[name](softcap=softcap, sink=sink, **options)
