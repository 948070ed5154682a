"""Cross-entropy over a head's logits, a chunk of targets at a time: the whole (N, V) is never there.

For one target t with weight w, label smoothing s and z-loss z, over logits l of a vocabulary of V:

    loss = w · [(1 − s)·(lse − l_t) + s·(lse − mean(l)) + z·lse²],   lse = log Σ exp(l)
    ∂loss/∂l = w · [(1 + 2z·lse)·softmax(l) − (1 − s)·onehot(t) − s/V]

The second line is written out; the head's own gradient is autograd's, whatever the head computes.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from cutaway.errors import InputError
from cutaway.train.loss import linear_cross_entropy
from cutaway.train.loss.cross_entropy import CrossEntropyOptions, VocabShard, cross_entropy_with_grad


class LossSums(NamedTuple):
    """Sums over targets; whoever has all of a step's targets, over pieces and ranks, divides by their weight."""

    loss: Float[Tensor, ""]
    """What is minimized; it has the gradient."""
    weight: Float[Tensor, ""]
    """Σ of the weights."""
    cross_entropy: Float[Tensor, ""]
    """Plain cross-entropy, without smoothing and z, to report."""


class LossTargets(NamedTuple):
    """Targets that count, ready for the device that the vectors are on."""

    targets: Int[Tensor, " K"]
    weights: Float[Tensor, " K"]
    total_weight: Float[Tensor, ""]
    indices: Int[Tensor, " K"] | None
    """Which of all vectors they are of, where some do not count."""

    def to(self, device: torch.device | str) -> "LossTargets":
        kept = None if self.indices is None else to_device_async(self.indices, device)
        return LossTargets(
            to_device_async(self.targets, device),
            to_device_async(self.weights, device),
            to_device_async(self.total_weight, device),
            kept,
        )


def select_targets(targets: Int[Tensor, " N"], weights: Float[Tensor, " N"]) -> LossTargets:
    """Leave out targets of weight 0. Where weights are on the CPU, nobody waits for a device to know which."""
    if not weights.is_floating_point():
        raise InputError(f"weights have dtype {weights.dtype}; a weight is a number: pass weights.float()")
    weight = weights.detach().to(_accumulation_dtype(weights.dtype))
    counts = weight != 0
    if bool(counts.all()):
        return LossTargets(targets.long(), weight, weight.sum(), None)
    chosen = counts.nonzero().squeeze(-1)
    return LossTargets(targets[chosen.to(targets.device)].long(), weight[chosen], weight.sum(), chosen)


def to_device_async(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The same on another device; from memory that it can fetch for itself, nobody waits until it has."""
    if tensor.device.type == "cpu" and torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def chunked_cross_entropy(
    head: nn.Module,
    x: Float[Tensor, "N d"],
    targets: Int[Tensor, " N"],
    weights: Float[Tensor, " N"],
    *,
    label_smoothing: float = 0.0,
    z_loss_coef: float = 0.0,
    chunk_size: int,
) -> LossSums:
    """Σ weight · [cross-entropy with label smoothing + z·logsumexp²] in fp32 or wider, `chunk_size` targets at a time.

    Targets of weight 0 are not computed.
    """
    if x.ndim != 2 or targets.shape != x.shape[:1] or weights.shape != x.shape[:1]:
        shapes = f"{tuple(x.shape)}, {tuple(targets.shape)} and {tuple(weights.shape)}"
        raise InputError(
            f"x, targets and weights have shapes {shapes}; they must be (N, d), (N,) and (N,): flatten them"
        )
    return chunked_cross_entropy_selected(
        head,
        x,
        select_targets(targets, weights).to(x.device),
        label_smoothing=label_smoothing,
        z_loss_coef=z_loss_coef,
        chunk_size=chunk_size,
    )


def chunked_cross_entropy_selected(
    head: nn.Module,
    x: Float[Tensor, "N d"],
    selected: LossTargets,
    *,
    label_smoothing: float = 0.0,
    z_loss_coef: float = 0.0,
    chunk_size: int,
    vocab_shard: VocabShard | None = None,
    buffers: dict[str, Tensor] | None = None,
) -> LossSums:
    """As `chunked_cross_entropy`, of a head that may have a `vocab_shard` only; `buffers` are memory to use again.

    The head's parameters are taken as they are at the call: a wrapper that swaps them (FSDP) must hold them gathered
    around it.
    """
    terms = _validate_options(label_smoothing, z_loss_coef, chunk_size)._replace(
        vocab_shard=vocab_shard, buffers=buffers
    )
    # Autograd must see each parameter as an input, or a tied table would lose this half of its gradient, and DDP's
    # and FSDP's hooks would wait for one that never comes.
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    if torch.is_grad_enabled() and (x.requires_grad or trained):
        value, entropy = _ChunkedCrossEntropy.apply(
            head, terms, selected.indices, selected.targets, selected.weights, x, *trained
        )  # type: ignore[no-untyped-call]
    else:
        rows = x if selected.indices is None else x[selected.indices]
        value, entropy, _ = _forward_in_chunks(head, terms, rows, selected.targets, selected.weights, None)
    return LossSums(value, selected.total_weight, entropy)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The gradient is taken with the value, chunk by chunk, and handed out, scaled, on the way back."""

    @staticmethod
    def forward(
        ctx: Any,
        head: nn.Module,
        options: CrossEntropyOptions,
        indices: Tensor | None,
        targets: Tensor,
        weights: Tensor,
        x: Tensor,
        *head_params: Tensor,
    ) -> tuple[Tensor, Tensor]:
        rows = x.detach() if indices is None else x.detach()[indices]
        ctx.linear_output = None
        if options.vocab_shard is None and linear_cross_entropy.can_use_linear_cross_entropy(head, rows, head_params):
            _check_targets(targets, len(head_params[0]))
            ctx.linear_output = linear_cross_entropy.linear_cross_entropy(
                head_params[0], rows, targets, weights, options
            )
            value, entropy, x_grad, sums = ctx.linear_output.loss, ctx.linear_output.cross_entropy, None, []
        else:
            room = torch.zeros_like(rows) if x.requires_grad else None
            sums = [torch.zeros_like(each, dtype=_accumulation_dtype(each.dtype)) for each in head_params]
            value, entropy, (x_grad, *_) = _forward_in_chunks(
                head, options, rows, targets, weights, (room, list(head_params), sums)
            )
        ctx.save_for_backward(indices, x_grad, *sums)
        ctx.shape, ctx.dtype, ctx.dtypes = x.shape, x.dtype, [each.dtype for each in head_params]
        ctx.mark_non_differentiable(entropy)
        return value, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor | None, _: Tensor) -> tuple[Tensor | None, ...]:
        kept, rows, *sums = ctx.saved_tensors
        if not sums and ctx.dtypes:  # linear_cross_entropy: scaled where they are, for a head's gradient is large
            if ctx.linear_output is None:
                raise RuntimeError("this loss has been gone back through; compute it again to do so twice")
            (_, _, rows, *sums), ctx.linear_output = ctx.linear_output, None
            for each in (rows, *sums):
                each.mul_(grad_output)
            grad_output = None
        x_grad = None
        if rows is not None:
            x_grad = (rows if grad_output is None else rows * grad_output).to(ctx.dtype)
            if kept is not None:
                x_grad = x_grad.new_zeros(ctx.shape).index_copy_(0, kept, x_grad)
        scaled = sums if grad_output is None else [each * grad_output for each in sums]
        grads = [each.to(dtype) for each, dtype in zip(scaled, ctx.dtypes, strict=True)]
        return None, None, None, None, None, x_grad, *grads


