"""Beam search: the best few continuations at each step, all prompts side by side, until no better end can come."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from operator import index
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cutaway.errors import InputError, WeightError
from cutaway.generate.generation_config import MAX_PENALTY, EarlyStopping
from cutaway.generate.search.beam_logits_processors import NO_TOKEN, BeamLogitsProcessor
from cutaway.model import Cache, DecoderOnly, EncoderDecoder, Transformer
from cutaway.model.inputs import check_positive_int

INVALID_LOGITS = 2
"""Beside 0 and 1, for a prompt that is done or goes on: its logits are not numbers."""
DecodeFn = Callable[[Int[Tensor, "R 1"]], Float[Tensor, "R V"]]
"""One more token of each row: the logits after it."""


class Beam(NamedTuple):
    """One continuation: its tokens, the end among them; its log-probability divided by length ** length_penalty."""

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
    """For each prompt its `n` best continuations, the best first; fewer where there are no more.

    An encoder-decoder reads the prompts as its sources and writes from `decoder_start_token_id` on. `early_stopping` is
    True to end at the first `num_beams` ends, False to go on while the best beam's score so far beats one of them,
    "never" while any length could. The other arguments are explained at `GenerationConfig`.
    """
    for name, value in (("num_beams", num_beams), ("max_new_tokens", max_new_tokens), ("n", n)):
        check_positive_int(name, value)
    for name, value in (("min_new_tokens", min_new_tokens), ("no_repeat_ngram_size", no_repeat_ngram_size)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise InputError(f"{name} is {value!r}; give a whole number, 0 or more")
    if n > num_beams:
        raise InputError(f"n is {n}, but {num_beams} beams end in no more than {num_beams} texts; ask for more beams")
    if not isinstance(early_stopping, bool) and early_stopping != "never":
        raise InputError(f"early_stopping is {early_stopping!r}; use True, False or 'never'")
    number = isinstance(length_penalty, int | float) and not isinstance(length_penalty, bool)
    if not number or not abs(length_penalty) <= MAX_PENALTY:
        raise InputError(f"length_penalty is {length_penalty!r}; give a number from -{MAX_PENALTY} to {MAX_PENALTY}")
    size = model.config.vocab_size
    ends = sorted(_check_ids_in_vocab("eos_token_ids", eos_token_ids, size))
    forbidden = [_check_ids_in_vocab("bad_words_ids", sequence, size) for sequence in bad_words_ids]
    if not all(forbidden):
        raise InputError(
            "bad_words_ids holds an empty sequence, which would ban everything; give at least one token in each"
        )
    rules = BeamLogitsProcessor(
        size,
        model.device,
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        eos_token_ids=ends,
        forced_bos_token_id=None
        if forced_bos_token_id is None
        else _check_ids_in_vocab("forced_bos_token_id", [forced_bos_token_id], size)[0],
        forced_eos_token_ids=_check_ids_in_vocab(
            "forced_eos_token_ids",
            [forced_eos_token_ids] if isinstance(forced_eos_token_ids, int) else forced_eos_token_ids,
            size,
        ),
        bad_words_ids=[sequence for sequence in forbidden if sequence not in [[end] for end in ends]],
        suppress_tokens=_check_ids_in_vocab("suppress_tokens", suppress_tokens, size),
        begin_suppress_tokens=_check_ids_in_vocab("begin_suppress_tokens", begin_suppress_tokens, size),
        no_repeat_ngram_size=no_repeat_ngram_size,
        repetition_penalty=repetition_penalty,
    )
    if len(prompts) == 0:
        return []
    search = BeamSearch(rules, num_beams, max_new_tokens, length_penalty, early_stopping)
    with torch.no_grad():
        given, cache, logits, step = _prefill(model, prompts, decoder_start_token_id, max_new_tokens)
        found = search.run(given if rules.needs_history else given[:, :0], cache, logits, step)
    cut = max_new_tokens if len(rules.forced_eos_token_ids) else None  # the last token was not the model's choice
    return [_finished_beams(number, *each, ends, cut)[:n] for number, each in enumerate(found)]


@dataclass(frozen=True)
class BeamSearch:
    """The loop. A beam's score is the sum of its log-probabilities; −inf is no beam."""

    logits_processor: BeamLogitsProcessor
    num_beams: int
    max_new_tokens: int
    length_penalty: float
    early_stopping: EarlyStopping

    def run(
        self, prompt_tokens: Int[Tensor, "P G"], cache: Cache, logits: Float[Tensor, "P V"], decode: DecodeFn
    ) -> list[tuple[Tensor, Tensor]]:
        """For each prompt, scores and tokens of its ends. `prompt_tokens`: what the rules see before the first new one.

        The device is waited for once a step, to see which prompts are done; those leave the batch.
        """
        device, size = logits.device, self.logits_processor.vocab_size
        found: dict[int, tuple[Tensor, Tensor]] = {}
        here = list(range(len(prompt_tokens)))  # the prompts still in the batch
        history = prompt_tokens.unsqueeze(1)
        score = torch.zeros(len(prompt_tokens), 1, device=device)
        ended = torch.full((len(prompt_tokens), self.num_beams), -torch.inf, device=device)
        texts = torch.full((len(prompt_tokens), self.num_beams, self.max_new_tokens), NO_TOKEN, device=device)
        # So many that enough go on if as many as can end.
        keep = max(2, 1 + len(self.logits_processor.eos_token_ids)) * self.num_beams
        for new in range(self.max_new_tokens):
            width = score.shape[-1]  # one beam a prompt, at first
            log_p = self.logits_processor(logits.float().log_softmax(-1), history.flatten(0, 1), new)
            total = (score.unsqueeze(-1) + log_p.view(*score.shape, size)).flatten(1)
            best, flat = total.topk(min(keep, total.shape[-1]))
            parent, token = flat // size, flat % size
            grown = torch.cat([_gather_beams(history, parent), token.unsqueeze(-1)], -1)
            ends = (token.unsqueeze(-1) == self.logits_processor.eos_token_ids).any(-1) | (
                new + 1 == self.max_new_tokens
            )
            # Only the best `num_beams` may end here; the others are there to go on in their place.
            worth = (best / (new + 1) ** self.length_penalty).masked_fill(~ends, -torch.inf)[:, : self.num_beams]
            text = F.pad(
                grown[:, : self.num_beams, prompt_tokens.shape[-1] :],
                (0, self.max_new_tokens - new - 1),
                value=NO_TOKEN,
            )
            ended, order = torch.cat([ended, worth], -1).topk(self.num_beams)
            texts = _gather_beams(torch.cat([texts, text], 1), order)
            score, order = best.masked_fill(ends, -torch.inf).topk(min(self.num_beams, best.shape[-1]))
            history, token, parent = _gather_beams(grown, order), token.gather(1, order), parent.gather(1, order)
            state = torch.where(
                best[:, 0].isnan(), INVALID_LOGITS, self.can_improve(score, ended, new + 1).long()
            ).tolist()
            if INVALID_LOGITS in state:  # NaN is the largest of all, to topk
                number = here[state.index(INVALID_LOGITS)]
                raise WeightError(
                    f"the logits for prompt {number} are not numbers after {new} new tokens; the weights are damaged,"
                    " or too large for their dtype: try float32"
                )
            found |= {here[row]: (ended[row], texts[row]) for row, on in enumerate(state) if not on}
            kept = [row for row, on in enumerate(state) if on]
            if not kept:
                break
            rows = torch.arange(len(here), device=device)
            if len(kept) < len(here):
                rows = torch.tensor(kept, device=device)
                here = [here[row] for row in kept]
                history, token, parent = history[rows], token[rows], parent[rows]
                score, ended, texts = score[rows], ended[rows], texts[rows]
            cache.select_rows((rows.unsqueeze(-1) * width + parent).flatten())
            logits = decode(token.view(-1, 1))
        return [found[number] for number in range(len(prompt_tokens))]

    def can_improve(
        self, scores: Float[Tensor, "P R"], finished_scores: Float[Tensor, "P N"], num_new: int
    ) -> Bool[Tensor, " P"]:
        """Whether a prompt's best beam may still end above its worst end, which is −inf while there are too few."""
        worst = finished_scores[:, -1]
        if num_new == self.max_new_tokens:
            return torch.zeros_like(worst, dtype=torch.bool)
        length = self.max_new_tokens if self.early_stopping == "never" and self.length_penalty > 0 else num_new
        hope = scores[:, 0] / length**self.length_penalty > worst
        return hope & (worst == -torch.inf) if self.early_stopping is True else hope


