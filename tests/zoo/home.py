"""A home-made GPT, right in every way, of small methods that a bug replaces; and what it offers to `ct.check`."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

State = list[tuple[Tensor, Tensor, Tensor]]
"""Of each layer: keys, values, and the positions they stand at (-1 for padding)."""


class Attention(nn.Module):
    """Grouped heads, RoPE, an optional window; the mask follows from positions."""

    def __init__(self, d: int, heads: int, groups: int, window: int | None, dropout: float) -> None:
        super().__init__()
        self.heads, self.groups, self.width, self.window, self.dropout = heads, groups, d // heads, window, dropout
        self.q = nn.Linear(d, d, bias=False)
        self.k = nn.Linear(d, groups * self.width, bias=False)
        self.v = nn.Linear(d, groups * self.width, bias=False)
        self.o = nn.Linear(d, d, bias=False)

    def visible(self, query: Tensor, key: Tensor) -> Tensor:
        """Who sees whom, from positions (B, T) and (B, S): real, not later, within the window."""
        i, j = query[:, :, None], key[:, None, :]
        seen = (j >= 0) & (j <= i)
        return seen if self.window is None else seen & (i - j < self.window)

    def expand(self, x: Tensor) -> Tensor:
        """Keys or values (B, G, T, D) for each head."""
        return x.repeat_interleave(self.heads // self.groups, 1)

    def frequencies(self, device: torch.device) -> Tensor:
        return 10_000.0 ** (-torch.arange(0, self.width, 2, device=device, dtype=torch.float32) / self.width)

    def turn(self, x: Tensor, positions: Tensor) -> Tensor:
        """RoPE: the halves of each head are turned by position × frequency."""
        angle = positions[:, None, :, None].float() * self.frequencies(x.device)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def scale(self) -> float:
        return 1 / math.sqrt(self.width)

    def pattern(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        """softmax(q·kᵀ·scale)·v over what is seen; queries that see nothing read zeros."""
        scores = (q @ k.transpose(-1, -2)) * self.scale()
        blind = ~seen.any(-1, keepdim=True)
        pattern = self.pattern(scores.masked_fill(~(seen | blind)[:, None], -torch.inf))
        pattern = F.dropout(pattern, self.dropout, self.training)
        return (pattern @ v).masked_fill(blind[:, None], 0.0)

    def remember(self, k: Tensor, v: Tensor, positions: Tensor, state: Any) -> tuple[Tensor, Tensor, Tensor]:
        """What was stored, and the new."""
        if state is None:
            return k, v, positions
        return torch.cat((state[0], k), 2), torch.cat((state[1], v), 2), torch.cat((state[2], positions), 1)

    def forward(self, x: Tensor, positions: Tensor, documents: Tensor | None, state: Any) -> tuple[Tensor, Any]:
        def split(y: Tensor, heads: int) -> Tensor:
            return y.unflatten(-1, (heads, self.width)).transpose(1, 2)

        place = positions.clamp(min=0)
        q = self.turn(split(self.q(x), self.heads), place)
        k = self.turn(split(self.k(x), self.groups), place)
        k, v, held = self.remember(k, split(self.v(x), self.groups), positions, state)
        seen = self.visible(positions, held)
        if documents is not None:
            seen = seen & (documents[:, :, None] == documents[:, None, :])
        out = self.attend(q, self.expand(k), self.expand(v), seen)
        return self.o(out.transpose(1, 2).flatten(2)), (k, v, held)


class Block(nn.Module):
    def __init__(self, d: int, **how: Any) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(d), nn.RMSNorm(d)
        self.attention = Attention(d, **how)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        self.drop = nn.Dropout(how["dropout"])

    def forward(self, x: Tensor, positions: Tensor, documents: Tensor | None, state: Any) -> tuple[Tensor, Any]:
        added, state = self.attention(self.norm1(x), positions, documents, state)
        x = x + self.drop(added)
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x))))), state


class Home(nn.Module):
    """The whole model: tokens → logits."""

    def __init__(
        self,
        vocab: int = 61,
        d: int = 32,
        layers: int = 2,
        heads: int = 4,
        groups: int = 2,
        window: int | None = None,
        dropout: float = 0.0,
        tied: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.vocab, self.window = vocab, window
        self.embed = nn.Embedding(vocab, d)
        how = {"heads": heads, "groups": groups, "window": window, "dropout": dropout}
        self.blocks = nn.ModuleList(Block(d, **how) for _ in range(layers))
        self.norm = nn.RMSNorm(d)
        self.head = nn.Linear(d, vocab, bias=False)
        for part in self.modules():
            if isinstance(part, nn.Linear | nn.Embedding):
                nn.init.normal_(part.weight, std=1 / math.sqrt(part.weight.shape[-1]))
        if tied:
            self.head.weight = self.embed.weight
        self.eval()

    def number(self, tokens: Tensor, mask: Tensor | None, before: Tensor | None) -> Tensor:
        """Real tokens are numbered from 0, padding is -1; behind a state the numbers go on."""
        mask = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
        begun = 0 if before is None else (before.max(1, keepdim=True).values + 1)
        return torch.where(mask, mask.long().cumsum(-1) - 1 + begun, -1)

    def forward(
        self,
        tokens: Tensor,
        mask: Tensor | None = None,
        *,
        places: Tensor | None = None,
        documents: Tensor | None = None,
        state: State | None = None,
    ) -> tuple[Tensor, State]:
        positions = self.number(tokens, mask, None if state is None else state[0][2]) if places is None else places
        x, kept = self.embed(tokens), []
        for n, block in enumerate(self.blocks):
            x, layer = block(x, positions, documents, None if state is None else state[n])
            kept.append(layer)
        return self.head(self.norm(x)), kept

    # what is built on it
    def loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The mean of −log p of each next token that is asked for."""
        logits = self(tokens)[0][:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)

    def accumulated(self, pieces: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Sums of pieces over the count of all."""
        counts = [int((labels[:, 1:] != -100).sum()) for _, labels in pieces]
        return sum(self.loss(*piece) * n for piece, n in zip(pieces, counts, strict=True)) / sum(counts)  # type: ignore[return-value]

    def write(self, tokens: Tensor, n: int, mask: Tensor | None = None) -> Tensor:
        """n tokens more, each the likeliest, through the cache."""
        logits, state = self(tokens, mask)
        chosen = [logits[:, -1:].argmax(-1)]
        for _ in range(n - 1):
            logits, state = self(chosen[-1], state=state)
            chosen.append(logits[:, -1:].argmax(-1))
        return torch.cat(chosen, 1)

    def reorder(self, state: State, parents: Tensor) -> State:
        """The rows of the new beams."""
        return [(k[parents], v[parents], held[parents]) for k, v, held in state]

    def search(self, tokens: Tensor, n: int, width: int) -> tuple[Tensor, Tensor]:
        """The likeliest continuations and their log-probabilities: a beam search through the cache."""
        logits, state = self(tokens)
        sums, found = torch.zeros(1), tokens[:, :0]
        for _ in range(n):
            total = sums[:, None] + logits[:, -1].log_softmax(-1)
            sums, place = total.flatten().topk(width)
            parents, token = place // self.vocab, place[:, None] % self.vocab
            found = torch.cat((found[parents], token), 1)
            state = self.reorder(state, parents)
            logits, state = self(token, state=state)
        return found, sums

    def guess(self, text: list[int], n: int) -> list[int]:
        """What followed the last time that the last token was there."""
        seen = [at for at in range(len(text) - 1) if text[at] == text[-1]]
        return text[seen[-1] + 1 :][:n] if seen else []

    def accepted(self, guess: list[int], own: list[int]) -> int:
        """How many guesses are what the model says itself."""
        return next((n for n, (a, b) in enumerate(zip(guess, own, strict=False)) if a != b), len(guess))

    def speculate(self, tokens: Tensor, n: int) -> Tensor:
        """n tokens more, several guessed ones read at a time."""
        rows = []
        for text in tokens.tolist():
            begun = len(text)
            while len(text) < begun + n:
                guess = self.guess(text, 3)
                logits = self(torch.tensor([text + guess]))[0][0, len(text) - 1 :]
                own = logits.argmax(-1).tolist()
                kept = self.accepted(guess, own)
                text = [*text, *guess[:kept], own[kept]]
            rows.append(text[begun : begun + n])
        return torch.tensor(rows)

    def poisoned(self, tokens: Tensor, value: float) -> Tensor:
        """Logits behind slots that hold no token."""
        spare = []
        for block in self.blocks:
            x = torch.full((len(tokens), block.attention.groups, 5, block.attention.width), value)
            spare.append((x, x, torch.full((len(tokens), 5), -1)))
        return self(tokens, state=spare)[0]


def sample(
    logits: Tensor, n: int, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """n draws."""
    p, tokens = (logits / temperature).softmax(-1).sort(descending=True)
    if top_k is not None:
        p = torch.where(torch.arange(len(p)) < top_k, p, 0.0)
    if top_p is not None:
        p = torch.where(p.cumsum(0) - p < top_p, p, 0.0)
    return tokens[torch.multinomial(p, n, replacement=True)]


def places_of(documents: Tensor) -> Tensor:
    """Positions that begin anew with each document."""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    new = torch.ones_like(documents, dtype=torch.bool)
    new[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return index - torch.where(new, index, 0).cummax(1).values


def offers(model: Home) -> dict[str, Any]:
    """All that a home-made GPT can be asked, as keyword arguments of `ct.check`."""
    return {
        "logits": lambda tokens: model(tokens)[0],
        "padded": lambda tokens, mask: model(tokens, mask)[0],
        "placed": lambda tokens, positions: model(tokens, places=positions)[0],
        "packed": lambda tokens, documents: model(tokens, places=places_of(documents), documents=documents)[0],
        "cached": lambda tokens, state: model(tokens, state=state),
        "generate": model.write,
        "generate_padded": lambda tokens, mask, n: model.write(tokens, n, mask),
        "beams": model.search,
        "sample": sample,
        "speculate": model.speculate,
        "poisoned": model.poisoned,
        "loss": model.loss,
        "accumulated": model.accumulated,
        "window": model.window,
        "layers": len(model.blocks),
        "relative": True,
        "tied": model.head.weight is model.embed.weight,
    }
