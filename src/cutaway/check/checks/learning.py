"""Whether a model can learn: its first loss, its gradients, and what a few steps do."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cutaway.check.again import SMALL
from cutaway.check.entropy import own_loss
from cutaway.check.exam import MARGIN, CannotError, Exam, swapped
from cutaway.check.finding import Part
from cutaway.check.offered import no_logits
from cutaway.check.reads import refuse_compiled
from cutaway.check.registry import check
from cutaway.check.slope import slope

ABOVE, BELOW = 2.0, 0.5
"""Nats above ln V, and the share of it, from which on a first loss is no usual one: logits of σ² = 4 give 2 more."""
RATES, STEPS, FALLS = (3e-3, 3e-2, 3e-4), 30, 0.9
"""Learning rates that are tried in turn, for so many steps; the loss must fall to this share."""
MANY = 1 << 16
"""Numbers of a gradient by which its usual size is told."""
SAMPLED = 256
"""Numbers of a gradient that are compared."""
NUDGE = 1e-2
"""By which share of its usual size a tensor is moved to see whether it acts."""
RATE = 3e-4
LEAST, MOST = 1e-11, 3.0
"""Of a tensor's usual size: what a first step of Adam should move it by."""


def trained_tensors(exam: Exam) -> dict[str, nn.Parameter]:
    """Parameters that want a gradient."""
    module = exam.target.module
    assert module is not None
    found = {name: each for name, each in module.named_parameters() if each.requires_grad}
    if not found:
        raise CannotError("needs parameters that require a gradient")
    return found


def backward(exam: Exam, tokens: Tensor) -> Tensor:
    """The loss of a text, with fresh gradients in the parameters."""
    for each in trained_tensors(exam).values():
        each.grad = None
    with torch.enable_grad():
        loss = own_loss(exam, tokens)
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


@dataclass
class Slope:
    """What is known of one parameter's gradient."""

    finite: bool
    alive: bool
    ratio: float | None
    """A first step of Adam as a share of the parameter's usual size; None where there is none, or it is no matrix."""


def slopes(exam: Exam) -> tuple[Tensor, float, dict[str, Slope]]:
    """A text, its loss, and of each parameter's gradient what the checks ask; made once, for it costs a way back."""

    def look() -> tuple[Tensor, float, dict[str, Slope]]:
        tokens = exam.text(1, min(12, exam.length))
        loss = float(backward(exam, tokens))
        found = {name: slope_of(each) for name, each in trained_tensors(exam).items()}
        forget(exam)
        return tokens, loss, found

    return exam.once(f"slopes {exam.ratio}", look)


