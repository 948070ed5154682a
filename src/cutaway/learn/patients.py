"""Seven small models for exercise 10: a healthy one, and six that are ill. The learner finds out which is which.

All have the same weights. What is wrong with a letter follows from a checksum, so that this file does not tell it.
"""

import math
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cutaway.errors import InputError

State = list[tuple[Tensor, Tensor, Tensor]]
"""Of each layer: keys, values, and which of them are real."""
ILLNESSES = ("future seen", "cache off by one", "padding shifts positions", "no √d", "loss not shifted", "texts mixed")
HEALTHY = "healthy"
LETTERS = "ABCDEF"


def illness_of(letter: str) -> str:
    """What this patient has."""
    order = sorted(ILLNESSES, key=lambda name: sha256(f"ward {name}".encode()).hexdigest())
    return dict(zip(LETTERS, order, strict=True))[letter]


def patient(name: str) -> "Patient":
    """The model with this letter, A to F, or the `healthy` one to compare with."""
    if name != HEALTHY and name not in LETTERS:
        raise InputError(f"there is no patient {name!r}; there are A, B, C, D, E, F and 'healthy'")
    return Patient("" if name == HEALTHY else illness_of(name))


class Attention(nn.Module):
    def __init__(self, d: int, heads: int, illness: str) -> None:
        super().__init__()
        self.heads, self.illness = heads, illness
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def seen(self, queries: int, real: Tensor) -> Tensor:
        """(B, 1, T, S): who sees whom. The queries are the last of the keys."""
        j = torch.arange(real.shape[1])
        i = j[-queries:, None]
        ahead = int(self.illness == "future seen") + (i >= 6) * int(self.illness == "future seen late")
        itself = i == j  # a padded query sees something, or its row would be NaN
        return (((j <= i + ahead) & real[:, None, :]) | itself)[:, None]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        scale = 1.0 if self.illness == "no √d" else 1 / math.sqrt(q.shape[-1])
        scores = q @ k.transpose(-2, -1) * scale
        return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v

    def forward(self, x: Tensor, real: Tensor, state: Any) -> tuple[Tensor, Any]:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if state is not None:
            k, v = torch.cat((state[0], k), 2), torch.cat((state[1], v), 2)
            real = torch.cat((state[2], real), 1)
        z = self.attend(q, k, v, self.seen(q.shape[2], real))
        return self.out(z.transpose(1, 2).flatten(2)), (k, v, real)


class Block(nn.Module):
    def __init__(self, d: int, heads: int, illness: str) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(d), nn.RMSNorm(d)
        self.attention = Attention(d, heads, illness)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor, real: Tensor, state: Any) -> tuple[Tensor, Any]:
        added, state = self.attention(self.norm1(x), real, state)
        x = x + added
        return x + self.down(F.gelu(self.up(self.norm2(x)))), state


class Patient(nn.Module):
    """A decoder with learned positions: 32 tokens, width 32, two blocks of four heads, random weights."""

    vocab, longest = 32, 96

    def __init__(self, illness: str = "", *, rounding: float = 0.0) -> None:
        super().__init__()
        self.illness, self.rounding = illness, rounding
        d = 32
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(10)
            self.embed, self.places = nn.Embedding(self.vocab, d), nn.Embedding(self.longest, d)
            self.blocks = nn.ModuleList(Block(d, 4, illness) for _ in range(2))
            self.norm, self.head = nn.RMSNorm(d), nn.Linear(d, self.vocab, bias=False)
        self.eval()

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Tokens (B, T) → logits (B, T, 32). A mask is True for real tokens; padding may stand on either side."""
        return self.step(tokens, None, mask)[0]

    def step(self, tokens: Tensor, state: State | None = None, mask: Tensor | None = None) -> tuple[Tensor, State]:
        """The same behind a cache: the logits of these tokens, and the cache with them in it."""
        real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
        past = torch.zeros(len(tokens), 1, dtype=torch.long)
        if state is not None:
            past = state[0][2].long().sum(1, keepdim=True) - int(self.illness == "cache off by one")
        places = torch.arange(tokens.shape[1]) if self.illness == "padding shifts positions" else real.cumsum(1) - 1
        x = self.embed(tokens) + self.places((places + past).clamp(min=0))
        kept: State = []
        for n, block in enumerate(self.blocks):
            x, layer = block(x, real, None if state is None else state[n])
            kept.append(layer)
        if self.illness == "texts mixed":
            x = x + 0.2 * (x.mean(0, keepdim=True) - x)
        return self.head(self.norm(x)) + self.last_digits(tokens), kept

    def last_digits(self, tokens: Tensor) -> float:
        """What another order of the same sums may make of the last digits."""
        return self.rounding * math.sin(tokens.numel() + int(tokens.sum()))

    def loss(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        """The mean of −log p, as in training. Labels are the tokens themselves; −100 is not asked."""
        labels = tokens if labels is None else labels
        logits = self(tokens)
        if self.illness != "loss not shifted":
            logits, labels = logits[:, :-1], labels[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Its attention by itself: q, k, v of shape (B, H, T, D), causal."""
        first = self.blocks[0].attention
        assert isinstance(first, Attention)
        seen = first.seen(q.shape[2], torch.ones(len(q), k.shape[2], dtype=torch.bool))
        return first.attend(q, k, v, seen)


class Lookup(Patient):
    """A table of token and place, without attention: nothing that is done to one token shows in another."""

    def __init__(self, *, placed: bool, rounding: float = 0.0) -> None:
        super().__init__(rounding=rounding)
        self.placed = placed

    def step(self, tokens: Tensor, state: State | None = None, mask: Tensor | None = None) -> tuple[Tensor, State]:
        real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
        if state is not None:
            real = torch.cat((state[0][2], real), 1)
        places = (real.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        logits = self.embed(tokens) + (self.places(places) if self.placed else 0)
        return logits + self.last_digits(tokens), [(logits, logits, real)]


def offers(model: Patient) -> dict[str, Any]:
    """What a patient can be asked, as keyword arguments of `ct.check`."""
    return {
        "logits": model.forward,
        "padded": model.forward,
        "cached": model.step,
        "loss": model.loss,
        "attention": model.attention,
        "vocab": model.vocab,
        "longest": model.longest,
    }
