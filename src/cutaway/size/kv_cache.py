"""What a KV cache holds, layer by layer."""

from dataclasses import dataclass

from cutaway.config.attention import LatentAttention, MultiHeadBase
from cutaway.config.stack import CrossBlock
from cutaway.config.transformer import Config, Encoder, EncoderDecoder
from cutaway.size.precision import kv_vector_bytes


@dataclass(frozen=True)
class LayerCacheSize:
    """One attention layer's share."""

    kind: str
    """'full', 'window', 'latent' or 'cross'."""
    bytes_per_token: int
    """Bytes a token."""
    window: int | None
    """Tokens kept at most."""
    expanded_bytes_per_token: int
    """Bytes a token for a runtime that keeps MLA's keys and values expanded; the same for others."""

    def bytes_for(self, num_tokens: int) -> int:
        return self.bytes_per_token * (num_tokens if self.window is None else min(num_tokens, self.window))


@dataclass(frozen=True)
class KVCacheSize:
    """Keys and values of every layer for a batch of sequences; a slot's position (8 bytes) is not counted."""

    layers: tuple[LayerCacheSize, ...]
    batch_size: int
    context: int
    source_len: int

    def num_tokens(self, layer: LayerCacheSize) -> int:
        return self.source_len if layer.kind == "cross" else self.context

    @property
    def total_bytes(self) -> int:
        """With windows used: a sliding layer keeps no more than it can see."""
        return self.batch_size * sum(layer.bytes_for(self.num_tokens(layer)) for layer in self.layers)

    @property
    def unwindowed_bytes(self) -> int:
        """For a runtime that keeps every token in every layer."""
        return self.batch_size * sum(layer.bytes_per_token * self.num_tokens(layer) for layer in self.layers)

    @property
    def expanded_bytes(self) -> int:
        """For a runtime that keeps MLA's keys and values expanded, and every token."""
        return self.batch_size * sum(layer.expanded_bytes_per_token * self.num_tokens(layer) for layer in self.layers)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one more token of one sequence adds, while no window is full."""
        return sum(layer.bytes_per_token for layer in self.layers if layer.kind != "cross")

    @property
    def by_kind(self) -> dict[str, tuple[int, int]]:
        """By kind: how many layers, and their bytes."""
        found: dict[str, tuple[int, int]] = {}
        for layer in self.layers:
            count, size = found.get(layer.kind, (0, 0))
            found[layer.kind] = count + 1, size + self.batch_size * layer.bytes_for(self.num_tokens(layer))
        return found


def kv_cache_size(
    config: Config, *, batch_size: int, context: int, source_len: int | None = None, dtype: str = "bf16"
) -> KVCacheSize:
    """Encoders have none; an encoder-decoder keeps its target's tokens and, once, its source's."""
    d_model = config.d_model
    layers: list[LayerCacheSize] = []
    if not isinstance(config, Encoder):
        for block in config.decoder.blocks:
            attention = block.attention
            if isinstance(attention, LatentAttention):
                token = kv_vector_bytes(dtype, attention.kv_rank) + kv_vector_bytes(dtype, attention.d_rope)
                widths = attention.d_nope + attention.d_rope, attention.d_value
                expanded = attention.heads * sum(kv_vector_bytes(dtype, width) for width in widths)
                layers.append(LayerCacheSize("latent", token, attention.window, expanded))
            else:
                token = _kv_bytes_per_token(attention, d_model, dtype)
                kind = "full" if attention.window is None else "window"
                layers.append(LayerCacheSize(kind, token, attention.window, token))
            if isinstance(config, EncoderDecoder) and isinstance(block, CrossBlock):
                token = _kv_bytes_per_token(block.cross, d_model, dtype)
                layers.append(LayerCacheSize("cross", token, None, token))
    return KVCacheSize(tuple(layers), batch_size, context, source_len or context)


def _kv_bytes_per_token(attention: MultiHeadBase, d_model: int, dtype: str) -> int:
    """A key and a value for each key head: grouped heads share them."""
    return 2 * attention.num_kv_heads * kv_vector_bytes(dtype, attention.head_dim(d_model))
