"""Seven small models for exercise 10: a correct one, and six with a bug each. The learner finds out which is which.

All have the same weights. What is wrong with a letter follows from a checksum, so that this file does not tell it.
"""

import math
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cutaway.errors import InputError

CacheState = list[tuple[Tensor, Tensor, Tensor]]
"""Of each layer: keys, values, and which of them are real."""
BUGS = ("future seen", "cache off by one", "padding shifts positions", "no √d", "loss not shifted", "texts mixed")
CORRECT = "correct"
LETTERS = "ABCDEF"


def bug_of_letter(letter: str) -> str:
    """The bug that the model with this letter has."""
    order = sorted(BUGS, key=lambda name: sha256(f"ward {name}".encode()).hexdigest())
    return dict(zip(LETTERS, order, strict=True))[letter]


def build_buggy_model(name: str) -> "BuggyModel":
    """The model with this letter, A to F, or the `correct` one to compare with."""
    if name != CORRECT and name not in LETTERS:
        raise InputError(f"there is no model {name!r}; there are A, B, C, D, E, F and 'correct'")
    return BuggyModel("" if name == CORRECT else bug_of_letter(name))


class Attention(nn.Module):
    def __init__(self, d: int, heads: int, bug: str) -> None:
        super().__init__()
        self.heads, self.bug = heads, bug
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def visible_mask(self, num_queries: int, attention_mask: Tensor) -> Tensor:
        """(B, 1, T, S): who sees whom. The queries are the last of the keys."""
        j = torch.arange(attention_mask.shape[1])
        i = j[-num_queries:, None]
        ahead = int(self.bug == "future seen") + (i >= 6) * int(self.bug == "future seen late")
        itself = i == j  # a padded query sees something, or its row would be NaN
        return (((j <= i + ahead) & attention_mask[:, None, :]) | itself)[:, None]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        scale = 1.0 if self.bug == "no √d" else 1 / math.sqrt(q.shape[-1])
        scores = q @ k.transpose(-2, -1) * scale
        return scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v

    def forward(self, x: Tensor, attention_mask: Tensor, cache: Any) -> tuple[Tensor, Any]:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if cache is not None:
            k, v = torch.cat((cache[0], k), 2), torch.cat((cache[1], v), 2)
            attention_mask = torch.cat((cache[2], attention_mask), 1)
        z = self.attend(q, k, v, self.visible_mask(q.shape[2], attention_mask))
        return self.out(z.transpose(1, 2).flatten(2)), (k, v, attention_mask)


class Block(nn.Module):
    def __init__(self, d: int, heads: int, bug: str) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(d), nn.RMSNorm(d)
        self.attention = Attention(d, heads, bug)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor, attention_mask: Tensor, cache: Any) -> tuple[Tensor, Any]:
        added, cache = self.attention(self.norm1(x), attention_mask, cache)
        x = x + added
        return x + self.down(F.gelu(self.up(self.norm2(x)))), cache


class BuggyModel(nn.Module):
    """A decoder with learned positions: 32 tokens, width 32, two blocks of four heads, random weights."""

    vocab_size, max_len = 32, 96

    def __init__(self, bug: str = "", *, rounding: float = 0.0) -> None:
        super().__init__()
        self.bug, self.rounding = bug, rounding
        d = 32
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(10)
            self.embed, self.position_embed = nn.Embedding(self.vocab_size, d), nn.Embedding(self.max_len, d)
            self.blocks = nn.ModuleList(Block(d, 4, bug) for _ in range(2))
            self.norm, self.head = nn.RMSNorm(d), nn.Linear(d, self.vocab_size, bias=False)
        self.eval()

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Tokens (B, T) → logits (B, T, 32). A mask is True for real tokens; padding may stand on either side."""
        return self.step(tokens, None, mask)[0]

    def step(
        self, tokens: Tensor, cache: CacheState | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, CacheState]:
        """The same behind a cache: the logits of these tokens, and the cache with them in it."""
        real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
        past = torch.zeros(len(tokens), 1, dtype=torch.long)
        if cache is not None:
            past = cache[0][2].long().sum(1, keepdim=True) - int(self.bug == "cache off by one")
        places = torch.arange(tokens.shape[1]) if self.bug == "padding shifts positions" else real.cumsum(1) - 1
        x = self.embed(tokens) + self.position_embed((places + past).clamp(min=0))
        kept: CacheState = []
        for n, block in enumerate(self.blocks):
            x, layer = block(x, real, None if cache is None else cache[n])
            kept.append(layer)
        if self.bug == "texts mixed":
            x = x + 0.2 * (x.mean(0, keepdim=True) - x)
        return self.head(self.norm(x)) + self.rounding_noise(tokens), kept

    def rounding_noise(self, tokens: Tensor) -> float:
        """What another order of the same sums may make of the last digits."""
        return self.rounding * math.sin(tokens.numel() + int(tokens.sum()))

    def loss(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        """The mean of −log p, as in training. Labels are the tokens themselves; −100 is not asked."""
        labels = tokens if labels is None else labels
        logits = self(tokens)
        if self.bug != "loss not shifted":
            logits, labels = logits[:, :-1], labels[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Its attention by itself: q, k, v of shape (B, H, T, D), causal."""
        first = self.blocks[0].attention
        assert isinstance(first, Attention)
        seen = first.visible_mask(q.shape[2], torch.ones(len(q), k.shape[2], dtype=torch.bool))
        return first.attend(q, k, v, seen)


class TokenLookupModel(BuggyModel):
    """A table of token and place, without attention: nothing that is done to one token shows in another."""

    def __init__(self, *, with_positions: bool, rounding: float = 0.0) -> None:
        super().__init__(rounding=rounding)
        self.with_positions = with_positions

    def step(
        self, tokens: Tensor, cache: CacheState | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, CacheState]:
        real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
        if cache is not None:
            real = torch.cat((cache[0][2], real), 1)
        places = (real.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        logits = self.embed(tokens) + (self.position_embed(places) if self.with_positions else 0)
        return logits + self.rounding_noise(tokens), [(logits, logits, real)]


def check_arguments(model: BuggyModel) -> dict[str, Any]:
    """What a model can be asked, as keyword arguments of `ct.check`."""
    return {
        "logits": model.forward,
        "logits_with_mask": model.forward,
        "logits_with_cache": model.step,
        "loss": model.loss,
        "attention": model.attention,
        "vocab_size": model.vocab_size,
        "max_seq_len": model.max_len,
    }
