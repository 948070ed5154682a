"""Beam search over a batch of prompts, with length penalty and early stopping as in transformers."""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cutaway.errors import InputError, WeightError
from cutaway.generate.sampling.sampling_params import check_ids_in_vocab
from cutaway.generate.search.beam_grammars import BeamGrammars
from cutaway.generate.search.beam_logits_processors import NO_TOKEN, BeamLogitsProcessor, BeamSearchParams
from cutaway.model import Cache, DecoderOnly, EncoderDecoder, Transformer

_INVALID_LOGITS = 2
"""State of a prompt: 0 finished, 1 continues, 2 its logits contain NaN."""


class Beam(NamedTuple):
    """A finished beam: tokens including EOS, and score = sum of log-probabilities / length ** length_penalty."""

    tokens: list[int]
    score: float
    finish_reason: Literal["stop", "length"]


def beam_search(model: Transformer, prompts: Sequence[Sequence[int]], params: BeamSearchParams) -> list[list[Beam]]:
    """Return the `n` best beams per prompt, best first, or all finished beams if there are fewer.

    With an encoder-decoder the prompts are sources, and targets start with `decoder_start_token_id`.
    """
    if not isinstance(model, DecoderOnly | EncoderDecoder):
        raise InputError("this model is encoder-only; beam search needs a decoder")
    vocab_size = model.config.vocab_size
    forced_bos = [] if params.forced_bos_token_id is None else [params.forced_bos_token_id]
    check_ids_in_vocab("forced_bos_token_id", forced_bos, vocab_size)
    check_ids_in_vocab("forced_eos_token_ids", params.forced_eos_token_ids, vocab_size)
    if len(prompts) == 0:
        return []
    processor = BeamLogitsProcessor(vocab_size, model.device, params)
    with torch.no_grad():
        history, cache, logits = _prefill(model, prompts, params)
        history = history if processor.needs_history else history[:, :0]
        results = _search(model, params, processor, history, cache, logits)
    return [_finished_beams(i, *result, params)[: params.n] for i, result in enumerate(results)]


def _search(
    model: DecoderOnly | EncoderDecoder,
    params: BeamSearchParams,
    logits_processor: BeamLogitsProcessor,
    prompt_tokens: Int[Tensor, "P G"],
    cache: Cache,
    logits: Float[Tensor, "P V"],
) -> list[tuple[Tensor, Tensor]]:
    """The beam search loop: return scores and tokens of the finished beams per prompt.

    A running beam's score is the sum of its log-probabilities; −inf marks an empty slot. Dimensions: P prompts, R beams
    per prompt (1 before the first step), V the vocabulary. `prompt_tokens`: history of the logits processor before
    the first new token. Each step synchronizes once with the device, to find the prompts that are finished and
    remove them from the batch.
    """
    device, vocab_size, num_beams = logits.device, logits_processor.vocab_size, params.num_beams
    results: dict[int, tuple[Tensor, Tensor]] = {}
    active = list(range(len(prompt_tokens)))  # prompts still in the batch
    history = prompt_tokens.unsqueeze(1)
    score = torch.zeros(len(prompt_tokens), 1, device=device)
    finished_scores = torch.full((len(prompt_tokens), num_beams), -torch.inf, device=device)
    finished_tokens = torch.full((len(prompt_tokens), num_beams, params.max_new_tokens), NO_TOKEN, device=device)
    # Enough candidates for num_beams running beams, even if each EOS token of every beam is among the candidates.
    num_candidates = max(2, 1 + len(logits_processor.eos_token_ids)) * num_beams
    num_forced = int(params.forced_bos_token_id is not None)
    grammars = (
        None if params.grammar is None else BeamGrammars(params.grammar, len(prompt_tokens), vocab_size, num_forced)
    )
    for num_new in range(params.max_new_tokens):
        num_parents = score.shape[-1]  # beams per prompt: 1 in the first step
        log_p = logits_processor(logits.float().log_softmax(-1), history.flatten(0, 1), num_new)
        is_eos_forced = num_new + 1 == params.max_new_tokens and len(params.forced_eos_token_ids) > 0
        if grammars is not None and not is_eos_forced:
            log_p = grammars.mask(log_p, num_new)
        # (P, R·V): scores of all one-token extensions of all beams of a prompt
        total = (score.unsqueeze(-1) + log_p.view(*score.shape, vocab_size)).flatten(1)
        best, flat = total.topk(min(num_candidates, total.shape[-1]))
        parent, token = flat // vocab_size, flat % vocab_size
        candidates = torch.cat([_gather_beams(history, parent), token.unsqueeze(-1)], -1)
        is_finished = (token.unsqueeze(-1) == logits_processor.eos_token_ids).any(-1)
        is_finished |= num_new + 1 == params.max_new_tokens
        if grammars is not None:  # a beam is also finished when its grammar allows no more text
            is_finished |= grammars.extend(parent, token, best, num_new)
        # As in transformers, only the best num_beams candidates may finish; the others can only continue.
        new_scores = (best / (num_new + 1) ** params.length_penalty).masked_fill(~is_finished, -torch.inf)
        new_tokens = candidates[:, :num_beams, prompt_tokens.shape[-1] :]
        new_tokens = F.pad(new_tokens, (0, params.max_new_tokens - num_new - 1), value=NO_TOKEN)
        finished_scores, order = torch.cat([finished_scores, new_scores[:, :num_beams]], -1).topk(num_beams)
        finished_tokens = _gather_beams(torch.cat([finished_tokens, new_tokens], 1), order)
        score, order = best.masked_fill(is_finished, -torch.inf).topk(min(num_beams, best.shape[-1]))
        history, token, parent = _gather_beams(candidates, order), token.gather(1, order), parent.gather(1, order)
        if grammars is not None:
            grammars.select(order)
        improvable = _can_improve(params, score, finished_scores, num_new + 1)
        state = torch.where(best[:, 0].isnan(), _INVALID_LOGITS, improvable.long()).tolist()
        if _INVALID_LOGITS in state:  # topk sorts NaN first
            i = active[state.index(_INVALID_LOGITS)]
            raise WeightError(
                f"the logits for prompt {i} contain NaN after {num_new} new tokens; the weights are corrupt,"
                " or overflow their dtype: try float32"
            )
        for row, goes_on in enumerate(state):
            if not goes_on:
                results[active[row]] = finished_scores[row], finished_tokens[row]
        remaining = [row for row, goes_on in enumerate(state) if goes_on]
        if not remaining:
            break
        rows = torch.arange(len(active), device=device)
        if len(remaining) < len(active):
            rows = torch.tensor(remaining, device=device)
            active = [active[row] for row in remaining]
            if grammars is not None:
                grammars.select_prompts(remaining)
            history, token, parent = history[rows], token[rows], parent[rows]
            score, finished_scores, finished_tokens = score[rows], finished_scores[rows], finished_tokens[rows]
        cache.select_rows((rows.unsqueeze(-1) * num_parents + parent).flatten())
        token = token.view(-1, 1)
        if isinstance(model, EncoderDecoder):
            x = model.hidden_states(None, token, cache=cache)
        else:
            x = model.hidden_states(token, cache=cache)
        logits = model.lm_head(x[:, -1])
    return [results[i] for i in range(len(prompt_tokens))]


