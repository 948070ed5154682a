"""Beam search over a batch of prompts, with length penalty and early stopping as in transformers."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from operator import index
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cutaway.arguments import check_positive_int
from cutaway.errors import InputError, WeightError
from cutaway.generate.generation_config import MAX_PENALTY, EarlyStopping
from cutaway.generate.search.beam_logits_processors import NO_TOKEN, BeamLogitsProcessor
from cutaway.model import Cache, DecoderOnly, EncoderDecoder, Transformer

INVALID_LOGITS = 2
"""State of a prompt: 0 finished, 1 continues, 2 its logits contain NaN."""
DecodeFn = Callable[[Int[Tensor, "R 1"]], Float[Tensor, "R V"]]
"""Decode one token per row and return the next logits."""


class Beam(NamedTuple):
    """A finished beam: tokens including EOS, and log-probability / length ** length_penalty."""

    tokens: list[int]
    score: float
    finish_reason: Literal["stop", "length"]


def beam_search(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    *,
    num_beams: int,
    max_new_tokens: int,
    eos_token_ids: Collection[int] = (),
    n: int = 1,
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = False,
    min_new_tokens: int = 0,
    decoder_start_token_id: int | None = None,
    forced_bos_token_id: int | None = None,
    forced_eos_token_ids: int | Sequence[int] = (),
    bad_words_ids: Sequence[Sequence[int]] = (),
    suppress_tokens: Sequence[int] = (),
    begin_suppress_tokens: Sequence[int] = (),
    no_repeat_ngram_size: int = 0,
    repetition_penalty: float = 1.0,
) -> list[list[Beam]]:
    """Return the `n` best beams per prompt, best first; fewer if there are no more.

    With an encoder-decoder the prompts are sources, and targets start with `decoder_start_token_id`. `early_stopping`:
    True stops at `num_beams` finished beams; False continues while the best running beam's current score beats the
    worst finished one; "never" continues while its score at any length could. For the other arguments see
    `GenerationConfig`.
    """
    for name, value in (("num_beams", num_beams), ("max_new_tokens", max_new_tokens), ("n", n)):
        check_positive_int(name, value)
    for name, value in (("min_new_tokens", min_new_tokens), ("no_repeat_ngram_size", no_repeat_ngram_size)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise InputError(f"{name} is {value!r}; pass an integer, 0 or more")
    if n > num_beams:
        raise InputError(
            f"n is {n}, but num_beams is {num_beams}, which gives at most {num_beams} completions; use more beams"
        )
    if not isinstance(early_stopping, bool) and early_stopping != "never":
        raise InputError(f"early_stopping is {early_stopping!r}; use True, False or 'never'")
    is_number = isinstance(length_penalty, int | float) and not isinstance(length_penalty, bool)
    if not is_number or not abs(length_penalty) <= MAX_PENALTY:
        raise InputError(f"length_penalty is {length_penalty!r}; pass a number from -{MAX_PENALTY} to {MAX_PENALTY}")
    vocab_size = model.config.vocab_size
    eos_ids = sorted(_check_ids_in_vocab("eos_token_ids", eos_token_ids, vocab_size))
    bad_words = [_check_ids_in_vocab("bad_words_ids", sequence, vocab_size) for sequence in bad_words_ids]
    if not all(bad_words):
        raise InputError(
            "bad_words_ids contains an empty sequence, which would suppress all tokens; pass at least one token in each"
        )
    processor = BeamLogitsProcessor(
        vocab_size,
        model.device,
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        eos_token_ids=eos_ids,
        forced_bos_token_id=None
        if forced_bos_token_id is None
        else _check_ids_in_vocab("forced_bos_token_id", [forced_bos_token_id], vocab_size)[0],
        forced_eos_token_ids=_check_ids_in_vocab(
            "forced_eos_token_ids",
            [forced_eos_token_ids] if isinstance(forced_eos_token_ids, int) else forced_eos_token_ids,
            vocab_size,
        ),
        bad_words_ids=[sequence for sequence in bad_words if sequence not in [[end] for end in eos_ids]],
        suppress_tokens=_check_ids_in_vocab("suppress_tokens", suppress_tokens, vocab_size),
        begin_suppress_tokens=_check_ids_in_vocab("begin_suppress_tokens", begin_suppress_tokens, vocab_size),
        no_repeat_ngram_size=no_repeat_ngram_size,
        repetition_penalty=repetition_penalty,
    )
    if len(prompts) == 0:
        return []
    search = BeamSearch(processor, num_beams, max_new_tokens, length_penalty, early_stopping)
    with torch.no_grad():
        prompt_tokens, cache, logits, decode = _prefill(model, prompts, decoder_start_token_id, max_new_tokens)
        results = search.run(prompt_tokens if processor.needs_history else prompt_tokens[:, :0], cache, logits, decode)
    forced_eos_len = (
        max_new_tokens if len(processor.forced_eos_token_ids) else None
    )  # a beam of this length ends with a forced token
    return [_finished_beams(i, *result, eos_ids, forced_eos_len)[:n] for i, result in enumerate(results)]


@dataclass(frozen=True)
class BeamSearch:
    """The beam search loop. A running beam's score is the sum of its log-probabilities; −inf marks an empty slot.

    Dimensions: P prompts, R beams per prompt (1 before the first step), V the vocabulary.
    """

    logits_processor: BeamLogitsProcessor
    num_beams: int
    max_new_tokens: int
    length_penalty: float
    early_stopping: EarlyStopping

    def run(
        self, prompt_tokens: Int[Tensor, "P G"], cache: Cache, logits: Float[Tensor, "P V"], decode: DecodeFn
    ) -> list[tuple[Tensor, Tensor]]:
        """Return scores and tokens of the finished beams per prompt.

        `prompt_tokens`: history of the logits processor before the first new token. Each step synchronizes once with
        the device, to find the prompts that are finished and remove them from the batch.
        """
        device, vocab_size = logits.device, self.logits_processor.vocab_size
        results: dict[int, tuple[Tensor, Tensor]] = {}
        active = list(range(len(prompt_tokens)))  # prompts still in the batch
        history = prompt_tokens.unsqueeze(1)
        score = torch.zeros(len(prompt_tokens), 1, device=device)
        finished_scores = torch.full((len(prompt_tokens), self.num_beams), -torch.inf, device=device)
        finished_tokens = torch.full((len(prompt_tokens), self.num_beams, self.max_new_tokens), NO_TOKEN, device=device)
        # Enough candidates for num_beams running beams even if every beam ends with each EOS token.
        num_candidates = max(2, 1 + len(self.logits_processor.eos_token_ids)) * self.num_beams
        for num_new in range(self.max_new_tokens):
            num_parents = score.shape[-1]  # beams per prompt: 1 in the first step
            log_p = self.logits_processor(logits.float().log_softmax(-1), history.flatten(0, 1), num_new)
            # (P, R·V): scores of all one-token extensions of all beams of a prompt
            total = (score.unsqueeze(-1) + log_p.view(*score.shape, vocab_size)).flatten(1)
            best, flat = total.topk(min(num_candidates, total.shape[-1]))
            parent, token = flat // vocab_size, flat % vocab_size
            candidates = torch.cat([_gather_beams(history, parent), token.unsqueeze(-1)], -1)
            is_finished = (token.unsqueeze(-1) == self.logits_processor.eos_token_ids).any(-1) | (
                num_new + 1 == self.max_new_tokens
            )
            # As in transformers, only the best num_beams candidates may finish; the others can only continue.
            new_scores = (best / (num_new + 1) ** self.length_penalty).masked_fill(~is_finished, -torch.inf)[
                :, : self.num_beams
            ]
            new_tokens = F.pad(
                candidates[:, : self.num_beams, prompt_tokens.shape[-1] :],
                (0, self.max_new_tokens - num_new - 1),
                value=NO_TOKEN,
            )
            finished_scores, order = torch.cat([finished_scores, new_scores], -1).topk(self.num_beams)
            finished_tokens = _gather_beams(torch.cat([finished_tokens, new_tokens], 1), order)
            score, order = best.masked_fill(is_finished, -torch.inf).topk(min(self.num_beams, best.shape[-1]))
            history, token, parent = _gather_beams(candidates, order), token.gather(1, order), parent.gather(1, order)
            state = torch.where(
                best[:, 0].isnan(), INVALID_LOGITS, self.can_improve(score, finished_scores, num_new + 1).long()
            ).tolist()
            if INVALID_LOGITS in state:  # topk sorts NaN first
                i = active[state.index(INVALID_LOGITS)]
                raise WeightError(
                    f"the logits for prompt {i} contain NaN after {num_new} new tokens; the weights are corrupt,"
                    " or overflow their dtype: try float32"
                )
            results |= {
                active[row]: (finished_scores[row], finished_tokens[row])
                for row, goes_on in enumerate(state)
                if not goes_on
            }
            remaining = [row for row, goes_on in enumerate(state) if goes_on]
            if not remaining:
                break
            rows = torch.arange(len(active), device=device)
            if len(remaining) < len(active):
                rows = torch.tensor(remaining, device=device)
                active = [active[row] for row in remaining]
                history, token, parent = history[rows], token[rows], parent[rows]
                score, finished_scores, finished_tokens = score[rows], finished_scores[rows], finished_tokens[rows]
            cache.select_rows((rows.unsqueeze(-1) * num_parents + parent).flatten())
            logits = decode(token.view(-1, 1))
        return [results[i] for i in range(len(prompt_tokens))]

    def can_improve(
        self, scores: Float[Tensor, "P R"], finished_scores: Float[Tensor, "P N"], num_new: int
    ) -> Bool[Tensor, " P"]:
        """Whether a prompt's best running beam may still beat its worst finished beam (−inf if there are too few)."""
        worst = finished_scores[:, -1]
        if num_new == self.max_new_tokens:
            return torch.zeros_like(worst, dtype=torch.bool)
        length = self.max_new_tokens if self.early_stopping == "never" and self.length_penalty > 0 else num_new
        improvable = scores[:, 0] / length**self.length_penalty > worst
        return improvable & (worst == -torch.inf) if self.early_stopping is True else improvable