GradBuffers = tuple[Tensor | None, list[Tensor], list[Tensor]]
"""Room for x's gradient, the head's parameters, and the sums of their gradients."""


def _forward_in_chunks(
    head: nn.Module,
    options: CrossEntropyOptions,
    x: Tensor,
    targets: Tensor,
    weights: Tensor,
    grad_buffers: GradBuffers | None,
) -> tuple[Tensor, Tensor, GradBuffers]:
    """Loss and plain cross-entropy; the gradients are added to what is given for them."""
    wide = _accumulation_dtype(x.dtype)
    value, entropy = torch.zeros((), dtype=wide, device=x.device), torch.zeros((), dtype=wide, device=x.device)
    for start in range(0, len(x), options.chunk_size):
        part = slice(start, start + options.chunk_size)
        piece, target, w = x[part], targets[part, None], weights[part, None].to(wide)
        wants_x = grad_buffers is not None and grad_buffers[0] is not None
        with torch.set_grad_enabled(grad_buffers is not None):
            piece = piece.detach().requires_grad_(wants_x)
            logits = head(piece)
        if start == 0:
            _check_targets(targets, logits.shape[-1] if options.vocab_shard is None else options.vocab_shard.vocab_size)
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            dtype = torch.promote_types(wide, logits.dtype)
            slope, losses, plain = cross_entropy_with_grad(
                logits.detach(), target, w, options, dtype, compute_grad=grad_buffers is not None
            )
            value += losses.sum()
            entropy += plain.sum()
            if grad_buffers is None:
                continue
            x_grad, trained, sums = grad_buffers
            inputs = [piece, *trained] if wants_x else trained
            grads = list(torch.autograd.grad(logits, inputs, slope.to(logits.dtype), materialize_grads=True))
            del logits, slope
            for total in reversed(sums):
                total += grads.pop()  # gone before the next chunk's is made
            if x_grad is not None:
                x_grad[part] = grads.pop()
    return value, entropy, grad_buffers or (None, [], [])


def _check_targets(targets: Tensor, vocab_size: int) -> None:
    """Ids of the vocabulary, where a look does not wait for a device."""
    if targets.device.type == "cpu" and not torch.compiler.is_compiling():
        low, high = (int(each) for each in torch.aminmax(targets))
        if low < 0 or high >= vocab_size:
            bad = low if low < 0 else high
            raise InputError(
                f"targets hold {bad}, and the head tells 0 to {vocab_size - 1}; give it weight 0 or fix it"
            )


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _validate_options(label_smoothing: float, z_loss_coef: float, chunk_size: int) -> CrossEntropyOptions:
    if not 0 <= label_smoothing < 1:
        raise InputError(
            f"label_smoothing is {label_smoothing}; it is the share spread over the vocabulary, so give 0 up to below 1"
        )
    if z_loss_coef < 0:
        raise InputError(f"z_loss_coef is {z_loss_coef}; a negative weight would drive logits apart, so give 0 or more")
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
        raise InputError(f"chunk_size is {chunk_size!r}; give how many targets to take at once, 1 or more")
    return CrossEntropyOptions(label_smoothing, z_loss_coef, chunk_size)
