"""Loss checks: loss-shift, loss-reduction, loss-eos, loss-ignore-index."""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from torch.nn import functional as F

from cutaway.check.adapters.user_functions import describe_value
from cutaway.check.checked_model import require
from cutaway.check.context import CheckContext, TensorFunction
from cutaway.check.module_state import perturb_weights
from cutaway.check.numerics import NOISE_MARGIN, Difference
from cutaway.check.registry import register_check
from cutaway.check.report.finding import CaseResult, SkipCheckError, failure, skipped, success, warning
from cutaway.errors import format_raised

IGNORE_INDEX = -100
"""Label that the loss ignores."""
_SHIFT_NAMES = {0: "the token itself", 1: "the next token", 2: "the token after the next", -1: "the previous token"}
_LEAK_CHECKS = ("causality", "causality-paths", "eval-determinism")
"""If one of these checks fails, the loss cannot be compared with the logits."""
_FACTOR_TOLERANCE = 1e-3
"""Relative tolerance for recognizing a shift."""
_LOSS_GRADIENT_TOLERANCE = 0.02
"""Largest error of the gradient of the loss, relative to the gradient of the mean of −log p."""


def _label_shift(ctx: CheckContext) -> int:
    """Shift between logits and labels: 1 for next-token prediction, 0 for an encoder."""
    return 0 if ctx.model.kind == "encoder" else 1


def _token_losses(logits: Tensor, labels: Tensor, shift: int) -> tuple[Tensor, Tensor]:
    """−log p of each label that is not ignored, and the (row, position) of these labels."""
    length = labels.shape[1] - shift
    if length < 1:
        raise SkipCheckError("needs longer sequences")
    targets = labels[:, shift:]
    counted = targets != IGNORE_INDEX
    losses = F.cross_entropy(logits[:, :length][counted].float(), targets[counted], reduction="none")
    return losses, counted.nonzero() + torch.tensor([0, shift], device=labels.device)


def _mean_loss(logits: Tensor, labels: Tensor, shift: int) -> Tensor:
    """Mean of −log p over the labels that are not ignored."""
    return _token_losses(logits, labels, shift)[0].mean()


def _require_vocab_logits(ctx: CheckContext, logits: Tensor) -> Tensor:
    """Return the logits; raise SkipCheckError if their last axis is smaller than the vocabulary (no output head)."""
    if logits.shape[-1] < (ctx.model.vocab_size or 0):
        raise SkipCheckError("needs logits over the vocabulary")
    return logits


def compute_loss(ctx: CheckContext, tokens: Tensor) -> Tensor:
    """Loss with `tokens` as labels: the model's own or, if it has no loss function, computed from the logits."""
    if ctx.model.loss is not None:
        return _require_scalar(ctx.model.loss(tokens, tokens)).reshape(())
    return _mean_loss(_require_vocab_logits(ctx, ctx.logits(tokens)), tokens, _label_shift(ctx))


def model_loss(ctx: CheckContext, tokens: Tensor, labels: Tensor) -> Tensor:
    """The model's own loss, as a tensor of shape (1,)."""
    return _require_scalar(require(ctx.model.loss)(tokens, labels)).float().reshape(1)


def _require_scalar(loss: object) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise SkipCheckError(f"needs a scalar loss; this one is {describe_value(loss)}")
    return loss


def _reference_loss(ctx: CheckContext, logits: Tensor, labels: Tensor) -> Tensor:
    """The loss computed from the logits, as a tensor of shape (1,)."""
    return _mean_loss(logits, labels, _label_shift(ctx)).reshape(1)


def _compare_loss(ctx: CheckContext, tokens: Tensor, labels: Tensor, logits: Tensor) -> Difference:
    """Compare the model's own loss with the loss computed from `logits`."""
    diff = ctx.compare(lambda: _reference_loss(ctx, logits, labels), lambda: model_loss(ctx, tokens, labels))
    # Implementations round a mean differently, and the noise of a single number is underestimated.
    scale = max(1.0, float(logits.float().abs().max()))
    diff.tolerance = max(diff.tolerance, NOISE_MARGIN * (ctx.noise_ratio + 1e-6) * scale)
    return diff


