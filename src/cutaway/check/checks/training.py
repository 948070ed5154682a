"""Whether a model can learn: its first loss, its gradients, a few steps, and steps in pieces or with less memory."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cutaway.check.checks.loss import DistinctLogits, model_loss
from cutaway.check.context import CheckContext
from cutaway.check.module_state import MAX_PERTURBED_PARAMS, require_uncompiled, swap_tensors
from cutaway.check.numerics import NOISE_MARGIN
from cutaway.check.probes.embedding_gradients import check_finite_differences
from cutaway.check.probes.reference_loss import IGNORE_INDEX, compute_loss
from cutaway.check.registry import register_check
from cutaway.check.report.finding import CaseResult, SkipCheckError

MAX_LOSS_ABOVE_UNIFORM, MIN_LOSS_RATIO = 2.0, 0.5
"""Nats above ln V, and the share of it, from which on a first loss is no usual one: logits of σ² = 4 give 2 more."""


OVERFIT_LRS, OVERFIT_STEPS, OVERFIT_LOSS_RATIO = (3e-3, 3e-2, 3e-4), 30, 0.9
"""Learning rates that are tried in turn, for so many steps; the loss must fall to this share."""


RMS_SAMPLE_SIZE = 1 << 16
"""Numbers of a gradient by which its usual size is told."""


GRADIENT_SAMPLE_SIZE = 256
"""Numbers of a gradient that are compared."""


PARAMETER_PERTURBATION = 1e-2
"""By which share of its usual size a tensor is moved to see whether it acts."""


ADAM_LR = 3e-4


MIN_UPDATE_RATIO, MAX_UPDATE_RATIO = 1e-11, 3.0
"""Of a tensor's usual size: what a first step of Adam should move it by."""


def _trainable_parameters(context: CheckContext) -> dict[str, nn.Parameter]:
    """Parameters that want a gradient."""
    module = context.model.module
    assert module is not None
    found = {name: each for name, each in module.named_parameters() if each.requires_grad}
    if not found:
        raise SkipCheckError("needs parameters that require a gradient")
    return found


def _run_backward(context: CheckContext, tokens: Tensor) -> Tensor:
    """The loss of a text, with fresh gradients in the parameters."""
    for each in _trainable_parameters(context).values():
        each.grad = None
    with torch.enable_grad():
        loss = compute_loss(context, tokens)
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


@dataclass
class GradientStats:
    """What is known of one parameter's gradient."""

    is_finite: bool
    is_nonzero: bool
    update_ratio: float | None
    """A first step of Adam as a share of the parameter's usual size; None where there is none, or it is no matrix."""


def _collect_gradient_stats(context: CheckContext) -> tuple[Tensor, float, dict[str, GradientStats]]:
    """A text, its loss, and of each parameter's gradient what the checks ask; made once, for it costs a way back."""

    def look() -> tuple[Tensor, float, dict[str, GradientStats]]:
        tokens = context.random_tokens(1, min(12, context.seq_len))
        loss = float(_run_backward(context, tokens))
        found = {name: _gradient_stats(each) for name, each in _trainable_parameters(context).items()}
        _clear_gradients(context)
        return tokens, loss, found

    return context.compute_once(f"slopes {context.noise_ratio}", look)


