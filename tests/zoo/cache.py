"""Bugs of caches: what is remembered is not what was read."""

from typing import Any

import torch
import transformers
from torch import Tensor

from zoo.bug import bug
from zoo.home import Home, offers


def renumbered(rule: Any) -> Home:
    """A model that numbers the tokens behind a cache otherwise: rule(positions as they should be, tokens before)."""
    model = Home()
    plain = model.number

    def number(tokens: Tensor, mask: Tensor | None, before: Tensor | None) -> Tensor:
        positions = plain(tokens, mask, before)
        return positions if before is None else rule(positions, before.shape[1])

    model.number = number  # type: ignore[method-assign]
    return model


def remembering(model: Home, rule: Any) -> Home:
    """A model whose attention remembers by another rule: rule(attention, k, v, positions, state)."""
    for block in model.blocks:
        one = block.attention
        one.remember = lambda k, v, positions, state, one=one: rule(one, k, v, positions, state)
    return model


def joined(k: Tensor, v: Tensor, positions: Tensor, state: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.cat((state[0], k), 2), torch.cat((state[1], v), 2), torch.cat((state[2], positions), 1)


# ---------------------------------------------------------------------------------------------------------- steps


@bug("cache-steps")
def positions_one_too_far() -> Home:
    return renumbered(lambda positions, before: positions + 1)


@bug("cache-steps")
def a_token_that_is_stored_twice() -> Home:
    """The last key of what was read is stored again with the next."""

    def rule(one: Any, k: Tensor, v: Tensor, positions: Tensor, state: Any) -> Any:
        if state is None:
            return k, v, positions
        twice = [torch.cat((x, x[:, :, -1:]), 2) for x in state[:2]]
        return joined(k, v, positions, (*twice, torch.cat((state[2], state[2][:, -1:]), 1)))

    return remembering(Home(), rule)


@bug("cache-steps")
def rows_that_are_swapped() -> Home:
    def rule(one: Any, k: Tensor, v: Tensor, positions: Tensor, state: Any) -> Any:
        return (k, v, positions) if state is None else joined(k, v, positions, [x.flip(0) for x in state])

    return remembering(Home(), rule)


@bug("cache-steps")
def keys_that_are_turned_twice() -> Home:
    """Stored keys are turned again, by their position, when they are read."""

    def rule(one: Any, k: Tensor, v: Tensor, positions: Tensor, state: Any) -> Any:
        if state is None:
            return k, v, positions
        return joined(k, v, positions, (one.turn(state[0], state[2].clamp(min=0)), *state[1:]))

    return remembering(Home(), rule)


class Restarts(transformers.GPT2LMHeadModel):
    """Positions begin anew behind a cache."""

    def forward(self, input_ids: Any = None, past_key_values: Any = None, **how: Any) -> Any:
        if past_key_values is not None and past_key_values.get_seq_length():
            how["position_ids"] = torch.arange(input_ids.shape[1])[None]
        return super().forward(input_ids=input_ids, past_key_values=past_key_values, **how)


@bug("cache-steps")
def positions_that_begin_anew() -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    none = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    how = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2}
    return Restarts(transformers.GPT2Config(**how, **none)).eval(), {}


# --------------------------------------------------------------------------------------------------------- chunks


def piecewise(rule: Any) -> Home:
    """A model that sees by another rule wherever several tokens are read behind a cache."""
    model = Home()
    for block in model.blocks:
        plain = block.attention.visible

        def visible(query: Tensor, key: Tensor, plain: Any = plain) -> Tensor:
            seen = plain(query, key)
            return rule(seen, query, key) if 1 < query.shape[1] < key.shape[1] else seen

        block.attention.visible = visible
    return model


def spared(seen: Tensor, key: Tensor) -> Tensor:
    """Slots without a token stay hidden."""
    return seen & (key >= 0)[:, None, :]


@bug("cache-chunks")
def a_mask_aligned_to_the_upper_left() -> Home:
    """`is_causal=True` with more keys than queries."""

    def rule(seen: Tensor, query: Tensor, key: Tensor) -> Tensor:
        real = (key >= 0).long().cumsum(1) - 1
        index = torch.arange(query.shape[1])
        return seen if bool((key < 0).any()) else (real[:, None, :] <= index[None, :, None])

    return piecewise(rule)


@bug("cache-chunks", also=("causality-paths",))
def no_mask_within_a_piece() -> Home:
    return piecewise(lambda seen, query, key: seen if bool((key < 0).any()) else spared(torch.ones_like(seen), key))


