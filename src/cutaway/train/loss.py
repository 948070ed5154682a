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
from cutaway.train import bare
from cutaway.train.softmax import Terms, softmax_part
from cutaway.train.vocabulary import Vocabulary


class Loss(NamedTuple):
    """Sums over targets; whoever has all of a step's targets, over pieces and ranks, divides by their weight."""

    total: Float[Tensor, ""]
    """What is minimised; it has the gradient."""
    weight: Float[Tensor, ""]
    """Σ of the weights."""
    entropy_total: Float[Tensor, ""]
    """Plain cross-entropy, without smoothing and z, to report."""


class Asked(NamedTuple):
    """Targets that count, ready for the device that the vectors are on."""

    targets: Int[Tensor, " K"]
    weights: Float[Tensor, " K"]
    total: Float[Tensor, ""]
    kept: Int[Tensor, " K"] | None
    """Which of all vectors they are of, where some do not count."""

    def to(self, device: torch.device | str) -> "Asked":
        kept = None if self.kept is None else sent(self.kept, device)
        return Asked(sent(self.targets, device), sent(self.weights, device), sent(self.total, device), kept)


def asked(targets: Int[Tensor, " N"], weights: Float[Tensor, " N"]) -> Asked:
    """Leave out targets of weight 0. Where weights are on the CPU, nobody waits for a device to know which."""
    if not weights.is_floating_point():
        raise InputError(f"weights have dtype {weights.dtype}; a weight is a number: pass weights.float()")
    weight = weights.detach().to(_wide(weights.dtype))
    counts = weight != 0
    if bool(counts.all()):
        return Asked(targets.long(), weight, weight.sum(), None)
    chosen = counts.nonzero().squeeze(-1)
    return Asked(targets[chosen.to(targets.device)].long(), weight[chosen], weight.sum(), chosen)


