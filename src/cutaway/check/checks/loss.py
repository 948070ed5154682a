"""Loss checks: loss-shift, loss-reduction, loss-eos, loss-ignore-index."""

from collections.abc import Iterator
from contextlib import ExitStack

import torch
from torch import Tensor

from cutaway.check.context import CheckContext
from cutaway.check.module_state import perturb_weights
from cutaway.check.numerics import NOISE_MARGIN, Difference
from cutaway.check.probes.reference_loss import IGNORE_INDEX, label_shift, mean_loss, require_vocab_logits, token_losses
from cutaway.check.registry import register_check
from cutaway.check.report.finding import CaseResult, SkipCheckError

SHIFT_NAMES = {0: "the token itself", 1: "the next token", 2: "the token after the next", -1: "the previous token"}
LEAK_CHECKS = ("causality", "causality-paths", "eval-determinism")
"""If logits depend on more than their input, the loss cannot be compared with them."""
FACTOR_TOLERANCE = 1e-3
"""Relative tolerance for recognizing a shift."""


def model_loss(context: CheckContext, tokens: Tensor, labels: Tensor) -> Tensor:
    """The model's own loss, as a tensor of shape (1,)."""
    assert context.model.loss is not None
    loss = context.model.loss(tokens, labels)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        output = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise SkipCheckError(f"needs a scalar loss; this one is {output}")
    return loss.float().reshape(1)


def _cached_logits(context: CheckContext, tokens: Tensor) -> Tensor:
    """Logits of a sequence; those of the last sequence are cached."""
    assert context.model.logits is not None
    cached = context.memo.get("last_logits")
    if cached is None or cached[0].shape != tokens.shape or not torch.equal(cached[0], tokens):
        cached = context.memo["last_logits"] = (tokens.clone(), context.model.logits(tokens))
    return cached[1]


def _expected_loss(context: CheckContext, tokens: Tensor, labels: Tensor, shift: int | None = None) -> Tensor:
    """The reference loss, computed from the logits."""
    logits = require_vocab_logits(context, _cached_logits(context, tokens))
    return mean_loss(logits, labels, label_shift(context) if shift is None else shift).reshape(1)


def _compare_loss(context: CheckContext, tokens: Tensor, labels: Tensor, shift: int | None = None) -> Difference:
    """Compare the model's own loss with the reference loss."""
    diff = context.compare(
        lambda: _expected_loss(context, tokens, labels, shift), lambda: model_loss(context, tokens, labels)
    )
    # Implementations round a mean differently, and the noise of a single number is underestimated.
    scale = float(_cached_logits(context, tokens).float().abs().max())
    return Difference(
        diff.max_abs, max(diff.tolerance, NOISE_MARGIN * (context.noise_ratio + 1e-6) * max(1.0, scale)), diff.index
    )


class DistinctLogits(ExitStack):
    """Context manager that perturbs the weights of a small model if all logits are equal (a zero head)."""

    def __init__(self, context: CheckContext, tokens: Tensor) -> None:
        super().__init__()
        self.context, self.tokens = context, tokens

    def __enter__(self) -> "DistinctLogits":
        super().__enter__()
        self.context.memo.pop("last_logits", None)
        self.callback(self.context.memo.pop, "last_logits", None)  # computed with these weights
        if _has_uniform_losses(self.context, self.tokens) and self.context.model.module is not None:
            self.enter_context(perturb_weights(self.context.model.module, self.context.generator))
            self.context.memo.pop("last_logits", None)
        if _has_uniform_losses(self.context, self.tokens):
            self.close()
            raise SkipCheckError("needs logits that differ between tokens")
        return self


def _has_uniform_losses(context: CheckContext, tokens: Tensor) -> bool:
    """Whether −log p is the same for all tokens."""
    logits = require_vocab_logits(context, _cached_logits(context, tokens))
    losses = token_losses(logits, tokens, label_shift(context))[0]
    return bool(losses.max() - losses.min() <= 1e-5 + NOISE_MARGIN * context.noise_ratio * float(losses.abs().max()))


