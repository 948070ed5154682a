"""Bugs in masks: padding that is seen, text that is not."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from zoo.bug import bug
from zoo.home import Home, offers


def all_real(query: Tensor, key: Tensor) -> Tensor:
    return (key >= 0)[:, None, :].expand(-1, query.shape[1], -1)


def encoder(rule: Any = all_real) -> tuple[Home, dict[str, Any]]:
    """A home-made encoder: each token sees what the rule says."""
    model = Home()
    for block in model.blocks:
        block.attention.visible = rule
    kept = {name: offers(model)[name] for name in ("logits", "padded", "placed", "relative", "layers", "tied")}
    return model, kept | {"kind": "encoder"}


@bug("both-sides")
def a_causal_mask_in_an_encoder() -> tuple[Home, dict[str, Any]]:
    return encoder(lambda query, key: (key >= 0)[:, None, :] & (key[:, None, :] <= query[:, :, None]))


@bug("both-sides")
def a_mask_that_hides_the_past() -> tuple[Home, dict[str, Any]]:
    return encoder(lambda query, key: (key >= 0)[:, None, :] & (key[:, None, :] >= query[:, :, None]))


def upside_down(model: Home, blocks: list[int]) -> Home:
    """Where there is any padding, it is seen and the text is not."""
    for n in blocks:
        attention = model.blocks[n].attention

        def visible(query: Tensor, key: Tensor) -> Tensor:
            padding = (key < 0)[:, None, :].expand(-1, query.shape[1], -1)
            usual = (key >= 0)[:, None, :] & (key[:, None, :] <= query[:, :, None])
            return torch.where(padding.any(-1, keepdim=True), padding, usual)

        attention.visible = visible
    return model


@bug("mask-polarity", also=("generation", "cache-poison"))
def a_mask_upside_down() -> Home:
    return upside_down(Home(), [0, 1])


@bug("mask-polarity", also=("generation", "cache-poison"))
def a_mask_upside_down_in_one_layer() -> Home:
    return upside_down(Home(), [1])


@bug("self-visible", also=("rope-shift",))
def the_diagonal_is_hidden() -> Home:
    model = Home()
    for block in model.blocks:
        block.attention.visible = lambda query, key: (key >= 0)[:, None, :] & (key[:, None, :] < query[:, :, None])
    return model


@bug("self-visible", also=("rope-shift",))
def the_diagonal_is_hidden_in_the_last_layer() -> Home:
    model = Home()
    model.blocks[1].attention.visible = lambda query, key: (
        (key >= 0)[:, None, :] & (key[:, None, :] < query[:, :, None])
    )
    return model


@bug("self-visible", also=("rope-shift",))
def the_diagonal_is_hidden_from_some_position_on() -> Home:
    model = Home()
    model.blocks[0].attention.visible = lambda query, key: (
        (key >= 0)[:, None, :]
        & (key[:, None, :] <= query[:, :, None])
        & ((key[:, None, :] != query[:, :, None]) | (key[:, None, :] < 5))
    )
    return model


class Seated(nn.Embedding):
    """A token's vector, and that of its slot."""

    def __init__(self, vocab: int, d: int) -> None:
        super().__init__(vocab, d)
        self.places, self.begun = nn.Embedding(128, d), 0

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + self.places(torch.arange(self.begun, self.begun + tokens.shape[1]))


class Learned(Home):
    """Positions in a learned table, counted from the first slot."""

    def __init__(self) -> None:
        super().__init__(tied=False)
        self.embed = Seated(61, 32)

    def forward(self, tokens: Tensor, mask: Tensor | None = None, **how: Any) -> Any:
        self.embed.begun = 0 if how.get("state") is None else how["state"][0][0].shape[2]
        return super().forward(tokens, mask, **how)


@bug("left-padding")
def positions_that_count_padding() -> tuple[Home, dict[str, Any]]:
    model = Learned()
    return model, {name: offers(model)[name] for name in ("logits", "padded")}


@bug("left-padding", also=("pad-contents", "right-padding", "generation"))
def the_mask_of_the_first_row_for_all() -> Home:
    model = Home()
    plain = model.number
    model.number = (
        lambda tokens, mask, before: plain(  # type: ignore[method-assign]
            tokens, None if mask is None else mask[:1].expand_as(mask), before
        )
    )
    return model


