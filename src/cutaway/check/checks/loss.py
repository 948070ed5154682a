"""Whether the loss is the mean of −log p of just the tokens that are asked."""

from collections.abc import Iterator
from contextlib import ExitStack

import torch
from torch import Tensor

from cutaway.check.again import nudged
from cutaway.check.entropy import HIDDEN, each, mean, over_words, shift_of
from cutaway.check.exam import MARGIN, CannotError, Exam, Gap
from cutaway.check.finding import Part
from cutaway.check.registry import check

TOLD = {0: "the token itself", 1: "the next token", 2: "the token after the next", -1: "the token before"}
LEAKS = ("causality", "causality-paths", "eval-repeatable")
"""Where logits change with what they should not, a loss cannot be what its logits say."""
CLOSE = 1e-3
"""How near a factor must be to one that has a name."""


def offered(exam: Exam, tokens: Tensor, labels: Tensor) -> Tensor:
    """The target's loss as a number."""
    assert exam.target.loss is not None
    loss = exam.target.loss(tokens, labels)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise CannotError(f"needs a loss that is one number; this one is {what}")
    return loss.float().reshape(1)


def read(exam: Exam, tokens: Tensor) -> Tensor:
    """The logits of a text; of the last one asked for they are known."""
    assert exam.target.logits is not None
    kept = exam.known.get("read")
    if kept is None or kept[0].shape != tokens.shape or not torch.equal(kept[0], tokens):
        kept = exam.known["read"] = (tokens.clone(), exam.target.logits(tokens))
    return kept[1]


def ours(exam: Exam, tokens: Tensor, labels: Tensor, shift: int | None = None) -> Tensor:
    """What it should be."""
    logits = over_words(exam, read(exam, tokens))
    return mean(logits, labels, shift_of(exam) if shift is None else shift).reshape(1)


def compare(exam: Exam, tokens: Tensor, labels: Tensor, shift: int | None = None) -> Gap:
    """The offered loss beside its definition."""
    gap = exam.same(lambda: ours(exam, tokens, labels, shift), lambda: offered(exam, tokens, labels))
    # A mean over logits is rounded otherwise in each implementation, and one number shows little of its own noise.
    scale = float(read(exam, tokens).float().abs().max())
    return Gap(gap.worst, max(gap.bound, MARGIN * (exam.ratio + 1e-6) * max(1.0, scale)), gap.index)


class Settled(ExitStack):
    """While it lasts, weights are nudged where logits tell nothing (a head of zeros); small models only."""

    def __init__(self, exam: Exam, tokens: Tensor) -> None:
        super().__init__()
        self.exam, self.tokens = exam, tokens

    def __enter__(self) -> "Settled":
        super().__enter__()
        self.exam.known.pop("read", None)
        self.callback(self.exam.known.pop, "read", None)  # by these weights
        if flat(self.exam, self.tokens) and self.exam.target.module is not None:
            self.enter_context(nudged(self.exam.target.module, self.exam.generator))
            self.exam.known.pop("read", None)
        if flat(self.exam, self.tokens):
            self.close()
            raise CannotError("needs logits that tell tokens apart; these are all alike")
        return self


def flat(exam: Exam, tokens: Tensor) -> bool:
    """Whether −log p of all tokens is the same."""
    told = each(over_words(exam, read(exam, tokens)), tokens, shift_of(exam))[0]
    return bool(told.max() - told.min() <= 1e-5 + MARGIN * exam.ratio * float(told.abs().max()))