def _gather_beams(tensor: Int[Tensor, "P R L"], index: Int[Tensor, "P K"]) -> Int[Tensor, "P K L"]:
    """Select beams of each prompt by index."""
    return tensor.take_along_dim(index.unsqueeze(-1), 1)


def _prefill(
    model: Transformer, prompts: Sequence[Sequence[int]], decoder_start_token_id: int | None, max_new_tokens: int
) -> tuple[Int[Tensor, "P G"], Cache, Float[Tensor, "P V"], DecodeFn]:
    """Prefill the prompts, one row each; return decoder tokens, cache, first logits and the decode function."""
    vocab_size = model.config.vocab_size
    if isinstance(model, EncoderDecoder):
        if decoder_start_token_id is None:
            raise InputError("an encoder-decoder needs a first target token; pass decoder_start_token_id")
        start = torch.full(
            (len(prompts), 1),
            _check_ids_in_vocab("decoder_start_token_id", [decoder_start_token_id], vocab_size)[0],
            device=model.device,
        )
        source, mask = _left_pad(prompts, model.config.source_vocab_size or vocab_size, model.device)  # type: ignore[union-attr]
        cache = model.new_cache(len(prompts), max_new_tokens)
        x = model.hidden_states(source, start, mask, cache=cache)
        return (
            start,
            cache,
            model.head(x[:, -1]),
            lambda token: model.head(model.hidden_states(None, token, cache=cache)[:, -1]),
        )
    if not isinstance(model, DecoderOnly):
        raise InputError("this model is encoder-only; beam search needs a decoder")
    if decoder_start_token_id is not None:
        raise InputError("decoder_start_token_id is for encoder-decoders; put the first token into the prompt")
    tokens, mask = _left_pad(prompts, vocab_size, model.device)
    cache = model.new_cache(len(prompts), tokens.shape[-1] + max_new_tokens - 1)
    x = model.hidden_states(tokens, mask, cache=cache)
    prompt_tokens = tokens if mask is None else tokens.masked_fill(~mask, NO_TOKEN)
    return (
        prompt_tokens,
        cache,
        model.head(x[:, -1]),
        lambda token: model.head(model.hidden_states(token, cache=cache)[:, -1]),
    )


