"""From logits to the next token, for a whole batch at once and without waiting for the device."""

import functools
import math
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from cutaway.generate.distribution import Needs, Rows, draw, needs_of, probabilities, processed, weights
from cutaway.generate.noise import uniform
from cutaway.generate.settings import Settings

__all__ = ["Drawn", "Needs", "Rows", "Sampler", "draw", "probabilities", "processed", "uniform"]

COOLEST, HOTTEST = 1.2e-38, 1e38
"""Temperatures that float32 tells from 0 and from infinity."""


class Drawn(NamedTuple):
    """One step's tokens; log-probabilities are the model's own, before any setting, and only there if asked for."""

    tokens: Tensor  # (n,) int64
    bad: Tensor  # (n,) bool: a logit was NaN or +inf, or nothing was left to choose
    logprob: Tensor | None = None  # (n,) float32
    top_tokens: Tensor | None = None  # (n, most asked for) int64, the most likely first
    top_logprobs: Tensor | None = None


class Sampler:
    """The settings and the memory of up to `rows` requests on a device, each in its row."""

    def __init__(self, rows: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.vocab_size, self.device = vocab_size, torch.device(device)
        numbers = torch.zeros(rows, 6, dtype=torch.float64, device=device)
        whole = torch.zeros(rows, 3, dtype=torch.int64, device=device)
        self.all = Rows(numbers, whole, torch.zeros(rows, dtype=torch.int64, device=device))
        self.asked = [Needs()] * rows
        self.known: dict[int, Needs] = {}
        numbers[:, [1, 3]], whole[:, 1] = 1.0, vocab_size  # a row without a request chooses the most likely

    def set(
        self,
        row: int,
        settings: Settings,
        tokens: Sequence[int],
        seed: int,
        *,
        eos: Iterable[int] = (),
        answer: Sequence[int] = (),
    ) -> None:
        """Give a row to a request with this prompt; `answer` is what it has already said, if it was interrupted."""
        size, rows = self.vocab_size, self.all
        stops = {*settings.stop_tokens, *(() if settings.ignore_eos else eos)}
        needs = needs_of(settings, size, stops)
        temperature = settings.temperature and min(max(settings.temperature, COOLEST), HOTTEST)
        penalties = (settings.repetition_penalty, settings.presence_penalty, settings.frequency_penalty)
        numbers = (temperature, settings.top_p or 1.0, settings.min_p or 0.0, *penalties)
        whole = (seed, min(settings.top_k or size, size), settings.min_new_tokens)
        rows.numbers[row] = torch.tensor(numbers, dtype=torch.float64)
        rows.whole[row] = torch.tensor(whole)
        rows.step[row] = len(answer)
        self._widen(needs)
        for wide in (rows.seen, rows.counts, rows.bias, rows.stops):
            if wide is not None:
                wide[row] = 0
        if needs.repetition and rows.seen is not None:
            rows.seen[row, self._ids([*tokens, *answer])] = True
        if needs.counts and rows.counts is not None:
            said = self._ids(answer)
            rows.counts[row].index_add_(0, said, torch.ones_like(said, dtype=torch.int32))
        if needs.bias and rows.bias is not None:
            bias = torch.tensor(list(settings.logit_bias.values()), dtype=torch.float32, device=self.device)
            rows.bias[row, self._ids(settings.logit_bias)] = bias
            rows.bias[row, self._ids(settings.banned)] = -math.inf
        if needs.least and rows.stops is not None:
            rows.stops[row, self._ids(stops)] = True
        self._ask(row, needs)

    def clear(self, row: int) -> None:
        """The row's request is over, and what it needed is needed no more."""
        self._ask(row, Needs())

    def move(self, source: int, target: int) -> None:
        """The request of one row takes the place of another's."""
        for tensor in self.all.tensors():
            tensor[target] = tensor[source]
        self._ask(target, self.asked[source])

    def swap(self, a: int, b: int) -> None:
        """Two requests change places."""
        for tensor in self.all.tensors():
            kept = tensor[a].clone()
            tensor[a] = tensor[b]
            tensor[b] = kept
        first, second = self.asked[a], self.asked[b]
        self._ask(a, second)
        self._ask(b, first)

    def needs(self, rows: int) -> Needs:
        """What the rows 0 … rows − 1 need between them."""
        if rows not in self.known:
            result = Needs()
            for needs in self.asked[:rows]:
                result |= needs
            self.known[rows] = result
        return self.known[rows]

    def rows(self, n: int) -> Rows:
        """The first n rows, for `processed` and `probabilities`."""
        return self.all.first(n)

    def sample(self, logits: Float[Tensor, "n V"], needs: Needs, active: Bool[Tensor, " n"] | None = None) -> Drawn:
        """The next token of each row, which the active rows remember."""
        rows = self.all.first(len(logits))
        x = processed(logits, rows, needs)
        best, tokens = highest(x, parts_of(x))
        if needs.sampled:
            tokens = drawn(x, best, tokens, rows, needs)
        rows.advance(tokens, torch.ones_like(tokens, dtype=torch.bool) if active is None else active, needs)
        return Drawn(tokens, ~best.isfinite(), *told(logits, tokens, needs))

    def _ask(self, row: int, needs: Needs) -> None:
        self.asked[row] = needs
        self.known.clear()

    def _ids(self, tokens: Iterable[int]) -> Int64[Tensor, " t"]:
        return torch.tensor(list(tokens), dtype=torch.int64, device=self.device)

    def _widen(self, needs: Needs) -> None:
        """Make what is as wide as the vocabulary when first used; it stays in place, as captured graphs point to it."""
        rows, shape = self.all, (len(self.asked), self.vocab_size)
        if needs.repetition and rows.seen is None:
            rows.seen = torch.zeros(shape, dtype=torch.bool, device=self.device)
        if needs.counts and rows.counts is None:
            rows.counts = torch.zeros(shape, dtype=torch.int32, device=self.device)
        if needs.bias and rows.bias is None:
            rows.bias = torch.zeros(shape, dtype=torch.float32, device=self.device)
        if needs.least and rows.stops is None:
            rows.stops = torch.zeros(shape, dtype=torch.bool, device=self.device)


def drawn(
    x: Float[Tensor, "n V"], best: Float[Tensor, " n"], choice: Int64[Tensor, " n"], rows: Rows, needs: Needs
) -> Int64[Tensor, " n"]:
    """A token drawn for each row, or its best where the temperature is 0."""
    if x.is_cuda and has_triton():
        from cutaway.generate.fast.draws import draw_one_each

        return draw_one_each(x, best, choice, rows, needs)
    chosen = draw(weights(x, best, rows, needs), uniform(rows.whole[:, 0], rows.step))
    return torch.where(rows.sampled, chosen, choice)


@functools.cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def highest(x: Float[Tensor, "n V"], parts: int = 1) -> tuple[Float[Tensor, " n"], Int64[Tensor, " n"]]:
    """The largest of each row and its place, the first if there are several; by `parts`, so that they work at once."""
    if parts == 1:
        best, place = x.max(-1)
        return best, place
    each, inner = x.view(len(x), parts, -1).max(-1)
    best, part = each.max(-1)
    return best, part * (x.shape[-1] // parts) + inner.gather(-1, part.unsqueeze(-1)).squeeze(-1)


@functools.cache
def divisor(size: int) -> int:
    """The divisor of a vocabulary's size that is nearest to its root."""
    return max(part for part in range(1, math.isqrt(size) + 1) if size % part == 0)


def parts_of(x: Tensor) -> int:
    """A GPU gives a row to one of its processors, which for a wide row takes as long as a layer."""
    return divisor(x.shape[-1]) if x.is_cuda and len(x) < 64 else 1


def told(logits: Float[Tensor, "n V"], tokens: Int64[Tensor, " n"], needs: Needs) -> tuple[Tensor | None, ...]:
    """The chosen tokens' log-probabilities, and the most likely tokens with theirs, as far as any row asks."""
    if needs.logprobs is None:
        return None, None, None
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    if needs.logprobs == 0:
        return chosen, None, None
    top = logprobs.topk(min(needs.logprobs, logits.shape[-1]))
    return chosen, top.indices, top.values