@register_check(
    "loss-shift",
    catches="labels shifted twice or not at all: the model learns the token after the next, or to copy its input",
    cause="data and model both shift the labels, or neither does; or the shift crosses row boundaries",
    fix="shift once, per row: logits[:, :-1] against labels[:, 1:]",
    needs=("logits", "loss"),
    depends_on=LEAK_CHECKS,
)
@torch.no_grad()
def loss_shift(context: CheckContext) -> Iterator[CaseResult]:
    """Compare the loss with −log p of the tokens by the model's own logits, with labels shifted by 0, 1 and 2: a
    decoder must shift by 1, an encoder by 0."""
    tokens, expected_shift = context.random_tokens(2), label_shift(context)
    if tokens.shape[1] < 4:
        raise SkipCheckError("needs sequences of four tokens")
    expected_name = SHIFT_NAMES[expected_shift]
    with DistinctLogits(context, tokens):
        diff = _compare_loss(context, tokens, tokens)
        if diff.within_tolerance:
            yield CaseResult("pass", f"the loss predicts {expected_name}", diff.max_abs, diff.tolerance)
            return
        value = float(model_loss(context, tokens, tokens))
        for name, other in _losses_by_shift(context, tokens, expected_shift).items():
            if abs(value - other) <= diff.tolerance:
                message = f"the loss predicts {name.strip()}, not {expected_name}"
                yield CaseResult("fail", message, diff.max_abs, diff.tolerance)
                return
        shift = _infer_shift(context, tokens)
    if shift is None:
        raise SkipCheckError("needs a loss that is −log p of its logits with some shift; see loss-reduction")
    if shift == expected_shift:
        yield CaseResult("pass", f"the loss predicts {expected_name}")
    else:
        name = SHIFT_NAMES.get(shift, f"the token {shift} positions ahead")
        yield CaseResult("fail", f"the loss predicts {name}, not {expected_name}", shift, expected_shift)


def _losses_by_shift(context: CheckContext, tokens: Tensor, expected_shift: int) -> dict[str, float]:
    """The loss with wrong shifts, by name."""
    logits = _cached_logits(context, tokens).float()
    log_probs = logits.log_softmax(-1)  # (B, T, V)
    losses = {
        SHIFT_NAMES[shift]: float(mean_loss(logits, tokens, shift)) for shift in (0, 1, 2) if shift != expected_shift
    }
    if expected_shift:  # a loss may get the sequence without its last token
        losses |= {f"{SHIFT_NAMES[0]} ": float(mean_loss(logits[:, :-1], tokens[:, :-1], 0))}
    previous = -log_probs[:, 1:].gather(-1, tokens[:, :-1, None])
    losses[SHIFT_NAMES[-1]] = float(previous.mean())
    flat = log_probs.flatten(0, 1)  # (B·T, V)
    for shift in (1, 2):
        across_rows = -flat[:-shift].gather(-1, tokens.flatten()[shift:, None])
        losses[f"{SHIFT_NAMES[shift]}, across row boundaries"] = float(across_rows.mean())
        rolled = -log_probs.gather(-1, tokens.roll(-shift, 1)[..., None])
        losses[f"{SHIFT_NAMES[shift]}, with the labels rolled around each row"] = float(rolled.mean())
    # Shifted once per row and once in the flattened batch.
    mixed = -log_probs[:, :-2].gather(-1, tokens[:, 2:, None]).sum() - flat[tokens.shape[1] - 2, tokens[1, 0]]
    losses["the token after the next, across row boundaries"] = float(mixed) / (tokens.numel() - 2)
    return losses


def _infer_shift(context: CheckContext, tokens: Tensor) -> int | None:
    """The shift that explains the effect of one label on the loss, whatever other terms the loss has."""
    position = tokens.shape[1] // 2
    logits = _cached_logits(context, tokens).float()
    other = context.replace_tokens(tokens, slice(position, position + 1))
    first, second = torch.full_like(tokens, IGNORE_INDEX), torch.full_like(tokens, IGNORE_INDEX)
    first[:, position], second[:, position] = tokens[:, position], other[:, position]
    change = float(model_loss(context, tokens, first) - model_loss(context, tokens, second))
    for shift in (1, 0, 2, -1, 3):
        if 0 <= position - shift < tokens.shape[1]:
            row = logits[:, position - shift]  # (B, V)
            expected = float(
                (row.gather(1, other[:, position, None]) - row.gather(1, tokens[:, position, None])).mean()
            )
            if abs(change - expected) <= FACTOR_TOLERANCE * abs(expected) + 1e-6:
                return shift
    return None


