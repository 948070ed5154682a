"""Grammars of the beams of a beam search: one position in the grammar per beam."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cutaway.generate.sampling.logits_processing import mask_by_grammar
from cutaway.generate.structured_output.constraint import bitmask_width
from cutaway.generate.structured_output.grammar import Grammar, fill_bitmasks


class BeamGrammars:
    """The grammar positions of the running beams of each prompt, and of their candidate extensions.

    Dimensions: P prompts, R beams per prompt (1 before the first step), C candidates per prompt, V the vocabulary."""

    def __init__(self, grammar: Grammar, num_prompts: int, vocab_size: int, num_forced_tokens: int) -> None:
        """`num_forced_tokens`: number of first tokens, such as BOS, that the grammar does not see."""
        self.num_forced_tokens = num_forced_tokens
        self.width = bitmask_width(vocab_size)
        self.beams: list[list[Grammar | None]] = [[grammar] for _ in range(num_prompts)]
        """(P, R). None: an empty slot, whose score is −inf."""
        self.candidates: list[list[Grammar | None]] = []

    def mask(self, log_p: Float[Tensor, "R V"], num_new: int) -> Float[Tensor, "R V"]:
        """Set the log-probabilities of the tokens that the grammar of each beam does not allow to −inf."""
        if num_new < self.num_forced_tokens:
            return log_p
        grammars = [grammar for beams in self.beams for grammar in beams]
        bitmask = torch.zeros(len(grammars), self.width, dtype=torch.int32)
        fill_bitmasks(bitmask, grammars)
        return mask_by_grammar(log_p, bitmask.to(log_p.device))

    def extend(
        self, parent: Int[Tensor, "P C"], token: Int[Tensor, "P C"], score: Float[Tensor, "P C"], num_new: int
    ) -> Bool[Tensor, "P C"]:
        """Compute the grammars of candidates: a beam of the prompt and its next token. Return which are finished.

        `num_new`: number of tokens of each beam before the next token."""
        self.candidates = []
        for beams, *columns in zip(self.beams, parent.tolist(), token.tolist(), score.isfinite().tolist(), strict=True):
            row: list[Grammar | None] = []
            for beam, next_token, is_possible in zip(*columns, strict=True):
                grammar = beams[beam] if is_possible else None
                extended = None if grammar is None else grammar.copy()
                if extended is not None and num_new >= self.num_forced_tokens:
                    extended.accept(next_token, num_new - self.num_forced_tokens)
                row.append(extended)
            self.candidates.append(row)
        finished = [[grammar is not None and grammar.is_finished for grammar in row] for row in self.candidates]
        return torch.tensor(finished, device=token.device)

    def select(self, order: Int[Tensor, "P R"]) -> None:
        """The candidates with these indices are the running beams from now on."""
        rows = zip(self.candidates, order.tolist(), strict=True)
        self.beams = [[candidates[index] for index in indices] for candidates, indices in rows]

    def select_prompts(self, rows: list[int]) -> None:
        """Keep only the prompts in these rows."""
        self.beams = [self.beams[row] for row in rows]
