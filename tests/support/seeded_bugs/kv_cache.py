"""Bugs of caches: what is remembered is not what was read."""

from typing import Any

import torch
import transformers
from support.seeded_bugs.reference_gpt import ReferenceGPT, check_kwargs
from support.seeded_bugs.registry import seeded_bug
from torch import Tensor


def patch_cached_positions(rule: Any) -> ReferenceGPT:
    """A model that numbers the tokens behind a cache otherwise: rule(positions as they should be, tokens before)."""
    model = ReferenceGPT()
    plain = model.number_tokens

    def number(tokens: Tensor, mask: Tensor | None, before: Tensor | None) -> Tensor:
        positions = plain(tokens, mask, before)
        return positions if before is None else rule(positions, before.shape[1])

    model.number_tokens = number  # type: ignore[method-assign]
    return model


def patch_update_cache(model: ReferenceGPT, rule: Any) -> ReferenceGPT:
    """A model whose attention remembers by another rule: rule(attention, k, v, positions, cache)."""
    for block in model.blocks:
        one = block.attention
        one.update_cache = lambda k, v, positions, state, one=one: rule(one, k, v, positions, state)
    return model


def concat_cache(k: Tensor, v: Tensor, positions: Tensor, cache: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.cat((cache[0], k), 2), torch.cat((cache[1], v), 2), torch.cat((cache[2], positions), 1)


# ---------------------------------------------------------------------------------------------------------- steps


@seeded_bug("cache-decode")
def positions_off_by_one() -> ReferenceGPT:
    return patch_cached_positions(lambda positions, before: positions + 1)


@seeded_bug("cache-decode")
def last_key_stored_twice() -> ReferenceGPT:
    """The last key of what was read is stored again with the next."""

    def rule(one: Any, k: Tensor, v: Tensor, positions: Tensor, state: Any) -> Any:
        if state is None:
            return k, v, positions
        twice = [torch.cat((x, x[:, :, -1:]), 2) for x in state[:2]]
        return concat_cache(k, v, positions, (*twice, torch.cat((state[2], state[2][:, -1:]), 1)))

    return patch_update_cache(ReferenceGPT(), rule)


@seeded_bug("cache-decode")
def batch_rows_flipped() -> ReferenceGPT:
    def rule(one: Any, k: Tensor, v: Tensor, positions: Tensor, state: Any) -> Any:
        return (k, v, positions) if state is None else concat_cache(k, v, positions, [x.flip(0) for x in state])

    return patch_update_cache(ReferenceGPT(), rule)


@seeded_bug("cache-decode")
def rope_applied_twice() -> ReferenceGPT:
    """Stored keys are turned again, by their position, when they are read."""

    def rule(one: Any, k: Tensor, v: Tensor, positions: Tensor, state: Any) -> Any:
        if state is None:
            return k, v, positions
        return concat_cache(k, v, positions, (one.apply_rope(state[0], state[2].clamp(min=0)), *state[1:]))

    return patch_update_cache(ReferenceGPT(), rule)


class RestartingGPT2(transformers.GPT2LMHeadModel):
    """Positions begin anew behind a cache."""

    def forward(self, input_ids: Any = None, past_key_values: Any = None, **kwargs: Any) -> Any:
        if past_key_values is not None and past_key_values.get_seq_length():
            kwargs["position_ids"] = torch.arange(input_ids.shape[1])[None]
        return super().forward(input_ids=input_ids, past_key_values=past_key_values, **kwargs)


@seeded_bug("cache-decode")
def positions_restart() -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    none = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    how = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2}
    return RestartingGPT2(transformers.GPT2Config(**how, **none)).eval(), {}


# --------------------------------------------------------------------------------------------------------- chunks


def patch_chunk_mask(rule: Any) -> ReferenceGPT:
    """A model that sees by another rule wherever several tokens are read behind a cache."""
    model = ReferenceGPT()
    for block in model.blocks:
        plain = block.attention.visible

        def visible(query: Tensor, key: Tensor, plain: Any = plain) -> Tensor:
            seen = plain(query, key)
            return rule(seen, query, key) if 1 < query.shape[1] < key.shape[1] else seen

        block.attention.visible = visible
    return model


def hide_empty_slots(mask: Tensor, key: Tensor) -> Tensor:
    """Slots without a token stay hidden."""
    return mask & (key >= 0)[:, None, :]


@seeded_bug("cache-chunked-prefill")
def causal_mask_top_left_aligned() -> ReferenceGPT:
    """`is_causal=True` with more keys than queries."""

    def rule(seen: Tensor, query: Tensor, key: Tensor) -> Tensor:
        real = (key >= 0).long().cumsum(1) - 1
        index = torch.arange(query.shape[1])
        return seen if bool((key < 0).any()) else (real[:, None, :] <= index[None, :, None])

    return patch_chunk_mask(rule)