@contextmanager
def distinct_logits(ctx: CheckContext, tokens: Tensor) -> Iterator[Tensor]:
    """Yield the logits of these tokens. If the losses of all tokens are equal (as with a zero head), the weights of a
    small model are perturbed while the context is active."""
    with ExitStack() as stack:
        logits = _require_vocab_logits(ctx, ctx.base_logits(tokens))
        if _has_uniform_losses(ctx, tokens, logits) and ctx.model.module is not None:
            stack.enter_context(perturb_weights(ctx.module, ctx.generator))
            logits = ctx.logits(tokens)
        if _has_uniform_losses(ctx, tokens, logits):
            raise SkipCheckError("needs logits that differ between tokens")
        yield logits


def _has_uniform_losses(ctx: CheckContext, tokens: Tensor, logits: Tensor) -> bool:
    """Whether −log p is the same for all tokens."""
    losses = _token_losses(logits, tokens, _label_shift(ctx))[0]
    return bool(losses.max() - losses.min() <= 1e-5 + NOISE_MARGIN * ctx.noise_ratio * float(losses.abs().max()))


@register_check("loss-shift", needs=("logits", "loss"), depends_on=_LEAK_CHECKS)
def loss_shift(ctx: CheckContext) -> CaseResult:
    """Catches labels shifted twice or not at all: the model learns the token after the next, or to copy its input.

    Compare the loss with the mean of −log p from the model's own logits, with labels shifted by 0, 1 and 2. The loss of
    a decoder must equal the mean with a shift of 1, and the loss of an encoder the mean with a shift of 0.

    Cause: data and model both shift the labels, or neither does; or the shift crosses row boundaries.
    Fix: shift once, per row: logits[:, :-1] against labels[:, 1:].
    """
    tokens, expected_shift = ctx.random_tokens(2), _label_shift(ctx)
    if tokens.shape[1] < 4:
        raise SkipCheckError("needs sequences of four tokens")
    expected_name = _SHIFT_NAMES[expected_shift]
    with distinct_logits(ctx, tokens) as logits:
        diff = _compare_loss(ctx, tokens, tokens, logits)
        if diff.within_tolerance:
            return diff.success(f"the loss predicts {expected_name}")
        value = float(model_loss(ctx, tokens, tokens))
        for name, other in _losses_by_shift(logits.float(), tokens, expected_shift):
            if abs(value - other) <= diff.tolerance:
                return diff.failure(f"the loss predicts {name}, not {expected_name}")
        shift = _infer_shift(ctx, tokens, logits.float())
    if shift is None:
        raise SkipCheckError("needs a loss that is −log p of its logits with some shift; see loss-reduction")
    if shift == expected_shift:
        return success(f"the loss predicts {expected_name}")
    name = _SHIFT_NAMES.get(shift, f"the token {shift} positions ahead")
    return failure(f"the loss predicts {name}, not {expected_name}", shift, expected_shift)


def _losses_by_shift(logits: Tensor, tokens: Tensor, expected_shift: int) -> Iterator[tuple[str, float]]:
    """Yield (description, loss) for each wrong way to shift the labels."""
    log_probs = logits.log_softmax(-1)  # (B, T, V)
    for shift in (0, 1, 2):
        if shift != expected_shift:
            yield _SHIFT_NAMES[shift], float(_mean_loss(logits, tokens, shift))
    if expected_shift:  # a loss may get the sequence without its last token
        yield _SHIFT_NAMES[0], float(_mean_loss(logits[:, :-1], tokens[:, :-1], 0))
    yield _SHIFT_NAMES[-1], float(-log_probs[:, 1:].gather(-1, tokens[:, :-1, None]).mean())
    flat = log_probs.flatten(0, 1)  # (B·T, V)
    for shift in (1, 2):
        across_rows = -flat[:-shift].gather(-1, tokens.flatten()[shift:, None])
        yield f"{_SHIFT_NAMES[shift]}, across row boundaries", float(across_rows.mean())
        rolled = -log_probs.gather(-1, tokens.roll(-shift, 1)[..., None])
        yield f"{_SHIFT_NAMES[shift]}, with the labels rolled around each row", float(rolled.mean())
    # The labels are shifted once per row and once in the flattened batch.
    mixed = -log_probs[:, :-2].gather(-1, tokens[:, 2:, None]).sum() - flat[tokens.shape[1] - 2, tokens[1, 0]]
    yield f"{_SHIFT_NAMES[2]}, across row boundaries", float(mixed) / (tokens.numel() - 2)