@bug("cache-chunks", also=("causality-paths",))
def one_number_for_a_piece() -> Home:
    """The position of a piece is that of its first token."""
    return renumbered(lambda positions, before: positions if before == 5 else positions[:, :1].expand_as(positions))


# --------------------------------------------------------------------------------------------------------- poison


def peeking(rule: Any) -> Home:
    model = Home()
    for block in model.blocks:
        plain = block.attention.visible
        block.attention.visible = lambda query, key, plain=plain: rule(plain(query, key), query, key)
    return model


@bug("cache-poison", also=("left-padding", "generation", "right-padding", "pad-contents"))
def empty_slots_that_are_seen() -> Home:
    return peeking(lambda seen, query, key: seen | ((key < 0)[:, None, :] & (query >= 0)[:, :, None]))


@bug("cache-poison")
def one_empty_slot_that_is_seen() -> tuple[Home, dict[str, Any]]:
    """The slot before the first token counts as filled."""
    model = Home()
    right = model.poisoned

    def poisoned(tokens: Tensor, value: float) -> Tensor:
        for block in model.blocks:
            plain = type(block.attention).visible.__get__(block.attention)
            block.attention.visible = lambda query, key, plain=plain: (
                plain(query, key) | (torch.arange(key.shape[1]) == 4)
            )
        try:
            return right(tokens, value)
        finally:
            for block in model.blocks:
                del block.attention.visible

    return model, offers(model) | {"poisoned": poisoned}


# --------------------------------------------------------------------------------------------------------- window

WIDE = 40
"""A window that the text of the other checks does not leave."""


def kept(slots: int) -> Home:
    """A cache that keeps so many of the last tokens beside the new ones."""

    def rule(one: Any, k: Tensor, v: Tensor, positions: Tensor, state: Any) -> Any:
        if state is None:
            return k, v, positions
        return joined(k, v, positions, (state[0][:, :, -slots:], state[1][:, :, -slots:], state[2][:, -slots:]))

    return remembering(Home(window=WIDE), rule)


@bug("cache-window")
def a_ring_with_one_slot_too_few() -> Home:
    return kept(WIDE - 2)


@bug("cache-window")
def a_window_that_is_left_one_late() -> Home:
    """Behind a cache, the window is one token wider."""
    model = Home(window=WIDE)
    for block in model.blocks:
        one = block.attention
        plain = one.visible

        def visible(query: Tensor, key: Tensor, one: Any = one, plain: Any = plain) -> Tensor:
            one.window = WIDE + (query.shape[1] < key.shape[1])
            return plain(query, key)

        one.visible = visible
    return model


@bug("cache-window")
def a_ring_that_mixes_the_order() -> Home:
    """When it wraps, slots keep the positions of the tokens that were there before."""

    def rule(one: Any, k: Tensor, v: Tensor, positions: Tensor, state: Any) -> Any:
        if state is None:
            return k, v, positions
        keys, values, held = joined(k, v, positions, state)
        if keys.shape[2] > WIDE + 3:
            keys = torch.cat((keys[:, :, :-1].roll(1, 2), keys[:, :, -1:]), 2)
        return keys, values, held

    return remembering(Home(window=WIDE), rule)


# ---------------------------------------------------------------------------------------------------------- reuse


@bug("cache-reuse")
def a_cache_that_stays_in_the_module() -> tuple[Home, dict[str, Any]]:
    """It is emptied only where the next text has as many rows."""
    model = Home()
    left: list[Any] = [None]

    def cached(tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        if state is None and left[0] is not None and len(left[0][0][0]) > len(tokens):
            state = [tuple(x[: len(tokens)] for x in layer) for layer in left[0]]
        logits, left[0] = model(tokens, state=state)
        return logits, left[0]

    return model, offers(model) | {"cached": cached}


@bug("cache-reuse", also=("generation",))
def a_state_that_writing_leaves_behind() -> Home:
    """The cache of the text before is read again, if there was one for as many rows."""
    model = Home()
    left: dict[int, Any] = {}

    def write(tokens: Tensor, n: int, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            return Home.write(model, tokens, n, mask)
        logits, state = model(tokens, state=left.get(len(tokens)))
        chosen = [logits[:, -1:].argmax(-1)]
        for _ in range(n - 1):
            logits, state = model(chosen[-1], state=state)
            chosen.append(logits[:, -1:].argmax(-1))
        left[len(tokens)] = state
        return torch.cat(chosen, 1)

    model.write = write  # type: ignore[method-assign]
    return model
