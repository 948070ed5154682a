"""A stack: embedding, blocks, final norm. Encoder and decoder differ in `causal` and in cross-attention."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

import cutaway.config as cfg
from cutaway.model.activation_checkpointing import ActivationCheckpointing, run_block
from cutaway.model.attention import LayerContext
from cutaway.model.block import build_block
from cutaway.model.cache import Cache, CacheShape, SlotMapping
from cutaway.model.embedding import Embedding
from cutaway.model.kernels import Kernel
from cutaway.model.layers import EmbeddingTable
from cutaway.model.masks import MaskSpec, TokenPositions, cross_attention_mask, self_attention_mask
from cutaway.model.norms import build_norm
from cutaway.model.positions import Alibi, Disentangled, RelativeBias, ScoreBias
from cutaway.model.rope import Rope


def build_position(attention: cfg.Attention, d_model: int, *, causal: bool) -> Rope | ScoreBias | Disentangled | None:
    """Build the position method that acts inside attention: RoPE, ALiBi, relative bias, disentangled, or None."""
    position = attention.position
    if isinstance(position, cfg.Rope):
        return Rope(position, position.rotary_dim or attention.max_rotary_dim(d_model))
    if isinstance(position, cfg.Alibi):
        return Alibi(position, attention.heads)
    if isinstance(position, cfg.RelativeBias):
        return RelativeBias(position, attention.heads, causal=causal)
    if isinstance(position, cfg.Disentangled):
        return Disentangled(position, d_model)
    return None


class Stack(nn.Module):
    """Embedding, blocks and final norm: maps token ids to the residual stream after the final norm."""

    def __init__(self, config: cfg.Stack, d_model: int, token_table: EmbeddingTable, *, causal: bool) -> None:
        super().__init__()
        self.causal, self.vocab_size = causal, token_table.num_embeddings
        self.embed = Embedding(config.embedding, d_model, token_table)
        weight_sets = config.weight_sets  # ALBERT: layers with the same weight set are the same block
        first_layers = [weight_sets.index(index) for index in range(max(weight_sets) + 1)]
        blocks = [build_block(config.blocks[i], config, d_model, is_first=i == 0) for i in first_layers]
        self.blocks = nn.ModuleList(blocks[index] for index in weight_sets)
        # Layers with the same position method share it: RoPE angles are computed once per pass, T5's bias is one table.
        keys = [_position_sharing_key(config, layer, d_model) for layer in range(config.layers)]
        first = [keys.index(key) for key in keys]  # for each layer, the first layer with the same key
        self.positions = nn.ModuleDict()
        for layer in sorted(set(first)):
            position = build_position(config.blocks[layer].attention, d_model, causal=causal)
            if position is not None:
                self.positions[str(layer)] = position
        self.layer_position_keys = [str(layer) for layer in first]
        ropes = [rope for rope in self.positions.values() if isinstance(rope, Rope) and not rope.is_dynamic_ntk]
        self.rope_switch_lengths = sorted({rope.switch_length for rope in ropes if rope.switch_length is not None})
        """Sequence lengths at which LongRoPE changes the angles of all tokens; a cached row cannot grow past them."""
        self.windows = [block.attention.window for block in config.blocks]
        self.final_norm = build_norm(config.norm if config.placement.final_norm else cfg.NoNorm(), d_model)
        self.final_dropout = config.final_dropout
        self.activation_checkpointing: list[ActivationCheckpointing] = ["none"] * config.layers
        """Mode of each layer."""

    @property
    def cache_shapes(self) -> list[CacheShape]:
        """Shape of each layer's cached keys and values."""
        return [block.attn.f.cache_shape for block in self.blocks]  # type: ignore[union-attr, misc]

    def forward(
        self,
        tokens: Int[Tensor, "B T"],
        token_positions: TokenPositions,
        token_types: Int[Tensor, "B T"] | None = None,
        memory: Float[Tensor, "B S d"] | None = None,
        memory_positions: TokenPositions | None = None,
        cache: Cache | None = None,
        slot_mappings: dict[int, SlotMapping] | None = None,
    ) -> Float[Tensor, "B T d"]:
        x = self.embed(tokens, token_positions, token_types)
        contexts = self.build_layer_contexts(token_positions, x.dtype, cache, slot_mappings or {})
        if memory_positions is not None:
            mask_spec = cross_attention_mask(token_positions, memory_positions)
            self.add_cross_attention_context(contexts, memory, mask_spec, x.dtype, cache)
        return F.dropout(self.run_blocks(x, contexts), self.final_dropout, self.training)

    def run_blocks(self, x: Float[Tensor, "B T d"], contexts: list[LayerContext]) -> Float[Tensor, "B T d"]:
        """Apply all blocks and the final norm."""
        for mode, block, context in zip(self.activation_checkpointing, self.blocks, contexts, strict=True):
            x = run_block(mode, block, x, context)
        return self.final_norm(x)

    def build_layer_contexts(
        self,
        token_positions: TokenPositions,
        dtype: torch.dtype,
        cache: Cache | None,
        slot_mappings: dict[int, SlotMapping],
    ) -> list[LayerContext]:
        """Build each layer's context. Layers with equal positions, windows and kernels share angles and masks."""
        ropes = {key: rope(token_positions, dtype) for key, rope in self.positions.items() if isinstance(rope, Rope)}
        biases = {key: bias for key, bias in self.positions.items() if isinstance(bias, ScoreBias)}
        tables = {key: table for key, table in self.positions.items() if isinstance(table, Disentangled)}
        prepared: dict[tuple[str | None, int | None, str, int | None], Any] = {}
        contexts = []
        for layer, (position, window) in enumerate(zip(self.layer_position_keys, self.windows, strict=True)):
            kernel = _get_kernel(self.blocks[layer].attn)
            bias, table = biases.get(position), tables.get(position)
            layer_cache = None if cache is None else cache.layers[layer]
            num_slots = None if layer_cache is None else layer_cache.num_slots
            slot_mapping = None if num_slots is None else slot_mappings[num_slots]
            key = None if bias is None and table is None else position, window, kernel.name, num_slots
            if key not in prepared:
                key_positions = token_positions if slot_mapping is None else slot_mapping.key_positions
                mask_spec = self_attention_mask(token_positions, key_positions, is_causal=self.causal, window=window)
                relative = None if table is None else table(token_positions.position, key_positions.position)
                prepared[key] = kernel.prepare_mask(mask_spec, bias, dtype), relative
            mask, relative = prepared[key]
            contexts.append(LayerContext(mask, ropes.get(position), layer_cache, slot_mapping, relative))
        return contexts

    def add_cross_attention_context(
        self,
        contexts: list[LayerContext],
        memory: Float[Tensor, "B S d"] | None,
        mask_spec: MaskSpec,
        dtype: torch.dtype,
        cache: Cache | None,
    ) -> None:
        """Add the encoder output, its mask and its cache to each layer's context."""
        prepared: dict[str, Any] = {}
        for layer, context in enumerate(contexts):
            kernel = _get_kernel(self.blocks[layer].cross)
            if kernel.name not in prepared:
                prepared[kernel.name] = kernel.prepare_mask(mask_spec, None, dtype)
            context.memory, context.prepared_cross_mask = memory, prepared[kernel.name]
            context.cross_cache = None if cache is None or cache.cross_layers is None else cache.cross_layers[layer]


def _get_kernel(branch: Any) -> Kernel:
    return branch.f.kernel


def _position_sharing_key(config: cfg.Stack, layer: int, d_model: int) -> tuple[Any, ...]:
    """Key that is equal for two layers if they can share a position method."""
    attention = config.blocks[layer].attention
    position = attention.position
    if isinstance(position, cfg.RelativeBias):
        return position, attention.heads, None if position.shared else layer
    if isinstance(position, cfg.Disentangled):
        return (position,)
    return position, attention.heads, attention.max_rotary_dim(d_model)
