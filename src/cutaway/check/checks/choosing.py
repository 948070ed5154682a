"""How the next token is chosen: by draws, and by a search for the likeliest text."""

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from cutaway.check.checks.writing import prompt_and_room
from cutaway.check.exam import MARGIN, CannotError, Exam
from cutaway.check.finding import Part
from cutaway.check.plain import parameters
from cutaway.check.registry import CAUSAL, check
from cutaway.errors import raised

BEAMS = 3
PROMPTS = 8
"""Prompts among which one is sought whose beams change places, where passes are quick."""
DRAWS, FEWEST = 4000, 20.0
"""Tokens drawn; and how many of a kind must be expected for it to count as a kind of its own."""
CHANCE = 1e-12
"""That a right sampler is called wrong."""
PATIENCE = 0.05
"""Seconds for the draws of one setting."""


@check(
    "beams",
    catches="beams with scores that are not theirs: caches not reordered with the beams, scores of other tokens",
    cause="after beams change places, their cache rows do not, or a token's probability is added to another beam",
    fix="reorder every row of the state by the new beams' parents, and add log-probabilities along each one's path",
    needs=("logits", "beams"),
    kinds=CAUSAL,
    after=("causality", "rows-apart", "cache-steps", "generation"),
)
@torch.no_grad()
def beams(exam: Exam) -> Iterator[Part]:
    """Read each beam that is returned in one pass: its score must be the sum of its tokens' log-probabilities, no two
    may be alike, and none may be worse than what a search by whole passes finds."""
    assert exam.target.beams is not None
    length, n = prompt_and_room(exam, 5)
    length = 1 if exam.target.kind == "encoder-decoder" else length  # its answers begin with one token
    vocab = exam.target.vocab or 2
    width = min(BEAMS, vocab)
    for _ in range(PROMPTS if not exam.slow else 1):
        prompt = exam.text(1, length)
        best, gaps, moved = search(exam, prompt, n, width)
        if moved:
            break
    found, scores = exam.target.beams(prompt, n, width)
    found = found[:, length:] if found.shape[1] == length + n else found
    if found.shape != (width, n):
        raise CannotError(f"{width} beams of {n} tokens were asked for, and {tuple(found.shape)} came back")
    scores = scores.flatten().float().to(prompt.device)
    own = scored(exam, prompt, found)
    far = (scores - own).abs()
    worst = int(far.argmax())
    bound = 2 * MARGIN * exam.ratio * float(own.abs().max())
    if not float(far[worst]) <= bound or gaps <= 2 * bound:
        bound = max(bound, 2 * MARGIN * exam.noise(lambda: scored(exam, prompt, found), own))
    if not float(far[worst]) <= bound:
        message = f"beam {worst} is said to have log-probability {scores[worst]:.4g}, and has {own[worst]:.4g}"
        yield Part("fail", message, float(far[worst]), bound, f"beam {worst}")
        return
    if len({tuple(row) for row in found.tolist()}) < width:
        yield Part("fail", "the same beam is returned twice")
        return
    close = gaps <= bound
    short = (best - own.sort(descending=True).values).max()
    if not close and not float(short) <= bound:
        message = "a search by whole passes finds beams that are likelier than those returned"
        yield Part("fail", message, float(short), bound)
        return
    still = "" if moved else " (none of them had to change places)"
    yield Part("pass", f"{width} beams have the log-probabilities of one pass{still}", float(far[worst]), bound)


def scored(exam: Exam, prompt: Tensor, found: Tensor) -> Tensor:
    """The sum of the log-probabilities of each continuation."""
    assert exam.target.logits is not None
    tokens = torch.cat((prompt.expand(len(found), -1), found.to(prompt)), 1)
    log_p = exam.target.logits(tokens)[:, prompt.shape[1] - 1 : -1].float().log_softmax(-1)
    return log_p.gather(-1, found.to(prompt)[..., None])[..., 0].sum(-1)


def search(exam: Exam, prompt: Tensor, n: int, width: int) -> tuple[Tensor, float, bool]:
    """The sums of a beam search by whole passes, the best first; by how little a beam was left out; and whether one of
    those that are returned changed its place on the way, without which a cache that stays as it is would be right."""
    assert exam.target.logits is not None
    tokens, sums, least = prompt, torch.zeros(1, device=prompt.device), float("inf")
    moved = torch.zeros(1, dtype=torch.bool, device=prompt.device)
    for step in range(n):
        log_p = exam.target.logits(tokens)[:, -1].float().log_softmax(-1)
        total = (sums[:, None] + log_p).flatten()
        best, place = total.topk(min(width + 1, len(total)))
        least = min(least, float(best[width - 1] - best[width])) if len(best) > width else least
        sums, parents, token = best[:width], place[:width] // log_p.shape[-1], place[:width] % log_p.shape[-1]
        moved = moved[parents]
        if 0 < step < n - 1:  # first there is one row only, and behind the last nothing is read
            moved = moved | (parents != torch.arange(width, device=parents.device))
        tokens = torch.cat((tokens[parents], token[:, None]), 1)
    return sums, least, bool(moved.any())


