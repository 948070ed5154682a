"""A model made deeper or wider keeps its kind."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.config_strategies import configs

import cutaway as ct
from cutaway.config import Config, MultiHeadBase
from cutaway.size import count_parameters, size
from cutaway.size.model_scaling import (
    LAYER_CANDIDATES,
    build_family_config,
    max_head_dim,
    min_layers,
    num_heads,
    num_layers,
    scale_config,
)


def test_llamas_family_is_llama_3s_shape() -> None:
    assert count_parameters(build_family_config("llama")).total == count_parameters(ct.config("llama-3-8b")).total
    layer = 8192 * (64 + 2 * 16 + 64) * 128 + 3 * 8192 * 28_672 + 2 * 8192
    assert (
        count_parameters(scale_config(build_family_config("llama"), 80, 8192)).total
        == 80 * layer + 2 * 128_256 * 8192 + 8192
    )


@pytest.mark.parametrize("name", ct.presets())
def test_a_source_at_its_own_shape_is_itself(name: str) -> None:
    config = ct.config(name)
    assert scale_config(config, num_layers(config), config.d_model) == config


def shared_by(config: Config) -> list[float]:
    """How many queries share a key, block by block; one key for all stays one, whatever the width."""
    every = [block.attention for stack in config.stacks.values() for block in stack.block]
    return [each.heads / each.num_kv_heads for each in every if isinstance(each, MultiHeadBase) and each.kv_heads != 1]


@pytest.mark.parametrize("name", ct.presets())
def test_twice_as_wide_keeps_every_ratio(name: str) -> None:
    config = ct.config(name)
    layers, width = num_layers(config), config.d_model
    wide, deep = scale_config(config, layers, 2 * width), scale_config(config, 2 * layers, width)
    assert (wide.d_model, num_layers(wide)) == (2 * width, layers)
    assert num_heads(wide) == 2 * num_heads(config)
    assert max_head_dim(wide) == max_head_dim(config)
    assert shared_by(wide) == shared_by(config)
    assert (deep.d_model, num_layers(deep)) == (width, 2 * layers)
    assert [stack.layers for stack in deep.stacks.values()] == [2 * stack.layers for stack in config.stacks.values()]
    assert count_parameters(deep).total >= count_parameters(config).total
    assert count_parameters(wide).total > 1.5 * count_parameters(config).total
    assert wide.vocab_size == config.vocab_size


def test_deepseek_scales_its_experts_and_latents() -> None:
    half = scale_config(ct.config("deepseek-v3"), 31, 3584)
    dense, mixed = half.decoder.blocks[0], half.decoder.blocks[3]
    attention = mixed.attention
    assert (attention.heads, attention.q_rank, attention.kv_rank, attention.d_nope) == (64, 768, 256, 128)
    assert (mixed.ffn.experts, mixed.ffn.expert.hidden, mixed.ffn.shared.hidden) == (256, 1024, 1024)
    assert dense.ffn.hidden == 9216


def test_key_heads_stay_a_divisor() -> None:
    small = scale_config(ct.config("llama-3-8b"), 12, 768)  # 6 heads, of which 1.5 would be keys
    assert (small.decoder.blocks[0].attention.heads, small.decoder.blocks[0].attention.kv_heads) == (6, 2)


@given(config=configs(), layers=st.sampled_from(LAYER_CANDIDATES), width=st.sampled_from([64, 128, 768, 1024]))
def test_any_model_can_be_scaled(config: Config, layers: int, width: int) -> None:
    assert scale_config(config, num_layers(config), config.d_model) == config
    if layers >= min_layers(config):
        other = scale_config(config, layers, width)
        assert (num_layers(other), other.d_model) == (layers, width)
        assert size(other, context=8).memory.total_bytes > 0
