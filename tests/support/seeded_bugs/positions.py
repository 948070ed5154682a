"""Seeded bugs in positions: missing RoPE, different rotations of q and k, low precision, wrong scaling."""

from types import SimpleNamespace
from typing import Any

import torch
from support.seeded_bugs.attention import patch_attention
from support.seeded_bugs.reference_gpt import ReferenceGPT, check_kwargs
from support.seeded_bugs.registry import seeded_bug
from torch import Tensor

import cutaway as ct
from cutaway.config import NoScaling
from cutaway.model.rope import Rope


@seeded_bug("position-encoding")
def no_rope() -> ReferenceGPT:
    return patch_attention(apply_rope=lambda x, positions: x)


@seeded_bug("position-encoding")
def rope_over_heads() -> ReferenceGPT:
    """RoPE along the head axis instead of the sequence axis."""
    model = ReferenceGPT(kv_heads=4)
    for block in model.blocks:
        attention = block.attention
        original = attention.apply_rope
        attention.apply_rope = lambda x, positions, original=original: original(
            x.transpose(1, 2), torch.arange(x.shape[1]).expand(len(x), -1)
        ).transpose(1, 2)
    return model


def patch_key_rope(key_rope: Any) -> ReferenceGPT:
    """Rotate keys (2 heads) with `key_rope`; queries (4 heads) stay as they are."""
    model = ReferenceGPT()
    for block in model.blocks:
        attention = block.attention
        original = attention.apply_rope
        attention.apply_rope = lambda x, positions, original=original: (
            key_rope(original, x, positions) if x.shape[1] == 2 else original(x, positions)
        )
    return model


@seeded_bug("rope-shift-invariance")
def rope_on_queries_only() -> ReferenceGPT:
    return patch_key_rope(lambda original, x, positions: x)


@seeded_bug("rope-shift-invariance", also_caught_by=("rope-layout",))
def keys_interleaved() -> ReferenceGPT:
    def interleaved(original: Any, x: Tensor, positions: Tensor) -> Tensor:
        split = torch.cat((x[..., 0::2], x[..., 1::2]), -1)
        a, b = original(split, positions).chunk(2, -1)
        return torch.stack((a, b), -1).flatten(-2)

    return patch_key_rope(interleaved)


