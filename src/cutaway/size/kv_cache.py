"""KV cache size by layer: full, sliding-window, latent (MLA) and cross-attention."""

from dataclasses import dataclass

from cutaway.config.attention import LatentAttention, MultiHeadBase
from cutaway.config.stack import CrossBlock
from cutaway.config.transformer import Config, Encoder, EncoderDecoder
from cutaway.size.precision import kv_vector_bytes


@dataclass(frozen=True)
class LayerCacheSize:
    """KV cache size of one attention layer, in bytes per token."""

    kind: str
    """'full', 'window', 'latent' or 'cross'."""
    bytes_per_token: int
    window: int | None
    """Maximum number of cached tokens; None for no limit."""
    expanded_bytes_per_token: int
    """Bytes per token if MLA caches up-projected keys and values; equal to `bytes_per_token` for other attention."""

    def bytes_for(self, num_tokens: int) -> int:
        return self.bytes_per_token * (num_tokens if self.window is None else min(num_tokens, self.window))


@dataclass(frozen=True)
class KVCacheSize:
    """KV cache size of a batch: keys and values of all layers, without the 8 bytes per slot that hold its position."""

    layers: tuple[LayerCacheSize, ...]
    batch_size: int
    context: int
    source_len: int

    def num_tokens(self, layer: LayerCacheSize) -> int:
        return self.source_len if layer.kind == "cross" else self.context

    @property
    def total_bytes(self) -> int:
        """Number of bytes of the KV cache, if sliding-window layers cache only the tokens in their window."""
        return self.batch_size * sum(layer.bytes_for(self.num_tokens(layer)) for layer in self.layers)

    @property
    def unwindowed_bytes(self) -> int:
        """Number of bytes of the KV cache if every layer, also with a sliding window, caches every token."""
        return self.batch_size * sum(layer.bytes_per_token * self.num_tokens(layer) for layer in self.layers)

    @property
    def expanded_bytes(self) -> int:
        """Bytes of the KV cache if every layer caches every token and MLA caches the up-projected keys and values."""
        return self.batch_size * sum(layer.expanded_bytes_per_token * self.num_tokens(layer) for layer in self.layers)

    @property
    def bytes_per_token(self) -> int:
        """Number of bytes that one more token of one sequence adds to the KV cache before any window is full."""
        return sum(layer.bytes_per_token for layer in self.layers if layer.kind != "cross")

    @property
    def by_kind(self) -> dict[str, tuple[int, int]]:
        """Number of attention layers of each kind, and bytes of their KV cache: {kind: (layers, bytes)}."""
        result: dict[str, tuple[int, int]] = {}
        for layer in self.layers:
            count, nbytes = result.get(layer.kind, (0, 0))
            result[layer.kind] = count + 1, nbytes + self.batch_size * layer.bytes_for(self.num_tokens(layer))
        return result


def kv_cache_size(
    config: Config, *, batch_size: int, context: int, source_len: int | None = None, dtype: str = "bf16"
) -> KVCacheSize:
    """Compute the KV cache size of `batch_size` sequences of `context` tokens.

    Encoders have no cache; an encoder-decoder caches target tokens and `source_len` source tokens."""
    d_model = config.d_model
    layers: list[LayerCacheSize] = []
    if not isinstance(config, Encoder):
        for block in config.decoder.blocks:
            attention = block.attention
            if isinstance(attention, LatentAttention):
                per_token = kv_vector_bytes(dtype, attention.kv_rank) + kv_vector_bytes(dtype, attention.d_rope)
                widths = attention.d_nope + attention.d_rope, attention.d_value
                expanded_per_token = attention.heads * sum(kv_vector_bytes(dtype, width) for width in widths)
                layers.append(LayerCacheSize("latent", per_token, attention.window, expanded_per_token))
            else:
                per_token = _kv_bytes_per_token(attention, d_model, dtype)
                kind = "full" if attention.window is None else "window"
                layers.append(LayerCacheSize(kind, per_token, attention.window, per_token))
            if isinstance(config, EncoderDecoder) and isinstance(block, CrossBlock):
                per_token = _kv_bytes_per_token(block.cross, d_model, dtype)
                layers.append(LayerCacheSize("cross", per_token, None, per_token))
    return KVCacheSize(tuple(layers), batch_size, context, source_len or context)


def _kv_bytes_per_token(attention: MultiHeadBase, d_model: int, dtype: str) -> int:
    """Number of bytes of the keys and values of one token: one key and one value vector per key-value head."""
    return 2 * attention.num_kv_heads * kv_vector_bytes(dtype, attention.head_dim(d_model))