@check(
    "loss-shift",
    catches="labels shifted once too often, or not at all: the model learns the token after the next, or to copy",
    cause="data and model both shift the labels, or neither does; or the shift runs over the ends of rows",
    fix="shift in one place only: logits[:, :-1] against labels[:, 1:], row by row",
    needs=("logits", "loss"),
    after=LEAKS,
)
@torch.no_grad()
def loss_shift(exam: Exam) -> Iterator[Part]:
    """Compare the loss of a text with −log p of its tokens by its own logits, with labels shifted by none, one and two:
    for a decoder it must be one, for an encoder none."""
    tokens, right = exam.text(2), shift_of(exam)
    if tokens.shape[1] < 4:
        raise CannotError("needs texts of four tokens")
    with Settled(exam, tokens):
        gap = compare(exam, tokens, tokens)
        if gap.ok:
            yield Part("pass", f"the logits at a position are held to {TOLD[right]}", gap.worst, gap.bound)
            return
        value = float(offered(exam, tokens, tokens))
        for name, other in other_shifts(exam, tokens, right).items():
            if abs(value - other) <= gap.bound:
                message = f"the logits at a position are held to {name.strip()}, not to {TOLD[right]}"
                yield Part("fail", message, gap.worst, gap.bound)
                return
        seen = seen_shift(exam, tokens)
    if seen is None:
        raise CannotError("needs a loss that is −log p of its logits by some shift; loss-uniform says more")
    verdict = Part("pass", f"the logits at a position are held to {TOLD[right]}")
    if seen != right:
        named = TOLD.get(seen, f"the token {seen} further on")
        verdict = Part("fail", f"the logits at a position are held to {named}, not to {TOLD[right]}", seen, right)
    yield verdict


def other_shifts(exam: Exam, tokens: Tensor, right: int) -> dict[str, float]:
    """What the loss would be by other shifts."""
    logits = read(exam, tokens).float()
    rows = logits.log_softmax(-1)
    found = {TOLD[shift]: float(mean(logits, tokens, shift)) for shift in (0, 1, 2) if shift != right}
    if right:  # a loss may be given the text without its last token
        found |= {f"{TOLD[0]} ": float(mean(logits[:, :-1], tokens[:, :-1], 0))}
    back = -rows[:, 1:].gather(-1, tokens[:, :-1, None])
    found[TOLD[-1]] = float(back.mean())
    ones = rows.flatten(0, 1)
    for shift in (1, 2):
        over = float(-ones[:-shift].gather(-1, tokens.flatten()[shift:, None]).mean())
        found[f"{TOLD[shift]}, across the ends of rows"] = over
        round_ = -rows.gather(-1, tokens.roll(-shift, 1)[..., None])
        found[f"{TOLD[shift]}, with a row's first tokens after its last"] = float(round_.mean())
    half = -rows[:, :-2].gather(-1, tokens[:, 2:, None]).sum() - ones[tokens.shape[1] - 2, tokens[1, 0]]
    found["the token after the next, across the ends of rows"] = float(half) / (tokens.numel() - 2)
    return found


def seen_shift(exam: Exam, tokens: Tensor) -> int | None:
    """The shift by which one label alone acts on the loss, whatever else is added to it."""
    at = tokens.shape[1] // 2
    logits = read(exam, tokens).float()
    other = exam.changed(tokens, slice(at, at + 1))
    alone = torch.full_like(tokens, HIDDEN)
    one, two = alone.clone(), alone.clone()
    one[:, at], two[:, at] = tokens[:, at], other[:, at]
    moved = float(offered(exam, tokens, one) - offered(exam, tokens, two))
    for shift in (1, 0, 2, -1, 3):
        if 0 <= at - shift < tokens.shape[1]:
            row = logits[:, at - shift]
            expected = float((row.gather(1, other[:, at, None]) - row.gather(1, tokens[:, at, None])).mean())
            if abs(moved - expected) <= CLOSE * abs(expected) + 1e-6:
                return shift
    return None