def _infer_shift(ctx: CheckContext, tokens: Tensor, logits: Tensor) -> int | None:
    """The shift that explains the effect of one label on the loss, even if the loss has other terms; None if none
    does."""
    position = tokens.shape[1] // 2
    other = ctx.replace_tokens(tokens, slice(position, position + 1))
    first, second = torch.full_like(tokens, IGNORE_INDEX), torch.full_like(tokens, IGNORE_INDEX)
    first[:, position], second[:, position] = tokens[:, position], other[:, position]
    change = float(model_loss(ctx, tokens, first) - model_loss(ctx, tokens, second))
    for shift in (1, 0, 2, -1, 3):
        if 0 <= position - shift < tokens.shape[1]:
            row = logits[:, position - shift]  # (B, V)
            pairs = row.gather(1, other[:, position, None]) - row.gather(1, tokens[:, position, None])
            expected = float(pairs.mean())
            if abs(change - expected) <= _FACTOR_TOLERANCE * abs(expected) + 1e-6:
                return shift
    return None


@register_check("loss-reduction", needs=("logits", "loss"), depends_on=("loss-shift", *_LEAK_CHECKS))
def loss_reduction(ctx: CheckContext) -> CaseResult:
    """Catches a loss that is not the mean of −log p: a sum, a mean over the vocabulary, softmax applied twice.

    Compare the loss with the mean of −log p from the model's own logits (ln V if the logits are uniform). If the two
    differ, losses with other labels show whether the loss has a wrong factor or an added term. Label smoothing and
    auxiliary losses are not bugs. If the two are equal, their gradients must be equal too.

    Cause: the wrong reduction or denominator, ignored token ids, or probabilities passed instead of logits.
    Fix: use F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()): uniform logits give ln V.
    """
    tokens, shift = ctx.random_tokens(2), _label_shift(ctx)
    with distinct_logits(ctx, tokens) as logits:
        diff = _compare_loss(ctx, tokens, tokens, logits)
        if diff.within_tolerance:
            return _check_loss_gradient(ctx, tokens) or diff.success("the loss is the mean of −log p")
        labels = [tokens, *(ctx.replace_tokens(tokens) for _ in range(3))]
        actual = [float(model_loss(ctx, tokens, y)) for y in labels]
        expected = [float(_reference_loss(ctx, logits, y)) for y in labels]
    # Fit actual = factor · expected + constant.
    factors = [(actual[0] - actual[n]) / ((expected[0] - expected[n]) or 1e-30) for n in (1, 2, 3)]
    factor = sorted(factors)[1]
    message = f"the loss is {actual[0]:.4g}, but the mean of −log p is {expected[0]:.4g}"
    if factor == 0 or max(factors) - min(factors) > 0.02 * abs(factor):
        message += "; other labels do not change the two by a common factor"
        return diff.failure(message)
    constant = actual[0] - factor * expected[0]
    used = logits[:, : tokens.shape[1] - shift].float()
    uniform = float((used.logsumexp(-1) - used.mean(-1)).mean())  # mean of −log p over the vocabulary
    if abs(factor - 1) < 0.01:
        message = f"the loss is the mean of −log p plus {constant:.3g}, which does not depend on the labels"
        return success(message, constant)
    if 0 < factor < 1 and abs(constant - (1 - factor) * uniform) < 0.02 * max(abs(constant), 1e-6):
        return success(f"the loss is −log p with label smoothing of {1 - factor:.3g}", factor)
    message += f": a factor of {factor:.4g}{_describe_factor(ctx, factor, tokens)}"
    return failure(message, factor, 1.0)


def _check_loss_gradient(ctx: CheckContext, tokens: Tensor) -> CaseResult | None:
    """A failure if the gradient of the loss differs from that of the mean of −log p of the logits; otherwise None."""
    if ctx.model.module is None or ctx.is_slow:
        return None
    params = [param for param in ctx.module.parameters() if param.requires_grad]
    computations: tuple[TensorFunction, ...] = (
        lambda: model_loss(ctx, tokens, tokens),
        lambda: _reference_loss(ctx, ctx.logits(tokens), tokens),
    )
    gradients = []
    try:
        with torch.enable_grad():
            for compute in computations:
                values = torch.autograd.grad(compute().sum(), params, allow_unused=True)
                gradients.append([torch.zeros_like(p) if g is None else g for g, p in zip(values, params, strict=True)])
    except RuntimeError:  # a loss or logits without gradients: see gradient-flow
        return None
    pairs = list(zip(*gradients, strict=True))
    error = math.hypot(*(float((actual.float() - expected.float()).norm()) for actual, expected in pairs))
    size = math.hypot(*(float(expected.float().norm()) for _, expected in pairs))
    if not error > _LOSS_GRADIENT_TOLERANCE * size:
        return None
    return failure(
        "the loss is the mean of −log p, but its gradient is not the gradient of the mean of −log p",
        error / max(size, 1e-30),
        _LOSS_GRADIENT_TOLERANCE,
        cause="a part of the loss is detached, or its custom backward is wrong or has another factor",
        fix="use F.cross_entropy, or compare the gradient of the loss with that of F.cross_entropy",
    )


