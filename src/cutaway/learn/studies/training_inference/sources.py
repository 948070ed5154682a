"""Sources with known next-token probabilities: memory of two tokens, memory of the whole sequence, a finite text."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from cutaway.learn.studies.train_grid import TrainingData


@dataclass(frozen=True)
class PairChain:
    """The next symbol depends on the last two: after each pair, `num_successors` of the symbols are allowed.

    The successors of a pair are among `num_followers` symbols that can follow its last symbol, so that most pairs of
    symbols never occur. With probability `noise` a symbol is replaced by any symbol.
    """

    num_symbols: int = 16
    num_followers: int = 6
    num_successors: int = 3
    noise: float = 0.01
    seed: int = 0

    @cached_property
    def transitions(self) -> Tensor:
        """(S, S, S): probability of a symbol after two symbols."""
        generator, size = torch.Generator().manual_seed(self.seed), self.num_symbols
        table = torch.zeros(size, size, size)
        for last in range(size):
            followers = torch.randperm(size, generator=generator)[: self.num_followers]
            for before in range(size):
                successors = followers[torch.randperm(self.num_followers, generator=generator)[: self.num_successors]]
                weights = torch.rand(self.num_successors, generator=generator) + 0.2
                table[before, last, successors] = weights / weights.sum()
        return (1 - self.noise) * table + self.noise / size

    @cached_property
    def pair_frequencies(self) -> Tensor:
        """(S, S): stationary distribution of pairs, in fp64."""
        frequencies = torch.full((self.num_symbols,) * 2, self.num_symbols**-2.0, dtype=torch.float64)
        for _ in range(500):
            frequencies = torch.einsum("ab,abc->bc", frequencies, self.transitions.double())
        return frequencies / frequencies.sum()

    @property
    def entropy_rate(self) -> float:
        """Nats per token."""
        transitions = self.transitions.double()
        return float(-(self.pair_frequencies[..., None] * transitions * transitions.log()).sum())

    def sample(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        first = torch.multinomial(self.pair_frequencies.flatten(), count, replacement=True, generator=generator)
        tokens = [first // self.num_symbols, first % self.num_symbols]
        while len(tokens) < length:
            probs = self.transitions[tokens[-2], tokens[-1]]
            tokens.append(torch.multinomial(probs, 1, generator=generator)[:, 0])
        return torch.stack(tokens[:length], 1)

    def next_probs(self, tokens: Tensor) -> Tensor:
        """(B, T, S): probabilities of the symbol after each prefix of `tokens`."""
        frequencies = self.pair_frequencies.float().to(tokens.device)
        first = (frequencies / frequencies.sum(1, keepdim=True))[tokens[:, :1]]
        return torch.cat([first, self.transitions.to(tokens.device)[tokens[:, :-1], tokens[:, 1:]]], 1)


@dataclass(frozen=True)
class TopicChain:
    """A Markov chain whose transitions depend on a topic, which is drawn once per sequence and never written.

    After each symbol, a topic allows `num_successors` symbols. With probability `noise` a symbol is replaced by any
    symbol. All earlier symbols are evidence of the topic, so the source has the memory of the whole sequence.
    """

    num_symbols: int = 12
    num_topics: int = 4
    num_successors: int = 3
    noise: float = 0.01
    seed: int = 0

    @cached_property
    def transitions(self) -> Tensor:
        """(topics, S, S)."""
        generator, size = torch.Generator().manual_seed(self.seed), self.num_symbols
        table = torch.zeros(self.num_topics, size, size)
        for topic in range(self.num_topics):
            for last in range(size):
                weights = torch.rand(self.num_successors, generator=generator) + 0.2
                successors = torch.randperm(size, generator=generator)[: self.num_successors]
                table[topic, last, successors] = weights / weights.sum()
        return (1 - self.noise) * table + self.noise / size

    def sample(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        topics = torch.randint(self.num_topics, (count,), generator=generator)
        tokens = [torch.randint(self.num_symbols, (count,), generator=generator)]
        while len(tokens) < length:
            probs = self.transitions[topics, tokens[-1]]
            tokens.append(torch.multinomial(probs, 1, generator=generator)[:, 0])
        return torch.stack(tokens, 1)

    def next_probs(self, tokens: Tensor) -> Tensor:
        """(B, T, S): probabilities of the symbol after each prefix, with the posterior of the topic (Bayes)."""
        transitions = self.transitions.to(tokens.device)
        likelihoods = transitions.log()[:, tokens[:, :-1], tokens[:, 1:]]  # (topics, B, T - 1)
        posterior = torch.nn.functional.pad(likelihoods.cumsum(-1), (1, 0)).softmax(0)
        return torch.einsum("kbt,kbts->bts", posterior, transitions[:, tokens])


Source = PairChain | TopicChain


@dataclass(frozen=True)
class FiniteText:
    """A text of `count` sequences of a source. Training draws from them with replacement."""

    source: TrainingData
    count: int

    def text(self, length: int) -> Tensor:
        return self.source.sample(self.count, length, torch.Generator().manual_seed(0))

    def sample(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        return self.text(length)[torch.randint(self.count, (count,), generator=generator)]