@seeded_bug("rope-precision", also_caught_by=("low-precision", "rope-shift-invariance"))
def rope_angles_in_bf16() -> tuple[ReferenceGPT, dict[str, Any]]:
    model = ReferenceGPT().bfloat16()
    for block in model.blocks:
        attention = block.attention

        def apply_rope(x: Tensor, positions: Tensor, attention: Any = attention) -> Tensor:
            angle = positions[:, None, :, None].to(x.dtype) * attention.frequencies(x.device).to(x.dtype)
            cos, sin = angle.cos(), angle.sin()
            a, b = x.chunk(2, -1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

        attention.apply_rope = apply_rope
    return model, check_kwargs(model)


@seeded_bug("position-encoding", also_caught_by=("packing",))
def positions_ignored() -> Any:
    model = ReferenceGPT()
    return model, check_kwargs(model) | {"logits_with_positions": lambda tokens, positions: model(tokens)[0]}


SMALL_CONFIG = {"vocab_size": 50, "d_model": 32}


YARN = {"kind": "yarn", "factor": 4.0, "original_length": 32}


LLAMA3 = {"kind": "llama3", "factor": 8.0, "original_length": 32}


LONGROPE = {"short_factors": (1.0, 1.1, 1.2, 1.3), "long_factors": (1.5, 2.0, 3.0, 4.0), "original_length": 32}


def patch_rope(apply_rope: Any, **properties: Any) -> tuple[ReferenceGPT, dict[str, Any]]:
    """A model with another rotation, and additional keyword arguments of `ct.check`."""
    model = ReferenceGPT()
    for block in model.blocks:
        block.attention.apply_rope = lambda x, positions, attention=block.attention: apply_rope(attention, x, positions)
    return model, check_kwargs(model) | properties


def rope_by_tables(attention: Any, x: Tensor, positions: Tensor, *, interleaved: bool, sign: float = -1.0) -> Tensor:
    """x·cos + rotate(x)·sin with interleaved tables, and a half-split or interleaved rotate."""
    angle = (positions[:, None, :, None].float() * attention.frequencies(x.device)).repeat_interleave(2, -1)
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    rotated = torch.stack((sign * b, a), -1).flatten(-2) if interleaved else torch.cat((sign * b, a), -1)
    return x * angle.cos() + rotated * angle.sin()


@seeded_bug("rope-layout", also_caught_by=("rope-shift-invariance",))
def half_rotation_with_interleaved_tables() -> tuple[ReferenceGPT, dict[str, Any]]:
    return patch_rope(lambda attention, x, positions: rope_by_tables(attention, x, positions, interleaved=False))


@seeded_bug("rope-layout", also_caught_by=("rope-shift-invariance",))
def missing_minus() -> tuple[ReferenceGPT, dict[str, Any]]:
    return patch_rope(
        lambda attention, x, positions: rope_by_tables(attention, x, positions, interleaved=True, sign=1.0)
    )


@seeded_bug("rope-layout")
def interleaved_instead_of_half() -> tuple[ReferenceGPT, dict[str, Any]]:
    return patch_rope(
        lambda attention, x, positions: rope_by_tables(attention, x, positions, interleaved=True),
        rope={"layout": "half"},
    )


@seeded_bug("rope-layout")
def negative_angles() -> tuple[ReferenceGPT, dict[str, Any]]:
    return patch_rope(
        lambda attention, x, positions: type(attention).apply_rope(attention, x, -positions), rope={"layout": "half"}
    )


def build_cutaway_model(scaling: dict[str, Any] | None = None, **rope: Any) -> ct.Transformer:
    """A small cutaway decoder with RoPE."""
    position = {"kind": "rope", **rope, **({} if scaling is None else {"scaling": scaling})}
    block = {"attention": {"heads": 4, "kv_heads": 2, "position": position}, "ffn": {"hidden": 48}}
    return ct.build({"form": "decoder", **SMALL_CONFIG, "decoder": {"layers": 2, "block": block}}, seed=0)


def set_rope_attributes(model: Any, **values: Any) -> tuple[Any, dict[str, Any]]:
    """Set attributes of all Rope modules."""
    for module in model.modules():
        if isinstance(module, Rope):
            for name, value in values.items():
                setattr(module, name, value)
    return model, {}


def refill_rope(model: Any, **values: Any) -> tuple[Any, dict[str, Any]]:
    """Set attributes of all Rope modules and recompute their frequencies."""
    set_rope_attributes(model, **values)
    for module in model.modules():
        if isinstance(module, Rope):
            module.register_constants()
    return model, {}


@seeded_bug("rope-layout", also_caught_by=("meta-buffers", "save-load"))
def wrong_layout() -> tuple[Any, dict[str, Any]]:
    return set_rope_attributes(build_cutaway_model(), interleaved=True)


@seeded_bug("rope-scaling")
def theta_ignored() -> tuple[ReferenceGPT, dict[str, Any]]:
    model = ReferenceGPT()
    return model, check_kwargs(model) | {"rope": {"theta": 500_000.0}}


@seeded_bug("rope-scaling", also_caught_by=("meta-buffers", "save-load"))
def linear_scaling_ignored() -> tuple[Any, dict[str, Any]]:
    return refill_rope(build_cutaway_model({"kind": "linear", "factor": 2.0}), scaling=NoScaling())


@seeded_bug("rope-scaling", also_caught_by=("meta-buffers", "save-load"))
def llama3_scaling_ignored() -> tuple[Any, dict[str, Any]]:
    return refill_rope(build_cutaway_model(LLAMA3), scaling=NoScaling())


@seeded_bug("rope-scaling", also_caught_by=("meta-buffers", "save-load"))
def yarn_attention_factor_ignored() -> tuple[Any, dict[str, Any]]:
    return set_rope_attributes(build_cutaway_model(YARN), attention_factor=1.0)


@seeded_bug("rope-scaling")
def longrope_short_factors_only() -> tuple[Any, dict[str, Any]]:
    return set_rope_attributes(build_cutaway_model({"kind": "longrope", **LONGROPE}), switch_length=None)


@seeded_bug("rope-scaling")
def dynamic_ntk_never_grows() -> tuple[Any, dict[str, Any]]:
    return set_rope_attributes(
        build_cutaway_model({"kind": "dynamic", "factor": 2.0, "original_length": 32}), switch_length=None
    )


# position-range


@seeded_bug("position-range", also_caught_by=("rope-scaling", "rope-layout"))
def positions_clamped_at_31() -> ReferenceGPT:
    model = ReferenceGPT()
    for block in model.blocks:
        attention = block.attention
        original = attention.apply_rope
        attention.apply_rope = lambda x, positions, original=original: original(x, positions.clamp(max=31))
    return model


class LearnedPositions(ReferenceGPT):
    """Learned absolute positions whose index is `index(position)`; no RoPE."""

    def __init__(self, index: Any) -> None:
        super().__init__()
        self.index = index
        self.position_table = torch.nn.Embedding(128, 32)
        for block in self.blocks:
            block.attention.apply_rope = lambda x, positions: x

    def forward(self, tokens: Tensor, *args: Any, **kwargs: Any) -> Any:
        length = tokens.shape[1]
        table = self.position_table(self.index(torch.arange(length, device=tokens.device)))
        hook = self.embed.register_forward_hook(lambda module, args, out: out + table)
        try:
            return super().forward(tokens, *args, **kwargs)
        finally:
            hook.remove()


def learned_positions(index: Any) -> tuple[ReferenceGPT, dict[str, Any]]:
    model = LearnedPositions(index).eval()
    return model, {"logits": lambda tokens: model(tokens)[0], "max_seq_len": 128}


@seeded_bug("position-range", also_caught_by=("rope-scaling", "rope-layout", "rope-precision"))
def positions_rounded_to_bf16() -> tuple[ReferenceGPT, dict[str, Any]]:
    """bf16 has no odd positions from 256 on."""
    model = ReferenceGPT()
    for block in model.blocks:
        attention = block.attention
        original = attention.apply_rope
        attention.apply_rope = lambda x, positions, original=original: original(x, positions.bfloat16())
    return model, check_kwargs(model) | {"max_seq_len": 2048}


@seeded_bug("position-range")
def learned_positions_clamped_at_40() -> tuple[ReferenceGPT, dict[str, Any]]:
    return learned_positions(lambda positions: positions.clamp(max=40))


@seeded_bug("position-range")
def learned_positions_modulo_32() -> tuple[ReferenceGPT, dict[str, Any]]:
    return learned_positions(lambda positions: positions % 32)


@seeded_bug("rope-scaling")
def theta_of_the_config_ignored() -> tuple[ReferenceGPT, dict[str, Any]]:
    """The module states rope_theta = 500000 in its config; its frequencies use 10000."""
    model = ReferenceGPT()
    model.config = SimpleNamespace(rope_theta=500_000.0, n_layer=2)  # type: ignore[assignment]
    return model, {"logits": lambda tokens: model(tokens)[0]}


@seeded_bug("rope-precision", also_caught_by=("low-precision", "rope-shift-invariance", "rope-layout"))
def rope_angles_rounded_to_bf16() -> tuple[ReferenceGPT, dict[str, Any]]:
    """Positions and frequencies are in bf16, and only cos and sin are in fp32."""

    def apply_rope(attention: Any, x: Tensor, positions: Tensor) -> Tensor:
        angle = (positions[:, None, :, None].bfloat16() * attention.frequencies(x.device).bfloat16()).float()
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    return patch_rope(apply_rope)


@seeded_bug("rope-layout")
def values_rotated() -> tuple[ReferenceGPT, dict[str, Any]]:
    """RoPE is applied to v too. The position properties of the model are not stated."""
    model = ReferenceGPT()
    for block in model.blocks:
        attention = block.attention

        def update_cache(k: Tensor, v: Tensor, positions: Tensor, cache: Any, attention: Any = attention) -> Any:
            v = attention.apply_rope(v, positions.clamp(min=0))
            return type(attention).update_cache(attention, k, v, positions, cache)

        attention.update_cache = update_cache
    kwargs = check_kwargs(model)
    return model, {name: value for name, value in kwargs.items() if name != "relative_positions"}
