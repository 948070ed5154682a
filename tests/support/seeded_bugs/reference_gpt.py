"""`ReferenceGPT`: a correct GPT of small methods that seeded bugs replace, and its keyword arguments for `ct.check`."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

KVCache = list[tuple[Tensor, Tensor, Tensor]]
"""Per layer: keys, values, and their positions (-1 for padding)."""


class Attention(nn.Module):
    """Grouped-query attention with RoPE and an optional sliding window; the mask is derived from positions."""

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
        """Mask (B, T, S) from query positions (B, T) and key positions (B, S): real, not later, within the window."""
        i, j = query[:, :, None], key[:, None, :]
        mask = (j >= 0) & (j <= i)
        return mask if self.window is None else mask & (i - j < self.window)

    def repeat_kv(self, x: Tensor) -> Tensor:
        """Repeat keys or values (B, G, T, D) for each head."""
        return x.repeat_interleave(self.heads // self.kv_heads, 1)

    def frequencies(self, device: torch.device) -> Tensor:
        return 10_000.0 ** (-torch.arange(0, self.head_dim, 2, device=device, dtype=torch.float32) / self.head_dim)

    def apply_rope(self, x: Tensor, positions: Tensor) -> Tensor:
        """RoPE in the half-split layout: rotate pairs by position × frequency."""
        angle = positions[:, None, :, None].float() * self.frequencies(x.device)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def scale(self) -> float:
        return 1 / math.sqrt(self.head_dim)

    def pattern(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """softmax(q·kᵀ·scale)·v over the visible keys; fully masked queries give zeros."""
        scores = (q @ k.transpose(-1, -2)) * self.scale()
        fully_masked = ~mask.any(-1, keepdim=True)
        pattern = self.pattern(scores.masked_fill(~(mask | fully_masked)[:, None], -torch.inf))
        pattern = F.dropout(pattern, self.dropout, self.training)
        return (pattern @ v).masked_fill(fully_masked[:, None], 0.0)

    def update_cache(self, k: Tensor, v: Tensor, positions: Tensor, cache: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Append new keys, values and positions to the cache."""
        if cache is None:
            return k, v, positions
        return torch.cat((cache[0], k), 2), torch.cat((cache[1], v), 2), torch.cat((cache[2], positions), 1)

    def forward(self, x: Tensor, positions: Tensor, documents: Tensor | None, cache: Any) -> tuple[Tensor, Any]:
        def split(y: Tensor, heads: int) -> Tensor:
            return y.unflatten(-1, (heads, self.head_dim)).transpose(1, 2)

        rope_positions = positions.clamp(min=0)
        q = self.apply_rope(split(self.q(x), self.heads), rope_positions)
        k = self.apply_rope(split(self.k(x), self.kv_heads), rope_positions)
        k, v, key_positions = self.update_cache(k, split(self.v(x), self.kv_heads), positions, cache)
        mask = self.visible(positions, key_positions)
        if documents is not None:
            mask = mask & (documents[:, :, None] == documents[:, None, :])
        out = self.attend(q, self.repeat_kv(k), self.repeat_kv(v), mask)
        return self.o(out.transpose(1, 2).flatten(2)), (k, v, key_positions)


class Block(nn.Module):
    """Pre-norm Transformer block."""

    def __init__(self, d_model: int, **attention_kwargs: Any) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(d_model), nn.RMSNorm(d_model)
        self.attention = Attention(d_model, **attention_kwargs)
        self.up, self.down = nn.Linear(d_model, 4 * d_model), nn.Linear(4 * d_model, d_model)
        self.dropout = nn.Dropout(attention_kwargs["dropout"])

    def forward(self, x: Tensor, positions: Tensor, documents: Tensor | None, cache: Any) -> tuple[Tensor, Any]:
        out, cache = self.attention(self.norm1(x), positions, documents, cache)
        x = x + self.dropout(out)
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x))))), cache


