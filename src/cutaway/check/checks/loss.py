"""Whether the loss is the mean of −log p of just the tokens that are asked."""

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

SHIFT_NAMES = {0: "the token itself", 1: "the next token", 2: "the token after the next", -1: "the token before"}
LEAK_CHECKS = ("causality", "causality-paths", "eval-determinism")
"""Where logits change with what they should not, a loss cannot be what its logits say."""
FACTOR_TOLERANCE = 1e-3
"""How near a factor must be to one that has a name."""


def model_loss(context: CheckContext, tokens: Tensor, labels: Tensor) -> Tensor:
    """The target's loss as a number."""
    assert context.model.loss is not None
    loss = context.model.loss(tokens, labels)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise SkipCheckError(f"needs a loss that is one number; this one is {what}")
    return loss.float().reshape(1)


def _cached_logits(context: CheckContext, tokens: Tensor) -> Tensor:
    """The logits of a text; of the last one asked for they are known."""
    assert context.model.logits is not None
    kept = context.memo.get("last_logits")
    if kept is None or kept[0].shape != tokens.shape or not torch.equal(kept[0], tokens):
        kept = context.memo["last_logits"] = (tokens.clone(), context.model.logits(tokens))
    return kept[1]


def _expected_loss(context: CheckContext, tokens: Tensor, labels: Tensor, shift: int | None = None) -> Tensor:
    """What it should be."""
    logits = require_vocab_logits(context, _cached_logits(context, tokens))
    return mean_loss(logits, labels, label_shift(context) if shift is None else shift).reshape(1)


def _compare_loss(context: CheckContext, tokens: Tensor, labels: Tensor, shift: int | None = None) -> Difference:
    """The offered loss beside its definition."""
    gap = context.compare(
        lambda: _expected_loss(context, tokens, labels, shift), lambda: model_loss(context, tokens, labels)
    )
    # A mean over logits is rounded otherwise in each implementation, and one number shows little of its own noise.
    scale = float(_cached_logits(context, tokens).float().abs().max())
    return Difference(
        gap.max_abs, max(gap.tolerance, NOISE_MARGIN * (context.noise_ratio + 1e-6) * max(1.0, scale)), gap.index
    )


class DistinctLogits(ExitStack):
    """While it lasts, weights are nudged where logits tell nothing (a head of zeros); small models only."""

    def __init__(self, context: CheckContext, tokens: Tensor) -> None:
        super().__init__()
        self.context, self.tokens = context, tokens

    def __enter__(self) -> "DistinctLogits":
        super().__enter__()
        self.context.memo.pop("last_logits", None)
        self.callback(self.context.memo.pop, "last_logits", None)  # by these weights
        if _has_uniform_losses(self.context, self.tokens) and self.context.model.module is not None:
            self.enter_context(perturb_weights(self.context.model.module, self.context.generator))
            self.context.memo.pop("last_logits", None)
        if _has_uniform_losses(self.context, self.tokens):
            self.close()
            raise SkipCheckError("needs logits that tell tokens apart; these are all alike")
        return self


def _has_uniform_losses(context: CheckContext, tokens: Tensor) -> bool:
    """Whether −log p of all tokens is the same."""
    told = token_losses(require_vocab_logits(context, _cached_logits(context, tokens)), tokens, label_shift(context))[0]
    return bool(told.max() - told.min() <= 1e-5 + NOISE_MARGIN * context.noise_ratio * float(told.abs().max()))


