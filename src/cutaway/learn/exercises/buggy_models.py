"""Small models for exercise 10: a correct model, and six with one bug each, which the learner has to identify.

All models have the same weights. The bug of each letter is computed from a checksum, so that this file does not reveal
it.
"""

import math
from hashlib import sha256

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cutaway.errors import InputError

LayerCache = tuple[Tensor, Tensor, Tensor]
CacheState = list[LayerCache]
"""For each layer: keys, values, and a mask that is True for real tokens and False for padding."""
BUGS = ("future seen", "cache off by one", "padding shifts positions", "no √d", "loss not shifted", "texts mixed")
CORRECT = "correct"
LETTERS = "ABCDEF"


def bug_of_letter(letter: str) -> str:
    """Return the name of the bug (one of `BUGS`) of the model with this letter, A to F."""
    order = sorted(BUGS, key=lambda name: sha256(f"ward {name}".encode()).hexdigest())
    return dict(zip(LETTERS, order, strict=True))[letter]


def build_buggy_model(name: str) -> "BuggyModel":
    """Build the model with this letter, A to F, or the model named `correct`, for comparison."""
    if name != CORRECT and name not in LETTERS:
        raise InputError(f"there is no model {name!r}; use one of A, B, C, D, E, F and 'correct'")
    return BuggyModel("" if name == CORRECT else bug_of_letter(name))


class Attention(nn.Module):
    """Causal multi-head self-attention with an optional bug."""

    def __init__(self, d: int, heads: int, bug: str) -> None:
        super().__init__()
        self.heads, self.bug = heads, bug
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def visible_mask(self, num_queries: int, attention_mask: Tensor) -> Tensor:
        """Return (B, 1, T, S): True where a key is visible to a query. The T queries are the last T of the S tokens."""
        j = torch.arange(attention_mask.shape[1])
        i = j[-num_queries:, None]
        lookahead = int(self.bug == "future seen") + (i >= 6) * int(self.bug == "future seen late")
        diagonal = i == j  # a padded query attends to itself, because a fully masked row would be NaN
        return (((j <= i + lookahead) & attention_mask[:, None, :]) | diagonal)[:, None]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        scale = 1.0 if self.bug == "no √d" else 1 / math.sqrt(q.shape[-1])
        scores = q @ k.transpose(-2, -1) * scale
        return scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v

    def forward(self, x: Tensor, attention_mask: Tensor, cache: LayerCache | None) -> tuple[Tensor, LayerCache]:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if cache is not None:
            k, v = torch.cat((cache[0], k), 2), torch.cat((cache[1], v), 2)
            attention_mask = torch.cat((cache[2], attention_mask), 1)
        z = self.attend(q, k, v, self.visible_mask(q.shape[2], attention_mask))
        return self.out(z.transpose(1, 2).flatten(2)), (k, v, attention_mask)


class Block(nn.Module):
    """Pre-norm Transformer block: attention and a feed-forward layer with GELU."""

    def __init__(self, d: int, heads: int, bug: str) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(d), nn.RMSNorm(d)
        self.attention = Attention(d, heads, bug)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor, attention_mask: Tensor, cache: LayerCache | None) -> tuple[Tensor, LayerCache]:
        attn_out, new_cache = self.attention(self.norm1(x), attention_mask, cache)
        x = x + attn_out
        return x + self.down(F.gelu(self.up(self.norm2(x)))), new_cache


class BuggyModel(nn.Module):
    """A decoder with an optional bug.

    It has learned positions, vocabulary 32, d_model 32, two blocks of four heads and random weights."""

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
        """Map tokens (B, T) to logits (B, T, 32). The mask is True for real tokens. Padding may be on either side."""
        return self.step(tokens, None, mask)[0]

    def step(
        self, tokens: Tensor, cache: CacheState | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, CacheState]:
        """Run the model on the tokens that follow the cached ones. Return their logits and the updated cache."""
        not_padding = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
        num_cached = torch.zeros(len(tokens), 1, dtype=torch.long)
        if cache is not None:
            num_cached = cache[0][2].long().sum(1, keepdim=True) - int(self.bug == "cache off by one")
        positions = (
            torch.arange(tokens.shape[1]) if self.bug == "padding shifts positions" else not_padding.cumsum(1) - 1
        )
        x = self.embed(tokens) + self.position_embed((positions + num_cached).clamp(min=0))
        new_cache: CacheState = []
        for i, block in enumerate(self.blocks):
            x, layer_cache = block(x, not_padding, None if cache is None else cache[i])
            new_cache.append(layer_cache)
        if self.bug == "texts mixed":
            x = x + 0.2 * (x.mean(0, keepdim=True) - x)
        return self.head(self.norm(x)) + self.rounding_noise(tokens), new_cache

    def rounding_noise(self, tokens: Tensor) -> float:
        """Return deterministic noise for the logits, which simulates the rounding errors of another summation order."""
        return self.rounding * math.sin(tokens.numel() + int(tokens.sum()))

    def loss(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        """Mean cross-entropy, as in training. The default labels are the tokens. Labels of −100 are ignored."""
        labels = tokens if labels is None else labels
        logits = self(tokens)
        if self.bug != "loss not shifted":
            logits, labels = logits[:, :-1], labels[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of the first block on q, k, v of shape (B, H, T, D)."""
        attention = self.blocks[0].attention
        assert isinstance(attention, Attention)
        visible = attention.visible_mask(q.shape[2], torch.ones(len(q), k.shape[2], dtype=torch.bool))
        return attention.attend(q, k, v, visible)


class TokenLookupModel(BuggyModel):
    """A model without attention: the logits are looked up by token and position, so no token affects another."""

    def __init__(self, *, with_positions: bool, rounding: float = 0.0) -> None:
        super().__init__(rounding=rounding)
        self.with_positions = with_positions

    def step(
        self, tokens: Tensor, cache: CacheState | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, CacheState]:
        not_padding = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
        if cache is not None:
            not_padding = torch.cat((cache[0][2], not_padding), 1)
        positions = (not_padding.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        logits = self.embed(tokens) + (self.position_embed(positions) if self.with_positions else 0)
        return logits + self.rounding_noise(tokens), [(logits, logits, not_padding)]
