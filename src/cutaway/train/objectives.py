"""From a batch to what the model reads and what it must say; which vector tells which token is settled here alone."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cutaway.errors import InputError
from cutaway.generate.noise import uniform
from cutaway.model import EncoderOnly, Transformer
from cutaway.model.masks import places
from cutaway.train.loss import Asked, Loss, asked, asked_loss, sent
from cutaway.train.seeds import mixed
from cutaway.train.vocabulary import Vocabulary

MASKED, RANDOM = 0.8, 0.1
"""Of the hidden tokens, those that become the mask and those that become any token; the rest stay as they are."""
LONGEST, STOP = 10, 0.2
"""A span goes on with probability 1 − STOP, up to LONGEST tokens: 3.8 of them on average (SpanBERT, 2020)."""
CHOICE, FATE, OTHER, LENGTH = range(4)
"""Streams of random numbers: which tokens, what becomes of them, which other token, how long a span."""


@dataclass(frozen=True)
class Task:
    """What to pass to the model, and for each vector that comes back its target and how much that counts."""

    reads: tuple[Tensor | None, ...]
    targets: Int[Tensor, "B T"]
    weights: Float[Tensor, "B T"]
    beside: dict[str, Tensor] = field(default_factory=dict)
    asked: Asked | None = None
    """Targets that count, once they are where the model is."""

    def hidden(self, model: Transformer) -> Float[Tensor, "B T d"]:
        """The vectors that the model's head reads."""
        run: Any = model.encode if isinstance(model, EncoderOnly) else model.hidden
        return run(*self.reads, **self.beside)

    def loss(
        self,
        model: Transformer,
        *,
        smoothing: float = 0.0,
        z: float = 0.0,
        chunk: int = 1024,
        vocabulary: Vocabulary | None = None,
        room: dict[str, Tensor] | None = None,
    ) -> Loss:
        """What the model gets wrong, summed over targets."""
        head = model.head
        if not isinstance(head, torch.nn.Module):
            raise InputError("this model has no head, so it cannot say a token; give it one: head.kind = 'lm'")
        x = self.hidden(model).flatten(0, 1)
        ask = self.asked or asked(self.targets.flatten(), self.weights.flatten()).to(x.device)
        return asked_loss(head, x, ask, smoothing=smoothing, z=z, chunk=chunk, vocabulary=vocabulary, room=room)

    def to(self, device: torch.device | str) -> "Task":
        """The same on another device. Weights stay: they are counted here, and asking a device is waiting for it."""
        reads = tuple(None if each is None else sent(each, device) for each in self.reads)
        beside = {name: sent(each, device) for name, each in self.beside.items()}
        ask = asked(self.targets.flatten(), self.weights.flatten()).to(device)
        return Task(reads, sent(self.targets, device), self.weights, beside, ask)


def next_token(tokens: Int[Tensor, "B T1"], documents: Int[Tensor, "B T1"] | None = None) -> Task:
    """The vector at t tells token t + 1, unless that begins another document."""
    _check_pairs("tokens", tokens)
    weights = torch.ones_like(tokens[:, 1:], dtype=torch.float32)
    if documents is None:
        return Task((tokens[:, :-1],), tokens[:, 1:], weights)
    weights = weights * (documents[:, 1:] == documents[:, :-1])
    return Task((tokens[:, :-1],), tokens[:, 1:], weights, _packed(documents[:, :-1]))


def prefix(
    tokens: Int[Tensor, "B T1"],
    documents: Int[Tensor, "B T1"] | None,
    lengths: Int[Tensor, " B"],
    *,
    mask: Bool[Tensor, "B T1"] | None = None,
    both_ways: bool = True,
) -> Task:
    """As next_token, but the first `lengths[b]` tokens of each document in row b are no targets.

    They see each other, unless not `both_ways`. Padding, where `mask` is False, stands on the right, where nothing
    that counts sees it.
    """
    task = next_token(tokens, documents)
    if lengths.shape != tokens.shape[:1]:
        raise InputError(f"lengths has shape {tuple(lengths.shape)}; give one length for each of {len(tokens)} rows")
    position = places(len(tokens), tokens.shape[-1], tokens.device, documents=documents).position
    told = position[:, 1:] >= lengths.unsqueeze(-1)
    if mask is not None:
        told = told & mask[:, 1:]
    beside = task.beside | ({"prefix": lengths} if both_ways else {})
    return Task(task.reads, task.targets, task.weights * told, beside)


def seq2seq(
    source: Int[Tensor, "B S"],
    source_mask: Bool[Tensor, "B S"] | None,
    target: Int[Tensor, "B T1"],
    target_mask: Bool[Tensor, "B T1"] | None,
) -> Task:
    """The decoder is given the true target so far; its first real token, which starts it, is no target itself."""
    _check_pairs("target", target)
    weights, reading = torch.ones_like(target[:, 1:], dtype=torch.float32), None
    if target_mask is not None:
        weights = weights * (target_mask[:, 1:] & target_mask[:, :-1])  # padding may stand on either side
        reading = _unless_all(target_mask[:, :-1])
    source_mask = None if source_mask is None else _unless_all(source_mask)
    return Task((source, target[:, :-1], source_mask, reading), target[:, 1:], weights)