@register_check(
    "loss-shift",
    catches="labels shifted once too often, or not at all: the model learns the token after the next, or to copy",
    cause="data and model both shift the labels, or neither does; or the shift runs over the ends of rows",
    fix="shift in one place only: logits[:, :-1] against labels[:, 1:], row by row",
    needs=("logits", "loss"),
    depends_on=LEAK_CHECKS,
)
@torch.no_grad()
def loss_shift(context: CheckContext) -> Iterator[CaseResult]:
    """Compare the loss of a text with −log p of its tokens by its own logits, with labels shifted by none, one and two:
    for a decoder it must be one, for an encoder none."""
    tokens, right = context.random_tokens(2), label_shift(context)
    if tokens.shape[1] < 4:
        raise SkipCheckError("needs texts of four tokens")
    with DistinctLogits(context, tokens):
        gap = _compare_loss(context, tokens, tokens)
        if gap.within_tolerance:
            yield CaseResult(
                "pass", f"the logits at a position are held to {SHIFT_NAMES[right]}", gap.max_abs, gap.tolerance
            )
            return
        value = float(model_loss(context, tokens, tokens))
        for name, other in _losses_by_shift(context, tokens, right).items():
            if abs(value - other) <= gap.tolerance:
                message = f"the logits at a position are held to {name.strip()}, not to {SHIFT_NAMES[right]}"
                yield CaseResult("fail", message, gap.max_abs, gap.tolerance)
                return
        seen = _infer_shift(context, tokens)
    if seen is None:
        raise SkipCheckError("needs a loss that is −log p of its logits by some shift; loss-reduction says more")
    verdict = CaseResult("pass", f"the logits at a position are held to {SHIFT_NAMES[right]}")
    if seen != right:
        named = SHIFT_NAMES.get(seen, f"the token {seen} further on")
        verdict = CaseResult(
            "fail", f"the logits at a position are held to {named}, not to {SHIFT_NAMES[right]}", seen, right
        )
    yield verdict


def _losses_by_shift(context: CheckContext, tokens: Tensor, expected_shift: int) -> dict[str, float]:
    """What the loss would be by other shifts."""
    logits = _cached_logits(context, tokens).float()
    rows = logits.log_softmax(-1)
    found = {
        SHIFT_NAMES[shift]: float(mean_loss(logits, tokens, shift)) for shift in (0, 1, 2) if shift != expected_shift
    }
    if expected_shift:  # a loss may be given the text without its last token
        found |= {f"{SHIFT_NAMES[0]} ": float(mean_loss(logits[:, :-1], tokens[:, :-1], 0))}
    back = -rows[:, 1:].gather(-1, tokens[:, :-1, None])
    found[SHIFT_NAMES[-1]] = float(back.mean())
    ones = rows.flatten(0, 1)
    for shift in (1, 2):
        over = float(-ones[:-shift].gather(-1, tokens.flatten()[shift:, None]).mean())
        found[f"{SHIFT_NAMES[shift]}, across the ends of rows"] = over
        round_ = -rows.gather(-1, tokens.roll(-shift, 1)[..., None])
        found[f"{SHIFT_NAMES[shift]}, with a row's first tokens after its last"] = float(round_.mean())
    half = -rows[:, :-2].gather(-1, tokens[:, 2:, None]).sum() - ones[tokens.shape[1] - 2, tokens[1, 0]]
    found["the token after the next, across the ends of rows"] = float(half) / (tokens.numel() - 2)
    return found


def _infer_shift(context: CheckContext, tokens: Tensor) -> int | None:
    """The shift by which one label alone acts on the loss, whatever else is added to it."""
    at = tokens.shape[1] // 2
    logits = _cached_logits(context, tokens).float()
    other = context.replace_tokens(tokens, slice(at, at + 1))
    alone = torch.full_like(tokens, IGNORE_INDEX)
    one, two = alone.clone(), alone.clone()
    one[:, at], two[:, at] = tokens[:, at], other[:, at]
    moved = float(model_loss(context, tokens, one) - model_loss(context, tokens, two))
    for shift in (1, 0, 2, -1, 3):
        if 0 <= at - shift < tokens.shape[1]:
            row = logits[:, at - shift]
            expected = float((row.gather(1, other[:, at, None]) - row.gather(1, tokens[:, at, None])).mean())
            if abs(moved - expected) <= FACTOR_TOLERANCE * abs(expected) + 1e-6:
                return shift
    return None


