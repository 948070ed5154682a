"""Seeded bugs in masks and padding: visible padding, masked real tokens, cross-attention."""

import math
from typing import Any

import torch
from support.seeded_bugs.reference_gpt import ReferenceGPT, check_kwargs
from support.seeded_bugs.registry import seeded_bug
from torch import Tensor, nn


def real_keys_visible(query: Tensor, key: Tensor) -> Tensor:
    return (key >= 0)[:, None, :].expand(-1, query.shape[1], -1)


def build_encoder(rule: Any = real_keys_visible) -> tuple[ReferenceGPT, dict[str, Any]]:
    """A bidirectional ReferenceGPT whose mask is `rule(query positions, key positions)`."""
    model = ReferenceGPT()
    for block in model.blocks:
        block.attention.visible = rule
    kwargs = {
        name: check_kwargs(model)[name]
        for name in (
            "logits",
            "logits_with_mask",
            "logits_with_positions",
            "relative_positions",
            "num_layers",
            "tied_embeddings",
        )
    }
    return model, kwargs | {"kind": "encoder"}


@seeded_bug("bidirectional-attention")
def causal_mask_in_encoder() -> tuple[ReferenceGPT, dict[str, Any]]:
    return build_encoder(lambda query, key: (key >= 0)[:, None, :] & (key[:, None, :] <= query[:, :, None]))


@seeded_bug("bidirectional-attention")
def anti_causal_mask_in_encoder() -> tuple[ReferenceGPT, dict[str, Any]]:
    return build_encoder(lambda query, key: (key >= 0)[:, None, :] & (key[:, None, :] >= query[:, :, None]))


def invert_mask(model: ReferenceGPT, blocks: list[int]) -> ReferenceGPT:
    """Invert the mask of rows with padding: padding is visible, and real tokens are masked."""
    for n in blocks:
        attention = model.blocks[n].attention

        def visible(query: Tensor, key: Tensor) -> Tensor:
            padding = (key < 0)[:, None, :].expand(-1, query.shape[1], -1)
            causal = (key >= 0)[:, None, :] & (key[:, None, :] <= query[:, :, None])
            return torch.where(padding.any(-1, keepdim=True), padding, causal)

        attention.visible = visible
    return model


@seeded_bug("mask-polarity", also_caught_by=("generation", "cache-unused-slots"))
def inverted_mask() -> ReferenceGPT:
    return invert_mask(ReferenceGPT(), [0, 1])


@seeded_bug("mask-polarity", also_caught_by=("generation", "cache-unused-slots"))
def inverted_mask_in_one_layer() -> ReferenceGPT:
    return invert_mask(ReferenceGPT(), [1])


@seeded_bug("mask-diagonal", also_caught_by=("rope-shift-invariance",))
def diagonal_masked() -> ReferenceGPT:
    model = ReferenceGPT()
    for block in model.blocks:
        block.attention.visible = lambda query, key: (key >= 0)[:, None, :] & (key[:, None, :] < query[:, :, None])
    return model


@seeded_bug("mask-diagonal", also_caught_by=("rope-shift-invariance",))
def diagonal_masked_in_last_layer() -> ReferenceGPT:
    model = ReferenceGPT()
    model.blocks[1].attention.visible = lambda query, key: (
        (key >= 0)[:, None, :] & (key[:, None, :] < query[:, :, None])
    )
    return model


@seeded_bug("mask-diagonal", also_caught_by=("rope-shift-invariance",))
def diagonal_masked_from_position() -> ReferenceGPT:
    model = ReferenceGPT()
    model.blocks[0].attention.visible = lambda query, key: (
        (key >= 0)[:, None, :]
        & (key[:, None, :] <= query[:, :, None])
        & ((key[:, None, :] != query[:, :, None]) | (key[:, None, :] < 5))
    )
    return model


class SlotEmbedding(nn.Embedding):
    """Token embedding plus position embedding, with positions from the first slot."""

    def __init__(self, vocab_size: int, d_model: int) -> None:
        super().__init__(vocab_size, d_model)
        self.position_embedding, self.start = nn.Embedding(128, d_model), 0

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + self.position_embedding(torch.arange(self.start, self.start + tokens.shape[1]))


class LearnedPositionGPT(ReferenceGPT):
    """Learned position embeddings that count padding."""

    def __init__(self) -> None:
        super().__init__(tied=False)
        self.embed = SlotEmbedding(61, 32)

    def forward(self, tokens: Tensor, mask: Tensor | None = None, **kwargs: Any) -> Any:
        self.embed.start = 0 if kwargs.get("cache") is None else kwargs["cache"][0][0].shape[2]
        return super().forward(tokens, mask, **kwargs)


@seeded_bug("left-padding")
def positions_count_padding() -> tuple[ReferenceGPT, dict[str, Any]]:
    model = LearnedPositionGPT()
    return model, {name: check_kwargs(model)[name] for name in ("logits", "logits_with_mask")}


@seeded_bug("left-padding", also_caught_by=("padding-leak", "right-padding", "generation"))
def first_row_mask_for_all() -> ReferenceGPT:
    model = ReferenceGPT()
    original = model.number_tokens
    model.number_tokens = (
        lambda tokens, mask, before: original(  # type: ignore[method-assign]
            tokens, None if mask is None else mask[:1].expand_as(mask), before
        )
    )
    return model


@seeded_bug("right-padding", also_caught_by=("padding-leak", "left-padding"))
def mask_ignored() -> tuple[ReferenceGPT, dict[str, Any]]:
    model, kwargs = build_encoder()
    return model, kwargs | {"logits_with_mask": lambda tokens, mask: model(tokens)[0]}