@register_check(
    "loss-reduction",
    catches="a loss that is not the mean of −log p: a sum, a mean over the vocabulary, softmax applied twice",
    cause="the wrong reduction, the wrong denominator, or probabilities passed instead of logits",
    fix="use F.cross_entropy(logits.flatten(0, 1), labels.flatten()) on raw logits: uniform logits then give ln V",
    needs=("logits", "loss"),
    depends_on=("loss-shift", *LEAK_CHECKS),
)
@torch.no_grad()
def loss_reduction(context: CheckContext) -> Iterator[CaseResult]:
    """Compare the loss with the mean of −log p from the model's own logits (ln V if they are uniform). If they differ,
    other labels separate a factor from an added term: label smoothing and auxiliary losses are not bugs."""
    tokens, shift = context.random_tokens(2), label_shift(context)
    with DistinctLogits(context, tokens):
        diff = _compare_loss(context, tokens, tokens)
        if diff.within_tolerance:
            yield CaseResult("pass", "the loss is the mean of −log p", diff.max_abs, diff.tolerance)
            return
        labels = [tokens, *(context.replace_tokens(tokens) for _ in range(3))]
        actual = [float(model_loss(context, tokens, y)) for y in labels]
        expected = [float(_expected_loss(context, tokens, y)) for y in labels]
        logits = _cached_logits(context, tokens).float()
    # Fit actual = factor · expected + constant.
    factors = [(actual[0] - actual[n]) / ((expected[0] - expected[n]) or 1e-30) for n in (1, 2, 3)]
    factor = sorted(factors)[1]
    message = f"the loss is {actual[0]:.4g}, and the mean of −log p is {expected[0]:.4g}"
    if factor == 0 or max(factors) - min(factors) > 0.02 * abs(factor):
        message += "; other labels do not change it accordingly"
        yield CaseResult("fail", message, diff.max_abs, diff.tolerance)
        return
    constant = actual[0] - factor * expected[0]
    used = logits[:, : tokens.shape[1] - shift]
    uniform = float((used.logsumexp(-1) - used.mean(-1)).mean())  # mean of −log p over the vocabulary
    if abs(factor - 1) < 0.01:
        message = f"the loss is the mean of −log p plus {constant:.3g}, which does not depend on the labels"
        yield CaseResult("pass", message, constant)
    elif 0 < factor < 1 and abs(constant - (1 - factor) * uniform) < 0.02 * max(abs(constant), 1e-6):
        yield CaseResult("pass", f"the loss is −log p with label smoothing of {1 - factor:.3g}", factor)
    else:
        message += f": a factor of {factor:.4g}{_describe_factor(context, factor, tokens)}"
        yield CaseResult("fail", message, factor, 1.0)


def _describe_factor(context: CheckContext, factor: float, tokens: Tensor) -> str:
    """The mistake that explains a factor on the loss, or nothing."""
    batch_size, num_labels = len(tokens), tokens.shape[1] - label_shift(context)  # labels per row
    assert context.model.vocab_size is not None
    known = {
        "a sum over all tokens": batch_size * num_labels,
        "a sum over the tokens of a row": num_labels,
        "a sum over the rows": batch_size,
        "also a mean over the vocabulary": 1 / context.model.vocab_size,
        "bits instead of nats": 1.4427,
        "positions without labels counted in the denominator": num_labels / tokens.shape[1],
        "divided twice by the number of rows": 1 / batch_size,
        "divided twice by the number of tokens": 1 / (batch_size * num_labels),
        "divided twice by the tokens of a row": 1 / num_labels,
    }
    return next((f" ({name})" for name, value in known.items() if abs(factor / value - 1) < 0.01), "")


@register_check(
    "loss-eos",
    catches="an eos token that is never a label: the model does not learn to stop",
    cause="labels equal to the pad token are ignored, and the pad token is the eos token",
    fix="ignore padding by the attention mask or by lengths, not by the token id",
    needs=("logits", "loss"),
    depends_on=("loss-shift", "loss-reduction", "eval-determinism"),
)
@torch.no_grad()
def loss_eos(context: CheckContext) -> Iterator[CaseResult]:
    """End each row with the eos token, then also with padding after it whose labels are -100: the loss must include the
    eos token."""
    eos = context.model.eos_token_id
    if eos is None:
        raise SkipCheckError("needs the eos token id (the property eos_token_id=)")
    tokens = context.random_tokens(2)
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
        with DistinctLogits(context, inputs):
            without_eos = labels.masked_fill(labels == eos, IGNORE_INDEX)
            loss = float(model_loss(context, inputs, labels))
            included = float(_expected_loss(context, inputs, labels))
            excluded = float(_expected_loss(context, inputs, without_eos))
            if abs(loss - excluded) < 0.2 * abs(included - excluded):
                message = f"the eos token {place} is ignored: the loss is {loss:.4g}, and with it {included:.4g}"
                yield CaseResult("fail", message, loss, included, f"position {tokens.shape[1] - 1}")
                return
            if abs(loss - included) < 0.2 * abs(included - excluded):
                yield CaseResult("pass", f"the loss includes the eos token {place}")
            else:
                yield CaseResult(
                    "skip", "skipped: the loss is neither the value with the eos token nor the one without"
                )