@register_check(
    "loss-reduction",
    catches="a loss that is not the mean of −log p: a sum, a mean over the vocabulary, softmax taken twice",
    cause="the wrong reduction, the wrong count in the denominator, or probabilities given where logits are wanted",
    fix="F.cross_entropy(logits.flatten(0, 1), labels.flatten()) on raw logits: uniform ones then give ln V",
    needs=("logits", "loss"),
    depends_on=("loss-shift", *LEAK_CHECKS),
)
@torch.no_grad()
def loss_reduction(context: CheckContext) -> Iterator[CaseResult]:
    """Compare the loss with the mean of −log p that its own logits give (ln V where they are uniform). Where it is
    another, other labels tell a factor from what is added: smoothing and auxiliary terms are no bug."""
    tokens, shift = context.random_tokens(2), label_shift(context)
    with DistinctLogits(context, tokens):
        gap = _compare_loss(context, tokens, tokens)
        if gap.within_tolerance:
            yield CaseResult("pass", "the loss is the mean of −log p", gap.max_abs, gap.tolerance)
            return
        labels = [tokens, *(context.replace_tokens(tokens) for _ in range(3))]
        theirs = [float(model_loss(context, tokens, given)) for given in labels]
        due = [float(_expected_loss(context, tokens, given)) for given in labels]
        logits = _cached_logits(context, tokens).float()
    slopes = [(theirs[0] - theirs[n]) / ((due[0] - due[n]) or 1e-30) for n in (1, 2, 3)]
    slope = sorted(slopes)[1]
    told = f"the loss is {theirs[0]:.4g}, and the mean of −log p is {due[0]:.4g}"
    if slope == 0 or max(slopes) - min(slopes) > 0.02 * abs(slope):
        why = "; other labels do not change it as they should"
        yield CaseResult("fail", told + why, gap.max_abs, gap.tolerance)
        return
    left = theirs[0] - slope * due[0]
    used = logits[:, : tokens.shape[1] - shift]
    even = float((used.logsumexp(-1) - used.mean(-1)).mean())
    if abs(slope - 1) < 0.01:
        yield CaseResult("pass", f"the loss is the mean of −log p, and {left:.3g} that no label changes", left)
    elif 0 < slope < 1 and abs(left - (1 - slope) * even) < 0.02 * max(abs(left), 1e-6):
        yield CaseResult("pass", f"the loss is −log p with labels smoothed by {1 - slope:.3g}", slope)
    else:
        yield CaseResult(
            "fail", f"{told}: {slope:.4g} times as much{_describe_factor(context, slope, tokens)}", slope, 1.0
        )


def _describe_factor(context: CheckContext, factor: float, tokens: Tensor) -> str:
    """A factor in words."""
    rows, asked = len(tokens), tokens.shape[1] - label_shift(context)
    assert context.model.vocab_size is not None
    known = {
        "a sum over all tokens": rows * asked,
        "a sum over the tokens of a row": asked,
        "a sum over the rows": rows,
        "a mean over the vocabulary too": 1 / context.model.vocab_size,
        "bits, not nats": 1.4427,
        "divided by tokens that are no labels too": asked / tokens.shape[1],
        "divided by the rows once more": 1 / rows,
        "divided by the tokens once more": 1 / (rows * asked),
        "divided by a row's tokens once more": 1 / asked,
    }
    return next((f", as {name} would be" for name, value in known.items() if abs(factor / value - 1) < 0.01), "")


@register_check(
    "loss-eos",
    catches="an end token that is never a label: the model does not learn to stop",
    cause="padding is hidden by comparing labels with the pad token, and the pad token is the end token",
    fix="hide padding by the attention mask or by lengths, never by the token's number",
    needs=("logits", "loss"),
    depends_on=("loss-shift", "loss-reduction", "eval-determinism"),
)
@torch.no_grad()
def loss_eos(context: CheckContext) -> Iterator[CaseResult]:
    """End each row with the end token, then with padding behind it that is hidden by -100: the end must count."""
    end = context.model.eos_token_id
    if end is None:
        raise SkipCheckError("needs the number of the end token (the property eos_token_id=)")
    tokens = context.random_tokens(2)
    if tokens.shape[1] < 5:
        raise SkipCheckError("needs texts of five tokens")
    tokens[:, -1] = end
    padded, labels = tokens.clone(), tokens.clone()
    padded[1, -3:], labels[1, -3:] = end, IGNORE_INDEX
    labels[1, -3] = end
    for given, asked, when in ((tokens, tokens, "at the end of a row"), (padded, labels, "before padding")):
        with DistinctLogits(context, given):
            due, without = asked.clone(), asked.clone()
            without[without == end] = IGNORE_INDEX
            value, whole, less = _losses_by_labels(context, given, asked, due, without)
            if abs(value - less) < 0.2 * abs(whole - less):
                message = f"the end token {when} is no label: the loss is {value:.4g}, with it {whole:.4g}"
                yield CaseResult("fail", message, value, whole, f"position {tokens.shape[1] - 1}")
                return
            near = abs(value - whole) < 0.2 * abs(whole - less)
            told = f"the end token {when} counts" if near else "skipped: not to be told"
            yield CaseResult("pass" if near else "skip", told)


