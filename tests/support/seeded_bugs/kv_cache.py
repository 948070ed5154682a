"""Seeded bugs in the KV cache: decode, chunked prefill, unused slots, sliding window, reuse."""

from types import MethodType
from typing import Any

import torch
import transformers
from support.seeded_bugs.reference_gpt import Attention, ReferenceGPT, check_kwargs
from support.seeded_bugs.registry import seeded_bug
from torch import Tensor


def patch_cached_positions(rule: Any) -> ReferenceGPT:
    """A model whose positions after cached tokens are `rule(correct positions, number of cached tokens)`."""
    model = ReferenceGPT()
    original = model.number_tokens

    def number(tokens: Tensor, mask: Tensor | None, before: Tensor | None) -> Tensor:
        positions = original(tokens, mask, before)
        return positions if before is None else rule(positions, before.shape[1])

    model.number_tokens = number  # type: ignore[method-assign]
    return model


def patch_update_cache(model: ReferenceGPT, rule: Any) -> ReferenceGPT:
    """Replace update_cache by `rule(attention, k, v, positions, cache)`."""
    for block in model.blocks:
        attention = block.attention
        attention.update_cache = lambda k, v, positions, cache, attention=attention: rule(
            attention, k, v, positions, cache
        )
    return model


def concat_cache(k: Tensor, v: Tensor, positions: Tensor, cache: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.cat((cache[0], k), 2), torch.cat((cache[1], v), 2), torch.cat((cache[2], positions), 1)


# cache-decode


@seeded_bug("cache-decode")
def positions_off_by_one() -> ReferenceGPT:
    return patch_cached_positions(lambda positions, before: positions + 1)


@seeded_bug("cache-decode")
def last_key_stored_twice() -> ReferenceGPT:
    """The last cached key is stored again with the next one."""

    def rule(attention: Any, k: Tensor, v: Tensor, positions: Tensor, cache: Any) -> Any:
        if cache is None:
            return k, v, positions
        duplicated = [torch.cat((x, x[:, :, -1:]), 2) for x in cache[:2]]
        return concat_cache(k, v, positions, (*duplicated, torch.cat((cache[2], cache[2][:, -1:]), 1)))

    return patch_update_cache(ReferenceGPT(), rule)


@seeded_bug("cache-decode")
def batch_rows_flipped() -> ReferenceGPT:
    def rule(attention: Any, k: Tensor, v: Tensor, positions: Tensor, cache: Any) -> Any:
        return (k, v, positions) if cache is None else concat_cache(k, v, positions, [x.flip(0) for x in cache])

    return patch_update_cache(ReferenceGPT(), rule)


@seeded_bug("cache-decode")
def rope_applied_twice() -> ReferenceGPT:
    """RoPE is applied again to cached keys."""

    def rule(attention: Any, k: Tensor, v: Tensor, positions: Tensor, cache: Any) -> Any:
        if cache is None:
            return k, v, positions
        return concat_cache(k, v, positions, (attention.apply_rope(cache[0], cache[2].clamp(min=0)), *cache[1:]))

    return patch_update_cache(ReferenceGPT(), rule)


@seeded_bug("cache-decode")
def cache_drops_tokens_beyond_48() -> ReferenceGPT:
    """The cache keeps the last 48 tokens, although attention has no window."""

    def rule(attention: Any, k: Tensor, v: Tensor, positions: Tensor, cache: Any) -> Any:
        if cache is None:
            return k, v, positions
        k, v, positions = concat_cache(k, v, positions, cache)
        return k[:, :, -48:], v[:, :, -48:], positions[:, -48:]

    return patch_update_cache(ReferenceGPT(), rule)


@seeded_bug("cache-decode")
def slot_clamped_at_the_end_of_the_cache() -> tuple[ReferenceGPT, dict[str, Any]]:
    """The last slots of a cache for 96 tokens are never written: the index is clamped, as in jax.lax updates."""

    def rule(attention: Any, k: Tensor, v: Tensor, positions: Tensor, cache: Any) -> Any:
        if cache is None:
            return k, v, positions
        if cache[0].shape[2] >= 94:
            cache = (cache[0][:, :, :-1], cache[1][:, :, :-1], cache[2][:, :-1])
        return concat_cache(k, v, positions, cache)

    model = patch_update_cache(ReferenceGPT(), rule)
    return model, check_kwargs(model) | {"max_seq_len": 96}


class RestartingGPT2(transformers.GPT2LMHeadModel):
    """Positions restart at 0 after cached tokens."""

    def forward(self, input_ids: Any = None, past_key_values: Any = None, **kwargs: Any) -> Any:
        if past_key_values is not None and past_key_values.get_seq_length():
            kwargs["position_ids"] = torch.arange(input_ids.shape[1])[None]
        return super().forward(input_ids=input_ids, past_key_values=past_key_values, **kwargs)


@seeded_bug("cache-decode")
def positions_restart() -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    no_special_tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    sizes = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2}
    return RestartingGPT2(transformers.GPT2Config(**sizes, **no_special_tokens)).eval(), {}


