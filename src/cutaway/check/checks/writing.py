"""What is written is what the logits say."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from cutaway.check.exam import MARGIN, CannotError, Exam
from cutaway.check.finding import Part
from cutaway.check.pieces import REFUSALS
from cutaway.check.registry import CAUSAL, check


def prompt_and_room(exam: Exam, most: int = 6) -> tuple[int, int]:
    """Tokens of a prompt, and of what is written behind it."""
    n = max(1, min(most, exam.length // (2 if not exam.slow else 3)))
    return max(1, min(exam.length - n, 10)), n


def given(exam: Exam, write: Callable[[Tensor, int], Tensor], prompt: Tensor, n: int) -> tuple[Tensor, Part | None]:
    """What was written behind a prompt, without the prompt where that is given back too; and what is wrong in how much
    it is. A text may end early, but then not before as many tokens as it has shown it can write."""

    def asked(m: int) -> Tensor:
        out = write(prompt, m)
        length = prompt.shape[1]
        whole = out.shape[1] >= length + 1 and torch.equal(out[:, :length].to(prompt), prompt)
        return out[:, length:] if whole and out.shape[1] > m else out

    out = asked(n)
    if out.ndim != 2 or len(out) != len(prompt):
        raise CannotError(f"what was written has the shape {tuple(out.shape)} for {len(prompt)} prompts")
    if out.shape[1] > n:
        return out, Part("fail", f"{n} tokens were asked for, and {out.shape[1]} were written", out.shape[1], n)
    if out.shape[1] < n:
        fewer = max(1, out.shape[1])
        less = asked(fewer).shape[1]
        if less < fewer:
            return out, Part("fail", f"{fewer} tokens were asked for, and {less} were written", less, fewer)
    return out, None


@torch.no_grad()
def unlikely(exam: Exam, prompt: Tensor, written: Tensor) -> tuple[int, int, float, float] | None:
    """The first written token that is not the likeliest by one pass over the whole: its row, its number, by how much it
    is less likely, and what noise would explain. What comes behind an end is not looked at."""
    logits, eos = exam.target.logits, exam.target.eos
    assert logits is not None
    tokens = torch.cat((prompt, written.to(prompt)), 1)
    first = prompt.shape[1] - 1

    def read() -> Tensor:
        return logits(tokens)[:, first:-1].float()

    out = read()
    behind = out.max(-1).values - out.gather(-1, written.to(prompt)[..., None])[..., 0]
    if eos is not None:
        behind = behind.masked_fill(((written == eos).cumsum(1) - (written == eos).long() > 0).to(behind.device), 0.0)
    # Both logits may be off by the noise.
    bound = 2 * MARGIN * exam.ratio * float(out.abs().max())
    if bool((behind <= bound).all()):
        return None
    bound = max(bound, 2 * MARGIN * exam.noise(read, out))
    far = ~(behind <= bound)
    if not bool(far.any()):
        return None
    number = int(far.any(0).long().argmax())
    row = int(far[:, number].long().argmax())
    return row, number, float(behind[row, number]), bound


def greedily(
    exam: Exam, write: Callable[[Tensor, int], Tensor], prompt: Tensor, n: int, how: str, alone: list[Tensor] | None
) -> Part:
    """Whether each written token is the likeliest; `alone` are the prompts without their padding."""
    written, wrong = given(exam, write, prompt, n)
    if wrong is not None:
        return wrong
    if not written.shape[1]:
        return Part("skip", f"skipped: nothing was written {how}")
    for row, text in enumerate([prompt] if alone is None else alone):
        found = unlikely(exam, text, written if alone is None else written[row : row + 1])
        if found is not None:
            at, number, behind, bound = found
            at = at if alone is None else row
            message = f"written {how}, token {number} of row {at} is not the likeliest behind the text before it"
            return Part("fail", message, behind, bound, f"row {at}, new token {number}")
    return Part("pass", f"each of {written.shape[1]} tokens written {how} is the likeliest")


@check(
    "generation",
    catches="a text that is not what the logits say: a step late, a stale cache, the wrong row, padding that counts",
    cause="the next token is taken from the wrong position, is fed twice, or positions count the padding",
    fix="take the logits of the last real token, feed each token once, and number tokens from the first real one",
    needs=("logits", "generate|generate_padded"),
    kinds=CAUSAL,
    after=("causality-paths", "causality", "cache-steps"),
)
@torch.no_grad()
def generation(exam: Exam) -> Iterator[Part]:
    """Let it write greedily and read the result in one pass: each token must be the likeliest there, or as likely but
    for noise. Then a batch of prompts of different lengths, padded on the left, each against itself alone."""
    target = exam.target
    length, n = prompt_and_room(exam)
    if target.generate is not None:
        yield greedily(exam, target.generate, exam.text(2, length), n, "in a batch of two", None)
        if not exam.slow:
            yield greedily(exam, target.generate, exam.text(1, max(1, length // 2)), n, "alone", None)
    if target.generate_padded is not None:
        prompt, mask, alone = padded(exam, length)
        write = target.generate_padded
        how = "behind padding on the left"
        yield greedily(exam, lambda _, m: write(prompt, mask, m), prompt, n, how, alone)


def padded(exam: Exam, length: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Three prompts of different lengths in one batch, which of it is real, and each alone."""
    prompt = exam.text(3, length)
    mask = torch.ones_like(prompt, dtype=torch.bool)
    for row, pads in enumerate((0, length // 3, length - 1)):
        mask[row, :pads] = False
    prompt = prompt.masked_fill(~mask, 0 if exam.target.pad is None else exam.target.pad)
    return prompt, mask, [row[real][None] for row, real in zip(prompt, mask, strict=True)]


@check(
    "speculation",
    catches="speculative decoding that writes something else than the model alone would",
    cause="a refused guess stays in the cache or in the text, or the token behind the last accepted one is skipped",
    fix="keep guesses up to the first that is not the model's own, then its own token, and roll the cache back there",
    needs=("logits", "speculate"),
    kinds=CAUSAL,
    after=("causality", "cache-steps", "generation"),
)
@torch.no_grad()
def speculation(exam: Exam) -> Iterator[Part]:
    """Let it write speculatively, behind a text that repeats itself (so that there is something to guess) and one that
    does not: each token must be the likeliest in one pass."""
    speculate = exam.target.speculate
    assert speculate is not None
    length, n = prompt_and_room(exam, 7)
    repeated = exam.text(2, max(1, length // 3)).repeat(1, 3)
    ways = [(repeated, "behind a text that repeats itself"), (exam.text(2, length), "behind another text")]
    for prompt, how in ways[:1] if exam.slow else ways:
        yield greedily(exam, speculate, prompt, n, f"speculatively {how}", None)


@check(
    "mode-restored",
    catches="a model that is left in another mode after writing, so that training goes on without dropout",
    cause="generate calls eval() or train(), and does not put back what was set before",
    fix="note the mode of every part before, and set it again in a finally",
    needs=("module", "generate|beams|speculate"),
    kinds=CAUSAL,
)
def mode_restored(exam: Exam) -> Iterator[Part]:
    """In training and in evaluation mode, let it write, and look: the mode of every part, which weights ask for
    gradients and whether any are taken must be as before."""
    target, module = exam.target, exam.target.module
    assert module is not None
    prompt = exam.text(1, max(1, min(4, exam.length // 2)))
    parts = dict(module.named_modules())
    ways: dict[str, Callable[[], Any]] = {}
    if target.generate is not None:
        ways["generating"] = lambda: target.generate(prompt, 2)  # type: ignore[misc]
    if target.beams is not None:
        ways["a beam search"] = lambda: target.beams(prompt[:, :1], 2, 2)  # type: ignore[misc]
    if target.speculate is not None:
        ways["speculating"] = lambda: target.speculate(prompt, 2)  # type: ignore[misc]
    for path, write in ways.items():
        for training in (True, False):
            module.train(training)
            weights = {name: p for name, p in module.named_parameters() if p.is_floating_point()}
            asked = {name: p.requires_grad for name, p in weights.items()}
            for p in weights.values():  # all ask, so that what an earlier text froze is seen to be frozen again
                p.requires_grad_(True)
            with torch.enable_grad():
                try:
                    write()
                    taken = torch.is_grad_enabled()
                    frozen = [name for name, p in weights.items() if not p.requires_grad]
                except REFUSALS as error:
                    yield Part("skip", f"skipped: {path} in training it refuses: {str(error)[:100]}")
                    break
                finally:
                    for name, p in weights.items():
                        p.requires_grad_(asked[name])
            left = [name for name, part in parts.items() if part.training != training]
            if left:
                now = "training" if parts[left[0]].training else "evaluation"
                what = f"after {path}, {len(left)} of {len(parts)} parts of the model are left in {now} mode"
                yield Part("fail", what, float(len(left)), 0.0, left[0] or "the whole model")
                return
            if frozen or not taken:
                what = f"{frozen[0]} asks for other gradients" if frozen else "no gradients are taken any more"
                yield Part("fail", f"after {path}, {what}", where=frozen[0] if frozen else None)
                return
        else:
            yield Part("pass", f"{path} leaves every part in its mode")
