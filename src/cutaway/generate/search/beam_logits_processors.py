"""Beam search parameters and logits processing: forced and suppressed tokens, bad words, repeated n-grams."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cutaway.argument_checks import check_positive_int
from cutaway.errors import InputError
from cutaway.generate.generation_config import MAX_PENALTY, EarlyStopping
from cutaway.generate.structured_output.grammar import Grammar

NO_TOKEN = -1
"""Padding in a token history."""


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """Arguments of `beam_search`; those without a description are described in `GenerationConfig`."""

    num_beams: int
    max_new_tokens: int
    eos_token_ids: Collection[int] = ()
    n: int = 1
    """Number of beams to return per prompt."""
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    """When the search of a prompt stops, after `num_beams` beams have finished.

    True: at once. False: when the current score of the best running beam is not above that of the worst finished beam.
    "never": when the score of the best running beam cannot exceed that of the worst finished beam at any length."""
    min_new_tokens: int = 0
    decoder_start_token_id: int | None = None
    forced_bos_token_id: int | None = None
    forced_eos_token_ids: Sequence[int] = ()
    bad_words_ids: Sequence[Sequence[int]] = ()
    suppress_tokens: Sequence[int] = ()
    begin_suppress_tokens: Sequence[int] = ()
    no_repeat_ngram_size: int = 0
    repetition_penalty: float = 1.0
    grammar: Grammar | None = None
    """Grammar at the start of a completion, which all completions must match."""

    def __post_init__(self) -> None:
        for name in ("num_beams", "max_new_tokens", "n"):
            check_positive_int(name, getattr(self, name))
        if self.n > self.num_beams:
            raise InputError(f"n is {self.n}, but num_beams is {self.num_beams}; use more beams")
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise InputError(f"early_stopping is {self.early_stopping!r}; use True, False or 'never'")
        penalty = self.length_penalty
        is_number = isinstance(penalty, int | float) and not isinstance(penalty, bool)
        if not is_number or not abs(penalty) <= MAX_PENALTY:
            raise InputError(f"length_penalty is {penalty!r}; pass a number from -{MAX_PENALTY} to {MAX_PENALTY}")


class BeamLogitsProcessor:
    """Changes next-token log-probabilities by penalties, suppressed tokens and forced tokens, as transformers does."""

    def __init__(self, vocab_size: int, device: torch.device, params: BeamSearchParams) -> None:
        self.vocab_size, self.params = vocab_size, params

        def token_tensor(token_ids: Collection[int]) -> Int[Tensor, " S"]:
            return torch.tensor(sorted(token_ids), dtype=torch.long, device=device)

        self.eos_token_ids = token_tensor(params.eos_token_ids)
        self.forced_eos_token_ids = token_tensor(params.forced_eos_token_ids)
        bos = params.forced_bos_token_id
        self.forced_bos_token_id = None if bos is None else token_tensor([bos])
        self.suppress_tokens = token_tensor(params.suppress_tokens)
        self.begin_suppress_tokens = token_tensor(params.begin_suppress_tokens)
        eos_words = [[token_id] for token_id in params.eos_token_ids]
        bad_words = [list(words) for words in params.bad_words_ids if list(words) not in eos_words]
        lengths = sorted({len(words) for words in bad_words})
        self.bad_words_ids = [
            torch.tensor([words for words in bad_words if len(words) == length], device=device) for length in lengths
        ]
        self.needs_history = (
            params.no_repeat_ngram_size > 0 or params.repetition_penalty != 1 or any(length > 1 for length in lengths)
        )
        """Whether a rule depends on earlier tokens, including the prompt."""

    def __call__(self, scores: Float[Tensor, "R V"], history: Int[Tensor, "R L"], num_new: int) -> Float[Tensor, "R V"]:
        """Process the scores (log-probabilities) of the token after `num_new` generated tokens, in place.

        `history`: the tokens so far of each row, with NO_TOKEN as padding."""
        forced = self.forced_bos_token_id if num_new == 0 else None
        if num_new == self.params.max_new_tokens - 1 and len(self.forced_eos_token_ids):
            forced = self.forced_eos_token_ids
        if forced is not None:
            scores.fill_(-torch.inf).index_fill_(1, forced, 0.0)
        else:
            if self.params.repetition_penalty != 1:
                self._apply_repetition_penalty(scores, history)
            self._block_repeated_ngrams(scores, history)
            for sequences in self.bad_words_ids:
                self._block_bad_words(scores, history, sequences)
            if num_new < self.params.min_new_tokens:
                scores.index_fill_(1, self.eos_token_ids, -torch.inf)
        scores.index_fill_(1, self.suppress_tokens, -torch.inf)
        if num_new == (self.forced_bos_token_id is not None):
            scores.index_fill_(1, self.begin_suppress_tokens, -torch.inf)
        return scores

    def _block_repeated_ngrams(self, scores: Float[Tensor, "R V"], history: Int[Tensor, "R L"]) -> None:
        """Suppress tokens that would repeat an n-gram of the history."""
        length, n = history.shape[-1], self.params.no_repeat_ngram_size
        if 0 < n <= length:
            windows = history.unfold(1, n, 1)  # (R, L − n + 1, n)
            suffix = history[:, length + 1 - n :]
            matches = (windows[..., :-1] == suffix.unsqueeze(1)).all(-1) & (windows != NO_TOKEN).all(-1)
            self._block_tokens(scores, windows[..., -1], matches)

    def _block_bad_words(
        self, scores: Float[Tensor, "R V"], history: Int[Tensor, "R L"], sequences: Int[Tensor, "S k"]
    ) -> None:
        """Suppress tokens that would complete a bad-words sequence."""
        prefix_len = sequences.shape[-1] - 1
        if prefix_len <= history.shape[-1]:
            suffix = history[:, history.shape[-1] - prefix_len :]
            matches = (suffix.unsqueeze(1) == sequences[:, :-1]).all(-1)
            self._block_tokens(scores, sequences[:, -1].expand_as(matches), matches)

    def _apply_repetition_penalty(self, scores: Float[Tensor, "R V"], history: Int[Tensor, "R L"]) -> None:
        """Apply the repetition penalty to tokens of the history."""
        seen, penalty = self._vocab_mask(history, history != NO_TOKEN), self.params.repetition_penalty
        scores.copy_(torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores))

    def _block_tokens(
        self, scores: Float[Tensor, "R V"], tokens: Int[Tensor, "R S"], mask: Bool[Tensor, "R S"]
    ) -> None:
        scores.masked_fill_(self._vocab_mask(tokens, mask), -torch.inf)

    def _vocab_mask(self, tokens: Int[Tensor, "R S"], mask: Bool[Tensor, "R S"]) -> Bool[Tensor, "R V"]:
        """Return a vocabulary mask that is True at each row's tokens. Tokens with a False `mask` are ignored."""
        vocab_mask = torch.zeros(len(tokens), self.vocab_size + 1, dtype=torch.bool, device=tokens.device)
        return vocab_mask.scatter_(1, torch.where(mask, tokens, self.vocab_size), True)[:, :-1]