@register_check(
    "loss-ignore-index",
    catches="labels of -100 that count in the loss: padding is learned, or reduces the mean",
    cause="the mean is over all positions, or per row, or the labels of padding are not ignored",
    fix="exclude labels of -100 from the sum and from the count: ignore_index=-100 over the flattened batch",
    needs=("logits", "loss"),
    depends_on=("loss-shift", "loss-reduction", *LEAK_CHECKS),
)
@torch.no_grad()
def loss_ignore_index(context: CheckContext) -> Iterator[CaseResult]:
    """Set labels to -100, more in one row than in the other: the loss must be the mean over the other labels. Then
    replace the tokens after a decoder's last label: the loss must not change."""
    tokens = context.random_tokens(2)
    length = tokens.shape[1]
    if length < 5:
        raise SkipCheckError("needs sequences of five tokens")
    labels = tokens.clone()
    labels[0, 2] = IGNORE_INDEX
    labels[1, length // 2 :] = IGNORE_INDEX
    with DistinctLogits(context, tokens):
        diff = _compare_loss(context, tokens, labels)
        other_terms = (
            0.0
            if diff.within_tolerance
            else float(model_loss(context, tokens, tokens) - _expected_loss(context, tokens, tokens))
        )
        loss, expected = float(model_loss(context, tokens, labels)), float(_expected_loss(context, tokens, labels))
        if diff.within_tolerance:
            yield CaseResult("pass", "labels of -100 are ignored", diff.max_abs, diff.tolerance)
        elif abs(other_terms) > diff.tolerance:
            yield CaseResult("skip", "skipped: the loss has other terms", diff.max_abs, diff.tolerance)
        else:
            rules = _losses_by_padding_rule(context, tokens, labels)
            reason = next((name for name, value in rules.items() if abs(value - loss) <= diff.tolerance), "")
            message = f"with labels of -100 the loss is {loss:.4g}, and the mean over the other labels is "
            message += f"{expected:.4g}{reason}"
            yield CaseResult("fail", message, diff.max_abs, diff.tolerance)
            return
        if context.model.kind == "encoder":
            return
        labels = tokens.clone()
        labels[:, length // 2 :] = IGNORE_INDEX
        other = context.replace_tokens(tokens, slice(length // 2, None))
        base = model_loss(context, tokens, labels)
        diff = context.compare(
            lambda: model_loss(context, tokens, labels), lambda: model_loss(context, other, labels), first_result=base
        )
        diff.tolerance = max(diff.tolerance, 1e-5 * max(1.0, abs(float(base))))
        yield context.expect_equal(
            diff,
            passed="the tokens after the last label do not change the loss",
            failed="the tokens after the last label, such as padding, change the loss",
        )


def _losses_by_padding_rule(context: CheckContext, tokens: Tensor, labels: Tensor) -> dict[str, float]:
    """The loss with wrong rules for labels of -100, by description."""
    logits, shift = _cached_logits(context, tokens), label_shift(context)
    losses, index = token_losses(logits, labels, shift)
    num_labels = tokens.shape[1] - shift
    row_means = torch.stack([losses[index[:, 0] == row].mean() for row in range(len(tokens))])
    zero_labels = labels.masked_fill(labels == IGNORE_INDEX, 0)
    return {
        ": they are counted in the denominator": float(losses.sum()) / (len(tokens) * num_labels),
        ": it is a mean of row means": float(row_means.mean()),
        ": they are learned as token 0": float(mean_loss(logits, zero_labels, shift)),
        ": they are learned": float(mean_loss(logits, tokens, shift)),
    }
