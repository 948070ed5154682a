"""What may come next in a beam: forced, banned and suppressed tokens, repeated sequences, ends that come too early."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

NONE = -1
"""Stands in a history where no token is."""


class Rules:
    """What may come next, as changes of the log-probabilities; in transformers' order, so that the same rule wins."""

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        *,
        most: int,
        least: int,
        eos: Sequence[int],
        forced_bos: int | None,
        forced_eos: Sequence[int],
        banned: Sequence[Sequence[int]],
        suppressed: Sequence[int],
        suppressed_first: Sequence[int],
        no_repeat_ngram: int,
        repetition_penalty: float,
    ) -> None:
        self.vocab_size, self.most, self.least, self.ngram = vocab_size, most, least, no_repeat_ngram
        self.penalty = repetition_penalty

        def ids(numbers: Sequence[int]) -> Int[Tensor, " S"]:
            return torch.tensor(numbers, dtype=torch.long, device=device)

        self.eos, self.forced_eos = ids(eos), ids(forced_eos)
        self.forced_bos = None if forced_bos is None else ids([forced_bos])
        self.suppressed, self.suppressed_first = ids(suppressed), ids(suppressed_first)
        lengths = sorted({len(sequence) for sequence in banned})
        alike = ([sequence for sequence in banned if len(sequence) == length] for length in lengths)
        self.banned = [torch.tensor(sequences, device=device) for sequences in alike]
        self.look_back = no_repeat_ngram > 0 or repetition_penalty != 1 or any(length > 1 for length in lengths)
        """Whether a rule looks at earlier tokens, the prompt's among them."""

    def __call__(self, scores: Float[Tensor, "R V"], history: Int[Tensor, "R L"], new: int) -> Float[Tensor, "R V"]:
        """Scores of the token after `new` new ones, changed in place."""
        forced = self.forced_bos if new == 0 else None
        if new == self.most - 1 and len(self.forced_eos):
            forced = self.forced_eos
        if forced is not None:
            scores.fill_(-torch.inf).index_fill_(1, forced, 0.0)
        else:
            if self.penalty != 1:
                self.penalise(scores, history)
            self.repeats(scores, history)
            for sequences in self.banned:
                self.completes(scores, history, sequences)
            if new < self.least:
                scores.index_fill_(1, self.eos, -torch.inf)
        scores.index_fill_(1, self.suppressed, -torch.inf)
        if new == (self.forced_bos is not None):
            scores.index_fill_(1, self.suppressed_first, -torch.inf)
        return scores

    def repeats(self, scores: Float[Tensor, "R V"], history: Int[Tensor, "R L"]) -> None:
        """Take away what would make the last tokens a sequence that was there before."""
        length = history.shape[-1]
        if 0 < self.ngram <= length:
            windows = history.unfold(1, self.ngram, 1)
            last = history[:, length + 1 - self.ngram :]
            seen = (windows[..., :-1] == last.unsqueeze(1)).all(-1) & (windows != NONE).all(-1)
            self.take_away(scores, windows[..., -1], seen)

    def completes(
        self, scores: Float[Tensor, "R V"], history: Int[Tensor, "R L"], sequences: Int[Tensor, "S k"]
    ) -> None:
        """Take away what would complete a banned sequence."""
        before = sequences.shape[-1] - 1
        if before <= history.shape[-1]:
            last = history[:, history.shape[-1] - before :]
            begun = (last.unsqueeze(1) == sequences[:, :-1]).all(-1)
            self.take_away(scores, sequences[:, -1].expand_as(begun), begun)

    def penalise(self, scores: Float[Tensor, "R V"], history: Int[Tensor, "R L"]) -> None:
        """Make what was there before less likely."""
        seen = self.marked(history, history != NONE)
        scores.copy_(torch.where(seen, torch.where(scores < 0, scores * self.penalty, scores / self.penalty), scores))

    def take_away(self, scores: Float[Tensor, "R V"], tokens: Int[Tensor, "R S"], where: Bool[Tensor, "R S"]) -> None:
        scores.masked_fill_(self.marked(tokens, where), -torch.inf)

    def marked(self, tokens: Int[Tensor, "R S"], where: Bool[Tensor, "R S"]) -> Bool[Tensor, "R V"]:
        """Which of the vocabulary are among each row's tokens; those that do not count go to a spare column."""
        found = torch.zeros(len(tokens), self.vocab_size + 1, dtype=torch.bool, device=tokens.device)
        return found.scatter_(1, torch.where(where, tokens, self.vocab_size), True)[:, :-1]