@bug("right-padding", also=("pad-contents", "left-padding"))
def a_mask_that_is_ignored() -> tuple[Home, dict[str, Any]]:
    model, given = encoder()
    return model, given | {"padded": lambda tokens, mask: model(tokens)[0]}


@bug("pad-contents", also=("right-padding", "left-padding"))
def a_mean_over_padding_too() -> tuple[Home, dict[str, Any]]:
    model, given = encoder()
    plain = model.norm.forward
    model.norm.forward = lambda x: plain(x + x.mean(1, keepdim=True))  # type: ignore[method-assign]
    return model, given


@bug("masked-row")
def softmax_over_nothing() -> tuple[Home, dict[str, Any]]:
    """0/0 is blanked on the way forward, and comes back with the gradient."""
    model, given = encoder()
    for block in model.blocks:
        attention = block.attention

        def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
            added = torch.where(seen, 0.0, -torch.inf)[:, None]
            return (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + added).softmax(-1).nan_to_num(0.0) @ v

        attention.attend = attend
    return model, given


@bug("masked-row")
def a_row_of_nan() -> tuple[Home, dict[str, Any]]:
    model, given = encoder()
    for block in model.blocks:
        attention = block.attention
        attention.attend = lambda q, k, v, seen: (
            (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(~seen[:, None], -torch.inf).softmax(-1) @ v
        )
    return model, given


class Pair(nn.Module):
    """An encoder-decoder of PyTorch's own parts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.places = nn.Embedding(61, 32), nn.Embedding(128, 32)
        self.body = nn.Transformer(32, 4, 2, 2, 48, 0.0, batch_first=True)
        self.head = nn.Linear(32, 61)
        self.hides_in_encoder = self.hides_in_decoder = self.reads = True
        self.eval()

    def vectors(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens) + self.places(torch.arange(tokens.shape[1]))

    def forward(self, source: Tensor, mask: Tensor | None, tokens: Tensor) -> Tensor:
        hidden = None if mask is None else ~mask
        memory = self.body.encoder(self.vectors(source), src_key_padding_mask=hidden if self.hides_in_encoder else None)
        memory = self.seen(memory)
        later = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
        out = self.body.decoder(
            self.vectors(tokens),
            memory,
            tgt_mask=later,
            memory_key_padding_mask=hidden if self.hides_in_decoder else None,
        )
        return self.head(out)

    def seen(self, memory: Tensor) -> Tensor:
        """Of the encoder's output, what the decoder is given."""
        return memory


def pair(model: Pair) -> tuple[Pair, dict[str, Any]]:
    source = torch.arange(9)[None] + 3
    return model, {
        "logits": lambda tokens: model(source.expand(len(tokens), -1), None, tokens),
        "crossed": model,
        "kind": "encoder-decoder",
        "layers": 2,
    }


@bug("source-padding")
def no_source_mask_in_the_decoder() -> tuple[Pair, dict[str, Any]]:
    model = Pair()
    model.hides_in_decoder = False
    return pair(model)


@bug("source-padding")
def no_source_mask_in_the_encoder() -> tuple[Pair, dict[str, Any]]:
    model = Pair()
    model.hides_in_encoder = False
    return pair(model)


@bug("source-used", also=("dead-heads", "attention-entropy"))
def a_source_that_is_not_read() -> tuple[Pair, dict[str, Any]]:
    model = Pair()
    model.seen = lambda memory: torch.zeros_like(memory)  # type: ignore[method-assign]
    return pair(model)


@bug("source-used")
def encoder_and_decoder_that_read_all_but_the_last() -> tuple[Pair, dict[str, Any]]:
    model = Pair()
    plain = model.forward
    model.forward = (
        lambda source, mask, tokens: plain(  # type: ignore[method-assign]
            source[:, :-1], None if mask is None else mask[:, :-1], tokens
        )
    )
    return pair(model)


@bug("source-used")
def a_triangle_over_the_source() -> tuple[Pair, dict[str, Any]]:
    """Cross-attention is given the mask of self-attention: later tokens of the source are hidden."""
    model = Pair()
    for layer in model.body.decoder.layers:
        plain = layer.multihead_attn.forward

        def attend(query: Tensor, key: Tensor, value: Tensor, plain: Any = plain, **how: Any) -> Any:
            later = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool).triu(1)
            return plain(query, key, value, **how | {"attn_mask": later, "is_causal": False})

        layer.multihead_attn.forward = attend
    return pair(model)
