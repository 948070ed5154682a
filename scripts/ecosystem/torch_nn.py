"""torch.nn: TransformerEncoder (fast path, nested tensors), Transformer, MultiheadAttention, SDPA, FlexAttention."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NAME = "torch.nn"
HOMEPAGE = "https://github.com/pytorch/pytorch"
LENGTH, VOCAB, WIDTH, HEADS = 96, 64, 32, 4
AttentionFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


def configurations() -> Iterator[tuple[str, Callable[[], Any]]]:
    for norm_first in (False, True):
        place = "pre-norm" if norm_first else "post-norm"
        yield f"TransformerEncoder, causal mask, {place}", partial(make_stack, causal=True, norm_first=norm_first)
        yield f"TransformerEncoder, {place}", partial(make_stack, causal=False, norm_first=norm_first)
    yield (
        "TransformerEncoder, boolean causal mask, is_causal=True",
        partial(make_stack, causal=True, is_causal=True, boolean=True),
    )
    yield "TransformerEncoder without nested tensors", partial(make_stack, causal=False, nested=False)
    yield "TransformerEncoder, gelu, no bias", partial(make_stack, causal=True, activation="gelu", bias=False)
    yield "Transformer", make_encoder_decoder
    for name in ATTENTION:
        if "flex" not in name:  # compiled while check traces the ops, it fails; it is compared as a kernel instead
            yield name, partial(make_decoder, name)
    for name in ("no options", "add_bias_kv", "add_zero_attn", "weights returned"):
        yield f"MultiheadAttention, {name}", partial(make_multihead, name)
    yield "scaled_dot_product_attention, lower-right mask with a KV cache", make_cached
    yield "scaled_dot_product_attention, is_causal=True with a KV cache", partial(make_cached, lower_right=False)


class Stack(nn.Module):
    """Token and position embeddings, nn.TransformerEncoder, output layer."""

    def __init__(self, causal: bool, is_causal: bool, boolean: bool, nested: bool, **options: Any) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, dropout=0.1, batch_first=True, **options)
        nested = nested and not options.get("norm_first")
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.causal, self.is_causal, self.boolean = causal, is_causal, boolean

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))
        causal_mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=x.dtype)
        attention_mask = (causal_mask < 0 if self.boolean else causal_mask) if self.causal else None
        padding = None if mask is None else ~mask
        if padding is not None and attention_mask is not None and not self.boolean:
            padding = torch.zeros(padding.shape, dtype=x.dtype).masked_fill(padding, float("-inf"))
        return self.head(
            self.layers(x, attention_mask, src_key_padding_mask=padding, is_causal=self.is_causal and mask is None)
        )


def make_stack(
    *, causal: bool, is_causal: bool = False, boolean: bool = False, nested: bool = True, **options: Any
) -> tuple[nn.Module, dict[str, Any]]:
    model = Stack(causal, is_causal, boolean, nested, **options)
    kind = "decoder" if causal else "encoder"
    arguments = {"logits_with_mask": model.__call__, "kind": kind, "vocab_size": VOCAB, "max_seq_len": LENGTH}
    return model.eval(), arguments | {"relative_positions": False, "padding_side": "right"}


def make_encoder_decoder() -> tuple[nn.Module, dict[str, Any]]:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.position = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
            self.transformer = nn.Transformer(WIDTH, HEADS, 2, 2, 64, batch_first=True)
            self.head = nn.Linear(WIDTH, VOCAB)

        def forward(self, source: Tensor, mask: Tensor | None, tokens: Tensor) -> Tensor:
            x, y = (self.embed(ids) + self.position(torch.arange(ids.shape[1])) for ids in (source, tokens))
            causal = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=x.dtype)
            padding = {} if mask is None else {"src_key_padding_mask": ~mask, "memory_key_padding_mask": ~mask}
            return self.head(self.transformer(x, y, tgt_mask=causal, tgt_is_causal=True, **padding))

    model = Model().eval()
    source = torch.randint(VOCAB, (1, 9))
    arguments = {
        "kind": "encoder-decoder",
        "logits": lambda tokens: model(source.expand(len(tokens), -1), None, tokens),
        "logits_with_source": model.__call__,
        "vocab_size": VOCAB,
        "max_seq_len": LENGTH,
    }
    return model, arguments


def attend_grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def attend_boolean_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def attend_additive_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.full((1, 1, q.shape[-2], k.shape[-2]), float("-inf"), dtype=q.dtype).triu(1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def attend_window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril().triu(-7)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def attend_math(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        return attend_grouped(q, k, v)


def attend_flex(q: Tensor, k: Tensor, v: Tensor, window: int | None = None, blocks: bool = True) -> Tensor:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def is_visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) if window is None else (j <= i) & (i - j < window)

    def mask_score(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where(is_visible(b, h, i, j), score, -float("inf"))

    if not blocks:
        return flex_attention(q, k, v, score_mod=mask_score, enable_gqa=True)
    block_mask = create_block_mask(is_visible, None, None, q.shape[-2], k.shape[-2], device="cpu", BLOCK_SIZE=16)
    return flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True)


ATTENTION: dict[str, AttentionFunction] = {
    "scaled_dot_product_attention, is_causal=True, enable_gqa": attend_grouped,
    "scaled_dot_product_attention, boolean mask": attend_boolean_mask,
    "scaled_dot_product_attention, additive mask": attend_additive_mask,
    "scaled_dot_product_attention, window": attend_window,
    "scaled_dot_product_attention, math backend": attend_math,
    "flex_attention, block mask": attend_flex,
    "flex_attention, score_mod": partial(attend_flex, blocks=False),
    "flex_attention, window": partial(attend_flex, window=8),
}


class Decoder(nn.Module):
    """Two pre-norm blocks with a given attention function and grouped heads."""

    def __init__(self, attend: Callable[..., Tensor], kv_heads: int = 2) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(4))
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, WIDTH + 2 * kv_heads * 8) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.ffn = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)) for _ in range(2))
        self.final_norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB)
        self.attend, self.kv_heads = attend, kv_heads

    def forward(self, tokens: Tensor, cache: list[tuple[Tensor, Tensor]] | None = None) -> Tensor:
        start = cache[0][0].shape[2] if cache else 0
        x = self.embed(tokens) + self.position(start + torch.arange(tokens.shape[1]))
        for i in range(2):
            x = x + self.out[i](self.attend_layer(i, self.norms[2 * i](x), cache))
            x = x + self.ffn[i](self.norms[2 * i + 1](x))
        return self.head(self.final_norm(x))

    def attend_layer(self, i: int, x: Tensor, cache: list[tuple[Tensor, Tensor]] | None) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, 8)).transpose(1, 2)
            for part in self.qkv[i](x).split((WIDTH, self.kv_heads * 8, self.kv_heads * 8), dim=-1)
        )
        if cache is not None:
            if len(cache) > i:
                k, v = torch.cat([cache[i][0], k], dim=2), torch.cat([cache[i][1], v], dim=2)
            cache[i : i + 1] = [(k, v)]
        return self.attend(q, k, v).transpose(1, 2).flatten(2)


def make_decoder(name: str) -> tuple[nn.Module, dict[str, Any]]:
    model = Decoder(ATTENTION[name]).eval()
    facts = {"vocab_size": VOCAB, "max_seq_len": LENGTH, "relative_positions": False, "kv_heads": 2}
    window = {"window": 8, "windows": (8,)} if "window" in name else {}
    others = {other: attend for other, attend in ATTENTION.items() if ("window" in other) == ("window" in name)}
    window["logits_by_kernel"] = {other: partial(run_with, model, attend) for other, attend in others.items()}
    return model, {**facts, **window, "logits": model.__call__, "attention": ATTENTION[name]}


def run_with(model: Decoder, attend: AttentionFunction, tokens: Tensor) -> Tensor:
    previous, model.attend = model.attend, attend
    try:
        return model(tokens)
    finally:
        model.attend = previous


def make_cached(lower_right: bool = True) -> tuple[nn.Module, dict[str, Any]]:
    """A chunk after cached tokens: the mask is aligned with the last keys or, with is_causal, with the first ones."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
        if not lower_right:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(k.shape[-2] - q.shape[-2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    model = Decoder(attend).eval()

    def logits_with_cache(tokens: Tensor, cache: Any) -> tuple[Tensor, Any]:
        cache = [] if cache is None else list(cache)
        return model(tokens, cache), cache

    facts = {"vocab_size": VOCAB, "max_seq_len": LENGTH, "relative_positions": False, "kv_heads": 2}
    return model, {**facts, "logits_with_cache": logits_with_cache, "logits": model.__call__}


def make_multihead(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A causal model with nn.MultiheadAttention."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.position = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
            options = {name: True} if name.startswith("add_") else {}
            self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **options)
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

        def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
            x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))
            causal = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
            padding = None if mask is None else ~mask
            y = self.norm(x)
            weights = name == "weights returned"
            y = self.attention(y, y, y, key_padding_mask=padding, attn_mask=causal, need_weights=weights)[0]
            return self.head(x + y)

    model = Model().eval()
    facts = {"vocab_size": VOCAB, "max_seq_len": LENGTH, "relative_positions": False, "padding_side": "right"}
    return model, {**facts, "logits_with_mask": model.__call__}