def _can_improve(
    params: BeamSearchParams, scores: Float[Tensor, "P R"], finished_scores: Float[Tensor, "P N"], num_new: int
) -> Bool[Tensor, " P"]:
    """Whether a prompt's best running beam may still get a higher score than its worst finished beam.

    The worst score is −inf while fewer than `num_beams` beams have finished."""
    worst = finished_scores[:, -1]
    if num_new == params.max_new_tokens:
        return torch.zeros_like(worst, dtype=torch.bool)
    length = params.max_new_tokens if params.early_stopping == "never" and params.length_penalty > 0 else num_new
    improvable = scores[:, 0] / length**params.length_penalty > worst
    return improvable & (worst == -torch.inf) if params.early_stopping is True else improvable


def _gather_beams(tensor: Int[Tensor, "P R L"], index: Int[Tensor, "P K"]) -> Int[Tensor, "P K L"]:
    """Select beams of each prompt by index."""
    return tensor.take_along_dim(index.unsqueeze(-1), 1)


def _prefill(
    model: DecoderOnly | EncoderDecoder, prompts: Sequence[Sequence[int]], params: BeamSearchParams
) -> tuple[Int[Tensor, "P G"], Cache, Float[Tensor, "P V"]]:
    """Prefill the prompts, one row each; return the decoder tokens, the cache and the logits of the first new token."""
    vocab_size, start = model.config.vocab_size, params.decoder_start_token_id
    if isinstance(model, EncoderDecoder):
        if start is None:
            raise InputError("an encoder-decoder needs a first target token; pass decoder_start_token_id")
        source, mask = _left_pad(prompts, model.config.source_vocab_size or vocab_size, model.device)  # type: ignore[union-attr]
        tokens = torch.full((len(prompts), 1), start, device=model.device)
        cache = model.new_cache(len(prompts), params.max_new_tokens)
        return tokens, cache, model.lm_head(model.hidden_states(source, tokens, mask, cache=cache)[:, -1])
    if start is not None:
        raise InputError("decoder_start_token_id is for encoder-decoders; put the first token into the prompt")
    tokens, mask = _left_pad(prompts, vocab_size, model.device)
    cache = model.new_cache(len(prompts), tokens.shape[-1] + params.max_new_tokens - 1)
    logits = model.lm_head(model.hidden_states(tokens, mask, cache=cache)[:, -1])
    return tokens if mask is None else tokens.masked_fill(~mask, NO_TOKEN), cache, logits


def _left_pad(
    prompts: Sequence[Sequence[int]], vocab_size: int, device: torch.device
) -> tuple[Int[Tensor, "P T"], Bool[Tensor, "P T"] | None]:
    """Return the left-padded prompts, one per row, and their padding mask (None if all have the same length)."""
    rows = [check_ids_in_vocab(f"prompt {i}", prompt, vocab_size) for i, prompt in enumerate(prompts)]
    if not all(rows):
        raise InputError(f"prompt {rows.index([])} is empty; pass at least one token")
    max_len = max(map(len, rows))
    tokens = torch.tensor([[0] * (max_len - len(row)) + row for row in rows], device=device)
    if min(map(len, rows)) == max_len:
        return tokens, None
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return tokens, torch.arange(max_len, device=device) >= max_len - lengths.unsqueeze(-1)


def _finished_beams(prompt_index: int, scores: Tensor, sequences: Tensor, params: BeamSearchParams) -> list[Beam]:
    """Convert the finished beams of a prompt to `Beam`. A beam with a forced EOS has the finish reason "length"."""
    beams = []
    for score, row in zip(scores.tolist(), sequences.tolist(), strict=True):
        tokens = [token for token in row if token != NO_TOKEN]
        if score > -math.inf:
            is_forced = len(params.forced_eos_token_ids) > 0 and len(tokens) == params.max_new_tokens
            is_stop = tokens[-1] in params.eos_token_ids and not is_forced
            beams.append(Beam(tokens, score, "stop" if is_stop else "length"))
    if not beams:
        raise InputError(
            f"prompt {prompt_index} cannot be continued: every next token is suppressed or would repeat an n-gram;"
            " relax bad_words_ids, suppress_tokens or no_repeat_ngram_size"
        )
    return beams
