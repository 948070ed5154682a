"""Cross-entropy of the logits of a head in chunks of targets, so that the full (N, V) logits are never in memory.

For one target t with weight w, label smoothing s, z-loss coefficient z and logits l over a vocabulary of V tokens:

    loss = w · [(1 − s)·(lse − l_t) + s·(lse − mean(l)) + z·lse²],   lse = log Σ exp(l)
    ∂loss/∂l = w · [(1 + 2z·lse)·softmax(l) − (1 − s)·onehot(t) − s/V]

The gradient with respect to the logits is computed by this formula. Autograd computes the gradients of the head's
parameters and inputs, so the head can be any module.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from cutaway.errors import InputError
from cutaway.train.loss import linear_cross_entropy
from cutaway.train.loss.cross_entropy import CrossEntropyOptions, cross_entropy_with_grad


class MetricSum(NamedTuple):
    """Sum of a metric over a micro-batch, and the sum of the weights by which its mean is computed."""

    total: Float[Tensor, ""]
    weight: Float[Tensor, ""]


class LossSums(NamedTuple):
    """Loss, weight and cross-entropy, each summed over the targets of a micro-batch.

    The caller divides by the total weight of a step, over all its micro-batches and ranks.
    """

    loss: Float[Tensor, ""]
    """The loss that training minimizes. Only this sum is differentiable."""
    weight: Float[Tensor, ""]
    """Sum of the weights."""
    cross_entropy: Float[Tensor, ""]
    """Cross-entropy without label smoothing and z-loss, for reporting. Objectives without cross-entropy report their
    loss."""
    metrics: Mapping[str, MetricSum] = MappingProxyType({})
    """Other metrics of the objective, without gradient, by their names in the metrics of a step. An evaluation adds
    'eval_' to the names. All micro-batches of a run have the same names."""


class LossTargets(NamedTuple):
    """Targets whose weight is not 0, on the device of the hidden states."""

    targets: Int[Tensor, " K"]
    weights: Float[Tensor, " K"]
    total_weight: Float[Tensor, ""]
    indices: Int[Tensor, " K"] | None
    """Row indices of the targets in the hidden states; None if all rows have a target."""

    def to(self, device: torch.device | str) -> "LossTargets":
        targets, weights, total_weight = (to_device_async(each, device) for each in self[:3])
        indices = None if self.indices is None else to_device_async(self.indices, device)
        return LossTargets(targets, weights, total_weight, indices)


class SoftTargets(Protocol):
    """Target distributions beside the target tokens, e.g. those of a teacher."""

    def loss_with_grad(
        self,
        logits: Tensor,
        target: Tensor,
        weight: Tensor,
        rows: slice,
        options: CrossEntropyOptions,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Like `cross_entropy_with_grad`, for the targets with index `rows`."""


def select_targets(targets: Int[Tensor, " N"], weights: Float[Tensor, " N"]) -> LossTargets:
    """Select the targets whose weight is not 0. If the weights are on the CPU, this does not synchronize with a GPU."""
    weight = weights.detach().to(_accumulation_dtype(weights.dtype))
    is_selected = weight != 0
    if bool(is_selected.all()):
        return LossTargets(targets.long(), weight, weight.sum(), None)
    indices = is_selected.nonzero().squeeze(-1)
    return LossTargets(targets[indices.to(targets.device)].long(), weight[indices], weight.sum(), indices)