# cache-chunked-prefill


def patch_chunk_mask(rule: Any) -> ReferenceGPT:
    """A model with another mask for chunks after cached tokens: `rule(correct mask, query, key)`."""
    model = ReferenceGPT()
    for block in model.blocks:
        original = block.attention.visible

        def visible(query: Tensor, key: Tensor, original: Any = original) -> Tensor:
            mask = original(query, key)
            return rule(mask, query, key) if 1 < query.shape[1] < key.shape[1] else mask

        block.attention.visible = visible
    return model


def mask_empty_slots(mask: Tensor, key: Tensor) -> Tensor:
    """Also mask slots without a token."""
    return mask & (key >= 0)[:, None, :]


@seeded_bug("cache-chunked-prefill")
def causal_mask_top_left_aligned() -> ReferenceGPT:
    """`is_causal=True` with more keys than queries."""

    def rule(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
        key_index = (key >= 0).long().cumsum(1) - 1
        query_index = torch.arange(query.shape[1])
        return mask if bool((key < 0).any()) else (key_index[:, None, :] <= query_index[None, :, None])

    return patch_chunk_mask(rule)


@seeded_bug("cache-chunked-prefill", also_caught_by=("causality-paths",))
def no_mask_within_chunk() -> ReferenceGPT:
    return patch_chunk_mask(
        lambda mask, query, key: mask if bool((key < 0).any()) else mask_empty_slots(torch.ones_like(mask), key)
    )


@seeded_bug("cache-chunked-prefill", also_caught_by=("causality-paths",))
def same_position_within_chunk() -> ReferenceGPT:
    """All tokens of a chunk have the position of its first token."""
    return patch_cached_positions(
        lambda positions, before: positions if before == 5 else positions[:, :1].expand_as(positions)
    )


# cache-unused-slots


def patch_visible(rule: Any) -> ReferenceGPT:
    """A model whose attention mask is `rule(correct mask, query, key)`."""
    model = ReferenceGPT()
    for block in model.blocks:
        original = block.attention.visible
        block.attention.visible = lambda query, key, original=original: rule(original(query, key), query, key)
    return model


@seeded_bug("cache-unused-slots", also_caught_by=("left-padding", "generation", "right-padding", "padding-leak"))
def empty_slots_visible() -> ReferenceGPT:
    return patch_visible(lambda mask, query, key: mask | ((key < 0)[:, None, :] & (query >= 0)[:, :, None]))


@seeded_bug("cache-unused-slots")
def one_empty_slot_visible() -> tuple[ReferenceGPT, dict[str, Any]]:
    """The unused slot before the first token is visible."""
    model = ReferenceGPT()
    original_logits = model.logits_with_filled_cache

    def logits_with_filled_cache(tokens: Tensor, value: float) -> Tensor:
        for block in model.blocks:
            original = type(block.attention).visible.__get__(block.attention)
            block.attention.visible = lambda query, key, original=original: (
                original(query, key) | (torch.arange(key.shape[1]) == 4)
            )
        try:
            return original_logits(tokens, value)
        finally:
            for block in model.blocks:
                del block.attention.visible

    return model, check_kwargs(model) | {"logits_with_filled_cache": logits_with_filled_cache}


# cache-sliding-window

WINDOW = 40
"""A window longer than the sequences of the other checks."""


def rolling_cache_model(num_slots: int) -> ReferenceGPT:
    """A rolling cache that keeps the last `num_slots` tokens in addition to the new ones."""

    def rule(attention: Any, k: Tensor, v: Tensor, positions: Tensor, cache: Any) -> Any:
        if cache is None:
            return k, v, positions
        return concat_cache(
            k, v, positions, (cache[0][:, :, -num_slots:], cache[1][:, :, -num_slots:], cache[2][:, -num_slots:])
        )

    return patch_update_cache(ReferenceGPT(window=WINDOW), rule)


@seeded_bug("cache-sliding-window")
def ring_one_slot_too_small() -> ReferenceGPT:
    return rolling_cache_model(WINDOW - 2)


@seeded_bug("cache-sliding-window")
def cached_window_one_too_wide() -> ReferenceGPT:
    """With cached tokens, the window is one token longer."""
    model = ReferenceGPT(window=WINDOW)
    for block in model.blocks:
        attention = block.attention
        original = attention.visible

        def visible(query: Tensor, key: Tensor, attention: Any = attention, original: Any = original) -> Tensor:
            attention.window = WINDOW + (query.shape[1] < key.shape[1])
            return original(query, key)

        attention.visible = visible
    return model


@seeded_bug("cache-sliding-window")
def ring_scrambles_order() -> ReferenceGPT:
    """After the ring buffer wraps, slots have the positions of the previous tokens."""

    def rule(attention: Any, k: Tensor, v: Tensor, positions: Tensor, cache: Any) -> Any:
        if cache is None:
            return k, v, positions
        keys, values, key_positions = concat_cache(k, v, positions, cache)
        if keys.shape[2] > WINDOW + 3:
            keys = torch.cat((keys[:, :, :-1].roll(1, 2), keys[:, :, -1:]), 2)
        return keys, values, key_positions

    return patch_update_cache(ReferenceGPT(window=WINDOW), rule)


# cache-reuse


@seeded_bug("cache-reuse")
def cache_kept_in_module() -> tuple[ReferenceGPT, dict[str, Any]]:
    """The cache is reset only if the next batch has at least as many rows."""
    model = ReferenceGPT()
    stored: list[Any] = [None]

    def logits_with_cache(tokens: Tensor, cache: Any) -> tuple[Tensor, Any]:
        if cache is None and stored[0] is not None and len(stored[0][0][0]) > len(tokens):
            cache = [tuple(x[: len(tokens)] for x in layer) for layer in stored[0]]
        logits, stored[0] = model(tokens, cache=cache)
        return logits, stored[0]

    return model, check_kwargs(model) | {"logits_with_cache": logits_with_cache}


@seeded_bug("cache-reuse", also_caught_by=("generation",))
def generate_leaves_cache() -> ReferenceGPT:
    """The cache of the previous prompt with the same batch size is reused."""
    model = ReferenceGPT()
    caches: dict[int, Any] = {}

    def generate(tokens: Tensor, n: int, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            return ReferenceGPT.generate(model, tokens, n, mask)
        logits, cache = model(tokens, cache=caches.get(len(tokens)))
        new_tokens = [logits[:, -1:].argmax(-1)]
        for _ in range(n - 1):
            logits, cache = model(new_tokens[-1], cache=cache)
            new_tokens.append(logits[:, -1:].argmax(-1))
        caches[len(tokens)] = cache
        return torch.cat(new_tokens, 1)

    model.generate = generate  # type: ignore[method-assign]
    return model


# cache-padding


@seeded_bug("cache-padding")
def cached_padding_is_visible() -> tuple[ReferenceGPT, dict[str, Any]]:
    """Decode steps attend to the cached padding of a left-padded batch."""
    model = ReferenceGPT()

    def visible(self: Attention, query: Tensor, key: Tensor) -> Tensor:
        mask = Attention.visible(self, query, key)
        return mask | (key[:, None, :] < 0) if query.shape[1] == 1 else mask

    for block in model.blocks:
        block.attention.visible = MethodType(visible, block.attention)
    kwargs = check_kwargs(model)
    return model, {name: kwargs[name] for name in ("logits", "logits_with_cache", "logits_with_padded_cache")}


@seeded_bug("cache-padding")
def positions_of_new_tokens_count_padding() -> tuple[ReferenceGPT, dict[str, Any]]:
    model = ReferenceGPT()

    def number_tokens(tokens: Tensor, mask: Tensor | None, cached_positions: Tensor | None) -> Tensor:
        if cached_positions is None:
            return ReferenceGPT.number_tokens(model, tokens, mask, None)
        return (cached_positions.shape[1] + torch.arange(tokens.shape[1])).expand_as(tokens)

    model.number_tokens = number_tokens  # type: ignore[method-assign]
    kwargs = check_kwargs(model)
    return model, {name: kwargs[name] for name in ("logits", "logits_with_padded_cache")}


# cache-decode, found without logits_with_cache=: the arguments of forward are recognized


class StatefulGPT(ReferenceGPT):
    """Forward takes start_pos and keeps the cache in the module, as in Meta's Llama; positions restart at zero."""

    def forward(self, tokens: Tensor, start_pos: int = 0) -> Tensor:  # type: ignore[override]
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        self.state = self.state if start_pos else None
        logits, self.state = ReferenceGPT.forward(self, tokens, position_ids=positions, cache=self.state)
        return logits

    state: Any = None


class CacheArgumentGPT(ReferenceGPT):
    """Forward takes `cache` and returns (logits, cache); decode steps restart positions at zero."""

    def forward(self, tokens: Tensor, cache: Any = None) -> tuple[Tensor, Any]:  # type: ignore[override]
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        return ReferenceGPT.forward(self, tokens, position_ids=positions, cache=cache)


class PastKeyValuesGPT(ReferenceGPT):
    """Forward takes past_key_values and use_cache; decode steps restart positions at zero."""

    def forward(  # type: ignore[override]
        self, tokens: Tensor, past_key_values: Any = None, use_cache: bool = False
    ) -> tuple[Any, ...]:
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        logits, cache = ReferenceGPT.forward(self, tokens, position_ids=positions, cache=past_key_values)
        return (logits, cache) if use_cache else (logits,)


@seeded_bug("cache-decode", also_caught_by=("causality-paths",))
def start_pos_ignored() -> tuple[ReferenceGPT, dict[str, Any]]:
    return StatefulGPT(), {}


@seeded_bug("cache-decode")
def cache_argument_restarts_positions() -> tuple[ReferenceGPT, dict[str, Any]]:
    return CacheArgumentGPT(), {}


@seeded_bug("cache-decode")
def past_key_values_restart_positions() -> tuple[ReferenceGPT, dict[str, Any]]:
    return PastKeyValuesGPT(), {}