def sent(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The same on another device; from memory that it can fetch for itself, nobody waits until it has."""
    if tensor.device.type == "cpu" and torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def head_loss(
    head: nn.Module,
    x: Float[Tensor, "N d"],
    targets: Int[Tensor, " N"],
    weights: Float[Tensor, " N"],
    *,
    smoothing: float = 0.0,
    z: float = 0.0,
    chunk: int,
) -> Loss:
    """Σ weight · [cross-entropy with label smoothing + z·logsumexp²] in fp32 (or wider), `chunk` targets at a time.

    Targets of weight 0 are not computed.
    """
    if x.ndim != 2 or targets.shape != x.shape[:1] or weights.shape != x.shape[:1]:
        shapes = f"{tuple(x.shape)}, {tuple(targets.shape)} and {tuple(weights.shape)}"
        raise InputError(
            f"x, targets and weights have shapes {shapes}; they must be (N, d), (N,) and (N,): flatten them"
        )
    return asked_loss(head, x, asked(targets, weights).to(x.device), smoothing=smoothing, z=z, chunk=chunk)


def asked_loss(
    head: nn.Module,
    x: Float[Tensor, "N d"],
    ask: Asked,
    *,
    smoothing: float = 0.0,
    z: float = 0.0,
    chunk: int,
    vocabulary: Vocabulary | None = None,
    room: dict[str, Tensor] | None = None,
) -> Loss:
    """As `head_loss`, of a head that may have a part of the `vocabulary` only; `room` is memory to use again.

    The head's parameters are taken as they are at the call: a wrapper that swaps them (FSDP) must hold them gathered
    around it.
    """
    terms = _checked(smoothing, z, chunk)._replace(vocabulary=vocabulary, room=room)
    # Autograd must see each parameter as an input, or a tied table would lose this half of its gradient, and DDP's
    # and FSDP's hooks would wait for one that never comes.
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    if torch.is_grad_enabled() and (x.requires_grad or trained):
        value, entropy = _HeadLoss.apply(head, terms, ask.kept, ask.targets, ask.weights, x, *trained)  # type: ignore[no-untyped-call]
    else:
        rows = x if ask.kept is None else x[ask.kept]
        value, entropy, _ = _in_chunks(head, terms, rows, ask.targets, ask.weights, None)
    return Loss(value, ask.total, entropy)


class _HeadLoss(torch.autograd.Function):
    """The gradient is taken with the value, chunk by chunk, and handed out, scaled, on the way back."""

    @staticmethod
    def forward(
        ctx: Any,
        head: nn.Module,
        terms: Terms,
        kept: Tensor | None,
        targets: Tensor,
        weight: Tensor,
        x: Tensor,
        *trained: Tensor,
    ) -> tuple[Tensor, Tensor]:
        rows = x.detach() if kept is None else x.detach()[kept]
        ctx.by_hand = None
        if terms.vocabulary is None and bare.can(head, rows, trained):
            _check_targets(targets, len(trained[0]))
            ctx.by_hand = bare.in_chunks(trained[0], rows, targets, weight, terms)
            value, entropy, x_grad, sums = ctx.by_hand.loss, ctx.by_hand.entropy, None, []
        else:
            room = torch.zeros_like(rows) if x.requires_grad else None
            sums = [torch.zeros_like(each, dtype=_wide(each.dtype)) for each in trained]
            value, entropy, (x_grad, *_) = _in_chunks(head, terms, rows, targets, weight, (room, list(trained), sums))
        ctx.save_for_backward(kept, x_grad, *sums)
        ctx.shape, ctx.dtype, ctx.dtypes = x.shape, x.dtype, [each.dtype for each in trained]
        ctx.mark_non_differentiable(entropy)
        return value, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor | None, _: Tensor) -> tuple[Tensor | None, ...]:
        kept, rows, *sums = ctx.saved_tensors
        if not sums and ctx.dtypes:  # by hand: scaled where they are, for a head's gradient is large
            if ctx.by_hand is None:
                raise RuntimeError("this loss has been gone back through; compute it again to do so twice")
            (_, _, rows, *sums), ctx.by_hand = ctx.by_hand, None
            for each in (rows, *sums):
                each.mul_(scale)
            scale = None
        x_grad = None
        if rows is not None:
            x_grad = (rows if scale is None else rows * scale).to(ctx.dtype)
            if kept is not None:
                x_grad = x_grad.new_zeros(ctx.shape).index_copy_(0, kept, x_grad)
        scaled = sums if scale is None else [each * scale for each in sums]
        grads = [each.to(dtype) for each, dtype in zip(scaled, ctx.dtypes, strict=True)]
        return None, None, None, None, None, x_grad, *grads


Gradients = tuple[Tensor | None, list[Tensor], list[Tensor]]
"""Room for x's gradient, the head's parameters, and the sums of their gradients."""


def _in_chunks(
    head: nn.Module, terms: Terms, x: Tensor, targets: Tensor, weight: Tensor, into: Gradients | None
) -> tuple[Tensor, Tensor, Gradients]:
    """Loss and plain cross-entropy; the gradients are added to what is given for them."""
    wide = _wide(x.dtype)
    value, entropy = torch.zeros((), dtype=wide, device=x.device), torch.zeros((), dtype=wide, device=x.device)
    for start in range(0, len(x), terms.chunk):
        part = slice(start, start + terms.chunk)
        piece, target, w = x[part], targets[part, None], weight[part, None].to(wide)
        wants_x = into is not None and into[0] is not None
        with torch.set_grad_enabled(into is not None):
            piece = piece.detach().requires_grad_(wants_x)
            logits = head(piece)
        if start == 0:
            _check_targets(targets, logits.shape[-1] if terms.vocabulary is None else terms.vocabulary.size)
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            dtype = torch.promote_types(wide, logits.dtype)
            slope, losses, plain = softmax_part(logits.detach(), target, w, terms, dtype, slopes=into is not None)
            value += losses.sum()
            entropy += plain.sum()
            if into is None:
                continue
            x_grad, trained, sums = into
            inputs = [piece, *trained] if wants_x else trained
            grads = list(torch.autograd.grad(logits, inputs, slope.to(logits.dtype), materialize_grads=True))
            del logits, slope
            for total in reversed(sums):
                total += grads.pop()  # gone before the next chunk's is made
            if x_grad is not None:
                x_grad[part] = grads.pop()
    return value, entropy, into or (None, [], [])


def _check_targets(targets: Tensor, vocab_size: int) -> None:
    """Ids of the vocabulary, where a look does not wait for a device."""
    if targets.device.type == "cpu" and not torch.compiler.is_compiling():
        low, high = (int(each) for each in torch.aminmax(targets))
        if low < 0 or high >= vocab_size:
            bad = low if low < 0 else high
            raise InputError(
                f"targets hold {bad}, and the head tells 0 to {vocab_size - 1}; give it weight 0 or fix it"
            )


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _checked(smoothing: float, z: float, chunk: int) -> Terms:
    if not 0 <= smoothing < 1:
        raise InputError(
            f"smoothing is {smoothing}; it is the share spread over the vocabulary, so give 0 up to below 1"
        )
    if z < 0:
        raise InputError(f"z is {z}; a negative weight would drive logits apart, so give 0 or more")
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
        raise InputError(f"chunk is {chunk!r}; give how many targets to take at once, 1 or more")
    return Terms(smoothing, z, chunk)