def _describe_factor(ctx: CheckContext, factor: float, tokens: Tensor) -> str:
    """The mistake that explains a factor on the loss, in parentheses; empty if no known mistake does."""
    batch_size, num_labels = len(tokens), tokens.shape[1] - _label_shift(ctx)  # labels per row
    known = {
        "a sum over all tokens": batch_size * num_labels,
        "a sum over the tokens of a row": num_labels,
        "a sum over the rows": batch_size,
        "also a mean over the vocabulary": 1 / require(ctx.model.vocab_size),
        "bits instead of nats": 1.4427,
        "positions without labels counted in the denominator": num_labels / tokens.shape[1],
        "divided twice by the number of rows": 1 / batch_size,
        "divided twice by the number of tokens": 1 / (batch_size * num_labels),
        "divided twice by the tokens of a row": 1 / num_labels,
    }
    return next((f" ({name})" for name, value in known.items() if abs(factor / value - 1) < 0.01), "")


@register_check("loss-eos", needs=("logits", "loss"), depends_on=("loss-shift", "loss-reduction", "eval-determinism"))
def loss_eos(ctx: CheckContext) -> Iterator[CaseResult]:
    """Catches an eos token that is never a label: the model does not learn to stop.

    End each row with the eos token, then put padding with labels of -100 after it: the loss must include the eos token
    in both cases.

    Cause: labels equal to the pad token are ignored, and the pad token is the eos token.
    Fix: ignore padding by the attention mask or by lengths, not by the token id.
    """
    eos = ctx.model.eos_token_id
    if eos is None:
        raise SkipCheckError("needs the eos token id (the property eos_token_id=)")
    tokens = ctx.random_tokens(2)
    if tokens.shape[1] < 5:
        raise SkipCheckError("needs sequences of five tokens")
    tokens[:, -1] = eos
    padded_tokens, padded_labels = tokens.clone(), tokens.clone()
    padded_tokens[1, -3:], padded_labels[1, -3:] = eos, IGNORE_INDEX
    padded_labels[1, -3] = eos
    for inputs, labels, place in (
        (tokens, tokens, "at the end of a row"),
        (padded_tokens, padded_labels, "before padding"),
    ):
        with distinct_logits(ctx, inputs) as logits:
            without_eos = labels.masked_fill(labels == eos, IGNORE_INDEX)
            loss = float(model_loss(ctx, inputs, labels))
            included, excluded = (float(_reference_loss(ctx, logits, y)) for y in (labels, without_eos))
        if abs(loss - excluded) < 0.2 * abs(included - excluded):
            message = f"the eos token {place} is ignored: the loss is {loss:.4g} instead of {included:.4g}"
            yield failure(message, loss, included, f"position {tokens.shape[1] - 1}")
            return
        if abs(loss - included) < 0.2 * abs(included - excluded):
            yield success(f"the loss includes the eos token {place}")
        else:
            yield skipped("the loss is neither the value with the eos token nor the one without")


