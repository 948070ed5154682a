"""Generation checks: generation, speculative-decoding, mode-restored, beam-search, sampling."""

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
    """Choose the length of a prompt and the number of new tokens."""
    num_tokens = max(1, min(max_new_tokens, context.seq_len // (2 if not context.is_slow else 3)))
    return max(1, min(context.seq_len - num_tokens, 10)), num_tokens


def _generate_continuation(
    context: CheckContext, generate: Callable[[Tensor, int], Tensor], prompt: Tensor, num_tokens: int
) -> tuple[Tensor, CaseResult | None]:
    """Generate from a prompt and remove the prompt if the output includes it; also return a failure if the number of
    tokens is wrong. Generation may end early at an eos token, but then the same number of tokens must be possible."""

    def generate_new(n: int) -> Tensor:
        out = generate(prompt, n)
        length = prompt.shape[1]
        has_prompt = out.shape[1] >= length + 1 and torch.equal(out[:, :length].to(prompt), prompt)
        return out[:, length:] if has_prompt and out.shape[1] > n else out

    def wrong_count(requested: int, generated: int) -> CaseResult:
        message = f"{requested} tokens were requested, and {generated} were generated"
        return CaseResult("fail", message, generated, requested)

    out = generate_new(num_tokens)
    if out.ndim != 2 or len(out) != len(prompt):
        raise SkipCheckError(f"the generated tokens have shape {tuple(out.shape)} for {len(prompt)} prompts")
    if out.shape[1] > num_tokens:
        return out, wrong_count(num_tokens, out.shape[1])
    if out.shape[1] < num_tokens:
        fewer = max(1, out.shape[1])
        num_generated = generate_new(fewer).shape[1]
        if num_generated < fewer:
            return out, wrong_count(fewer, num_generated)
    return out, None


@torch.no_grad()
def find_non_greedy_token(
    context: CheckContext, prompt: Tensor, continuation: Tensor
) -> tuple[int, int, float, float] | None:
    """The first generated token that is not the argmax of the logits of one forward pass: its row, its index, its logit
    deficit, and the tolerance. Tokens after an eos token are ignored."""
    logits, eos = context.model.logits, context.model.eos_token_id
    assert logits is not None
    tokens = torch.cat((prompt, continuation.to(prompt)), 1)
    first = prompt.shape[1] - 1

    def forward() -> Tensor:
        return logits(tokens)[:, first:-1].float()

    out = forward()
    deficit = out.max(-1).values - out.gather(-1, continuation.to(prompt)[..., None])[..., 0]
    if eos is not None:
        is_eos = continuation == eos
        after_eos = (is_eos.cumsum(1) - is_eos.long() > 0).to(deficit.device)
        deficit = deficit.masked_fill(after_eos, 0.0)
    # Twice the noise: it affects both logits of the difference.
    tolerance = 2 * NOISE_MARGIN * context.noise_ratio * float(out.abs().max())
    if bool((deficit <= tolerance).all()):
        return None
    tolerance = max(tolerance, 2 * NOISE_MARGIN * context.measure_noise(forward, out))
    exceeds = ~(deficit <= tolerance)
    if not bool(exceeds.any()):
        return None
    index = int(exceeds.any(0).long().argmax())
    row = int(exceeds[:, index].long().argmax())
    return row, index, float(deficit[row, index]), tolerance


def _check_greedy(
    context: CheckContext,
    generate: Callable[[Tensor, int], Tensor],
    prompt: Tensor,
    num_tokens: int,
    description: str,
    unpadded_prompts: list[Tensor] | None,
) -> CaseResult:
    """Whether each generated token is the argmax; `unpadded_prompts` are the prompts of a padded batch."""
    generated, failure = _generate_continuation(context, generate, prompt, num_tokens)
    if failure is not None:
        return failure
    if not generated.shape[1]:
        return CaseResult("skip", f"skipped: no tokens were generated {description}")
    is_padded = unpadded_prompts is not None
    for prompt_row, tokens in enumerate([prompt] if unpadded_prompts is None else unpadded_prompts):
        continuation = generated[prompt_row : prompt_row + 1] if is_padded else generated
        non_greedy = find_non_greedy_token(context, tokens, continuation)
        if non_greedy is not None:
            row, index, deficit, tolerance = non_greedy
            row = prompt_row if is_padded else row
            message = f"generated {description}, token {index} of row {row} is not the most likely next token"
            return CaseResult("fail", message, deficit, tolerance, f"row {row}, new token {index}")
    return CaseResult("pass", f"all {generated.shape[1]} tokens generated {description} are the most likely")


@register_check(
    "generation",
    catches="generated tokens that do not follow the logits: one step late, stale cache, wrong row, padded positions",
    cause="the next token is taken from the wrong position or fed twice, or positions count the padding",
    fix="use the logits of the last real token, feed each token once, and number positions from the first real token",
    needs=("logits", "generate|generate_padded"),
    kinds=CAUSAL_KINDS,
    depends_on=("causality-paths", "causality", "cache-decode"),
)
@torch.no_grad()
def generation(context: CheckContext) -> Iterator[CaseResult]:
    """Generate greedily and run the result in one forward pass: each token must be the most likely one, up to noise.
    Then generate from a left-padded batch of prompts of different lengths, and compare each row with the row alone."""
    model = context.model
    length, num_tokens = _choose_prompt_lengths(context)
    if model.generate is not None:
        prompt = context.random_tokens(2, length)
        yield _check_greedy(context, model.generate, prompt, num_tokens, "in a batch of two", None)
        if not context.is_slow:
            prompt = context.random_tokens(1, max(1, length // 2))
            yield _check_greedy(context, model.generate, prompt, num_tokens, "alone", None)
    if model.generate_padded is not None:
        padded, mask, unpadded = _padded_prompts(context, length)
        generate_padded = model.generate_padded
        yield _check_greedy(
            context, lambda _, n: generate_padded(padded, mask, n), padded, num_tokens, "with left padding", unpadded
        )


def _padded_prompts(context: CheckContext, seq_len: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Three prompts of different lengths: the left-padded batch, its mask, and the prompts alone."""
    prompt = context.random_tokens(3, seq_len)
    mask = torch.ones_like(prompt, dtype=torch.bool)
    for row, num_pads in enumerate((0, seq_len // 3, seq_len - 1)):
        mask[row, :num_pads] = False
    prompt = prompt.masked_fill(~mask, 0 if context.model.pad_token_id is None else context.model.pad_token_id)
    return prompt, mask, [row[real][None] for row, real in zip(prompt, mask, strict=True)]


@register_check(
    "speculative-decoding",
    catches="speculative decoding whose output differs from greedy decoding of the model",
    cause="a rejected draft token stays in the cache or the output, or the token after the accepted ones is skipped",
    fix="accept draft tokens up to the first mismatch, append the model's own token, and roll the cache back to there",
    needs=("logits", "generate_speculative"),
    kinds=CAUSAL_KINDS,
    depends_on=("causality", "cache-decode", "generation"),
)
@torch.no_grad()
def speculative_decoding(context: CheckContext) -> Iterator[CaseResult]:
    """Generate speculatively from a repetitive prompt (so that n-gram drafts are accepted) and from a random one: each
    token must be the most likely one in one forward pass."""
    generate_speculative = context.model.generate_speculative
    assert generate_speculative is not None
    length, num_tokens = _choose_prompt_lengths(context, 7)
    repeated = context.random_tokens(2, max(1, length // 3)).repeat(1, 3)
    cases = [(repeated, "from a repetitive prompt"), (context.random_tokens(2, length), "from a random prompt")]
    for prompt, description in cases[:1] if context.is_slow else cases:
        yield _check_greedy(context, generate_speculative, prompt, num_tokens, f"speculatively {description}", None)


@register_check(
    "mode-restored",
    catches="generation that leaves the model in another mode, so that training continues without dropout",
    cause="generate calls eval() or train() and does not restore the previous mode",
    fix="save the training flag of every module before, and restore it in a finally block",
    needs=("module", "generate|beam_search|generate_speculative"),
    kinds=CAUSAL_KINDS,
)
def mode_restored(context: CheckContext) -> Iterator[CaseResult]:
    """Generate in training and in eval mode: the training flag of every module, requires_grad of every parameter and
    torch.is_grad_enabled() must be unchanged."""
    model, module = context.model, context.model.module
    assert module is not None
    prompt = context.random_tokens(1, max(1, min(4, context.seq_len // 2)))
    submodules = dict(module.named_modules())
    paths: dict[str, Callable[[], Any]] = {}
    if model.generate is not None:
        paths["generate"] = lambda: model.generate(prompt, 2)  # type: ignore[misc]
    if model.beam_search is not None:
        paths["beam_search"] = lambda: model.beam_search(prompt[:, :1], 2, 2)  # type: ignore[misc]
    if model.generate_speculative is not None:
        paths["generate_speculative"] = lambda: model.generate_speculative(prompt, 2)  # type: ignore[misc]
    for path, run in paths.items():
        for training in (True, False):
            module.train(training)
            params = {name: param for name, param in module.named_parameters() if param.is_floating_point()}
            requires_grad = {name: param.requires_grad for name, param in params.items()}
            for param in params.values():  # set all, so that parameters that an earlier call froze are found too
                param.requires_grad_(True)
            with torch.enable_grad():
                try:
                    run()
                    grad_enabled = torch.is_grad_enabled()
                    frozen = [name for name, param in params.items() if not param.requires_grad]
                except UNSUPPORTED_ERRORS as error:
                    yield CaseResult("skip", f"skipped: {path} is not supported in training mode: {str(error)[:100]}")
                    break
                finally:
                    for name, param in params.items():
                        param.requires_grad_(requires_grad[name])
            changed = [name for name, submodule in submodules.items() if submodule.training != training]
            if changed:
                mode = "training" if submodules[changed[0]].training else "eval"
                message = f"after {path}, {len(changed)} of {len(submodules)} modules are left in {mode} mode"
                yield CaseResult("fail", message, float(len(changed)), 0.0, changed[0] or "the whole model")
                return
            if frozen or not grad_enabled:
                problem = f"{frozen[0]} no longer requires a gradient" if frozen else "gradients are disabled"
                yield CaseResult("fail", f"after {path}, {problem}", location=frozen[0] if frozen else None)
                return
        else:
            yield CaseResult("pass", f"{path} keeps the mode of every module")


NUM_BEAMS = 3


MAX_PROMPTS = 8
"""Prompts tried, if the model is fast, until the beams of one are reordered."""


NUM_SAMPLES, MIN_EXPECTED_COUNT = 4000, 20.0
"""Number of samples, and the smallest expected count of a chi-square category."""


SIGNIFICANCE_LEVEL = 1e-12
"""Probability that a correct sampler fails."""


SECONDS_PER_SETTING = 0.05
"""Time limit for the samples with one set of parameters."""


@register_check(
    "beam-search",
    catches="beams with wrong scores: the cache is not reordered with the beams, or scores belong to other tokens",
    cause="the cache rows are not reordered when the beams are, or a log-probability is added to another beam",
    fix="reorder all cache rows by the parents of the new beams, and sum log-probabilities along each beam",
    needs=("logits", "beam_search"),
    kinds=CAUSAL_KINDS,
    depends_on=("causality", "batch-isolation", "cache-decode", "generation"),
)
@torch.no_grad()
def beam_search(context: CheckContext) -> Iterator[CaseResult]:
    """Run each returned beam in one forward pass: its score must be the sum of its tokens' log-probabilities, no two
    beams may be equal, and none may be worse than those of a beam search without a cache."""
    assert context.model.beam_search is not None
    length, num_tokens = _choose_prompt_lengths(context, 5)
    length = 1 if context.model.kind == "encoder-decoder" else length  # the decoder starts with one token
    num_beams = min(NUM_BEAMS, context.model.vocab_size or 2)
    for _ in range(MAX_PROMPTS if not context.is_slow else 1):
        prompt = context.random_tokens(1, length)
        reference_scores, margin, reordered = _reference_beam_search(context, prompt, num_tokens, num_beams)
        if reordered:
            break
    beams, scores = context.model.beam_search(prompt, num_tokens, num_beams)
    beams = beams[:, length:] if beams.shape[1] == length + num_tokens else beams
    if beams.shape != (num_beams, num_tokens):
        raise SkipCheckError(f"beam_search returned shape {tuple(beams.shape)}, not ({num_beams}, {num_tokens})")
    scores = scores.flatten().float().to(prompt.device)
    log_probs = _sequence_log_probs(context, prompt, beams)
    errors = (scores - log_probs).abs()
    worst = int(errors.argmax())
    error = float(errors[worst])
    tolerance = 2 * NOISE_MARGIN * context.noise_ratio * float(log_probs.abs().max())
    if not error <= tolerance or margin <= 2 * tolerance:
        noise = context.measure_noise(lambda: _sequence_log_probs(context, prompt, beams), log_probs)
        tolerance = max(tolerance, 2 * NOISE_MARGIN * noise)
    if not error <= tolerance:
        message = f"the score of beam {worst} is {scores[worst]:.4g}, and its log-probability is {log_probs[worst]:.4g}"
        yield CaseResult("fail", message, error, tolerance, f"beam {worst}")
        return
    if len({tuple(beam) for beam in beams.tolist()}) < num_beams:
        yield CaseResult("fail", "the same beam is returned twice")
        return
    is_ambiguous = margin <= tolerance  # rounding may decide which beams are kept
    deficit = float((reference_scores - log_probs.sort(descending=True).values).max())
    if not is_ambiguous and not deficit <= tolerance:
        message = "a beam search without a cache finds more likely beams than those returned"
        yield CaseResult("fail", message, deficit, tolerance)
        return
    note = "" if reordered else " (no beam was reordered)"
    yield CaseResult(
        "pass", f"{num_beams} beams have the log-probabilities of one forward pass{note}", error, tolerance
    )


def _sequence_log_probs(context: CheckContext, prompt: Tensor, continuations: Tensor) -> Tensor:
    """Sum of the log-probabilities of each continuation, (N,)."""
    assert context.model.logits is not None
    tokens = torch.cat((prompt.expand(len(continuations), -1), continuations.to(prompt)), 1)
    log_probs = context.model.logits(tokens)[:, prompt.shape[1] - 1 : -1].float().log_softmax(-1)
    return log_probs.gather(-1, continuations.to(prompt)[..., None])[..., 0].sum(-1)


def _reference_beam_search(
    context: CheckContext, prompt: Tensor, num_tokens: int, num_beams: int
) -> tuple[Tensor, float, bool]:
    """Beam search without a cache: the scores, best first; the smallest margin by which a beam was dropped; and whether
    a returned beam was reordered, without which a cache that is not reordered would be correct too."""
    assert context.model.logits is not None
    tokens, scores, margin = prompt, torch.zeros(1, device=prompt.device), float("inf")
    reordered = torch.zeros(1, dtype=torch.bool, device=prompt.device)
    for step in range(num_tokens):
        log_probs = context.model.logits(tokens)[:, -1].float().log_softmax(-1)  # (beams, V)
        vocab_size = log_probs.shape[-1]
        candidates = (scores[:, None] + log_probs).flatten()
        best, index = candidates.topk(min(num_beams + 1, len(candidates)))
        if len(best) > num_beams:
            margin = min(margin, float(best[num_beams - 1] - best[num_beams]))
        scores, index = best[:num_beams], index[:num_beams]
        parents, next_tokens = index // vocab_size, index % vocab_size
        reordered = reordered[parents]
        if 0 < step < num_tokens - 1:  # the first step has one row, and the cache is not read after the last
            reordered = reordered | (parents != torch.arange(num_beams, device=parents.device))
        tokens = torch.cat((tokens[parents], next_tokens[:, None]), 1)
    return scores, margin, bool(reordered.any())


EMPTY_FILTER_CAUSE = "the filter keeps one token too few, so that none is left if it should keep one"


EMPTY_FILTER_FIX = "keep the token that crosses top_p, and exactly top_k tokens"


@register_check(
    "sampling",
    catches="samples that do not follow the probabilities: temperature applied twice, a filter that keeps one too few",
    cause="logits are scaled or filtered incorrectly, or sorted indices are used as token ids",
    fix="divide by the temperature once, keep the token that crosses top_p, and map sorted indices back to token ids",
    needs=("sample",),
    kinds=CAUSAL_KINDS,
)
@torch.no_grad()
def sampling(context: CheckContext) -> Iterator[CaseResult]:
    """Draw several thousand tokens from known logits and compare the counts with the probabilities (a chi-square test
    that a correct sampler fails once in 10¹² times); repeat with temperature, top_k and top_p, if it takes them."""
    sample = context.model.sample
    assert sample is not None
    # Unsorted, so that a sorted index used as a token id is detected; the last token is practically impossible.
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
    for sampling_kwargs in settings:
        description = ", ".join(f"{name} {value:g}" for name, value in sampling_kwargs.items())
        path = f" with {description}" if description else ""
        try:
            counts = _count_samples(sample, logits, sampling_kwargs)
        except (RuntimeError, IndexError, AssertionError) as error:
            if not sampling_kwargs:
                raise
            yield CaseResult(
                "fail", f"sampling{path} {format_raised(error)}", cause=EMPTY_FILTER_CAUSE, fix=EMPTY_FILTER_FIX
            )
            continue
        expected = _expected_probabilities(logits, **sampling_kwargs)
        num_samples = int(counts.sum())
        impossible = expected < 1e-12
        if int(counts[impossible].sum()):
            token = int((counts * impossible).argmax())
            message = f"{int(counts[token])} of {num_samples} samples{path} are a token of probability zero"
            yield CaseResult("fail", message, float(counts[token]), 0.0, f"token {token}")
            continue
        if int((~impossible).sum()) == 1:  # the only possible token, and only it was drawn
            yield CaseResult("pass", f"all {num_samples} samples{path} are the only possible token")
            continue
        p_value, num_categories = _chi_square_test(counts, expected)
        if num_categories < 2:
            yield CaseResult("skip", f"skipped: {num_samples} samples{path} within the time limit are too few")
            continue
        if p_value >= SIGNIFICANCE_LEVEL:
            message = f"{num_samples} samples{path} follow the probabilities"
            yield CaseResult("pass", message, p_value, SIGNIFICANCE_LEVEL)
        else:
            frequencies = counts / num_samples
            worst = int((frequencies - expected).abs().argmax())
            message = f"samples{path} do not follow the probabilities: token {worst} has a frequency of "
            message += f"{frequencies[worst]:.3f} and a probability of {expected[worst]:.3f}"
            yield CaseResult("fail", message, p_value, SIGNIFICANCE_LEVEL)


def _count_samples(sample: Any, logits: Tensor, sampling_kwargs: dict[str, Any]) -> Tensor:
    """Count samples per token: a first call is timed, and a second is as large as the time limit allows."""
    start = time.monotonic()
    tokens = sample(logits, 64, **sampling_kwargs).flatten().long()
    seconds = max(time.monotonic() - start, 1e-6)
    num_more = int(min(NUM_SAMPLES, 64 * SECONDS_PER_SETTING / seconds))
    if num_more > 64:
        tokens = torch.cat((tokens, sample(logits, num_more, **sampling_kwargs).flatten().long()))
    if int(tokens.min()) < 0 or int(tokens.max()) >= len(logits):
        raise SkipCheckError(
            f"from {len(logits)} logits it sampled token {int(tokens.max())}; it must sample from the logits passed"
        )
    return torch.bincount(tokens, minlength=len(logits)).double()


def _expected_probabilities(
    logits: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """The distribution that a correct sampler draws from."""
    p = (logits.double() / temperature).softmax(-1)
    order = p.argsort(descending=True)
    if top_k is not None:
        p[order[top_k:]] = 0.0
    if top_p is not None:
        mass_before = p[order].cumsum(0) - p[order]
        p[order[mass_before >= top_p]] = 0.0
    return p / p.sum()


def _chi_square_test(counts: Tensor, probabilities: Tensor) -> tuple[float, int]:
    """p-value of a chi-square test, and the number of categories; rare tokens are one category."""
    expected = probabilities * counts.sum()
    rare = expected < MIN_EXPECTED_COUNT
    observed = torch.cat((counts[~rare], counts[rare].sum()[None]))
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    if float(expected[-1]) < MIN_EXPECTED_COUNT:  # too few even together: leave them out
        observed, expected = observed[:-1], expected[:-1]
    if len(expected) < 2:
        return 1.0, len(expected)
    statistic = ((observed - expected) ** 2 / expected).sum()
    degrees = torch.tensor((len(expected) - 1) / 2, dtype=torch.double)
    return float(torch.special.gammaincc(degrees, statistic.cpu() / 2)), len(expected)
