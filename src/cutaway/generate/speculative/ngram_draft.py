"""Guesses without a model: a text's last tokens may have stood there before, and what followed may follow again."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from cutaway.errors import InputError
from cutaway.generate.engine.config import EngineConfig
from cutaway.generate.engine.request import Request
from cutaway.generate.sampling.sampling_state import SamplingFeatures, SamplingState
from cutaway.generate.speculative.draft_model import Proposal


@dataclass(frozen=True)
class NgramConfig:
    """Prompt lookup: what followed when the text's last tokens stood there before (Saxena 2023). Costs no model."""

    max_ngram_size: int = 3
    """How many of the last tokens are looked for; if they are not found, one less, and so on."""
    min_ngram_size: int = 2
    """With fewer than this, nothing is guessed."""

    def __post_init__(self) -> None:
        for name in ("max_ngram_size", "min_ngram_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InputError(f"{name} is {value!r}; give a whole number of tokens from 1")
        if self.min_ngram_size > self.max_ngram_size:
            raise InputError(
                f"min_ngram_size is {self.min_ngram_size}, more than max_ngram_size, {self.max_ngram_size}; lower it"
            )


class NgramIndex:
    """A text that grows, and where each of its short sequences last stood."""

    def __init__(self, config: NgramConfig, tokens: Iterable[int] = ()) -> None:
        self.config = config
        self.tokens: list[int] = []
        self.continuations: dict[tuple[int, ...], int] = {}
        """By sequence: where what followed it begins."""
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            end = len(self.tokens)
            for length in range(self.config.min_ngram_size, min(self.config.max_ngram_size, end) + 1):
                self.continuations[tuple(self.tokens[end - length :])] = end
            self.tokens.append(token)

    def propose(self, num_tokens: int) -> list[int]:
        """What came after the longest end of the text that stood there before; nothing if none did.

        Where that reaches the end of the text it goes on with itself, so what repeats is repeated.
        """
        text = self.tokens
        for length in range(min(self.config.max_ngram_size, len(text)), self.config.min_ngram_size - 1, -1):
            start = self.continuations.get(tuple(text[-length:]))
            if start is not None:
                period = len(text) - start
                return [text[start + i % period] for i in range(num_tokens)]
        return []


class NgramProposer:
    """Guesses by an `NgramIndex`; a source in the same vocabulary is looked through too."""

    def __init__(self, config: NgramConfig, engine_config: EngineConfig) -> None:
        self.config, self.device = config, engine_config.model.device
        self.uses_source = getattr(engine_config.model.config, "source_vocab_size", None) is None
        self.indexes: list[NgramIndex] = [NgramIndex(config)] * engine_config.max_num_seqs
        self.source_lens = [0] * engine_config.max_num_seqs
        """Tokens of the source, in front of each row's own text."""

    def add_requests(self, requests: Sequence[Request]) -> None:
        for ticket in requests:
            assert ticket.row is not None
            source = ticket.source_tokens if ticket.source_tokens is not None and self.uses_source else []
            self.indexes[ticket.row] = NgramIndex(self.config, [*source, *ticket.all_token_ids])
            self.source_lens[ticket.row] = len(source)

    def swap_rows(self, a: int, b: int) -> None:
        self.indexes[a], self.indexes[b] = self.indexes[b], self.indexes[a]
        self.source_lens[a], self.source_lens[b] = self.source_lens[b], self.source_lens[a]

    def propose(
        self, requests: Sequence[Request], max_tokens: Sequence[int], state: SamplingState, features: SamplingFeatures
    ) -> Proposal:
        runs = []
        for row, (ticket, count) in enumerate(zip(requests, max_tokens, strict=True)):
            repeats = self.indexes[row]
            repeats.extend(ticket.all_token_ids[len(repeats.tokens) - self.source_lens[row] :])
            runs.append(repeats.propose(count))
        counts = [len(run) for run in runs]
        longest = max(counts)
        tokens = torch.tensor([[*run, *[0] * (longest - len(run))] for run in runs], dtype=torch.long)
        return Proposal(tokens.view(len(runs), longest).to(self.device), counts)

    def truncate(self, lengths: Sequence[int]) -> None:
        """Guesses were never written down."""