@register_check(
    "loss-ignore-index", needs=("logits", "loss"), depends_on=("loss-shift", "loss-reduction", *_LEAK_CHECKS)
)
def loss_ignore_index(ctx: CheckContext) -> Iterator[CaseResult]:
    """Catches labels of -100 that count in the loss: padding is learned, or reduces the mean.

    Set labels at the end of the rows to -100, more in one row than in the other: the loss must be the mean over the
    other labels. Labels of -100 at the start of a row or inside it that are not ignored are a warning. Then replace the
    tokens after a decoder's last label: the loss must not change.

    Cause: the mean is over all positions, or per row, or the labels of padding are not ignored.
    Fix: exclude labels of -100 from the sum and from the count: ignore_index=-100 over the flattened batch.
    """
    tokens = ctx.random_tokens(2)
    length = tokens.shape[1]
    if length < 5:
        raise SkipCheckError("needs sequences of five tokens")
    labels = tokens.clone()
    labels[0, -1] = IGNORE_INDEX
    labels[1, length // 2 :] = IGNORE_INDEX
    with distinct_logits(ctx, tokens) as logits:
        case = _check_ignored_labels(ctx, tokens, labels, logits, "at the end of a row")
        yield case
        if case.verdict == "fail":
            return
        if case.verdict == "pass":
            yield from _check_leading_labels(ctx, tokens, logits)
        if ctx.model.kind == "encoder":
            return
        labels = tokens.clone()
        labels[:, length // 2 :] = IGNORE_INDEX
        other = ctx.replace_tokens(tokens, slice(length // 2, None))
        base = model_loss(ctx, tokens, labels)
        diff = ctx.compare(
            lambda: model_loss(ctx, tokens, labels), lambda: model_loss(ctx, other, labels), first_result=base
        )
        diff.tolerance = max(diff.tolerance, 1e-5 * max(1.0, abs(float(base))))
        yield diff.expect_equal(
            passed="the tokens after the last label do not change the loss",
            failed="the tokens after the last label, such as padding, change the loss",
        )


def _check_leading_labels(ctx: CheckContext, tokens: Tensor, logits: Tensor) -> Iterator[CaseResult]:
    """Warn if labels of -100 at the start of a row or inside it are not ignored. Padding does not need them, but
    fine-tuning does, where the labels of a prompt are -100."""
    length = tokens.shape[1]
    for place, ignored in (("at the start of a row", slice(0, length // 2)), ("inside a row", slice(2, length // 2))):
        labels = tokens.clone()
        labels[1, ignored] = IGNORE_INDEX
        reason = "; padding at the end of rows is ignored, but fine-tuning needs this to mask the labels of prompts"
        try:
            case = _check_ignored_labels(ctx, tokens, labels, logits, place)
        except Exception as error:  # any exception means that the loss does not support these labels
            case = failure(f"with labels of -100 {place} the loss {format_raised(error)}")
        if case.verdict == "fail":
            yield warning(case.message + reason, case.measured, case.threshold)
            return
        yield case


def _check_ignored_labels(ctx: CheckContext, tokens: Tensor, labels: Tensor, logits: Tensor, place: str) -> CaseResult:
    """Check that the loss is the mean over the labels that are not -100."""
    diff = _compare_loss(ctx, tokens, labels, logits)
    if diff.within_tolerance:
        return diff.success(f"labels of -100 {place} are ignored")
    if abs(float(model_loss(ctx, tokens, tokens) - _reference_loss(ctx, logits, tokens))) > diff.tolerance:
        return CaseResult("skip", "skipped: the loss has other terms", diff.max_abs, diff.tolerance)
    loss, expected = float(model_loss(ctx, tokens, labels)), float(_reference_loss(ctx, logits, labels))
    rules = _losses_by_padding_rule(logits, tokens, labels, _label_shift(ctx))
    reason = next((name for name, value in rules.items() if abs(value - loss) <= diff.tolerance), "")
    message = f"with labels of -100 {place} the loss is {loss:.4g}, but the mean over the other labels is "
    return diff.failure(f"{message}{expected:.4g}{reason}")


def _losses_by_padding_rule(logits: Tensor, tokens: Tensor, labels: Tensor, shift: int) -> dict[str, float]:
    """Description of a wrong rule for labels of -100 → the loss that this rule would give."""
    losses, index = _token_losses(logits, labels, shift)
    num_labels = tokens.shape[1] - shift
    row_means = torch.stack([losses[index[:, 0] == row].mean() for row in range(len(tokens))])
    zero_labels = labels.masked_fill(labels == IGNORE_INDEX, 0)
    return {
        ": labels of -100 are counted in the denominator": float(losses.sum()) / (len(tokens) * num_labels),
        ": the loss is a mean of row means": float(row_means.mean()),
        ": labels of -100 are learned as token 0": float(_mean_loss(logits, zero_labels, shift)),
        ": the tokens with labels of -100 are learned too": float(_mean_loss(logits, tokens, shift)),
    }
