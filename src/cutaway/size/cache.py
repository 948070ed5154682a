"""What a KV cache holds, layer by layer."""

from dataclasses import dataclass

from cutaway.config.attention import Heads, Latent
from cutaway.config.stack import CrossBlock
from cutaway.config.transformer import Config, Encoder, EncoderDecoder
from cutaway.size.numbers import cached_vector


@dataclass(frozen=True)
class LayerCache:
    """One attention layer's share."""

    kind: str
    """'full', 'window', 'latent' or 'cross'."""
    token: int
    """Bytes a token."""
    window: int | None
    """Tokens kept at most."""
    expanded: int
    """Bytes a token for a runtime that keeps MLA's keys and values expanded; the same for others."""

    def bytes(self, tokens: int) -> int:
        return self.token * (tokens if self.window is None else min(tokens, self.window))


@dataclass(frozen=True)
class KVCache:
    """Keys and values of every layer for a batch of sequences; a slot's position (8 bytes) is not counted."""

    layers: tuple[LayerCache, ...]
    batch: int
    context: int
    source: int

    def tokens_of(self, layer: LayerCache) -> int:
        return self.source if layer.kind == "cross" else self.context

    @property
    def bytes(self) -> int:
        """With windows used: a sliding layer keeps no more than it can see."""
        return self.batch * sum(layer.bytes(self.tokens_of(layer)) for layer in self.layers)

    @property
    def unwindowed(self) -> int:
        """For a runtime that keeps every token in every layer."""
        return self.batch * sum(layer.token * self.tokens_of(layer) for layer in self.layers)

    @property
    def expanded(self) -> int:
        """For a runtime that keeps MLA's keys and values expanded, and every token."""
        return self.batch * sum(layer.expanded * self.tokens_of(layer) for layer in self.layers)

    @property
    def token(self) -> int:
        """Bytes that one more token of one sequence adds, while no window is full."""
        return sum(layer.token for layer in self.layers if layer.kind != "cross")

    @property
    def kinds(self) -> dict[str, tuple[int, int]]:
        """By kind: how many layers, and their bytes."""
        found: dict[str, tuple[int, int]] = {}
        for layer in self.layers:
            count, size = found.get(layer.kind, (0, 0))
            found[layer.kind] = count + 1, size + self.batch * layer.bytes(self.tokens_of(layer))
        return found


def kv_cache(config: Config, *, batch: int, context: int, source: int | None = None, dtype: str = "bf16") -> KVCache:
    """Encoders have none; an encoder-decoder keeps its target's tokens and, once, its source's."""
    d_model = config.d_model
    layers: list[LayerCache] = []
    if not isinstance(config, Encoder):
        for block in config.decoder.blocks:
            attention = block.attention
            if isinstance(attention, Latent):
                token = cached_vector(dtype, attention.kv_rank) + cached_vector(dtype, attention.d_rope)
                widths = attention.d_nope + attention.d_rope, attention.d_value
                expanded = attention.heads * sum(cached_vector(dtype, width) for width in widths)
                layers.append(LayerCache("latent", token, attention.window, expanded))
            else:
                token = heads_token(attention, d_model, dtype)
                kind = "full" if attention.window is None else "window"
                layers.append(LayerCache(kind, token, attention.window, token))
            if isinstance(config, EncoderDecoder) and isinstance(block, CrossBlock):
                token = heads_token(block.cross, d_model, dtype)
                layers.append(LayerCache("cross", token, None, token))
    return KVCache(tuple(layers), batch, context, source or context)


def heads_token(attention: Heads, d_model: int, dtype: str) -> int:
    """A key and a value for each key head: grouped heads share them."""
    return 2 * attention.n_kv_heads * cached_vector(dtype, attention.head_width(d_model))