@torch.no_grad()
def slope_of(tensor: nn.Parameter) -> Slope:
    if tensor.grad is None:
        return Slope(True, False, None)
    total = float(tensor.grad.abs().sum())
    flat, weights = tensor.grad.flatten(), tensor.flatten()
    step = max(1, flat.numel() // MANY)
    some = flat[::step].float()
    some = some[some != 0]
    size = float(weights[::step].float().square().mean().sqrt())
    ratio = None
    if tensor.ndim >= 2 and size > 0 and len(some):
        ratio = RATE * float((some / (some.abs() + 1e-8)).square().mean().sqrt()) / size
    return Slope(math.isfinite(total), total != 0, ratio)


def forget(exam: Exam) -> None:
    for each in trained_tensors(exam).values():
        each.grad = None


def gradients(exam: Exam, tokens: Tensor) -> Tensor:
    """The loss, and of each parameter's gradient a sample."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(exam.seed)
        loss = backward(exam, tokens)
    found = [loss.float().reshape(1)]
    for each in trained_tensors(exam).values():
        flat = (torch.zeros_like(each) if each.grad is None else each.grad).detach().flatten().float()
        found.append(flat[:: max(1, flat.numel() // SAMPLED)])
    forget(exam)
    return torch.cat(found)


@check(
    "initial-loss",
    catches="fresh weights of the wrong size: the first loss is far from ln V, and the first steps only mend that",
    cause="the embedding kept its default of N(0, 1) and is the head too, or the stream grows with depth",
    fix="initialise the embedding with about 0.02, and layers that add to the stream with 0.02/√(2·layers)",
    needs=("logits", "module"),
    after=("loss-shift", "loss-uniform"),
)
@torch.no_grad()
def initial_loss(exam: Exam) -> Part:
    """The loss of fresh weights on random tokens must be near ln V. Weights are taken for fresh where the target says
    so, or where each norm's gain and each bias is as it began and rows of the token table are of one length."""
    target = exam.target
    assert target.module is not None
    assert target.logits is not None
    if wrong := no_logits(target.logits(exam.text(2)), target.kind):
        return wrong
    if target.trained or (target.trained is None and not fresh(target.module, target.vocab)):
        raise CannotError("needs fresh weights (the fact trained=False)")
    loss, even = float(own_loss(exam, exam.text(2))), math.log(target.vocab or 1)
    message = f"the first loss is {loss:.4g}, and ln V is {even:.4g}"
    if not loss <= even + ABOVE:
        return Part("warn", message, loss, even + ABOVE)
    if (target.vocab or 0) >= 16 and loss < BELOW * even and target.kind != "encoder":
        return Part("warn", f"{message}: random tokens cannot be known so well", loss, BELOW * even)
    return Part("pass", message, loss, even + ABOVE)


def fresh(module: nn.Module, vocab: int | None) -> bool:
    """Whether no step was taken: what begins at one or zero is still there, and rows of the table are alike."""
    gains = [each for name, each in module.named_parameters() if each.ndim == 1 and each.numel() > 1]
    if not gains or not all(bool((each == each[0]).all()) for each in gains if not is_drawn(each)):
        return False
    if not any(bool((each == each[0]).all()) for each in gains):
        return False
    for part in module.modules():
        if isinstance(part, nn.Embedding) and part.num_embeddings == vocab:
            rows = part.weight.float().norm(dim=1)
            rows = rows[rows > 0]
            if len(rows) < 2 or float(rows.std() / rows.mean()) > 3 / math.sqrt(2 * part.embedding_dim):
                return False
    return True


def is_drawn(bias: Tensor) -> bool:
    """Biases of nn.Linear begin uniform in ±1/√fan-in: none is larger than twice their mean size."""
    size = bias.float().abs()
    return bool(bias.numel() >= 8 and size.max() <= 2.5 * size.mean() and size.max() < 1)


@check(
    "overfit",
    catches="a model that cannot learn a single line by heart: something between loss and weights is broken",
    cause="the graph is cut (detach, no_grad, .data, numpy), a backward pass of one's own is wrong, or the loss is",
    fix="follow the gradient back from the loss; compare a backward pass of one's own with torch.autograd.gradcheck",
    needs=("logits", "module"),
    after=("gradient-reach", "loss-shift", "loss-uniform"),
)
def overfit(exam: Exam) -> Part:
    """Take a few tens of steps of AdamW on one short text, with copies of the weights: the loss must fall clearly."""
    module = exam.target.module
    assert module is not None
    tensors = trained_tensors(exam)
    count = sum(each.numel() for each in tensors.values())
    if count > SMALL or exam.slow:
        raise CannotError(f"needs a small model (at most {SMALL:,} parameters), for it is trained")
    tokens = exam.text(1, min(8, exam.length))
    best = math.inf
    first = math.inf
    for rate in RATES:
        with swapped(module, Tensor.clone), torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            optimiser = torch.optim.AdamW(tensors.values(), lr=rate, weight_decay=0.0)
            for step in range(STEPS):
                loss = float(backward(exam, tokens))
                first = loss if step == 0 else first
                best = min(best, loss)
                if best <= FALLS * first:
                    break
                optimiser.step()
        forget(exam)
        if best <= FALLS * first:
            message = f"the loss of one text falls from {first:.4g} to {best:.4g} in {step} steps"
            return Part("pass", message, best, FALLS * first)
    message = f"{STEPS} steps of AdamW on one text bring the loss from {first:.4g} to no less than {best:.4g}"
    return Part("fail", message, best, FALLS * first)


@check(
    "gradient-reach",
    catches="parameters that act and get no gradient: they never learn, and nothing says so",
    cause="detach(), no_grad(), .data or a new tensor made from numbers cuts the graph, as reentrant checkpointing may",
    fix="compute with the parameter itself, under grad, all the way from the loss",
    needs=("logits", "module"),
)
def gradient_reach(exam: Exam) -> Iterator[Part]:
    """Run back from the loss of a text. A parameter without a gradient is moved a little: where the loss then changes,
    it acts, and should have had one. Unused experts and heads that see one token only have none with reason. Then
    move the text's vectors: what the logits change by must be what the gradient says."""
    module = exam.target.module
    assert module is not None
    refuse_compiled(module)
    tensors = trained_tensors(exam)
    tokens, loss, found = slopes(exam)
    bad = [name for name, each in found.items() if not each.finite]
    silent = [name for name, each in found.items() if not each.alive]
    if not math.isfinite(loss):
        raise CannotError("needs a loss that is a number")
    if bad:
        yield Part("fail", f"the gradient of {bad[0]} is not finite", len(bad), 0, bad[0])
        return
    acting = [] if not silent or not acts(exam, tokens, [tensors[name] for name in silent]) else silent
    named = [name for name in acting[:12] if acts(exam, tokens, [tensors[name]])]
    if named:
        more = f" and {len(acting) - 1} more" if len(acting) > 1 else ""
        message = f"{named[0]}{more} act on the loss and get no gradient"
        yield Part("fail", message, len(acting), 0, named[0])
        return
    reached = len(tensors) - len(silent)
    yield Part("pass", f"{reached} of {len(tensors)} parameters get a gradient; the others do not act on this text")
    try:
        yield slope(exam)
    except CannotError as error:
        yield Part("skip", f"skipped: the slope {error}")


@torch.no_grad()
def acts(exam: Exam, tokens: Tensor, tensors: list[nn.Parameter]) -> bool:
    """Whether the loss changes when these are moved a little, by far more than rounding would."""
    draw = torch.Generator().manual_seed(exam.seed)
    before = float(own_loss(exam, tokens))
    moved = 0.0
    floor = MARGIN * exam.noise(lambda: own_loss(exam, tokens).reshape(1))
    for sign in (1.0, -1.0):
        kept = [(each, each.data) for each in tensors]
        try:
            for each, data in kept:
                size = float(data.float().square().mean().sqrt())
                noise = torch.randn(data.shape, generator=draw).to(data.device)
                each.data = (data.float() + sign * NUDGE * (size or 1.0) * noise).to(data.dtype)
            moved = max(moved, abs(float(own_loss(exam, tokens)) - before))
        finally:
            for each, data in kept:
                each.data = data
    return moved > floor


@check(
    "update-ratio",
    catches="matrices that a usual step of Adam would overwrite, or leave as they are",
    cause="weights far too small or far too large, or a gradient so small that Adam's ε swallows it",
    fix="initialise matrices with about 0.02 or 1/√width, and look at how gradients shrink on their way",
    needs=("logits", "module"),
    after=("gradient-reach",),
)
def update_ratio(exam: Exam) -> Part:
    """Compare what a first step of Adam at 3e-4 would add to each matrix with the matrix itself."""
    _, loss, found = slopes(exam)
    ratios = {name: each.ratio for name, each in found.items() if each.ratio is not None}
    if not ratios or not math.isfinite(loss):
        raise CannotError("needs matrices with a gradient")
    low, high = min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__)
    if ratios[high] > MOST:
        message = f"a step of Adam at {RATE:g} adds {ratios[high]:.3g} times itself to {high}"
        return Part("warn", message, ratios[high], MOST, high)
    if ratios[low] < LEAST:
        message = f"a step of Adam at {RATE:g} adds {ratios[low]:.3g} of itself to {low}"
        return Part("warn", message, ratios[low], LEAST, low)
    usual = sorted(ratios.values())[len(ratios) // 2]
    return Part("pass", f"a step of Adam at {RATE:g} adds about {usual:.2g} of itself to a matrix", usual)
