"""Greedy, speculative and beam-searched text is what the logits say, and draws follow the probabilities."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from cutaway.check.adapters.module import argument_names
from cutaway.check.context import CheckContext
from cutaway.check.numerics import NOISE_MARGIN
from cutaway.check.probes.cached_forward import UNSUPPORTED_ERRORS
from cutaway.check.registry import CAUSAL_KINDS, register_check
from cutaway.check.report.finding import CaseResult, SkipCheckError
from cutaway.errors import format_raised


def _choose_prompt_lengths(context: CheckContext, max_new_tokens: int = 6) -> tuple[int, int]:
    """Tokens of a prompt, and of what is written behind it."""
    n = max(1, min(max_new_tokens, context.seq_len // (2 if not context.is_slow else 3)))
    return max(1, min(context.seq_len - n, 10)), n


def _generate_continuation(
    context: CheckContext, generate: Callable[[Tensor, int], Tensor], prompt: Tensor, num_tokens: int
) -> tuple[Tensor, CaseResult | None]:
    """What was written behind a prompt, without the prompt where that is given back too; and what is wrong in how much
    it is. A text may end early, but then not before as many tokens as it has shown it can write."""

    def asked(m: int) -> Tensor:
        out = generate(prompt, m)
        length = prompt.shape[1]
        whole = out.shape[1] >= length + 1 and torch.equal(out[:, :length].to(prompt), prompt)
        return out[:, length:] if whole and out.shape[1] > m else out

    out = asked(num_tokens)
    if out.ndim != 2 or len(out) != len(prompt):
        raise SkipCheckError(f"what was written has the shape {tuple(out.shape)} for {len(prompt)} prompts")
    if out.shape[1] > num_tokens:
        return out, CaseResult(
            "fail", f"{num_tokens} tokens were asked for, and {out.shape[1]} were written", out.shape[1], num_tokens
        )
    if out.shape[1] < num_tokens:
        fewer = max(1, out.shape[1])
        less = asked(fewer).shape[1]
        if less < fewer:
            return out, CaseResult("fail", f"{fewer} tokens were asked for, and {less} were written", less, fewer)
    return out, None


@torch.no_grad()
def find_non_greedy_token(
    context: CheckContext, prompt: Tensor, continuation: Tensor
) -> tuple[int, int, float, float] | None:
    """The first written token that is not the likeliest by one pass over the whole: its row, its number, by how much it
    is less likely, and what noise would explain. What comes behind an end is not looked at."""
    logits, eos = context.model.logits, context.model.eos_token_id
    assert logits is not None
    tokens = torch.cat((prompt, continuation.to(prompt)), 1)
    first = prompt.shape[1] - 1

    def read() -> Tensor:
        return logits(tokens)[:, first:-1].float()

    out = read()
    behind = out.max(-1).values - out.gather(-1, continuation.to(prompt)[..., None])[..., 0]
    if eos is not None:
        behind = behind.masked_fill(
            ((continuation == eos).cumsum(1) - (continuation == eos).long() > 0).to(behind.device), 0.0
        )
    # Both logits may be off by the noise.
    bound = 2 * NOISE_MARGIN * context.noise_ratio * float(out.abs().max())
    if bool((behind <= bound).all()):
        return None
    bound = max(bound, 2 * NOISE_MARGIN * context.measure_noise(read, out))
    far = ~(behind <= bound)
    if not bool(far.any()):
        return None
    number = int(far.any(0).long().argmax())
    row = int(far[:, number].long().argmax())
    return row, number, float(behind[row, number]), bound


def _check_greedy(
    context: CheckContext,
    generate: Callable[[Tensor, int], Tensor],
    prompt: Tensor,
    num_tokens: int,
    description: str,
    unpadded_prompts: list[Tensor] | None,
) -> CaseResult:
    """Whether each written token is the likeliest; `alone` are the prompts without their padding."""
    written, wrong = _generate_continuation(context, generate, prompt, num_tokens)
    if wrong is not None:
        return wrong
    if not written.shape[1]:
        return CaseResult("skip", f"skipped: nothing was written {description}")
    for row, text in enumerate([prompt] if unpadded_prompts is None else unpadded_prompts):
        found = find_non_greedy_token(context, text, written if unpadded_prompts is None else written[row : row + 1])
        if found is not None:
            at, number, behind, bound = found
            at = at if unpadded_prompts is None else row
            message = (
                f"written {description}, token {number} of row {at} is not the likeliest behind the text before it"
            )
            return CaseResult("fail", message, behind, bound, f"row {at}, new token {number}")
    return CaseResult("pass", f"each of {written.shape[1]} tokens written {description} is the likeliest")


@register_check(
    "generation",
    catches="a text that is not what the logits say: a step late, a stale cache, the wrong row, padding that counts",
    cause="the next token is taken from the wrong position, is fed twice, or positions count the padding",
    fix="take the logits of the last real token, feed each token once, and number tokens from the first real one",
    needs=("logits", "generate|generate_padded"),
    kinds=CAUSAL_KINDS,
    depends_on=("causality-paths", "causality", "cache-decode"),
)
@torch.no_grad()
def generation(context: CheckContext) -> Iterator[CaseResult]:
    """Let it write greedily and read the result in one pass: each token must be the likeliest there, or as likely but
    for noise. Then a batch of prompts of different lengths, padded on the left, each against itself alone."""
    target = context.model
    length, n = _choose_prompt_lengths(context)
    if target.generate is not None:
        yield _check_greedy(context, target.generate, context.random_tokens(2, length), n, "in a batch of two", None)
        if not context.is_slow:
            yield _check_greedy(
                context, target.generate, context.random_tokens(1, max(1, length // 2)), n, "alone", None
            )
    if target.generate_padded is not None:
        prompt, mask, alone = _padded_prompts(context, length)
        write = target.generate_padded
        how = "behind padding on the left"
        yield _check_greedy(context, lambda _, m: write(prompt, mask, m), prompt, n, how, alone)


def _padded_prompts(context: CheckContext, seq_len: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Three prompts of different lengths in one batch, which of it is real, and each alone."""
    prompt = context.random_tokens(3, seq_len)
    mask = torch.ones_like(prompt, dtype=torch.bool)
    for row, pads in enumerate((0, seq_len // 3, seq_len - 1)):
        mask[row, :pads] = False
    prompt = prompt.masked_fill(~mask, 0 if context.model.pad_token_id is None else context.model.pad_token_id)
    return prompt, mask, [row[real][None] for row, real in zip(prompt, mask, strict=True)]


@register_check(
    "speculative-decoding",
    catches="speculative decoding that writes something else than the model alone would",
    cause="a refused guess stays in the cache or in the text, or the token behind the last accepted one is skipped",
    fix="keep guesses up to the first that is not the model's own, then its own token, and roll the cache back there",
    needs=("logits", "generate_speculative"),
    kinds=CAUSAL_KINDS,
    depends_on=("causality", "cache-decode", "generation"),
)
@torch.no_grad()
def speculative_decoding(context: CheckContext) -> Iterator[CaseResult]:
    """Let it write speculatively, behind a text that repeats itself (so that there is something to guess) and one that
    does not: each token must be the likeliest in one pass."""
    speculate = context.model.generate_speculative
    assert speculate is not None
    length, n = _choose_prompt_lengths(context, 7)
    repeated = context.random_tokens(2, max(1, length // 3)).repeat(1, 3)
    ways = [(repeated, "behind a text that repeats itself"), (context.random_tokens(2, length), "behind another text")]
    for prompt, how in ways[:1] if context.is_slow else ways:
        yield _check_greedy(context, speculate, prompt, n, f"speculatively {how}", None)


@register_check(
    "mode-restored",
    catches="a model that is left in another mode after writing, so that training goes on without dropout",
    cause="generate calls eval() or train(), and does not put back what was set before",
    fix="note the mode of every part before, and set it again in a finally",
    needs=("module", "generate|beam_search|generate_speculative"),
    kinds=CAUSAL_KINDS,
)
def mode_restored(context: CheckContext) -> Iterator[CaseResult]:
    """In training and in evaluation mode, let it write, and look: the mode of every part, which weights ask for
    gradients and whether any are taken must be as before."""
    target, module = context.model, context.model.module
    assert module is not None
    prompt = context.random_tokens(1, max(1, min(4, context.seq_len // 2)))
    parts = dict(module.named_modules())
    ways: dict[str, Callable[[], Any]] = {}
    if target.generate is not None:
        ways["generating"] = lambda: target.generate(prompt, 2)  # type: ignore[misc]
    if target.beam_search is not None:
        ways["a beam search"] = lambda: target.beam_search(prompt[:, :1], 2, 2)  # type: ignore[misc]
    if target.generate_speculative is not None:
        ways["speculating"] = lambda: target.generate_speculative(prompt, 2)  # type: ignore[misc]
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
                except UNSUPPORTED_ERRORS as error:
                    yield CaseResult("skip", f"skipped: {path} in training it refuses: {str(error)[:100]}")
                    break
                finally:
                    for name, p in weights.items():
                        p.requires_grad_(asked[name])
            left = [name for name, part in parts.items() if part.training != training]
            if left:
                now = "training" if parts[left[0]].training else "evaluation"
                what = f"after {path}, {len(left)} of {len(parts)} parts of the model are left in {now} mode"
                yield CaseResult("fail", what, float(len(left)), 0.0, left[0] or "the whole model")
                return
            if frozen or not taken:
                what = f"{frozen[0]} asks for other gradients" if frozen else "no gradients are taken any more"
                yield CaseResult("fail", f"after {path}, {what}", location=frozen[0] if frozen else None)
                return
        else:
            yield CaseResult("pass", f"{path} leaves every part in its mode")


NUM_BEAMS = 3


MAX_PROMPTS = 8
"""Prompts among which one is sought whose beams change places, where passes are quick."""


NUM_SAMPLES, MIN_EXPECTED_COUNT = 4000, 20.0
"""Tokens drawn; and how many of a kind must be expected for it to count as a kind of its own."""


SIGNIFICANCE_LEVEL = 1e-12
"""That a right sampler is called wrong."""


SECONDS_PER_SETTING = 0.05
"""Seconds for the draws of one setting."""


@register_check(
    "beam-search",
    catches="beams with scores that are not theirs: caches not reordered with the beams, scores of other tokens",
    cause="after beams change places, their cache rows do not, or a token's probability is added to another beam",
    fix="reorder every row of the state by the new beams' parents, and add log-probabilities along each one's path",
    needs=("logits", "beam_search"),
    kinds=CAUSAL_KINDS,
    depends_on=("causality", "batch-isolation", "cache-decode", "generation"),
)
@torch.no_grad()
def beam_search(context: CheckContext) -> Iterator[CaseResult]:
    """Read each beam that is returned in one pass: its score must be the sum of its tokens' log-probabilities, no two
    may be alike, and none may be worse than what a search by whole passes finds."""
    assert context.model.beam_search is not None
    length, n = _choose_prompt_lengths(context, 5)
    length = 1 if context.model.kind == "encoder-decoder" else length  # its answers begin with one token
    vocab = context.model.vocab_size or 2
    width = min(NUM_BEAMS, vocab)
    for _ in range(MAX_PROMPTS if not context.is_slow else 1):
        prompt = context.random_tokens(1, length)
        best, gaps, moved = _reference_beam_search(context, prompt, n, width)
        if moved:
            break
    found, scores = context.model.beam_search(prompt, n, width)
    found = found[:, length:] if found.shape[1] == length + n else found
    if found.shape != (width, n):
        raise SkipCheckError(f"{width} beams of {n} tokens were asked for, and {tuple(found.shape)} came back")
    scores = scores.flatten().float().to(prompt.device)
    own = _sequence_log_probs(context, prompt, found)
    far = (scores - own).abs()
    worst = int(far.argmax())
    bound = 2 * NOISE_MARGIN * context.noise_ratio * float(own.abs().max())
    if not float(far[worst]) <= bound or gaps <= 2 * bound:
        bound = max(
            bound, 2 * NOISE_MARGIN * context.measure_noise(lambda: _sequence_log_probs(context, prompt, found), own)
        )
    if not float(far[worst]) <= bound:
        message = f"beam {worst} is said to have log-probability {scores[worst]:.4g}, and has {own[worst]:.4g}"
        yield CaseResult("fail", message, float(far[worst]), bound, f"beam {worst}")
        return
    if len({tuple(row) for row in found.tolist()}) < width:
        yield CaseResult("fail", "the same beam is returned twice")
        return
    close = gaps <= bound
    short = (best - own.sort(descending=True).values).max()
    if not close and not float(short) <= bound:
        message = "a search by whole passes finds beams that are likelier than those returned"
        yield CaseResult("fail", message, float(short), bound)
        return
    still = "" if moved else " (none of them had to change places)"
    yield CaseResult("pass", f"{width} beams have the log-probabilities of one pass{still}", float(far[worst]), bound)


def _sequence_log_probs(context: CheckContext, prompt: Tensor, continuations: Tensor) -> Tensor:
    """The sum of the log-probabilities of each continuation."""
    assert context.model.logits is not None
    tokens = torch.cat((prompt.expand(len(continuations), -1), continuations.to(prompt)), 1)
    log_p = context.model.logits(tokens)[:, prompt.shape[1] - 1 : -1].float().log_softmax(-1)
    return log_p.gather(-1, continuations.to(prompt)[..., None])[..., 0].sum(-1)


def _reference_beam_search(
    context: CheckContext, prompt: Tensor, num_tokens: int, num_beams: int
) -> tuple[Tensor, float, bool]:
    """The sums of a beam search by whole passes, the best first; by how little a beam was left out; and whether one of
    those that are returned changed its place on the way, without which a cache that stays as it is would be right."""
    assert context.model.logits is not None
    tokens, sums, least = prompt, torch.zeros(1, device=prompt.device), float("inf")
    moved = torch.zeros(1, dtype=torch.bool, device=prompt.device)
    for step in range(num_tokens):
        log_p = context.model.logits(tokens)[:, -1].float().log_softmax(-1)
        total = (sums[:, None] + log_p).flatten()
        best, place = total.topk(min(num_beams + 1, len(total)))
        least = min(least, float(best[num_beams - 1] - best[num_beams])) if len(best) > num_beams else least
        sums, parents, token = (
            best[:num_beams],
            place[:num_beams] // log_p.shape[-1],
            place[:num_beams] % log_p.shape[-1],
        )
        moved = moved[parents]
        if 0 < step < num_tokens - 1:  # first there is one row only, and behind the last nothing is read
            moved = moved | (parents != torch.arange(num_beams, device=parents.device))
        tokens = torch.cat((tokens[parents], token[:, None]), 1)
    return sums, least, bool(moved.any())


EMPTY_FILTER_CAUSE = "the filter keeps one token too few: where it keeps one, none is left"


EMPTY_FILTER_FIX = "keep the token that crosses top-p, and as many tokens as top-k says"


@register_check(
    "sampling",
    catches="draws that do not follow the probabilities: temperature applied twice, a filter that keeps one too few",
    cause="logits are scaled or filtered otherwise than asked for, or tokens are drawn from unsorted for sorted ones",
    fix="divide by the temperature once, keep the token that crosses top-p, and map sorted places back to tokens",
    needs=("sample",),
    kinds=CAUSAL_KINDS,
)
@torch.no_grad()
def sampling(context: CheckContext) -> Iterator[CaseResult]:
    """Draw some thousand tokens from known logits and compare the counts with the probabilities (a chi-square test that
    a right sampler fails once in 10¹² times); again with temperature, top_k and top_p, where it takes these names."""
    sample = context.model.sample
    assert sample is not None
    # Not in order, so that a sorted place taken for a token shows; the last is as good as impossible.
    logits = torch.tensor([0.3, 2.0, -1.0, 1.2, 0.0, 1.7, -0.4, 0.9, -40.0], device=context.model.device)
    names = argument_names(sample)
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
            counts = _count_samples(sample, logits, how)
        except (RuntimeError, IndexError, AssertionError) as error:
            if not how:
                raise
            yield CaseResult(
                "fail", f"a draw{path} {format_raised(error)}", cause=EMPTY_FILTER_CAUSE, fix=EMPTY_FILTER_FIX
            )
            continue
        wanted = _expected_probabilities(logits, **how)
        never = wanted < 1e-12
        if int(counts[never].sum()):
            token = int((counts * never).argmax())
            message = f"{int(counts[token])} of {int(counts.sum())} draws{path} were a token that must not come up"
            yield CaseResult("fail", message, float(counts[token]), 0.0, f"token {token}")
            continue
        if int((~never).sum()) == 1:  # one token is left, and it alone was drawn
            yield CaseResult("pass", f"all {int(counts.sum())} draws{path} are the only token that is left")
            continue
        chance, kinds = _chi_square_test(counts, wanted)
        if kinds < 2:
            yield CaseResult("skip", f"skipped: {int(counts.sum())} draws{path} in time are too few")
            continue
        held = f"{int(counts.sum())} draws{path} follow the probabilities"
        worst = int(((counts / counts.sum()) - wanted).abs().argmax())
        broken = (
            f"draws{path} do not follow the probabilities: token {worst} came up {counts[worst] / counts.sum():.3f} of "
            f"the time, and has {wanted[worst]:.3f}"
        )
        yield CaseResult(
            "pass" if chance >= SIGNIFICANCE_LEVEL else "fail",
            held if chance >= SIGNIFICANCE_LEVEL else broken,
            chance,
            SIGNIFICANCE_LEVEL,
        )


def _count_samples(sample: Any, logits: Tensor, sampling_kwargs: dict[str, Any]) -> Tensor:
    """How often each token was drawn: in a first call that is timed, and in a second as large as the time allows."""
    since = time.monotonic()
    tokens = sample(logits, 64, **sampling_kwargs).flatten().long()
    spent = max(time.monotonic() - since, 1e-6)
    more = int(min(NUM_SAMPLES, 64 * SECONDS_PER_SETTING / spent))
    tokens = torch.cat((tokens, sample(logits, more, **sampling_kwargs).flatten().long())) if more > 64 else tokens
    if int(tokens.min()) < 0 or int(tokens.max()) >= len(logits):
        raise SkipCheckError(
            f"of {len(logits)} logits it drew token {int(tokens.max())}; it must draw from what is given"
        )
    return torch.bincount(tokens, minlength=len(logits)).double()


def _expected_probabilities(
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


def _chi_square_test(counts: Tensor, probabilities: Tensor) -> tuple[float, int]:
    """The chance of counts as odd as these or odder, by chi-square; and the number of kinds, the rare ones as one."""
    expected = probabilities * counts.sum()
    rare = expected < MIN_EXPECTED_COUNT
    seen = torch.cat((counts[~rare], counts[rare].sum()[None]))
    due = torch.cat((expected[~rare], expected[rare].sum()[None]))
    if float(due[-1]) < MIN_EXPECTED_COUNT:  # even together they are too few: then not counted at all
        seen, due = seen[:-1], due[:-1]
    if len(due) < 2:
        return 1.0, len(due)
    odd = ((seen - due) ** 2 / due).sum()
    return float(torch.special.gammaincc(torch.tensor((len(due) - 1) / 2, dtype=torch.double), odd.cpu() / 2)), len(due)