def to_device_async(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor to a device asynchronously. For a copy from CPU to GPU, the tensor is pinned first."""
    if tensor.device.type == "cpu" and torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def chunked_cross_entropy(
    head: nn.Module,
    x: Float[Tensor, "N d"],
    selected: LossTargets,
    options: CrossEntropyOptions,
    soft_targets: SoftTargets | None = None,
) -> LossSums:
    """Σ weight · [cross-entropy with label smoothing + z·logsumexp²] in fp32 or wider, a chunk of targets at a time.

    With `soft_targets`, their loss takes the place of the cross-entropy in training.
    The parameters of the head are read during the call, so a wrapper that shards them (FSDP) must keep them gathered.
    """
    # Each parameter must be an input of the autograd function. Otherwise a tied embedding would lose this part of its
    # gradient, and hooks of DDP and FSDP would wait for a gradient that is never computed.
    head_params = [parameter for parameter in head.parameters() if parameter.requires_grad]
    if torch.is_grad_enabled() and (x.requires_grad or head_params):
        loss, cross_entropy = _ChunkedCrossEntropy.apply(
            head, options, soft_targets, selected.indices, selected.targets, selected.weights, x, *head_params
        )  # type: ignore[no-untyped-call]
    else:
        rows = x if selected.indices is None else x[selected.indices]
        loss, cross_entropy = _forward_in_chunks(head, options, rows, selected.targets, selected.weights, None, None)
    return LossSums(loss, selected.total_weight, cross_entropy)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Computes gradients chunk by chunk in the forward pass. The backward pass multiplies by the upstream gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        head: nn.Module,
        options: CrossEntropyOptions,
        soft_targets: SoftTargets | None,
        indices: Tensor | None,
        targets: Tensor,
        weights: Tensor,
        x: Tensor,
        *head_params: Tensor,
    ) -> tuple[Tensor, Tensor]:
        rows = x.detach() if indices is None else x.detach()[indices]
        ctx.linear_output = None
        is_plain = options.vocab_shard is None and soft_targets is None
        if is_plain and linear_cross_entropy.can_use_linear_cross_entropy(head, rows, head_params):
            weight: Any = head.matrix.weight  # type: ignore[union-attr]  # an LMHead, as checked above
            _check_targets(targets, len(weight))
            output = linear_cross_entropy.linear_cross_entropy(weight, rows, targets, weights, options)
            ctx.linear_output = output
            loss, cross_entropy, x_grad, param_grads = output.loss, output.cross_entropy, None, []
        else:
            x_grad = torch.zeros_like(rows) if x.requires_grad else None
            param_grads = [torch.zeros_like(each, dtype=_accumulation_dtype(each.dtype)) for each in head_params]
            grad_buffers = (x_grad, list(head_params), param_grads)
            loss, cross_entropy = _forward_in_chunks(head, options, rows, targets, weights, grad_buffers, soft_targets)
        ctx.save_for_backward(indices, x_grad, *param_grads)
        ctx.shape, ctx.dtype, ctx.dtypes = x.shape, x.dtype, [each.dtype for each in head_params]
        ctx.is_linear = ctx.linear_output is not None
        ctx.mark_non_differentiable(cross_entropy)
        return loss, cross_entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor | None, _: Tensor) -> tuple[Tensor | None, ...]:
        indices, row_grads, *param_grads = ctx.saved_tensors
        if ctx.is_linear:  # gradients are scaled in place, because that of the weights is large
            if ctx.linear_output is None:
                raise RuntimeError(
                    "the backward pass of this loss already ran, and its gradients were freed; compute the loss again"
                )
            (_, _, row_grads, weight_grad), ctx.linear_output = ctx.linear_output, None
            param_grads = [] if weight_grad is None else [weight_grad]
            for each in (row_grads, *param_grads):
                each.mul_(grad_output)
            grad_output = None
        x_grad = None
        if row_grads is not None:
            x_grad = (row_grads if grad_output is None else row_grads * grad_output).to(ctx.dtype)
            if indices is not None:
                x_grad = x_grad.new_zeros(ctx.shape).index_copy_(0, indices, x_grad)
        scaled = param_grads if grad_output is None else [each * grad_output for each in param_grads]
        grads = [each.to(dtype) for each, dtype in zip(scaled, ctx.dtypes, strict=True)]
        return None, None, None, None, None, None, x_grad, *grads


GradBuffers = tuple[Tensor | None, list[Tensor], list[Tensor]]
"""Buffer for the gradient of x, trainable parameters of the head, and buffers for the gradients of these parameters."""


def _forward_in_chunks(
    head: nn.Module,
    options: CrossEntropyOptions,
    x: Tensor,
    targets: Tensor,
    weights: Tensor,
    grad_buffers: GradBuffers | None,
    soft_targets: SoftTargets | None,
) -> tuple[Tensor, Tensor]:
    """Return the loss, and the cross-entropy without smoothing and z-loss, as weighted sums over all targets.

    The gradient of x is written to its buffer, and gradients of parameters are added to their buffers. If
    `grad_buffers` is None, no gradients are computed.
    """
    sum_dtype = _accumulation_dtype(x.dtype)
    loss = torch.zeros((), dtype=sum_dtype, device=x.device)
    cross_entropy = torch.zeros((), dtype=sum_dtype, device=x.device)
    for start in range(0, len(x), options.chunk_size):
        chunk = slice(start, start + options.chunk_size)
        x_chunk, target, weight = x[chunk], targets[chunk, None], weights[chunk, None].to(sum_dtype)  # (n, d), (n, 1)
        needs_x_grad = grad_buffers is not None and grad_buffers[0] is not None
        with torch.set_grad_enabled(grad_buffers is not None):
            x_chunk = x_chunk.detach().requires_grad_(needs_x_grad)
            logits = head(x_chunk)  # (n, V)
        if start == 0:
            _check_targets(targets, logits.shape[-1] if options.vocab_shard is None else options.vocab_shard.vocab_size)
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            dtype = torch.promote_types(sum_dtype, logits.dtype)
            if soft_targets is None:
                logits_grad, losses, cross_entropies = cross_entropy_with_grad(
                    logits.detach(), target, weight, options, dtype, compute_grad=grad_buffers is not None
                )
            else:
                logits_grad, losses, cross_entropies = soft_targets.loss_with_grad(
                    logits.detach(), target, weight, chunk, options, dtype
                )
            loss += losses.sum()
            cross_entropy += cross_entropies.sum()
            if grad_buffers is None:
                continue
            x_grad, head_params, param_grads = grad_buffers
            inputs = [x_chunk, *head_params] if needs_x_grad else head_params
            grads = list(torch.autograd.grad(logits, inputs, logits_grad.to(logits.dtype), materialize_grads=True))
            del logits, logits_grad
            for total in reversed(param_grads):
                total += grads.pop()  # freed before the next chunk's gradient is allocated
            if x_grad is not None:
                x_grad[chunk] = grads.pop()
    return loss, cross_entropy


def _check_targets(targets: Tensor, vocab_size: int) -> None:
    """Raise InputError if a target is outside the vocabulary. On a GPU, the check is skipped, because it would sync."""
    if targets.device.type == "cpu" and not torch.compiler.is_compiling():
        low, high = (int(each) for each in torch.aminmax(targets))
        if low < 0 or high >= vocab_size:
            invalid = low if low < 0 else high
            raise InputError(
                f"targets contain the token id {invalid}, but the output head has only ids 0 to {vocab_size - 1};"
                " correct this target, or set its weight to 0"
            )


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