@check(
    "loss-uniform",
    catches="a loss that is not the mean of −log p: a sum, a mean over the vocabulary, softmax taken twice",
    cause="the wrong reduction, the wrong count in the denominator, or probabilities given where logits are wanted",
    fix="F.cross_entropy(logits.flatten(0, 1), labels.flatten()) on raw logits: uniform ones then give ln V",
    needs=("logits", "loss"),
    after=("loss-shift", *LEAKS),
)
@torch.no_grad()
def loss_uniform(exam: Exam) -> Iterator[Part]:
    """Compare the loss with the mean of −log p that its own logits give (ln V where they are uniform). Where it is
    another, other labels tell a factor from what is added: smoothing and auxiliary terms are no bug."""
    tokens, shift = exam.text(2), shift_of(exam)
    with Settled(exam, tokens):
        gap = compare(exam, tokens, tokens)
        if gap.ok:
            yield Part("pass", "the loss is the mean of −log p", gap.worst, gap.bound)
            return
        labels = [tokens, *(exam.changed(tokens) for _ in range(3))]
        theirs = [float(offered(exam, tokens, given)) for given in labels]
        due = [float(ours(exam, tokens, given)) for given in labels]
        logits = read(exam, tokens).float()
    slopes = [(theirs[0] - theirs[n]) / ((due[0] - due[n]) or 1e-30) for n in (1, 2, 3)]
    slope = sorted(slopes)[1]
    told = f"the loss is {theirs[0]:.4g}, and the mean of −log p is {due[0]:.4g}"
    if slope == 0 or max(slopes) - min(slopes) > 0.02 * abs(slope):
        why = "; other labels do not change it as they should"
        yield Part("fail", told + why, gap.worst, gap.bound)
        return
    left = theirs[0] - slope * due[0]
    used = logits[:, : tokens.shape[1] - shift]
    even = float((used.logsumexp(-1) - used.mean(-1)).mean())
    if abs(slope - 1) < 0.01:
        yield Part("pass", f"the loss is the mean of −log p, and {left:.3g} that no label changes", left)
    elif 0 < slope < 1 and abs(left - (1 - slope) * even) < 0.02 * max(abs(left), 1e-6):
        yield Part("pass", f"the loss is −log p with labels smoothed by {1 - slope:.3g}", slope)
    else:
        yield Part("fail", f"{told}: {slope:.4g} times as much{named(exam, slope, tokens)}", slope, 1.0)


def named(exam: Exam, factor: float, tokens: Tensor) -> str:
    """A factor in words."""
    rows, asked = len(tokens), tokens.shape[1] - shift_of(exam)
    assert exam.target.vocab is not None
    known = {
        "a sum over all tokens": rows * asked,
        "a sum over the tokens of a row": asked,
        "a sum over the rows": rows,
        "a mean over the vocabulary too": 1 / exam.target.vocab,
        "bits, not nats": 1.4427,
        "divided by tokens that are no labels too": asked / tokens.shape[1],
        "divided by the rows once more": 1 / rows,
        "divided by the tokens once more": 1 / (rows * asked),
        "divided by a row's tokens once more": 1 / asked,
    }
    return next((f", as {name} would be" for name, value in known.items() if abs(factor / value - 1) < 0.01), "")


@check(
    "loss-eos",
    catches="an end token that is never a label: the model does not learn to stop",
    cause="padding is hidden by comparing labels with the pad token, and the pad token is the end token",
    fix="hide padding by the attention mask or by lengths, never by the token's number",
    needs=("logits", "loss"),
    after=("loss-shift", "loss-uniform", "eval-repeatable"),
)
@torch.no_grad()
def loss_eos(exam: Exam) -> Iterator[Part]:
    """End each row with the end token, then with padding behind it that is hidden by -100: the end must count."""
    end = exam.target.eos
    if end is None:
        raise CannotError("needs the number of the end token (the fact eos=)")
    tokens = exam.text(2)
    if tokens.shape[1] < 5:
        raise CannotError("needs texts of five tokens")
    tokens[:, -1] = end
    padded, labels = tokens.clone(), tokens.clone()
    padded[1, -3:], labels[1, -3:] = end, HIDDEN
    labels[1, -3] = end
    for given, asked, when in ((tokens, tokens, "at the end of a row"), (padded, labels, "before padding")):
        with Settled(exam, given):
            due, without = asked.clone(), asked.clone()
            without[without == end] = HIDDEN
            value, whole, less = theirs_beside(exam, given, asked, due, without)
            if abs(value - less) < 0.2 * abs(whole - less):
                message = f"the end token {when} is no label: the loss is {value:.4g}, with it {whole:.4g}"
                yield Part("fail", message, value, whole, f"position {tokens.shape[1] - 1}")
                return
            near = abs(value - whole) < 0.2 * abs(whole - less)
            told = f"the end token {when} counts" if near else "skipped: not to be told"
            yield Part("pass" if near else "skip", told)