@seeded_bug("cache-chunked-prefill", also_caught_by=("causality-paths",))
def no_mask_within_chunk() -> ReferenceGPT:
    return patch_chunk_mask(
        lambda seen, query, key: seen if bool((key < 0).any()) else hide_empty_slots(torch.ones_like(seen), key)
    )


@seeded_bug("cache-chunked-prefill", also_caught_by=("causality-paths",))
def same_position_within_chunk() -> ReferenceGPT:
    """The position of a piece is that of its first token."""
    return patch_cached_positions(
        lambda positions, before: positions if before == 5 else positions[:, :1].expand_as(positions)
    )


# --------------------------------------------------------------------------------------------------------- poison


def patch_visible(rule: Any) -> ReferenceGPT:
    model = ReferenceGPT()
    for block in model.blocks:
        plain = block.attention.visible
        block.attention.visible = lambda query, key, plain=plain: rule(plain(query, key), query, key)
    return model


@seeded_bug("cache-unused-slots", also_caught_by=("left-padding", "generation", "right-padding", "padding-leak"))
def empty_slots_visible() -> ReferenceGPT:
    return patch_visible(lambda seen, query, key: seen | ((key < 0)[:, None, :] & (query >= 0)[:, :, None]))


@seeded_bug("cache-unused-slots")
def one_empty_slot_visible() -> tuple[ReferenceGPT, dict[str, Any]]:
    """The slot before the first token counts as filled."""
    model = ReferenceGPT()
    right = model.logits_with_filled_cache

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

    return model, check_kwargs(model) | {"logits_with_filled_cache": poisoned}


# --------------------------------------------------------------------------------------------------------- window

WINDOW = 40
"""A window that the text of the other checks does not leave."""


def rolling_cache_model(num_slots: int) -> ReferenceGPT:
    """A cache that keeps so many of the last tokens beside the new ones."""

    def rule(one: Any, k: Tensor, v: Tensor, positions: Tensor, state: Any) -> Any:
        if state is None:
            return k, v, positions
        return concat_cache(
            k, v, positions, (state[0][:, :, -num_slots:], state[1][:, :, -num_slots:], state[2][:, -num_slots:])
        )

    return patch_update_cache(ReferenceGPT(window=WINDOW), rule)


@seeded_bug("cache-sliding-window")
def ring_one_slot_too_small() -> ReferenceGPT:
    return rolling_cache_model(WINDOW - 2)


@seeded_bug("cache-sliding-window")
def cached_window_one_too_wide() -> ReferenceGPT:
    """Behind a cache, the window is one token wider."""
    model = ReferenceGPT(window=WINDOW)
    for block in model.blocks:
        one = block.attention
        plain = one.visible

        def visible(query: Tensor, key: Tensor, one: Any = one, plain: Any = plain) -> Tensor:
            one.window = WINDOW + (query.shape[1] < key.shape[1])
            return plain(query, key)

        one.visible = visible
    return model


@seeded_bug("cache-sliding-window")
def ring_scrambles_order() -> ReferenceGPT:
    """When it wraps, slots keep the positions of the tokens that were there before."""

    def rule(one: Any, k: Tensor, v: Tensor, positions: Tensor, state: Any) -> Any:
        if state is None:
            return k, v, positions
        keys, values, held = concat_cache(k, v, positions, state)
        if keys.shape[2] > WINDOW + 3:
            keys = torch.cat((keys[:, :, :-1].roll(1, 2), keys[:, :, -1:]), 2)
        return keys, values, held

    return patch_update_cache(ReferenceGPT(window=WINDOW), rule)


# ---------------------------------------------------------------------------------------------------------- reuse


@seeded_bug("cache-reuse")
def cache_kept_in_module() -> tuple[ReferenceGPT, dict[str, Any]]:
    """It is emptied only where the next text has as many rows."""
    model = ReferenceGPT()
    left: list[Any] = [None]

    def cached(tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        if state is None and left[0] is not None and len(left[0][0][0]) > len(tokens):
            state = [tuple(x[: len(tokens)] for x in layer) for layer in left[0]]
        logits, left[0] = model(tokens, cache=state)
        return logits, left[0]

    return model, check_kwargs(model) | {"logits_with_cache": cached}


@seeded_bug("cache-reuse", also_caught_by=("generation",))
def generate_leaves_cache() -> ReferenceGPT:
    """The cache of the text before is read again, if there was one for as many rows."""
    model = ReferenceGPT()
    left: dict[int, Any] = {}

    def write(tokens: Tensor, n: int, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            return ReferenceGPT.generate(model, tokens, n, mask)
        logits, state = model(tokens, cache=left.get(len(tokens)))
        chosen = [logits[:, -1:].argmax(-1)]
        for _ in range(n - 1):
            logits, state = model(chosen[-1], cache=state)
            chosen.append(logits[:, -1:].argmax(-1))
        left[len(tokens)] = state
        return torch.cat(chosen, 1)

    model.generate = write  # type: ignore[method-assign]
    return model
