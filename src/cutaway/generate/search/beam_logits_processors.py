"""Logits processing of beam search: forced and suppressed tokens, bad words, repeated n-grams, minimum length."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

NO_TOKEN = -1
"""Padding in a token history."""


class BeamLogitsProcessor:
    """Processes log-probabilities of the next token, in the order of transformers, so that the same rule wins."""

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        *,
        max_new_tokens: int,
        min_new_tokens: int,
        eos_token_ids: Sequence[int],
        forced_bos_token_id: int | None,
        forced_eos_token_ids: Sequence[int],
        bad_words_ids: Sequence[Sequence[int]],
        suppress_tokens: Sequence[int],
        begin_suppress_tokens: Sequence[int],
        no_repeat_ngram_size: int,
        repetition_penalty: float,
    ) -> None:
        self.vocab_size, self.max_new_tokens, self.min_new_tokens, self.no_repeat_ngram_size = (
            vocab_size,
            max_new_tokens,
            min_new_tokens,
            no_repeat_ngram_size,
        )
        self.repetition_penalty = repetition_penalty

        def token_tensor(numbers: Sequence[int]) -> Int[Tensor, " S"]:
            return torch.tensor(numbers, dtype=torch.long, device=device)

        self.eos_token_ids, self.forced_eos_token_ids = token_tensor(eos_token_ids), token_tensor(forced_eos_token_ids)
        self.forced_bos_token_id = None if forced_bos_token_id is None else token_tensor([forced_bos_token_id])
        self.suppress_tokens, self.begin_suppress_tokens = (
            token_tensor(suppress_tokens),
            token_tensor(begin_suppress_tokens),
        )
        lengths = sorted({len(sequence) for sequence in bad_words_ids})
        same_length = ([sequence for sequence in bad_words_ids if len(sequence) == length] for length in lengths)
        self.bad_words_ids = [torch.tensor(sequences, device=device) for sequences in same_length]
        self.needs_history = (
            no_repeat_ngram_size > 0 or repetition_penalty != 1 or any(length > 1 for length in lengths)
        )
        """Whether a rule depends on earlier tokens, including the prompt."""

    def __call__(self, scores: Float[Tensor, "R V"], history: Int[Tensor, "R L"], num_new: int) -> Float[Tensor, "R V"]:
        """Process, in place, the scores of the token after `num_new` generated tokens."""
        forced = self.forced_bos_token_id if num_new == 0 else None
        if num_new == self.max_new_tokens - 1 and len(self.forced_eos_token_ids):
            forced = self.forced_eos_token_ids
        if forced is not None:
            scores.fill_(-torch.inf).index_fill_(1, forced, 0.0)
        else:
            if self.repetition_penalty != 1:
                self._apply_repetition_penalty(scores, history)
            self._block_repeated_ngrams(scores, history)
            for sequences in self.bad_words_ids:
                self._block_bad_words(scores, history, sequences)
            if num_new < self.min_new_tokens:
                scores.index_fill_(1, self.eos_token_ids, -torch.inf)
        scores.index_fill_(1, self.suppress_tokens, -torch.inf)
        if num_new == (self.forced_bos_token_id is not None):
            scores.index_fill_(1, self.begin_suppress_tokens, -torch.inf)
        return scores

    def _block_repeated_ngrams(self, scores: Float[Tensor, "R V"], history: Int[Tensor, "R L"]) -> None:
        """Suppress tokens that would repeat an n-gram of the history."""
        length = history.shape[-1]
        if 0 < self.no_repeat_ngram_size <= length:
            windows = history.unfold(1, self.no_repeat_ngram_size, 1)  # (R, L − n + 1, n)
            suffix = history[:, length + 1 - self.no_repeat_ngram_size :]
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
        seen = self._vocab_mask(history, history != NO_TOKEN)
        scores.copy_(
            torch.where(
                seen,
                torch.where(scores < 0, scores * self.repetition_penalty, scores / self.repetition_penalty),
                scores,
            )
        )

    def _block_tokens(
        self, scores: Float[Tensor, "R V"], tokens: Int[Tensor, "R S"], mask: Bool[Tensor, "R S"]
    ) -> None:
        scores.masked_fill_(self._vocab_mask(tokens, mask), -torch.inf)

    def _vocab_mask(self, tokens: Int[Tensor, "R S"], mask: Bool[Tensor, "R S"]) -> Bool[Tensor, "R V"]:
        """Mask of the vocabulary that is true at each row's tokens; masked tokens are written to an extra column."""
        vocab_mask = torch.zeros(len(tokens), self.vocab_size + 1, dtype=torch.bool, device=tokens.device)
        return vocab_mask.scatter_(1, torch.where(mask, tokens, self.vocab_size), True)[:, :-1]