@seeded_bug("padding-leak", also_caught_by=("right-padding", "left-padding"))
def mean_includes_padding() -> tuple[ReferenceGPT, dict[str, Any]]:
    model, kwargs = build_encoder()
    original = model.norm.forward
    model.norm.forward = lambda x: original(x + x.mean(1, keepdim=True))  # type: ignore[method-assign]
    return model, kwargs


@seeded_bug("fully-masked-row")
def softmax_of_fully_masked_row() -> tuple[ReferenceGPT, dict[str, Any]]:
    """nan_to_num hides 0/0 in the forward pass, but not in the backward pass."""
    model, kwargs = build_encoder()
    for block in model.blocks:
        attention = block.attention

        def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
            bias = torch.where(mask, 0.0, -torch.inf)[:, None]
            return (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + bias).softmax(-1).nan_to_num(0.0) @ v

        attention.attend = attend
    return model, kwargs


@seeded_bug("fully-masked-row")
def nan_row() -> tuple[ReferenceGPT, dict[str, Any]]:
    model, kwargs = build_encoder()
    for block in model.blocks:
        attention = block.attention
        attention.attend = lambda q, k, v, mask: (
            (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(~mask[:, None], -torch.inf).softmax(-1) @ v
        )
    return model, kwargs


class ReferenceEncoderDecoder(nn.Module):
    """An encoder-decoder of torch.nn.Transformer layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.position_embedding = nn.Embedding(61, 32), nn.Embedding(128, 32)
        self.transformer = nn.Transformer(32, 4, 2, 2, 48, 0.0, batch_first=True)
        self.head = nn.Linear(32, 61)
        self.masks_encoder = self.masks_cross_attention = True
        self.eval()

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens) + self.position_embedding(torch.arange(tokens.shape[1]))

    def forward(self, source: Tensor, mask: Tensor | None, tokens: Tensor) -> Tensor:
        padding_mask = None if mask is None else ~mask
        memory = self.transformer.encoder(
            self.embed_tokens(source), src_key_padding_mask=padding_mask if self.masks_encoder else None
        )
        memory = self.visible_memory(memory)
        future = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
        out = self.transformer.decoder(
            self.embed_tokens(tokens),
            memory,
            tgt_mask=future,
            memory_key_padding_mask=padding_mask if self.masks_cross_attention else None,
        )
        return self.head(out)

    def visible_memory(self, memory: Tensor) -> Tensor:
        """The encoder output that the decoder attends to."""
        return memory


def encoder_decoder_kwargs(model: ReferenceEncoderDecoder) -> tuple[ReferenceEncoderDecoder, dict[str, Any]]:
    source = torch.arange(9)[None] + 3
    return model, {
        "logits": lambda tokens: model(source.expand(len(tokens), -1), None, tokens),
        "logits_with_source": model,
        "kind": "encoder-decoder",
        "num_layers": 2,
    }


@seeded_bug("cross-attention-padding")
def no_source_mask_in_decoder() -> tuple[ReferenceEncoderDecoder, dict[str, Any]]:
    model = ReferenceEncoderDecoder()
    model.masks_cross_attention = False
    return encoder_decoder_kwargs(model)


@seeded_bug("cross-attention-padding")
def no_source_mask_in_encoder() -> tuple[ReferenceEncoderDecoder, dict[str, Any]]:
    model = ReferenceEncoderDecoder()
    model.masks_encoder = False
    return encoder_decoder_kwargs(model)


@seeded_bug("cross-attention-source", also_caught_by=("dead-heads", "attention-entropy"))
def source_ignored() -> tuple[ReferenceEncoderDecoder, dict[str, Any]]:
    model = ReferenceEncoderDecoder()
    model.visible_memory = lambda memory: torch.zeros_like(memory)  # type: ignore[method-assign]
    return encoder_decoder_kwargs(model)


@seeded_bug("cross-attention-source")
def last_source_token_dropped() -> tuple[ReferenceEncoderDecoder, dict[str, Any]]:
    model = ReferenceEncoderDecoder()
    original = model.forward
    model.forward = (
        lambda source, mask, tokens: original(  # type: ignore[method-assign]
            source[:, :-1], None if mask is None else mask[:, :-1], tokens
        )
    )
    return encoder_decoder_kwargs(model)


@seeded_bug("cross-attention-source")
def only_first_source_tokens_visible() -> tuple[ReferenceEncoderDecoder, dict[str, Any]]:
    """The encoder reads the whole source, but cross-attention only sees its first sixteen outputs."""
    model = ReferenceEncoderDecoder()
    model.visible_memory = lambda memory: memory[:, :16]  # type: ignore[method-assign]
    return encoder_decoder_kwargs(model)


@seeded_bug("cross-attention-source")
def causal_cross_attention() -> tuple[ReferenceEncoderDecoder, dict[str, Any]]:
    """Cross-attention uses a causal mask, which masks later source tokens."""
    model = ReferenceEncoderDecoder()
    for layer in model.transformer.decoder.layers:
        original = layer.multihead_attn.forward

        def attend(query: Tensor, key: Tensor, value: Tensor, original: Any = original, **kwargs: Any) -> Any:
            future = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool).triu(1)
            return original(query, key, value, **kwargs | {"attn_mask": future, "is_causal": False})

        layer.multihead_attn.forward = attend
    return encoder_decoder_kwargs(model)
