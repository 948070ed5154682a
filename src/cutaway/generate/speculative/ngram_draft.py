"""N-gram drafts (prompt lookup): propose the continuation of an earlier occurrence of the last tokens."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from cutaway.argument_checks import check_positive_int
from cutaway.errors import InputError
from cutaway.generate.engine.config import EngineConfig
from cutaway.generate.engine.request import Request
from cutaway.generate.sampling.sampling_state import SamplingFeatures, SamplingState
from cutaway.generate.speculative.draft_model import Proposal


@dataclass(frozen=True)
class NgramConfig:
    """Prompt lookup decoding (Saxena 2023): drafts from earlier occurrences of the last tokens, without a model."""

    max_ngram_size: int = 3
    """Length of the longest n-gram to look up. If it is not found, a shorter one is looked up."""
    min_ngram_size: int = 2
    """Length of the shortest n-gram to look up."""

    def __post_init__(self) -> None:
        for name in ("max_ngram_size", "min_ngram_size"):
            check_positive_int(name, getattr(self, name))
        if self.min_ngram_size > self.max_ngram_size:
            sizes = f"min_ngram_size is {self.min_ngram_size}, more than max_ngram_size {self.max_ngram_size}"
            raise InputError(f"{sizes}; lower min_ngram_size")


class NgramIndex:
    """A growing token sequence, with the last occurrence of each n-gram."""

    def __init__(self, config: NgramConfig, tokens: Iterable[int] = ()) -> None:
        self.config = config
        self.tokens: list[int] = []
        self.continuations: dict[tuple[int, ...], int] = {}
        """For each n-gram, the index of the token after its last occurrence."""
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            end = len(self.tokens)
            for length in range(self.config.min_ngram_size, min(self.config.max_ngram_size, end) + 1):
                self.continuations[tuple(self.tokens[end - length :])] = end
            self.tokens.append(token)

    def propose(self, num_tokens: int) -> list[int]:
        """Return `num_tokens` tokens: the continuation of the longest suffix that occurred before. Empty if none did.

        A continuation that reaches the end of the sequence starts again, so that periodic text is continued.
        """
        tokens = self.tokens
        for length in range(min(self.config.max_ngram_size, len(tokens)), self.config.min_ngram_size - 1, -1):
            start = self.continuations.get(tuple(tokens[-length:]))
            if start is not None:
                period = len(tokens) - start
                return [tokens[start + i % period] for i in range(num_tokens)]
        return []


class NgramProposer:
    """Proposes, for each request, the tokens that followed the previous occurrence of its last n-gram.

    The source of an encoder-decoder is searched too, if source and target have the same vocabulary."""

    def __init__(self, config: NgramConfig, engine_config: EngineConfig) -> None:
        self.config, self.device = config, engine_config.model.device
        self.uses_source = getattr(engine_config.model.config, "source_vocab_size", None) is None
        self.indexes: list[NgramIndex] = [NgramIndex(config)] * engine_config.max_num_seqs
        self.source_lens = [0] * engine_config.max_num_seqs
        """Number of source tokens before each row's own sequence."""

    def add_requests(self, requests: Sequence[Request]) -> None:
        for request in requests:
            assert request.row is not None
            source = request.source_tokens if request.source_tokens is not None and self.uses_source else []
            self.indexes[request.row] = NgramIndex(self.config, [*source, *request.all_token_ids])
            self.source_lens[request.row] = len(source)

    def swap_rows(self, a: int, b: int) -> None:
        self.indexes[a], self.indexes[b] = self.indexes[b], self.indexes[a]
        self.source_lens[a], self.source_lens[b] = self.source_lens[b], self.source_lens[a]

    def propose(
        self, requests: Sequence[Request], max_tokens: Sequence[int], state: SamplingState, features: SamplingFeatures
    ) -> Proposal:
        drafts = []
        for row, (request, count) in enumerate(zip(requests, max_tokens, strict=True)):
            index = self.indexes[row]
            index.extend(request.all_token_ids[len(index.tokens) - self.source_lens[row] :])
            drafts.append(index.propose(count))
        counts = [len(draft) for draft in drafts]
        longest = max(counts)
        tokens = torch.tensor([[*draft, *[0] * (longest - len(draft))] for draft in drafts], dtype=torch.long)
        return Proposal(tokens.view(len(drafts), longest).to(self.device), counts)

    def truncate(self, lengths: Sequence[int]) -> None:
        """No-op: drafts are not stored."""
