"""Generation checks: generation, speculative-decoding, mode-restored, beam-search, sampling."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from cutaway.check.adapters.module import accepts_argument
from cutaway.check.checked_model import GenerateFunction, require
from cutaway.check.context import CheckContext
from cutaway.check.numerics import NOISE_MARGIN, Difference
from cutaway.check.probes.cached_forward import UNSUPPORTED_ERRORS
from cutaway.check.registry import CAUSAL_KINDS, register_check
from cutaway.check.report.finding import CaseResult, SkipCheckError, failure, skipped, success, warning
from cutaway.errors import format_raised

_NUM_EOS_PROMPTS = 32
"""Number of random prompts among which one is searched that the model continues with eos."""
_EOS_CAUSE = "one row that ends with eos ends the whole batch, or the tokens of other rows are replaced by padding"
_EOS_FIX = "record for each row whether it has ended, and stop when all rows have"


def _choose_prompt_lengths(ctx: CheckContext, max_new_tokens: int = 6) -> tuple[int, int]:
    """Choose the length of a prompt and the number of new tokens."""
    num_tokens = max(1, min(max_new_tokens, ctx.seq_len // (2 if not ctx.is_slow else 3)))
    return max(1, min(ctx.seq_len - num_tokens, 10)), num_tokens


def _generate_continuation(
    generate: GenerateFunction, prompt: Tensor, num_tokens: int
) -> tuple[Tensor, CaseResult | None]:
    """Generate from a prompt; return the new tokens, without the prompt, and a failure if their number is wrong.

    Generation may end early at an eos token. In that case, the number of generated tokens is requested in a second
    call, which must generate as many.
    """

    def generate_new(n: int) -> Tensor:
        out, length = generate(prompt, n), prompt.shape[1]
        has_prompt = out.shape[1] >= length + 1 and torch.equal(out[:, :length].to(prompt), prompt)
        return out[:, length:] if has_prompt and out.shape[1] > n else out

    out, requested = generate_new(num_tokens), num_tokens
    if out.ndim != 2 or len(out) != len(prompt):
        raise SkipCheckError(
            f"the generated tokens have shape {tuple(out.shape)}, not one row for each of {len(prompt)} prompts"
        )
    generated = out.shape[1]
    if generated < num_tokens:
        requested = max(1, generated)
        generated = min(requested, generate_new(requested).shape[1])
    if generated == requested:
        return out, None
    return out, failure(f"{requested} tokens were requested, but {generated} were generated", generated, requested)


def find_non_greedy_token(
    ctx: CheckContext, prompt: Tensor, continuation: Tensor
) -> tuple[int, int, float, float] | None:
    """Find the first generated token that is not the argmax of the logits of one forward pass.

    Returns (row, index, how far its logit is below the largest logit, tolerance), or None if there is no such token.
    Tokens after an eos token are ignored.
    """
    logits, eos = ctx.logits, ctx.model.eos_token_id
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
    tolerance = 2 * NOISE_MARGIN * ctx.noise_ratio * float(out.abs().max())
    if not bool((deficit <= tolerance).all()):
        tolerance = max(tolerance, 2 * NOISE_MARGIN * ctx.measure_noise(forward, out))
    exceeds = ~(deficit <= tolerance)
    if not bool(exceeds.any()):
        ctx.record_match(Difference(float(deficit.max()), tolerance / 2, ()), out)
        return None
    index = int(exceeds.any(0).long().argmax())
    row = int(exceeds[:, index].long().argmax())
    return row, index, float(deficit[row, index]), tolerance


def _check_greedy(
    ctx: CheckContext,
    generate: GenerateFunction,
    prompt: Tensor,
    num_tokens: int,
    description: str,
    unpadded_prompts: list[Tensor] | None = None,
) -> CaseResult:
    """Check that each generated token is the argmax of the logits of one forward pass.

    If `prompt` is a padded batch, `unpadded_prompts` are its rows without padding.
    """
    generated, wrong_count = _generate_continuation(generate, prompt, num_tokens)
    if wrong_count is not None:
        return wrong_count
    if not generated.shape[1]:
        return skipped(f"no tokens were generated {description}")
    batches = [(prompt, generated)]
    if unpadded_prompts is not None:
        batches = list(zip(unpadded_prompts, torch.split(generated, 1), strict=True))
    for batch, (tokens, continuation) in enumerate(batches):
        if (non_greedy := find_non_greedy_token(ctx, tokens, continuation)) is not None:
            row, index, deficit, tolerance = non_greedy
            row += batch
            message = f"generated {description}, token {index} of row {row} is not the most likely next token"
            return failure(message, deficit, tolerance, f"row {row}, new token {index}")
    return success(f"all {generated.shape[1]} tokens generated {description} are the most likely")


@register_check(
    "generation",
    needs=("logits", "generate|generate_padded"),
    kinds=CAUSAL_KINDS,
    depends_on=("causality-paths", "causality", "cache-decode"),
)
def generation(ctx: CheckContext) -> Iterator[CaseResult]:
    """Catches generated tokens that do not follow the logits: one step late, stale cache, wrong row, padded positions.

    Generate greedily and run the result in one forward pass: each token must be the most likely one, up to noise. If
    the eos token is known, one row of a batch ends at once, and the other must continue. Then generate from a padded
    batch of prompts of different lengths, and compare each row with the row alone.

    Cause: the next token is taken from the wrong position or fed twice, or positions count the padding.
    Fix: use the logits of the last real token, feed each token once, and number positions from the first real token.
    """
    model = ctx.model
    length, num_tokens = _choose_prompt_lengths(ctx)
    if model.generate is not None:
        prompt = ctx.random_tokens(2, length)
        yield _check_greedy(ctx, model.generate, prompt, num_tokens, "in a batch of two")
        if not ctx.is_slow:
            prompt = ctx.random_tokens(1, max(1, length // 2))
            yield _check_greedy(ctx, model.generate, prompt, num_tokens, "alone")
            if (prompts := _find_eos_prompts(ctx, length)) is not None:
                yield _check_generation_after_eos(ctx, model.generate, prompts, num_tokens)
    if model.generate_padded is not None:
        for side in ("left", "right"):
            if model.padding_side in (None, "both", side):
                yield _check_padded_generation(ctx, side, length, num_tokens)
    if model.generate is not None and not ctx.is_slow:
        prompt = ctx.random_tokens(2, length)
        yield _check_greedy(ctx, model.generate, prompt, num_tokens, "in a second batch of the same shape")


def _find_eos_prompts(ctx: CheckContext, length: int) -> Tensor | None:
    """Two prompts (2, T) such that the most likely next token is eos for the first one and not for the second one.

    None if the eos token is unknown, or if no random prompt has it as its next token.
    """
    eos = ctx.model.eos_token_id
    if eos is None:
        return None
    tokens = ctx.random_tokens(_NUM_EOS_PROMPTS, length)
    ends = ctx.logits(tokens).argmax(-1).eq(eos)  # (prompts, T)
    usable = ends & ends.logical_not().any(0)
    if not bool(usable.any()):
        return None
    row, position = divmod(int(usable.flatten().long().argmax()), length)
    other = int(ends[:, position].long().argmin())
    return tokens[[row, other], : position + 1]


def _check_generation_after_eos(
    ctx: CheckContext, generate: GenerateFunction, prompts: Tensor, num_tokens: int
) -> CaseResult:
    """Check that the second row continues after the first row has ended with eos."""
    generated, eos = generate(prompts, num_tokens), require(ctx.model.eos_token_id)
    description = "in a batch whose first row ends with eos"
    new_tokens = generated[1, -min(num_tokens, generated.shape[1]) :]
    if generated.shape[1] < num_tokens and not bool(new_tokens.eq(eos).any()):
        message = f"{num_tokens} tokens were requested, but {len(new_tokens)} were generated {description}"
        return failure(message, len(new_tokens), num_tokens, "row 1", _EOS_CAUSE, _EOS_FIX)
    case = _check_greedy(ctx, generate, prompts, num_tokens, description)
    return replace(case, cause=_EOS_CAUSE, fix=_EOS_FIX) if case.verdict == "fail" else case


def _check_padded_generation(ctx: CheckContext, side: str, length: int, num_tokens: int) -> CaseResult:
    """Check that each row of a padded batch gives the tokens of the row alone."""
    generate_padded = require(ctx.model.generate_padded)
    padded, mask, unpadded = _padded_prompts(ctx, length, side)
    case = _check_greedy(
        ctx, lambda _, n: generate_padded(padded, mask, n), padded, num_tokens, f"with {side} padding", unpadded
    )
    if side == "left" or ctx.model.padding_side is not None or case.verdict != "fail":
        return case
    cause = "the first new token is taken from the last position, which is padding in a right-padded row"
    fix = (
        "use the logits of the last real token of each row; pass padding_side='left' if right padding is not supported"
    )
    return replace(case, verdict="warn", cause=cause, fix=fix)


def _padded_prompts(ctx: CheckContext, seq_len: int, side: str) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Three prompts of different lengths: the padded batch, its mask, and the prompts alone."""
    prompt = ctx.random_tokens(3, seq_len)
    mask = torch.ones_like(prompt, dtype=torch.bool)
    for row, num_pads in enumerate((0, seq_len // 3, seq_len - 1)):
        mask[row, slice(num_pads) if side == "left" else slice(seq_len - num_pads, None)] = False
    prompt = prompt.masked_fill(~mask, 0 if ctx.model.pad_token_id is None else ctx.model.pad_token_id)
    return prompt, mask, [row[real][None] for row, real in zip(prompt, mask, strict=True)]


@register_check(
    "speculative-decoding",
    needs=("logits", "generate_speculative"),
    kinds=CAUSAL_KINDS,
    depends_on=("causality", "cache-decode", "generation"),
)
def speculative_decoding(ctx: CheckContext) -> Iterator[CaseResult]:
    """Catches speculative decoding whose output differs from greedy decoding of the model.

    Generate speculatively from a repetitive prompt (so that n-gram drafts are accepted) and from a random one: each
    token must be the most likely one in one forward pass.

    Cause: a rejected draft token stays in the cache or the output, or the token after the accepted ones is skipped.
    Fix: accept draft tokens up to the first mismatch, append the model's own token, and roll the cache back to there.
    """
    generate_speculative = require(ctx.model.generate_speculative)
    length, num_tokens = _choose_prompt_lengths(ctx, 7)
    repeated = ctx.random_tokens(2, max(1, length // 3)).repeat(1, 3)
    cases = [(repeated, "from a repetitive prompt"), (ctx.random_tokens(2, length), "from a random prompt")]
    for prompt, description in cases[:1] if ctx.is_slow else cases:
        yield _check_greedy(ctx, generate_speculative, prompt, num_tokens, f"speculatively {description}")


@register_check("mode-restored", needs=("module", "generate|beam_search|generate_speculative"), kinds=CAUSAL_KINDS)
def mode_restored(ctx: CheckContext) -> Iterator[CaseResult]:
    """Catches generation that leaves the model in another mode, so that training continues without dropout.

    Generate in training and in eval mode: the training flag of every module, requires_grad of every parameter and
    torch.is_grad_enabled() must be unchanged.

    Cause: generate calls eval() or train() and does not restore the previous mode.
    Fix: save the training flag of every module before, and restore it in a finally block.
    """
    model, module = ctx.model, ctx.module
    prompt = ctx.random_tokens(1, max(1, min(4, ctx.seq_len // 2)))
    arguments = {"generate": (prompt, 1), "beam_search": (prompt[:, :1], 2, 2), "generate_speculative": (prompt, 2)}
    for path in [name for name in arguments if getattr(model, name) is not None]:
        for training in (True, False):
            module.train(training)
            submodules = dict(module.named_modules())  # without those that generation adds, such as a new cache
            params = {name: param for name, param in module.named_parameters() if param.is_floating_point()}
            requires_grad = {name: param.requires_grad for name, param in params.items()}
            for param in params.values():  # so that parameters that an earlier call froze are found too
                param.requires_grad_(True)
            with torch.enable_grad():
                try:
                    getattr(model, path)(*arguments[path])
                    grad_enabled = torch.is_grad_enabled()
                    frozen = [name for name, param in params.items() if not param.requires_grad]
                except UNSUPPORTED_ERRORS as error:
                    yield skipped(f"{path} is not supported in training mode: {str(error)[:100]}")
                    break
                finally:
                    for name, param in params.items():
                        param.requires_grad_(requires_grad[name])
            changed = [name for name, submodule in submodules.items() if submodule.training != training]
            if changed:
                mode = "training" if submodules[changed[0]].training else "eval"
                message = f"after {path}, {len(changed)} of {len(submodules)} modules are left in {mode} mode"
                yield failure(message, float(len(changed)), 0.0, changed[0] or "the whole model")
                return
            if frozen or not grad_enabled:
                problem = f"{frozen[0]} no longer requires a gradient" if frozen else "gradients are disabled"
                yield failure(f"after {path}, {problem}", location=frozen[0] if frozen else None)
                return
        else:
            yield success(f"{path} keeps the mode of every module")


_NUM_BEAMS = 3


_MAX_PROMPTS = 8
"""Maximum number of prompts that are tried until the beams of one are reordered. A slow model gets one prompt."""


_NUM_SAMPLES, _MIN_EXPECTED_COUNT = 4000, 20.0
"""Number of samples, and the smallest expected count of a chi-square category."""


_SIGNIFICANCE_LEVEL = 1e-12
"""Probability that a correct sampler fails."""


_SECONDS_PER_SETTING = 0.05
"""Time limit for the samples with one set of parameters."""


@register_check(
    "beam-search",
    needs=("logits", "beam_search"),
    kinds=CAUSAL_KINDS,
    depends_on=("causality", "batch-isolation", "cache-decode", "generation"),
)
def beam_search(ctx: CheckContext) -> CaseResult:
    """Catches beams with wrong scores: the cache is not reordered with the beams, or scores belong to other tokens.

    Run each returned beam in one forward pass: its score must be the sum of its tokens' log-probabilities, no two beams
    may be equal, and none may be worse than those of a beam search without a cache.

    Cause: the cache rows are not reordered when the beams are, or a log-probability is added to another beam.
    Fix: reorder all cache rows by the parents of the new beams, and sum log-probabilities along each beam.
    """
    length, num_tokens = _choose_prompt_lengths(ctx, 5)
    length = 1 if ctx.model.kind == "encoder-decoder" else length  # the decoder starts with one token
    num_beams = min(_NUM_BEAMS, ctx.model.vocab_size or 2)
    for _ in range(_MAX_PROMPTS if not ctx.is_slow else 1):
        prompt = ctx.random_tokens(1, length)
        reference_scores, margin, reordered = _reference_beam_search(ctx, prompt, num_tokens, num_beams)
        if reordered:
            break
    beams, scores = require(ctx.model.beam_search)(prompt, num_tokens, num_beams)
    beams = beams[:, length:] if beams.shape[1] == length + num_tokens else beams
    if beams.shape != (num_beams, num_tokens):
        raise SkipCheckError(f"beam_search returned shape {tuple(beams.shape)}, not ({num_beams}, {num_tokens})")
    scores = scores.flatten().float().to(prompt.device)
    log_probs = _sequence_log_probs(ctx, prompt, beams)
    errors = (scores - log_probs).abs()
    worst = int(errors.argmax())
    error = float(errors[worst])
    tolerance = 2 * NOISE_MARGIN * ctx.noise_ratio * float(log_probs.abs().max())
    if not error <= tolerance or margin <= 2 * tolerance:
        noise = ctx.measure_noise(lambda: _sequence_log_probs(ctx, prompt, beams), log_probs)
        tolerance = max(tolerance, 2 * NOISE_MARGIN * noise)
    if not error <= tolerance:
        message = f"the score of beam {worst} is {scores[worst]:.4g}, but its log-probability is {log_probs[worst]:.4g}"
        return failure(message, error, tolerance, f"beam {worst}")
    if len({tuple(beam) for beam in beams.tolist()}) < num_beams:
        return failure("the same beam is returned twice")
    is_ambiguous = margin <= tolerance  # rounding may decide which beams are kept
    deficit = float((reference_scores - log_probs.sort(descending=True).values).max())
    if not is_ambiguous and not deficit <= tolerance:
        return failure("a beam search without a cache finds more likely beams than those returned", deficit, tolerance)
    note = "" if reordered else " (no beam was reordered)"
    return success(f"{num_beams} beams have the log-probabilities of one forward pass{note}", error, tolerance)


def _sequence_log_probs(ctx: CheckContext, prompt: Tensor, continuations: Tensor) -> Tensor:
    """Sum of the log-probabilities of the tokens of each continuation of `prompt`, (N,)."""
    tokens = torch.cat((prompt.expand(len(continuations), -1), continuations.to(prompt)), 1)
    log_probs = ctx.logits(tokens)[:, prompt.shape[1] - 1 : -1].float().log_softmax(-1)
    return log_probs.gather(-1, continuations.to(prompt)[..., None])[..., 0].sum(-1)


def _reference_beam_search(
    ctx: CheckContext, prompt: Tensor, num_tokens: int, num_beams: int
) -> tuple[Tensor, float, bool]:
    """Beam search without a cache.

    Returns the scores (best first), the smallest margin by which a beam was dropped, and whether a returned beam was
    reordered. Without reordering, even a cache that is not reordered would give the correct result.
    """
    tokens, scores, margin = prompt, torch.zeros(1, device=prompt.device), float("inf")
    reordered = torch.zeros(1, dtype=torch.bool, device=prompt.device)
    for step in range(num_tokens):
        log_probs = ctx.logits(tokens)[:, -1].float().log_softmax(-1)  # (beams, V)
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


_EMPTY_FILTER_CAUSE = "the filter keeps one token too few, so that none is left if it should keep one"


_EMPTY_FILTER_FIX = "keep the token that crosses top_p, and exactly top_k tokens"


_TEMPERATURE_AND_TOP_P = {"temperature": 2.0, "top_p": 0.7}


_FILTER_ORDER_CAUSE = "the logits are divided by the temperature after the top_p filter, which then keeps other tokens"


_FILTER_ORDER_FIX = "divide by the temperature first, as transformers and vLLM do, unless the other order is intended"


@register_check("sampling", needs=("sample",), kinds=CAUSAL_KINDS)
def sampling(ctx: CheckContext) -> Iterator[CaseResult]:
    """Catches samples that do not follow the probabilities: temperature applied twice, a filter that keeps one too few.

    Draw several thousand tokens from known logits and compare the counts with the probabilities (a chi-square test that
    a correct sampler fails once in 10¹² times). Repeat with temperature, top_k and top_p, if `sample` takes them, and
    with temperature and top_p: the temperature is applied first.

    Cause: logits are scaled or filtered incorrectly, or sorted indices are used as token ids.
    Fix: divide by the temperature once, keep the token that crosses top_p, and map sorted indices back to token ids.
    """
    sample = require(ctx.model.sample)
    # The logits are unsorted, to detect sorted indices used as token ids. The last token is practically impossible.
    logits = torch.tensor([0.3, 2.0, -1.0, 1.2, 0.0, 1.7, -0.4, 0.9, -40.0], device=ctx.model.device)
    values = {"temperature": (0.5, 2.0), "top_k": (3, 1), "top_p": (0.7, 0.05)}
    names = [name for name in values if accepts_argument(sample, name)]
    settings = [{}, *({name: value} for name in names for value in values[name])]
    if "temperature" in names and "top_p" in names:
        settings.append(_TEMPERATURE_AND_TOP_P)
    for params in settings:
        description = ", ".join(f"{name} {value:g}" for name, value in params.items())
        path = f" with {description}" if description else ""
        try:
            counts = _count_samples(ctx, partial(sample, logits, **params), len(logits))
        except TypeError as error:
            if not params or "argument" not in str(error):
                raise
            continue  # a function with **kwargs that does not take this argument
        except (RuntimeError, IndexError, AssertionError) as error:
            if not params:
                raise
            yield failure(f"sampling{path} {format_raised(error)}", cause=_EMPTY_FILTER_CAUSE, fix=_EMPTY_FILTER_FIX)
            continue
        case = _test_counts(counts, _expected_probabilities(logits, params), path)
        if case.verdict == "fail" and params is _TEMPERATURE_AND_TOP_P:
            top_p_first = _test_counts(counts, _expected_probabilities(logits, params, top_p_first=True), path)
            if top_p_first.verdict == "pass":
                message = f"{path.strip()}, top_p is applied before the temperature"
                case = warning(message, case.measured, case.threshold, cause=_FILTER_ORDER_CAUSE, fix=_FILTER_ORDER_FIX)
        yield case


def _test_counts(counts: Tensor, expected: Tensor, path: str) -> CaseResult:
    """Compare the counts of sampled tokens with the `expected` probabilities, by a chi-square test."""
    num_samples, impossible = int(counts.sum()), expected < 1e-12
    if int(counts[impossible].sum()):
        token = int((counts * impossible).argmax())
        message = f"{int(counts[token])} of {num_samples} samples{path} are a token of probability zero"
        return failure(message, float(counts[token]), 0.0, f"token {token}")
    if int((~impossible).sum()) == 1:  # the only possible token, and only it was drawn
        return success(f"all {num_samples} samples{path} are the only possible token")
    p_value, num_categories = _chi_square_test(counts, expected)
    if num_categories < 2:
        return skipped(f"{num_samples} samples{path} within the time limit are too few")
    if p_value >= _SIGNIFICANCE_LEVEL:
        return success(f"{num_samples} samples{path} follow the probabilities", p_value, _SIGNIFICANCE_LEVEL)
    frequencies = counts / num_samples
    worst = int((frequencies - expected).abs().argmax())
    message = f"samples{path} do not follow the probabilities: token {worst} has a frequency of "
    message += f"{frequencies[worst]:.3f} and a probability of {expected[worst]:.3f}"
    return failure(message, p_value, _SIGNIFICANCE_LEVEL)


def _count_samples(ctx: CheckContext, sample: Callable[[int], Tensor], vocab_size: int) -> Tensor:
    """Count samples per token. A first call is timed; a second draws as many samples as the time limit allows."""
    start = ctx.clock()
    tokens = sample(64).flatten().long()
    seconds = max(ctx.clock() - start, 1e-6)
    num_more = int(min(_NUM_SAMPLES, 64 * _SECONDS_PER_SETTING / seconds))
    if num_more > 64:
        tokens = torch.cat((tokens, sample(num_more).flatten().long()))
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size:
        message = f"for {vocab_size} logits, sample returned token {int(tokens.max())}"
        raise SkipCheckError(f"{message}; it must sample from the logits that are passed")
    return torch.bincount(tokens, minlength=vocab_size).double()


def _expected_probabilities(logits: Tensor, params: Mapping[str, float], *, top_p_first: bool = False) -> Tensor:
    """Probability (V,) with which a correct sampler with the parameters `params` draws each token.

    With `top_p_first`, the temperature is applied after the top_p filter.
    """
    temperature = params.get("temperature", 1.0)
    if top_p_first:
        kept = _expected_probabilities(logits, {"top_p": params["top_p"]})
        return (kept.log() / temperature).softmax(-1)
    p = (logits.double() / temperature).softmax(-1)
    order = p.argsort(descending=True)
    if "top_k" in params:
        p[order[int(params["top_k"]) :]] = 0.0
    if "top_p" in params:
        mass_before = p[order].cumsum(0) - p[order]
        p[order[mass_before >= params["top_p"]]] = 0.0
    return p / p.sum()


def _chi_square_test(counts: Tensor, probabilities: Tensor) -> tuple[float, int]:
    """p-value of a chi-square test, and the number of categories. Rare tokens are combined into one category."""
    expected = probabilities * counts.sum()
    rare = expected < _MIN_EXPECTED_COUNT
    observed = torch.cat((counts[~rare], counts[rare].sum()[None]))
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    if float(expected[-1]) < _MIN_EXPECTED_COUNT:  # too few even together: leave them out
        observed, expected = observed[:-1], expected[:-1]
    if len(expected) < 2:
        return 1.0, len(expected)
    statistic = ((observed - expected) ** 2 / expected).sum()
    degrees = torch.tensor((len(expected) - 1) / 2, dtype=torch.double)
    return float(torch.special.gammaincc(degrees, statistic.cpu() / 2)), len(expected)