def masked(
    tokens: Int[Tensor, "B T"],
    documents: Int[Tensor, "B T"] | None = None,
    *,
    mask_id: int,
    vocab_size: int,
    special: Collection[int] = (),
    rate: float = 0.15,
    seed: int,
    positions: Sequence[int] | Int[Tensor, " B"],
    spans: bool = False,
    mask: Bool[Tensor, "B T"] | None = None,
) -> Task:
    """Some tokens are hidden, and each one's own vector tells what it was (BERT, 2018).

    Each real token that is not special is hidden with probability `rate`, alone or in spans: 80 % become the mask,
    10 % any token of the vocabulary, 10 % stay. Row b is a function of (seed, positions[b]) alone.
    """
    if not 0 < rate < 1:
        raise InputError(f"rate is {rate}; it is the share of hidden tokens, so give more than 0 and less than 1")
    if len(positions) != len(tokens):
        raise InputError(f"there are {len(positions)} positions for {len(tokens)} rows; give each row's own")
    noise = _Noise(seed, [int(each) for each in positions], tokens)
    hidden, fate = noise.spans(rate) if spans else (noise.draw(CHOICE) < rate, noise.draw(FATE))
    never = torch.tensor(sorted(special), dtype=tokens.dtype, device=tokens.device)
    hidden = hidden & ~torch.isin(tokens, never)
    if mask is not None:
        hidden = hidden & mask
    other = (noise.draw(OTHER) * vocab_size).to(tokens.dtype)
    shown = torch.where(hidden & (fate < MASKED), mask_id, tokens)
    shown = torch.where(hidden & (fate >= MASKED) & (fate < MASKED + RANDOM), other, shown)
    beside = {} if documents is None else _packed(documents)
    if mask is not None and (some := _unless_all(mask)) is not None:
        beside["mask"] = some
    return Task((shown,), tokens, hidden.float(), beside)


class _Noise:
    """Random numbers from 0 to 1 for each token of each row, a function of (seed, the row's position, the column)."""

    def __init__(self, seed: int, positions: list[int], tokens: Int[Tensor, "B T"]) -> None:
        rows = [mixed(seed, position) for position in positions]
        self.rows = torch.tensor(rows, dtype=torch.int64, device=tokens.device).unsqueeze(-1)
        self.length = tokens.shape[-1]

    def draw(self, stream: int, before: int = 0) -> Float[Tensor, "B T"]:
        """One for each column, and for `before` columns to the left of the first."""
        columns = torch.arange(-before, self.length, device=self.rows.device).expand(len(self.rows), -1)
        return uniform(self.rows.expand_as(columns), columns, stream)

    def spans(self, rate: float) -> tuple[Bool[Tensor, "B T"], Float[Tensor, "B T"]]:
        """Which tokens lie in a span, and the fate that all of a span share: that of the nearest beginning.

        Spans may begin left of the row, so that its first tokens are hidden as often as all others.
        """
        before = LONGEST - 1
        begins = self.draw(CHOICE, before) < begin_rate(rate)
        going = self.draw(LENGTH, before)
        fates = self.draw(FATE, before)
        hidden = torch.zeros_like(begins[:, before:])
        fate = torch.ones_like(fates[:, before:])
        for back in reversed(range(LONGEST)):
            from_there = slice(before - back, before - back + self.length)
            reaches = begins[:, from_there] & (going[:, from_there] < (1 - STOP) ** back)
            hidden, fate = hidden | reaches, torch.where(reaches, fates[:, from_there], fate)
        return hidden, fate


@lru_cache(maxsize=16)
def begin_rate(rate: float) -> float:
    """How often spans must begin for `rate` of all tokens to lie in one: Π over k of (1 − q·(1 − STOP)^k) = 1 − rate.

    k is how far back a beginning is, and (1 − STOP)^k how many spans come so far.
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        middle, missed = (low + high) / 2, 1.0
        for back in range(LONGEST):
            missed *= 1 - middle * (1 - STOP) ** back
        low, high = (middle, high) if 1 - missed < rate else (low, middle)
    return high


def _packed(documents: Int[Tensor, "B T"]) -> dict[str, Tensor]:
    """Nothing where every row is one document: attention is then plain, and faster."""
    return {"documents": documents} if bool((documents != documents[:, :1]).any()) else {}


def _unless_all(mask: Bool[Tensor, "B T"]) -> Bool[Tensor, "B T"] | None:
    """A mask that hides nothing is none, and attention is faster without."""
    return None if bool(mask.all()) else mask


def _check_pairs(name: str, tokens: Tensor) -> None:
    if tokens.ndim != 2 or tokens.shape[-1] < 2:
        raise InputError(
            f"{name} has shape {tuple(tokens.shape)}; give rows of 2 tokens or more, one to read, one to say"
        )
