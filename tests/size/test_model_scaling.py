"""`scale_config` changes depth and width and keeps everything else."""

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


def test_llama_family_has_the_shape_of_llama_3() -> None:
    assert count_parameters(build_family_config("llama")).total == count_parameters(ct.config("llama-3-8b")).total
    layer = 8192 * (64 + 2 * 16 + 64) * 128 + 3 * 8192 * 28_672 + 2 * 8192
    assert (
        count_parameters(scale_config(build_family_config("llama"), 80, 8192)).total
        == 80 * layer + 2 * 128_256 * 8192 + 8192
    )


@pytest.mark.parametrize("name", ct.presets())
def test_scaling_to_the_same_shape_is_the_identity(name: str) -> None:
    config = ct.config(name)
    assert scale_config(config, num_layers(config), config.d_model) == config


def gqa_group_sizes(config: Config) -> list[float]:
    """GQA group size of each block, without MQA blocks."""
    attentions = [block.attention for stack in config.stacks.values() for block in stack.block]
    return [
        attention.heads / attention.num_kv_heads
        for attention in attentions
        if isinstance(attention, MultiHeadBase) and attention.kv_heads != 1
    ]


@pytest.mark.parametrize("name", ct.presets())
def test_doubling_width_or_depth_keeps_ratios(name: str) -> None:
    config = ct.config(name)
    layers, width = num_layers(config), config.d_model
    wide, deep = scale_config(config, layers, 2 * width), scale_config(config, 2 * layers, width)
    assert (wide.d_model, num_layers(wide)) == (2 * width, layers)
    assert num_heads(wide) == 2 * num_heads(config)
    assert max_head_dim(wide) == max_head_dim(config)
    assert gqa_group_sizes(wide) == gqa_group_sizes(config)
    assert (deep.d_model, num_layers(deep)) == (width, 2 * layers)
    assert [stack.layers for stack in deep.stacks.values()] == [2 * stack.layers for stack in config.stacks.values()]
    assert count_parameters(deep).total >= count_parameters(config).total
    assert count_parameters(wide).total > 1.5 * count_parameters(config).total
    assert wide.vocab_size == config.vocab_size


def test_moe_and_mla_dimensions_scale() -> None:
    scaled = scale_config(ct.config("deepseek-v3"), 31, 3584)
    dense_block, moe_block = scaled.decoder.blocks[0], scaled.decoder.blocks[3]
    attention = moe_block.attention
    assert (attention.heads, attention.q_rank, attention.kv_rank, attention.d_nope) == (64, 768, 256, 128)
    assert (moe_block.ffn.experts, moe_block.ffn.expert.hidden, moe_block.ffn.shared.hidden) == (256, 1024, 1024)
    assert dense_block.ffn.hidden == 9216


def test_kv_heads_divide_heads() -> None:
    scaled = scale_config(ct.config("llama-3-8b"), 12, 768)  # 6 heads; the same GQA group size would need 1.5 kv_heads
    assert (scaled.decoder.blocks[0].attention.heads, scaled.decoder.blocks[0].attention.kv_heads) == (6, 2)


@given(config=configs(), layers=st.sampled_from(LAYER_CANDIDATES), width=st.sampled_from([64, 128, 768, 1024]))
def test_random_configs_can_be_scaled(config: Config, layers: int, width: int) -> None:
    assert scale_config(config, num_layers(config), config.d_model) == config
    if layers >= min_layers(config):
        scaled = scale_config(config, layers, width)
        assert (num_layers(scaled), scaled.d_model) == (layers, width)
        assert size(scaled, context=8).memory.total_bytes > 0