def _left_pad(
    prompts: Sequence[Sequence[int]], vocab_size: int, device: torch.device
) -> tuple[Int[Tensor, "P T"], Bool[Tensor, "P T"] | None]:
    """Left-padded prompts, one per row, and their mask (None if they have equal lengths)."""
    rows = [_check_ids_in_vocab(f"prompt {i}", prompt, vocab_size) for i, prompt in enumerate(prompts)]
    if not all(rows):
        raise InputError(f"prompt {rows.index([])} is empty; pass at least one token")
    max_len = max(map(len, rows))
    tokens = torch.tensor([[0] * (max_len - len(row)) + row for row in rows], device=device)
    if min(map(len, rows)) == max_len:
        return tokens, None
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return tokens, torch.arange(max_len, device=device) >= max_len - lengths.unsqueeze(-1)


def _check_ids_in_vocab(name: str, ids: Collection[int], vocab_size: int) -> list[int]:
    """Return the token ids as ints; raise if one is not in the vocabulary."""
    try:
        token_ids = [index(token_id) for token_id in ids]
    except TypeError:
        raise InputError(f"{name} is {ids!r:.60}; pass token ids, which are integers") from None
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InputError(f"{name} holds the id {token_id}; the vocabulary has ids 0 to {vocab_size - 1}")
    return token_ids


def _finished_beams(
    prompt_index: int, scores: Tensor, sequences: Tensor, eos_token_ids: Collection[int], forced_eos_len: int | None
) -> list[Beam]:
    """Finished beams of a prompt on the host. A beam of length `forced_eos_len` was cut, whatever its last token."""
    beams = []
    for score, row in zip(scores.tolist(), sequences.tolist(), strict=True):
        tokens = [token for token in row if token != NO_TOKEN]
        if score > -math.inf:
            beams.append(
                Beam(
                    tokens, score, "stop" if tokens[-1] in eos_token_ids and len(tokens) != forced_eos_len else "length"
                )
            )
    if not beams:
        raise InputError(
            f"prompt {prompt_index} cannot be continued: every next token is suppressed or would repeat an n-gram;"
            " relax bad_words_ids, suppress_tokens or no_repeat_ngram_size"
        )
    return beams