class ReferenceGPT(nn.Module):
    """A small decoder: tokens → (logits, cache)."""

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
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=1 / math.sqrt(module.weight.shape[-1]))
        if tied:
            self.head.weight = self.embed.weight
        self.eval()

    def number_tokens(self, tokens: Tensor, mask: Tensor | None, cached_positions: Tensor | None) -> Tensor:
        """Positions (B, T): real tokens are numbered from 0 (after a cache, from its length), padding is -1."""
        mask = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
        start = 0 if cached_positions is None else (cached_positions.max(1, keepdim=True).values + 1)
        return torch.where(mask, mask.long().cumsum(-1) - 1 + start, -1)

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
        x, new_cache = self.embed(tokens), []
        for n, block in enumerate(self.blocks):
            x, layer = block(x, positions, documents, None if cache is None else cache[n])
            new_cache.append(layer)
        return self.head(self.norm(x)), new_cache

    def loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Mean of −log p of the next tokens; labels of -100 are ignored."""
        logits = self(tokens)[0][:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)

    def accumulated_loss(self, micro_batches: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Sum of the losses of all micro-batches, divided by the total number of labels."""
        counts = [int((labels[:, 1:] != -100).sum()) for _, labels in micro_batches]
        return sum(self.loss(*micro_batch) * n for micro_batch, n in zip(micro_batches, counts, strict=True)) / sum(
            counts
        )  # type: ignore[return-value]

    def last_real(self, logits: Tensor, mask: Tensor | None) -> Tensor:
        """Logits (B, 1, V) of the last token of each row that is not padding."""
        if mask is None:
            return logits[:, -1:]
        last = (mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)).argmax(1)
        return logits[torch.arange(len(logits)), last][:, None]

    def generate(self, tokens: Tensor, num_tokens: int, mask: Tensor | None = None) -> Tensor:
        """Greedy decoding with the cache."""
        logits, cache = self(tokens, mask)
        new_tokens = [self.last_real(logits, mask).argmax(-1)]
        for _ in range(num_tokens - 1):
            logits, cache = self(new_tokens[-1], cache=cache)
            new_tokens.append(logits[:, -1:].argmax(-1))
        return torch.cat(new_tokens, 1)

    def reorder_cache(self, cache: KVCache, parents: Tensor) -> KVCache:
        """Select the cache rows of the parents of the new beams."""
        return [(k[parents], v[parents], positions[parents]) for k, v, positions in cache]

    def beam_search(self, tokens: Tensor, num_tokens: int, num_beams: int) -> tuple[Tensor, Tensor]:
        """Beam search with the cache; returns the beams and their log-probabilities."""
        logits, cache = self(tokens)
        scores, beams = torch.zeros(1), tokens[:, :0]
        for _ in range(num_tokens):
            candidates = scores[:, None] + logits[:, -1].log_softmax(-1)
            scores, index = candidates.flatten().topk(num_beams)
            parents, token = index // self.vocab_size, index[:, None] % self.vocab_size
            beams = torch.cat((beams[parents], token), 1)
            cache = self.reorder_cache(cache, parents)
            logits, cache = self(token, cache=cache)
        return beams, scores

    def propose_draft(self, tokens: list[int], num_draft_tokens: int) -> list[int]:
        """Prompt lookup: the tokens after the previous occurrence of the last token."""
        matches = [position for position in range(len(tokens) - 1) if tokens[position] == tokens[-1]]
        return tokens[matches[-1] + 1 :][:num_draft_tokens] if matches else []

    def count_accepted(self, draft: list[int], target: list[int]) -> int:
        """Number of draft tokens that equal the model's own greedy tokens."""
        return next((n for n, (a, b) in enumerate(zip(draft, target, strict=False)) if a != b), len(draft))

    def generate_speculative(self, tokens: Tensor, num_tokens: int) -> Tensor:
        """Speculative decoding with prompt lookup at temperature 0."""
        rows = []
        for row in tokens.tolist():
            prompt_len, sequence = len(row), row
            while len(sequence) < prompt_len + num_tokens:
                draft = self.propose_draft(sequence, 3)
                logits = self(torch.tensor([sequence + draft]))[0][0, len(sequence) - 1 :]
                target = logits.argmax(-1).tolist()
                accepted = self.count_accepted(draft, target)
                sequence = [*sequence, *draft[:accepted], target[accepted]]
            rows.append(sequence[prompt_len : prompt_len + num_tokens])
        return torch.tensor(rows)

    def logits_with_filled_cache(self, tokens: Tensor, fill_value: float) -> Tensor:
        """Logits after five unused cache slots that hold `fill_value`."""
        cache = []
        for block in self.blocks:
            x = torch.full((len(tokens), block.attention.kv_heads, 5, block.attention.head_dim), fill_value)
            cache.append((x, x, torch.full((len(tokens), 5), -1)))
        return self(tokens, cache=cache)[0]


def sample(
    logits: Tensor, num_samples: int, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """Sample from softmax(logits / temperature) with top-k and top-p filters."""
    p, tokens = (logits / temperature).softmax(-1).sort(descending=True)
    if top_k is not None:
        p = torch.where(torch.arange(len(p)) < top_k, p, 0.0)
    if top_p is not None:
        p = torch.where(p.cumsum(0) - p < top_p, p, 0.0)
    return tokens[torch.multinomial(p, num_samples, replacement=True)]


def document_positions(documents: Tensor) -> Tensor:
    """Positions (B, T) that restart at each document."""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    is_first = torch.ones_like(documents, dtype=torch.bool)
    is_first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return index - torch.where(is_first, index, 0).cummax(1).values


def check_kwargs(model: ReferenceGPT) -> dict[str, Any]:
    """All functions and properties of a ReferenceGPT, as keyword arguments of `ct.check`."""
    return {
        "logits": lambda tokens: model(tokens)[0],
        "logits_with_mask": lambda tokens, mask: model(tokens, mask)[0],
        "logits_with_positions": lambda tokens, positions: model(tokens, position_ids=positions)[0],
        "logits_with_documents": lambda tokens, documents: model(
            tokens, position_ids=document_positions(documents), documents=documents
        )[0],
        "logits_with_cache": lambda tokens, cache: model(tokens, cache=cache),
        "logits_with_padded_cache": lambda tokens, mask, cache: model(tokens, mask[:, -tokens.shape[1] :], cache=cache),
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
