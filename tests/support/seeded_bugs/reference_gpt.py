"""A home-made GPT, right in every way, of small methods that a bug replaces; and what it offers to `ct.check`."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

KVCache = list[tuple[Tensor, Tensor, Tensor]]
"""Of each layer: keys, values, and the positions they stand at (-1 for padding)."""


class Attention(nn.Module):
    """Grouped heads, RoPE, an optional window; the mask follows from positions."""

    def __init__(self, d_model: int, heads: int, kv_heads: int, window: int | None, dropout: float) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.window, self.dropout = (
            heads,
            kv_heads,
            d_model // heads,
            window,
            dropout,
        )
        self.q = nn.Linear(d_model, d_model, bias=False)
        self.k = nn.Linear(d_model, kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(d_model, kv_heads * self.head_dim, bias=False)
        self.o = nn.Linear(d_model, d_model, bias=False)

    def visible(self, query: Tensor, key: Tensor) -> Tensor:
        """Who sees whom, from positions (B, T) and (B, S): real, not later, within the window."""
        i, j = query[:, :, None], key[:, None, :]
        seen = (j >= 0) & (j <= i)
        return seen if self.window is None else seen & (i - j < self.window)

    def repeat_kv(self, x: Tensor) -> Tensor:
        """Keys or values (B, G, T, D) for each head."""
        return x.repeat_interleave(self.heads // self.kv_heads, 1)

    def frequencies(self, device: torch.device) -> Tensor:
        return 10_000.0 ** (-torch.arange(0, self.head_dim, 2, device=device, dtype=torch.float32) / self.head_dim)

    def apply_rope(self, x: Tensor, positions: Tensor) -> Tensor:
        """RoPE: the halves of each head are turned by position × frequency."""
        angle = positions[:, None, :, None].float() * self.frequencies(x.device)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def scale(self) -> float:
        return 1 / math.sqrt(self.head_dim)

    def pattern(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """softmax(q·kᵀ·scale)·v over what is seen; queries that see nothing read zeros."""
        scores = (q @ k.transpose(-1, -2)) * self.scale()
        blind = ~mask.any(-1, keepdim=True)
        pattern = self.pattern(scores.masked_fill(~(mask | blind)[:, None], -torch.inf))
        pattern = F.dropout(pattern, self.dropout, self.training)
        return (pattern @ v).masked_fill(blind[:, None], 0.0)

    def update_cache(self, k: Tensor, v: Tensor, positions: Tensor, cache: Any) -> tuple[Tensor, Tensor, Tensor]:
        """What was stored, and the new."""
        if cache is None:
            return k, v, positions
        return torch.cat((cache[0], k), 2), torch.cat((cache[1], v), 2), torch.cat((cache[2], positions), 1)

    def forward(self, x: Tensor, positions: Tensor, documents: Tensor | None, cache: Any) -> tuple[Tensor, Any]:
        def split(y: Tensor, heads: int) -> Tensor:
            return y.unflatten(-1, (heads, self.head_dim)).transpose(1, 2)

        place = positions.clamp(min=0)
        q = self.apply_rope(split(self.q(x), self.heads), place)
        k = self.apply_rope(split(self.k(x), self.kv_heads), place)
        k, v, held = self.update_cache(k, split(self.v(x), self.kv_heads), positions, cache)
        seen = self.visible(positions, held)
        if documents is not None:
            seen = seen & (documents[:, :, None] == documents[:, None, :])
        out = self.attend(q, self.repeat_kv(k), self.repeat_kv(v), seen)
        return self.o(out.transpose(1, 2).flatten(2)), (k, v, held)


class Block(nn.Module):
    def __init__(self, d_model: int, **attention_kwargs: Any) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(d_model), nn.RMSNorm(d_model)
        self.attention = Attention(d_model, **attention_kwargs)
        self.up, self.down = nn.Linear(d_model, 4 * d_model), nn.Linear(4 * d_model, d_model)
        self.dropout = nn.Dropout(attention_kwargs["dropout"])

    def forward(self, x: Tensor, positions: Tensor, documents: Tensor | None, cache: Any) -> tuple[Tensor, Any]:
        added, cache = self.attention(self.norm1(x), positions, documents, cache)
        x = x + self.dropout(added)
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x))))), cache


class ReferenceGPT(nn.Module):
    """The whole model: tokens → logits."""

    def __init__(
        self,
        vocab_size: int = 61,
        d_model: int = 32,
        num_layers: int = 2,
        heads: int = 4,
        kv_heads: int = 2,
        window: int | None = None,
        dropout: float = 0.0,
        tied: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.vocab_size, self.window = vocab_size, window
        self.embed = nn.Embedding(vocab_size, d_model)
        self.blocks = nn.ModuleList(
            Block(d_model, heads=heads, kv_heads=kv_heads, window=window, dropout=dropout) for _ in range(num_layers)
        )
        self.norm = nn.RMSNorm(d_model)
        self.head = nn.Linear(d_model, vocab_size, bias=False)
        for part in self.modules():
            if isinstance(part, nn.Linear | nn.Embedding):
                nn.init.normal_(part.weight, std=1 / math.sqrt(part.weight.shape[-1]))
        if tied:
            self.head.weight = self.embed.weight
        self.eval()

    def number_tokens(self, tokens: Tensor, mask: Tensor | None, cached_positions: Tensor | None) -> Tensor:
        """Real tokens are numbered from 0, padding is -1; behind a cache the numbers go on."""
        mask = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
        begun = 0 if cached_positions is None else (cached_positions.max(1, keepdim=True).values + 1)
        return torch.where(mask, mask.long().cumsum(-1) - 1 + begun, -1)

    def forward(
        self,
        tokens: Tensor,
        mask: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        documents: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> tuple[Tensor, KVCache]:
        positions = (
            self.number_tokens(tokens, mask, None if cache is None else cache[0][2])
            if position_ids is None
            else position_ids
        )
        x, kept = self.embed(tokens), []
        for n, block in enumerate(self.blocks):
            x, layer = block(x, positions, documents, None if cache is None else cache[n])
            kept.append(layer)
        return self.head(self.norm(x)), kept

    # what is built on it
    def loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The mean of −log p of each next token that is asked for."""
        logits = self(tokens)[0][:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)

    def accumulated_loss(self, micro_batches: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Sums of pieces over the count of all."""
        counts = [int((labels[:, 1:] != -100).sum()) for _, labels in micro_batches]
        return sum(self.loss(*piece) * n for piece, n in zip(micro_batches, counts, strict=True)) / sum(counts)  # type: ignore[return-value]

    def generate(self, tokens: Tensor, num_tokens: int, mask: Tensor | None = None) -> Tensor:
        """n tokens more, each the likeliest, through the cache."""
        logits, state = self(tokens, mask)
        chosen = [logits[:, -1:].argmax(-1)]
        for _ in range(num_tokens - 1):
            logits, state = self(chosen[-1], cache=state)
            chosen.append(logits[:, -1:].argmax(-1))
        return torch.cat(chosen, 1)

    def reorder_cache(self, cache: KVCache, parents: Tensor) -> KVCache:
        """The rows of the new beams."""
        return [(k[parents], v[parents], held[parents]) for k, v, held in cache]

    def beam_search(self, tokens: Tensor, num_tokens: int, num_beams: int) -> tuple[Tensor, Tensor]:
        """The likeliest continuations and their log-probabilities: a beam search through the cache."""
        logits, state = self(tokens)
        sums, found = torch.zeros(1), tokens[:, :0]
        for _ in range(num_tokens):
            total = sums[:, None] + logits[:, -1].log_softmax(-1)
            sums, place = total.flatten().topk(num_beams)
            parents, token = place // self.vocab_size, place[:, None] % self.vocab_size
            found = torch.cat((found[parents], token), 1)
            state = self.reorder_cache(state, parents)
            logits, state = self(token, cache=state)
        return found, sums

    def propose_draft(self, tokens: list[int], num_draft_tokens: int) -> list[int]:
        """What followed the last time that the last token was there."""
        seen = [at for at in range(len(tokens) - 1) if tokens[at] == tokens[-1]]
        return tokens[seen[-1] + 1 :][:num_draft_tokens] if seen else []

    def count_accepted(self, draft: list[int], target: list[int]) -> int:
        """How many guesses are what the model says itself."""
        return next((n for n, (a, b) in enumerate(zip(draft, target, strict=False)) if a != b), len(draft))

    def generate_speculative(self, tokens: Tensor, num_tokens: int) -> Tensor:
        """n tokens more, several guessed ones read at a time."""
        rows = []
        for text in tokens.tolist():
            begun = len(text)
            while len(text) < begun + num_tokens:
                guess = self.propose_draft(text, 3)
                logits = self(torch.tensor([text + guess]))[0][0, len(text) - 1 :]
                own = logits.argmax(-1).tolist()
                kept = self.count_accepted(guess, own)
                text = [*text, *guess[:kept], own[kept]]
            rows.append(text[begun : begun + num_tokens])
        return torch.tensor(rows)

    def logits_with_filled_cache(self, tokens: Tensor, fill_value: float) -> Tensor:
        """Logits behind slots that hold no token."""
        spare = []
        for block in self.blocks:
            x = torch.full((len(tokens), block.attention.kv_heads, 5, block.attention.head_dim), fill_value)
            spare.append((x, x, torch.full((len(tokens), 5), -1)))
        return self(tokens, cache=spare)[0]


def sample(
    logits: Tensor, num_samples: int, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """n draws."""
    p, tokens = (logits / temperature).softmax(-1).sort(descending=True)
    if top_k is not None:
        p = torch.where(torch.arange(len(p)) < top_k, p, 0.0)
    if top_p is not None:
        p = torch.where(p.cumsum(0) - p < top_p, p, 0.0)
    return tokens[torch.multinomial(p, num_samples, replacement=True)]


def document_positions(documents: Tensor) -> Tensor:
    """Positions that begin anew with each document."""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    new = torch.ones_like(documents, dtype=torch.bool)
    new[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return index - torch.where(new, index, 0).cummax(1).values


def check_kwargs(model: ReferenceGPT) -> dict[str, Any]:
    """All that a home-made GPT can be asked, as keyword arguments of `ct.check`."""
    return {
        "logits": lambda tokens: model(tokens)[0],
        "logits_with_mask": lambda tokens, mask: model(tokens, mask)[0],
        "logits_with_positions": lambda tokens, positions: model(tokens, position_ids=positions)[0],
        "logits_with_documents": lambda tokens, documents: model(
            tokens, position_ids=document_positions(documents), documents=documents
        )[0],
        "logits_with_cache": lambda tokens, state: model(tokens, cache=state),
        "generate": model.generate,
        "generate_padded": lambda tokens, mask, n: model.generate(tokens, n, mask),
        "beam_search": model.beam_search,
        "sample": sample,
        "generate_speculative": model.generate_speculative,
        "logits_with_filled_cache": model.logits_with_filled_cache,
        "loss": model.loss,
        "accumulated_loss": model.accumulated_loss,
        "window": model.window,
        "num_layers": len(model.blocks),
        "relative_positions": True,
        "tied_embeddings": model.head.weight is model.embed.weight,
    }