def _losses_by_labels(
    context: CheckContext, tokens: Tensor, labels: Tensor, *alternatives: Tensor
) -> tuple[float, ...]:
    """The offered loss, then its definition for each way to take the labels; without what no label changes."""
    return (
        float(model_loss(context, tokens, labels)),
        *(float(_expected_loss(context, tokens, way)) for way in alternatives),
    )


@register_check(
    "loss-ignore-index",
    catches="labels of -100 that count: padding is learned, or thins the loss out",
    cause="the mean is taken over all positions, or row by row, or labels of padding are not hidden",
    fix="leave labels of -100 out of the sum and out of the count: ignore_index=-100 over the flattened batch",
    needs=("logits", "loss"),
    depends_on=("loss-shift", "loss-reduction", *LEAK_CHECKS),
)
@torch.no_grad()
def loss_ignore_index(context: CheckContext) -> Iterator[CaseResult]:
    """Hide labels, more in one row than in another: the loss must be the mean over the rest. Then change the tokens
    behind the last label of a decoder: it must stay."""
    tokens = context.random_tokens(2)
    length = tokens.shape[1]
    if length < 5:
        raise SkipCheckError("needs texts of five tokens")
    labels = tokens.clone()
    labels[0, 2] = IGNORE_INDEX
    labels[1, length // 2 :] = IGNORE_INDEX
    with DistinctLogits(context, tokens):
        gap = _compare_loss(context, tokens, labels)
        extra = (
            0.0
            if gap.within_tolerance
            else float(model_loss(context, tokens, tokens) - _expected_loss(context, tokens, tokens))
        )
        value, due = float(model_loss(context, tokens, labels)), float(_expected_loss(context, tokens, labels))
        if gap.within_tolerance:
            yield CaseResult("pass", "labels of -100 do not count", gap.max_abs, gap.tolerance)
        elif abs(extra) > gap.tolerance:
            yield CaseResult("skip", "skipped: other terms are in the loss", gap.max_abs, gap.tolerance)
        else:
            how = _losses_by_padding_rule(context, tokens, labels)
            why = next((name for name, other in how.items() if abs(other - value) <= gap.tolerance), "")
            message = f"with labels of -100 the loss is {value:.4g}, and the mean over the others is {due:.4g}{why}"
            yield CaseResult("fail", message, gap.max_abs, gap.tolerance)
            return
        if context.model.kind == "encoder":
            return
        labels = tokens.clone()
        labels[:, length // 2 :] = IGNORE_INDEX
        other = context.replace_tokens(tokens, slice(length // 2, None))
        base = model_loss(context, tokens, labels)
        gap = context.compare(
            lambda: model_loss(context, tokens, labels), lambda: model_loss(context, other, labels), first_result=base
        )
        gap.tolerance = max(gap.tolerance, 1e-5 * max(1.0, abs(float(base))))
        broken = "tokens behind the last label, where padding stands, change the loss"
        yield context.expect_equal(gap, passed="what stands behind the last label does not matter", failed=broken)


def _losses_by_padding_rule(context: CheckContext, tokens: Tensor, labels: Tensor) -> dict[str, float]:
    """What the loss would be if hidden labels were treated otherwise."""
    logits, shift = _cached_logits(context, tokens), label_shift(context)
    told, at = token_losses(logits, labels, shift)
    asked = tokens.shape[1] - shift
    rows = torch.stack([told[at[:, 0] == row].mean() for row in range(len(tokens))])
    zeros, same = labels.clone(), tokens
    zeros[zeros == IGNORE_INDEX] = 0
    return {
        ": they are counted in the denominator": float(told.sum()) / (len(tokens) * asked),
        ": each row counts alike, however few labels it has": float(rows.mean()),
        ": they are learned as token 0": float(mean_loss(logits, zeros, shift)),
        ": they are learned": float(mean_loss(logits, same, shift)),
    }