EMPTY = "the filter keeps one token too few: where it keeps one, none is left"
KEEP = "keep the token that crosses top-p, and as many tokens as top-k says"


@check(
    "sampler",
    catches="draws that do not follow the probabilities: temperature applied twice, a filter that keeps one too few",
    cause="logits are scaled or filtered otherwise than asked for, or tokens are drawn from unsorted for sorted ones",
    fix="divide by the temperature once, keep the token that crosses top-p, and map sorted places back to tokens",
    needs=("sample",),
    kinds=CAUSAL,
)
@torch.no_grad()
def sampler(exam: Exam) -> Iterator[Part]:
    """Draw some thousand tokens from known logits and compare the counts with the probabilities (a chi-square test that
    a right sampler fails once in 10¹² times); again with temperature, top_k and top_p, where it takes these names."""
    sample = exam.target.sample
    assert sample is not None
    # Not in order, so that a sorted place taken for a token shows; the last is as good as impossible.
    logits = torch.tensor([0.3, 2.0, -1.0, 1.2, 0.0, 1.7, -0.4, 0.9, -40.0], device=exam.target.device)
    names = parameters(sample)
    settings: list[dict[str, Any]] = [{}]
    settings += [
        {name: value}
        for name, value in (
            ("temperature", 0.5),
            ("temperature", 2.0),
            ("top_k", 3),
            ("top_k", 1),
            ("top_p", 0.7),
            ("top_p", 0.05),
        )
        if name in names
    ]
    for how in settings:
        told = ", ".join(f"{name} {value:g}" for name, value in how.items())
        path = f" with {told}" if told else ""
        try:
            counts = drawn(sample, logits, how)
        except (RuntimeError, IndexError, AssertionError) as error:
            if not how:
                raise
            yield Part("fail", f"a draw{path} {raised(error)}", cause=EMPTY, fix=KEEP)
            continue
        wanted = probabilities(logits, **how)
        never = wanted < 1e-12
        if int(counts[never].sum()):
            token = int((counts * never).argmax())
            message = f"{int(counts[token])} of {int(counts.sum())} draws{path} were a token that must not come up"
            yield Part("fail", message, float(counts[token]), 0.0, f"token {token}")
            continue
        if int((~never).sum()) == 1:  # one token is left, and it alone was drawn
            yield Part("pass", f"all {int(counts.sum())} draws{path} are the only token that is left")
            continue
        chance, kinds = fits(counts, wanted)
        if kinds < 2:
            yield Part("skip", f"skipped: {int(counts.sum())} draws{path} in time are too few")
            continue
        held = f"{int(counts.sum())} draws{path} follow the probabilities"
        worst = int(((counts / counts.sum()) - wanted).abs().argmax())
        broken = (
            f"draws{path} do not follow the probabilities: token {worst} came up {counts[worst] / counts.sum():.3f} of "
            f"the time, and has {wanted[worst]:.3f}"
        )
        yield Part("pass" if chance >= CHANCE else "fail", held if chance >= CHANCE else broken, chance, CHANCE)


def drawn(sample: Any, logits: Tensor, how: dict[str, Any]) -> Tensor:
    """How often each token was drawn: in a first call that is timed, and in a second as large as the time allows."""
    since = time.monotonic()
    tokens = sample(logits, 64, **how).flatten().long()
    spent = max(time.monotonic() - since, 1e-6)
    more = int(min(DRAWS, 64 * PATIENCE / spent))
    tokens = torch.cat((tokens, sample(logits, more, **how).flatten().long())) if more > 64 else tokens
    if int(tokens.min()) < 0 or int(tokens.max()) >= len(logits):
        raise CannotError(f"of {len(logits)} logits it drew token {int(tokens.max())}; it must draw from what is given")
    return torch.bincount(tokens, minlength=len(logits)).double()


def probabilities(
    logits: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """What a sampler must draw from."""
    p = (logits.double() / temperature).softmax(-1)
    order = p.argsort(descending=True)
    if top_k is not None:
        p[order[top_k:]] = 0.0
    if top_p is not None:
        before = p[order].cumsum(0) - p[order]
        p[order[before >= top_p]] = 0.0
    return p / p.sum()


def fits(counts: Tensor, wanted: Tensor) -> tuple[float, int]:
    """The chance of counts as odd as these or odder, by chi-square; and the number of kinds, the rare ones as one."""
    expected = wanted * counts.sum()
    rare = expected < FEWEST
    seen = torch.cat((counts[~rare], counts[rare].sum()[None]))
    due = torch.cat((expected[~rare], expected[rare].sum()[None]))
    if float(due[-1]) < FEWEST:  # even together they are too few: then not counted at all
        seen, due = seen[:-1], due[:-1]
    if len(due) < 2:
        return 1.0, len(due)
    odd = ((seen - due) ** 2 / due).sum()
    return float(torch.special.gammaincc(torch.tensor((len(due) - 1) / 2, dtype=torch.double), odd.cpu() / 2)), len(due)