def _gather_beams(tensor: Int[Tensor, "P R L"], index: Int[Tensor, "P K"]) -> Int[Tensor, "P K L"]:
    """For each prompt, these of its beams."""
    return tensor.take_along_dim(index.unsqueeze(-1), 1)


def _prefill(
    model: Transformer, prompts: Sequence[Sequence[int]], decoder_start_token_id: int | None, max_new_tokens: int
) -> tuple[Int[Tensor, "P G"], Cache, Float[Tensor, "P V"], DecodeFn]:
    """Read the prompts once each: what the decoder was given, the cache, the first logits, and how to go on."""
    size = model.config.vocab_size
    if isinstance(model, EncoderDecoder):
        if decoder_start_token_id is None:
            raise InputError(
                "an encoder-decoder's answer begins with a token of its own; give it as decoder_start_token_id"
            )
        start = torch.full(
            (len(prompts), 1),
            _check_ids_in_vocab("decoder_start_token_id", [decoder_start_token_id], size)[0],
            device=model.device,
        )
        source, mask = _left_pad(prompts, model.config.source_vocab_size or size, model.device)  # type: ignore[union-attr]
        cache = model.new_cache(len(prompts), max_new_tokens)
        x = model.hidden_states(source, start, mask, cache=cache)
        return (
            start,
            cache,
            model.head(x[:, -1]),
            lambda token: model.head(model.hidden_states(None, token, cache=cache)[:, -1]),
        )
    if not isinstance(model, DecoderOnly):
        raise InputError("this model fills masks and does not write on; beam search needs a decoder")
    if decoder_start_token_id is not None:
        raise InputError("decoder_start_token_id is for encoder-decoders; put this model's first token into the prompt")
    tokens, mask = _left_pad(prompts, size, model.device)
    cache = model.new_cache(len(prompts), tokens.shape[-1] + max_new_tokens - 1)
    x = model.hidden_states(tokens, mask, cache=cache)
    given = tokens if mask is None else tokens.masked_fill(~mask, NO_TOKEN)
    return given, cache, model.head(x[:, -1]), lambda token: model.head(model.hidden_states(token, cache=cache)[:, -1])