def theirs_beside(exam: Exam, tokens: Tensor, labels: Tensor, *ways: Tensor) -> tuple[float, ...]:
    """The offered loss, then its definition for each way to take the labels; without what no label changes."""
    return (float(offered(exam, tokens, labels)), *(float(ours(exam, tokens, way)) for way in ways))


@check(
    "loss-pads",
    catches="labels of -100 that count: padding is learned, or thins the loss out",
    cause="the mean is taken over all positions, or row by row, or labels of padding are not hidden",
    fix="leave labels of -100 out of the sum and out of the count: ignore_index=-100 over the flattened batch",
    needs=("logits", "loss"),
    after=("loss-shift", "loss-uniform", *LEAKS),
)
@torch.no_grad()
def loss_pads(exam: Exam) -> Iterator[Part]:
    """Hide labels, more in one row than in another: the loss must be the mean over the rest. Then change the tokens
    behind the last label of a decoder: it must stay."""
    tokens = exam.text(2)
    length = tokens.shape[1]
    if length < 5:
        raise CannotError("needs texts of five tokens")
    labels = tokens.clone()
    labels[0, 2] = HIDDEN
    labels[1, length // 2 :] = HIDDEN
    with Settled(exam, tokens):
        gap = compare(exam, tokens, labels)
        extra = 0.0 if gap.ok else float(offered(exam, tokens, tokens) - ours(exam, tokens, tokens))
        value, due = float(offered(exam, tokens, labels)), float(ours(exam, tokens, labels))
        if gap.ok or abs(extra) > gap.bound:
            yield Part("pass" if gap.ok else "skip", "labels of -100 do not count" if gap.ok
                       else "skipped: other terms are in the loss", gap.worst, gap.bound)  # fmt: skip
        else:
            how = ways(exam, tokens, labels)
            why = next((name for name, other in how.items() if abs(other - value) <= gap.bound), "")
            message = f"with labels of -100 the loss is {value:.4g}, and the mean over the others is {due:.4g}{why}"
            yield Part("fail", message, gap.worst, gap.bound)
            return
        if exam.target.kind == "encoder":
            return
        labels = tokens.clone()
        labels[:, length // 2 :] = HIDDEN
        other = exam.changed(tokens, slice(length // 2, None))
        base = offered(exam, tokens, labels)
        gap = exam.same(lambda: offered(exam, tokens, labels), lambda: offered(exam, other, labels), first=base)
        gap.bound = max(gap.bound, 1e-5 * max(1.0, abs(float(base))))
        broken = "tokens behind the last label, where padding stands, change the loss"
        yield exam.judge(gap, held="what stands behind the last label does not matter", broken=broken)


def ways(exam: Exam, tokens: Tensor, labels: Tensor) -> dict[str, float]:
    """What the loss would be if hidden labels were treated otherwise."""
    logits, shift = read(exam, tokens), shift_of(exam)
    told, at = each(logits, labels, shift)
    asked = tokens.shape[1] - shift
    rows = torch.stack([told[at[:, 0] == row].mean() for row in range(len(tokens))])
    zeros, same = labels.clone(), tokens
    zeros[zeros == HIDDEN] = 0
    return {
        ": they are counted in the denominator": float(told.sum()) / (len(tokens) * asked),
        ": each row counts alike, however few labels it has": float(rows.mean()),
        ": they are learned as token 0": float(mean(logits, zeros, shift)),
        ": they are learned": float(mean(logits, same, shift)),
    }