@torch.no_grad()
def _gradient_stats(parameter: nn.Parameter) -> GradientStats:
    if parameter.grad is None:
        return GradientStats(True, False, None)
    total = float(parameter.grad.abs().sum())
    flat, weights = parameter.grad.flatten(), parameter.flatten()
    step = max(1, flat.numel() // RMS_SAMPLE_SIZE)
    some = flat[::step].float()
    some = some[some != 0]
    size = float(weights[::step].float().square().mean().sqrt())
    ratio = None
    if parameter.ndim >= 2 and size > 0 and len(some):
        ratio = ADAM_LR * float((some / (some.abs() + 1e-8)).square().mean().sqrt()) / size
    return GradientStats(math.isfinite(total), total != 0, ratio)


def _clear_gradients(context: CheckContext) -> None:
    for each in _trainable_parameters(context).values():
        each.grad = None


def _sample_gradients(context: CheckContext, tokens: Tensor) -> Tensor:
    """The loss, and of each parameter's gradient a sample."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(context.seed)
        loss = _run_backward(context, tokens)
    found = [loss.float().reshape(1)]
    for each in _trainable_parameters(context).values():
        flat = (torch.zeros_like(each) if each.grad is None else each.grad).detach().flatten().float()
        found.append(flat[:: max(1, flat.numel() // GRADIENT_SAMPLE_SIZE)])
    _clear_gradients(context)
    return torch.cat(found)


@register_check(
    "initial-loss",
    catches="fresh weights of the wrong size: the first loss is far from ln V, and the first steps only mend that",
    cause="the embedding kept its default of N(0, 1) and is the head too, or the stream grows with depth",
    fix="initialize the embedding with about 0.02, and layers that add to the stream with 0.02/√(2·layers)",
    needs=("logits", "module"),
    depends_on=("loss-shift", "loss-reduction"),
)
@torch.no_grad()
def initial_loss(context: CheckContext) -> CaseResult:
    """The loss of fresh weights on random tokens must be near ln V. Weights are taken for fresh where the target says
    so, or where each norm's gain and each bias is as it began and rows of the token table are of one length."""
    target = context.model
    assert target.module is not None
    assert target.logits is not None
    if wrong := _detect_non_logits(target.logits(context.random_tokens(2)), target.kind):
        return wrong
    if target.trained or (target.trained is None and not _is_untrained(target.module, target.vocab_size)):
        raise SkipCheckError("needs fresh weights (the property trained=False)")
    loss, even = float(compute_loss(context, context.random_tokens(2))), math.log(target.vocab_size or 1)
    message = f"the first loss is {loss:.4g}, and ln V is {even:.4g}"
    if not loss <= even + MAX_LOSS_ABOVE_UNIFORM:
        return CaseResult("warn", message, loss, even + MAX_LOSS_ABOVE_UNIFORM)
    if (target.vocab_size or 0) >= 16 and loss < MIN_LOSS_RATIO * even and target.kind != "encoder":
        return CaseResult("warn", f"{message}: random tokens cannot be known so well", loss, MIN_LOSS_RATIO * even)
    return CaseResult("pass", message, loss, even + MAX_LOSS_ABOVE_UNIFORM)


def _is_untrained(module: nn.Module, vocab_size: int | None) -> bool:
    """Whether no step was taken: what begins at one or zero is still there, and rows of the table are alike."""
    gains = [each for name, each in module.named_parameters() if each.ndim == 1 and each.numel() > 1]
    if not gains or not all(bool((each == each[0]).all()) for each in gains if not _is_default_bias_init(each)):
        return False
    if not any(bool((each == each[0]).all()) for each in gains):
        return False
    for part in module.modules():
        if isinstance(part, nn.Embedding) and part.num_embeddings == vocab_size:
            rows = part.weight.float().norm(dim=1)
            rows = rows[rows > 0]
            if len(rows) < 2 or float(rows.std() / rows.mean()) > 3 / math.sqrt(2 * part.embedding_dim):
                return False
    return True


def _is_default_bias_init(bias: Tensor) -> bool:
    """Biases of nn.Linear begin uniform in ±1/√fan-in: none is larger than twice their mean size."""
    size = bias.float().abs()
    return bool(bias.numel() >= 8 and size.max() <= 2.5 * size.mean() and size.max() < 1)


@register_check(
    "overfit",
    catches="a model that cannot learn a single line by heart: something between loss and weights is broken",
    cause="the graph is cut (detach, no_grad, .data, numpy), a backward pass of one's own is wrong, or the loss is",
    fix="follow the gradient back from the loss; compare a backward pass of one's own with torch.autograd.gradcheck",
    needs=("logits", "module"),
    depends_on=("gradient-flow", "loss-shift", "loss-reduction"),
)
def overfit(context: CheckContext) -> CaseResult:
    """Take a few tens of steps of AdamW on one short text, with copies of the weights: the loss must fall clearly."""
    module = context.model.module
    assert module is not None
    tensors = _trainable_parameters(context)
    count = sum(each.numel() for each in tensors.values())
    if count > MAX_PERTURBED_PARAMS or context.is_slow:
        raise SkipCheckError(f"needs a small model (at most {MAX_PERTURBED_PARAMS:,} parameters), for it is trained")
    tokens = context.random_tokens(1, min(8, context.seq_len))
    best = math.inf
    first = math.inf
    for rate in OVERFIT_LRS:
        with swap_tensors(module, Tensor.clone), torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            optimizer = torch.optim.AdamW(tensors.values(), lr=rate, weight_decay=0.0)
            for step in range(OVERFIT_STEPS):
                loss = float(_run_backward(context, tokens))
                first = loss if step == 0 else first
                best = min(best, loss)
                if best <= OVERFIT_LOSS_RATIO * first:
                    break
                optimizer.step()
        _clear_gradients(context)
        if best <= OVERFIT_LOSS_RATIO * first:
            message = f"the loss of one text falls from {first:.4g} to {best:.4g} in {step} steps"
            return CaseResult("pass", message, best, OVERFIT_LOSS_RATIO * first)
    message = f"{OVERFIT_STEPS} steps of AdamW on one text bring the loss from {first:.4g} to no less than {best:.4g}"
    return CaseResult("fail", message, best, OVERFIT_LOSS_RATIO * first)


@register_check(
    "gradient-flow",
    catches="parameters that act and get no gradient: they never learn, and nothing says so",
    cause="detach(), no_grad(), .data or a new tensor made from numbers cuts the graph, as reentrant checkpointing may",
    fix="compute with the parameter itself, under grad, all the way from the loss",
    needs=("logits", "module"),
)
def gradient_flow(context: CheckContext) -> Iterator[CaseResult]:
    """Run back from the loss of a text. A parameter without a gradient is moved a little: where the loss then changes,
    it acts, and should have had one. Unused experts and heads that see one token only have none with reason. Then
    move the text's vectors: what the logits change by must be what the gradient says."""
    module = context.model.module
    assert module is not None
    require_uncompiled(module)
    tensors = _trainable_parameters(context)
    tokens, loss, found = _collect_gradient_stats(context)
    bad = [name for name, each in found.items() if not each.is_finite]
    silent = [name for name, each in found.items() if not each.is_nonzero]
    if not math.isfinite(loss):
        raise SkipCheckError("needs a loss that is a number")
    if bad:
        yield CaseResult("fail", f"the gradient of {bad[0]} is not finite", len(bad), 0, bad[0])
        return
    acting = [] if not silent or not _affects_loss(context, tokens, [tensors[name] for name in silent]) else silent
    named = [name for name in acting[:12] if _affects_loss(context, tokens, [tensors[name]])]
    if named:
        more = f" and {len(acting) - 1} more" if len(acting) > 1 else ""
        message = f"{named[0]}{more} act on the loss and get no gradient"
        yield CaseResult("fail", message, len(acting), 0, named[0])
        return
    reached = len(tensors) - len(silent)
    yield CaseResult(
        "pass", f"{reached} of {len(tensors)} parameters get a gradient; the others do not act on this text"
    )
    try:
        yield check_finite_differences(context)
    except SkipCheckError as error:
        yield CaseResult("skip", f"skipped: the slope {error}")


@torch.no_grad()
def _affects_loss(context: CheckContext, tokens: Tensor, parameters: list[nn.Parameter]) -> bool:
    """Whether the loss changes when these are moved a little, by far more than rounding would."""
    draw = torch.Generator().manual_seed(context.seed)
    before = float(compute_loss(context, tokens))
    moved = 0.0
    floor = NOISE_MARGIN * context.measure_noise(lambda: compute_loss(context, tokens).reshape(1))
    for sign in (1.0, -1.0):
        kept = [(each, each.data) for each in parameters]
        try:
            for each, data in kept:
                size = float(data.float().square().mean().sqrt())
                noise = torch.randn(data.shape, generator=draw).to(data.device)
                each.data = (data.float() + sign * PARAMETER_PERTURBATION * (size or 1.0) * noise).to(data.dtype)
            moved = max(moved, abs(float(compute_loss(context, tokens)) - before))
        finally:
            for each, data in kept:
                each.data = data
    return moved > floor


@register_check(
    "update-ratio",
    catches="matrices that a usual step of Adam would overwrite, or leave as they are",
    cause="weights far too small or far too large, or a gradient so small that Adam's ε swallows it",
    fix="initialize matrices with about 0.02 or 1/√width, and look at how gradients shrink on their way",
    needs=("logits", "module"),
    depends_on=("gradient-flow",),
)
def update_ratio(context: CheckContext) -> CaseResult:
    """Compare what a first step of Adam at 3e-4 would add to each matrix with the matrix itself."""
    _, loss, found = _collect_gradient_stats(context)
    ratios = {name: each.update_ratio for name, each in found.items() if each.update_ratio is not None}
    if not ratios or not math.isfinite(loss):
        raise SkipCheckError("needs matrices with a gradient")
    low, high = min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__)
    if ratios[high] > MAX_UPDATE_RATIO:
        message = f"a step of Adam at {ADAM_LR:g} adds {ratios[high]:.3g} times itself to {high}"
        return CaseResult("warn", message, ratios[high], MAX_UPDATE_RATIO, high)
    if ratios[low] < MIN_UPDATE_RATIO:
        message = f"a step of Adam at {ADAM_LR:g} adds {ratios[low]:.3g} of itself to {low}"
        return CaseResult("warn", message, ratios[low], MIN_UPDATE_RATIO, low)
    usual = sorted(ratios.values())[len(ratios) // 2]
    return CaseResult("pass", f"a step of Adam at {ADAM_LR:g} adds about {usual:.2g} of itself to a matrix", usual)


@register_check(
    "gradient-accumulation",
    catches="gradient accumulation that is not the whole batch: short pieces weigh as much as long ones",
    cause="each piece's mean is taken, and the means are averaged, however many labels each piece has",
    fix="sum the losses of all pieces, and divide by the count of labels in all of them",
    needs=("loss", "accumulated_loss"),
    depends_on=("batch-isolation", "loss-shift", "loss-reduction", "loss-ignore-index"),
)
@torch.no_grad()
def gradient_accumulation(context: CheckContext) -> Iterator[CaseResult]:
    """Cut a batch into pieces with few and many labels: accumulated, they must have the loss of the whole batch."""
    assert context.model.accumulated_loss is not None
    accumulated = context.model.accumulated_loss
    tokens = context.random_tokens(3)
    labels = tokens.clone()
    labels[0, 3:] = IGNORE_INDEX
    pieces = [(tokens[:1], labels[:1]), (tokens[1:], labels[1:])]
    summed: Callable[[], Tensor] = lambda: accumulated(pieces).float().reshape(1)  # noqa: E731
    with DistinctLogits(context, tokens):
        whole = model_loss(context, tokens, labels)
        means = [float(model_loss(context, *piece)) for piece in pieces]
        gap = context.compare(lambda: model_loss(context, tokens, labels), summed, first_result=whole)
        gap.tolerance = max(gap.tolerance, 1e-5 * max(1.0, abs(float(whole))))
        value = float(summed())
    known = {"the mean of the pieces' means": sum(means) / 2, "the sum of the pieces' means": sum(means)}
    why = next((f"; it is {name}" for name, other in known.items() if abs(value - other) <= gap.tolerance), "")
    broken = f"two pieces accumulate to {value:.4g}, and the whole batch has a loss of {float(whole):.4g}{why}"
    yield context.expect_equal(gap, passed="accumulated pieces are the whole batch", failed=broken)


@register_check(
    "activation-checkpointing",
    catches="activation checkpointing that changes what is learned: other dropout masks, or gradients that are lost",
    cause="the second pass draws anew or sees other state, or inputs without a gradient cut the graph (reentrant)",
    fix="torch.utils.checkpoint with use_reentrant=False and preserve_rng_state=True",
    needs=("logits", "module", "set_activation_checkpointing"),
)
def activation_checkpointing(context: CheckContext) -> Iterator[CaseResult]:
    """In training mode, from one state of chance: the loss and the gradients with recomputation must be those without,
    as the model is, and with its dropouts at 0.3."""
    target = context.model
    assert target.module is not None
    assert target.set_activation_checkpointing is not None
    module, switch = target.module, target.set_activation_checkpointing
    require_uncompiled(module)
    tokens = context.random_tokens(1, min(8, context.seq_len))

    def made(on: bool) -> Tensor:
        module.train()
        switch(on)
        try:
            return _sample_gradients(context, tokens)
        finally:
            switch(False)
            module.eval()

    drops = [part for part in module.modules() if isinstance(part, nn.Dropout)]
    shares = [part.p for part in drops]
    try:
        for share in (None, 0.3) if drops and not context.is_slow else (None,):
            for part in drops if share is not None else ():
                part.p = share  # type: ignore[assignment]
            plain = made(False)
            gap = context.compare(lambda: made(False), lambda: made(True), first_result=plain, with_grad=True)
            when = "" if share is None else f" with dropout of {share:g}"
            held = f"loss and gradients are the same with recomputation{when}"
            part_ = context.expect_equal(
                gap, passed=held, failed=f"recomputation changes the loss or the gradients{when}"
            )
            part_.location = part_.location or (
                _gradient_location(context, gap.index[0]) if not gap.within_tolerance else None
            )
            yield part_
    finally:
        for part, p in zip(drops, shares, strict=True):
            part.p = p


def _gradient_location(context: CheckContext, index: int) -> str:
    """Which parameter's gradient a number of the sample is of."""
    if index == 0:
        return "the loss"
    seen = 1
    for name, each in _trainable_parameters(context).items():
        seen += len(range(0, each.numel(), max(1, each.numel() // GRADIENT_SAMPLE_SIZE)))
        if index < seen:
            return f"the gradient of {name}"
    return ""


def _detect_non_logits(logits: Tensor, kind: str) -> CaseResult | None:
    """Whether numbers are no logits: probabilities, or what an activation has left of them."""
    if logits.shape[-1] < 3 or not bool((logits >= 0).all()):
        return None
    if bool(((logits.float().sum(-1) - 1).abs() < 1e-2).all()):
        return CaseResult(
            "fail",
            "what it gives as logits are probabilities: none is negative, and they sum to one",
            cause="softmax is taken in the model, and the loss takes it again",
            fix="give the logits, and take softmax where probabilities are wanted",
        )
    zeros = float((logits == 0).float().mean())
    if kind != "encoder" and 0.05 < zeros < 1:
        return CaseResult(
            "fail",
            f"no logit is negative, and {zeros:.0%} are exactly zero",
            zeros,
            0.05,
            cause="an activation stands behind the head",
            fix="give what the head gives: unlikely tokens have negative logits",
        )
    return None