def _left_pad(
    prompts: Sequence[Sequence[int]], vocab_size: int, device: torch.device
) -> tuple[Int[Tensor, "P T"], Bool[Tensor, "P T"] | None]:
    """One row a prompt, all ending together; no mask where they are of one length."""
    rows = [_check_ids_in_vocab(f"prompt {number}", prompt, vocab_size) for number, prompt in enumerate(prompts)]
    if not all(rows):
        raise InputError(f"prompt {rows.index([])} is empty; give at least one token")
    width = max(map(len, rows))
    tokens = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=device)
    if min(map(len, rows)) == width:
        return tokens, None
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return tokens, torch.arange(width, device=device) >= width - lengths.unsqueeze(-1)


def _check_ids_in_vocab(name: str, ids: Collection[int], vocab_size: int) -> list[int]:
    """Ids of this vocabulary, as integers."""
    try:
        known = [index(number) for number in ids]
    except TypeError:
        raise InputError(f"{name} is {ids!r:.60}; give token ids, which are whole numbers") from None
    for number in known:
        if not 0 <= number < vocab_size:
            raise InputError(f"{name} holds the id {number}; the vocabulary has ids 0 to {vocab_size - 1}")
    return known


def _finished_beams(
    prompt_index: int, scores: Tensor, sequences: Tensor, eos_token_ids: Collection[int], forced_eos_len: int | None
) -> list[Beam]:
    """A prompt's ends on the host. One of length `forced_eos_len` was cut, whatever its last token."""
    made = []
    for score, row in zip(scores.tolist(), sequences.tolist(), strict=True):
        tokens = [token for token in row if token != NO_TOKEN]
        if score > -math.inf:
            made.append(
                Beam(
                    tokens, score, "stop" if tokens[-1] in eos_token_ids and len(tokens) != forced_eos_len else "length"
                )
            )
    if not made:
        raise InputError(
            f"prompt {prompt_index} cannot be continued: each next token is banned, suppressed or would repeat a"
            " sequence; ask for less"
        )
    return made
