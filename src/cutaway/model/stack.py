"""A stack: embedding, blocks, final norm. Encoder and decoder differ in `causal` and in what they read beside."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from cutaway.config import Alibi as AlibiConfig
from cutaway.config import Latent, MultiHead, NoNorm
from cutaway.config import RelativeBias as RelativeBiasConfig
from cutaway.config import Rope as RopeConfig
from cutaway.config import Stack as StackConfig
from cutaway.model.attention import Scene
from cutaway.model.block import make_block
from cutaway.model.cache import Cache, Step, Widths
from cutaway.model.embedding import Embedding
from cutaway.model.kernels import Kernel
from cutaway.model.layers import Table
from cutaway.model.masks import Places, View, view, view_of_memory
from cutaway.model.norms import make_norm
from cutaway.model.positions import Alibi, RelativeBias, ScoreBias
from cutaway.model.recompute import Recompute, run_block
from cutaway.model.rope import Rope


def make_position(attention: MultiHead | Latent, d_model: int, *, causal: bool) -> Rope | ScoreBias | None:
    """The position method that acts inside this attention."""
    position = attention.position
    if isinstance(position, RopeConfig):
        width = attention.d_rope if isinstance(attention, Latent) else attention.head_width(d_model)
        return Rope(position, position.width or width)
    if isinstance(position, AlibiConfig):
        return Alibi(position, attention.heads)
    if isinstance(position, RelativeBiasConfig):
        return RelativeBias(position, attention.heads, causal=causal)
    return None


class Stack(nn.Module):
    """Tokens in, the normed stream out."""

    def __init__(self, config: StackConfig, d_model: int, table: Table, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.embed = Embedding(config.embedding, d_model, table)
        distinct = config.groups or config.layers
        owners = [layer * distinct // config.layers for layer in range(config.layers)]
        made = {
            owner: make_block(config.blocks[owners.index(owner)], config, d_model, first=owner == 0)
            for owner in range(distinct)
        }
        self.blocks = nn.ModuleList(made[owner] for owner in owners)
        # Layers with the same position method share it: a rotation is computed once a pass, T5's bias is one table.
        keys = [position_key(config, layer, d_model) for layer in range(config.layers)]
        first = [keys.index(key) for key in keys]
        self.positions = nn.ModuleDict()
        for layer in sorted(set(first)):
            position = make_position(config.blocks[layer].attention, d_model, causal=causal)
            if position is not None:
                self.positions[str(layer)] = position
        self.position_of = [str(layer) for layer in first]
        ropes = [position for position in self.positions.values() if isinstance(position, Rope)]
        self.turns = sorted({rope.switch_at for rope in ropes if rope.switch_at is not None and not rope.dynamic})
        """Lengths at which a sequence's tokens all turn by other angles, so that a cache cannot grow past them."""
        self.windows = [block.attention.window for block in config.blocks]
        self.final_norm = make_norm(config.norm if config.placement.final_norm else NoNorm(), d_model)
        self.final_dropout = config.final_dropout
        self.recompute: Recompute = "none"

    @property
    def cache_widths(self) -> list[Widths]:
        """What each layer keeps of a token."""
        return [block.attn.f.cache_widths for block in self.blocks]  # type: ignore[union-attr, misc]

    def forward(
        self,
        tokens: Int[Tensor, "B T"],
        places: Places,
        types: Int[Tensor, "B T"] | None = None,
        *,
        memory: Float[Tensor, "B S d"] | None = None,
        memory_places: Places | None = None,
        cache: Cache | None = None,
        steps: dict[int, Step] | None = None,
    ) -> Float[Tensor, "B T d"]:
        x = self.embed(tokens, places, types)
        scenes = self.scenes(places, x.dtype, cache, steps or {})
        if memory_places is not None:
            self.show_memory(scenes, memory, view_of_memory(places, memory_places), x.dtype, cache)
        return F.dropout(self.run(x, scenes), self.final_dropout, self.training)

    def run(self, x: Float[Tensor, "B T d"], scenes: list[Scene]) -> Float[Tensor, "B T d"]:
        """Through all blocks, and the final norm."""
        for block, scene in zip(self.blocks, scenes, strict=True):
            x = run_block(self.recompute, block, x, scene)
        return self.final_norm(x)

    def scenes(self, q: Places, dtype: torch.dtype, cache: Cache | None, steps: dict[int, Step]) -> list[Scene]:
        """What each layer is given. Rotations and plans are made once for all layers that can share them."""
        ropes = {name: module(q, dtype) for name, module in self.positions.items() if isinstance(module, Rope)}
        biases = {name: module for name, module in self.positions.items() if isinstance(module, ScoreBias)}
        plans: dict[tuple[str | None, int | None, str, int | None], Any] = {}
        scenes = []
        for layer, (position, window) in enumerate(zip(self.position_of, self.windows, strict=True)):
            kernel, bias = kernel_of(self.blocks[layer].attn), biases.get(position)
            kept = None if cache is None else cache.layers[layer]
            step = None if kept is None else steps[kept.slots]
            key = None if bias is None else position, window, kernel.name, None if kept is None else kept.slots
            if key not in plans:
                seen = view(q, q if step is None else step.keys, is_causal=self.causal, window=window)
                plans[key] = kernel.prepare(seen, bias, dtype)
            scenes.append(Scene(plans[key], ropes.get(position), kept, step))
        return scenes

    def show_memory(
        self,
        scenes: list[Scene],
        memory: Float[Tensor, "B S d"] | None,
        seen: View,
        dtype: torch.dtype,
        cache: Cache | None,
    ) -> None:
        """Add to each layer's scene what it reads of the encoder."""
        plans: dict[str, Any] = {}
        for layer, scene in enumerate(scenes):
            kernel = kernel_of(self.blocks[layer].cross)
            if kernel.name not in plans:
                plans[kernel.name] = kernel.prepare(seen, None, dtype)
            scene.memory, scene.cross_plan = memory, plans[kernel.name]
            scene.cross_cache = None if cache is None or cache.cross is None else cache.cross[layer]


def kernel_of(branch: Any) -> Kernel:
    return branch.f.kernel


def position_key(config: StackConfig, layer: int, d_model: int) -> tuple[Any, ...]:
    """What two layers must have in common to share a position method."""
    attention = config.blocks[layer].attention
    width = attention.d_rope if isinstance(attention, Latent) else attention.head_width(d_model)
    position = attention.position
    if isinstance(position, RelativeBiasConfig):
        return position, attention.heads, None if position.shared else layer
    return position, attention.heads, width
