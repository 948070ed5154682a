"""Components against transformers: RoPE scalings, T5 buckets, ALiBi slopes. Whole models are in tests/families."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

from cutaway import config as c
from cutaway.model.masks import TokenPositions
from cutaway.model.positions import Alibi, RelativeBias
from cutaway.model.rope import Rope

THETA, WIDTH, ORIGINAL = 50000.0, 16, 32
LONG = [1.0 + i / 4 for i in range(8)]
SCALINGS = {
    "linear": (c.LinearScaling(factor=3.0), {"factor": 3.0}),
    "dynamic": (c.DynamicNTK(factor=2.0, original_length=ORIGINAL), {"factor": 2.0}),
    "yarn": (
        c.Yarn(factor=4.0, original_length=ORIGINAL),
        {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    ),
    "longrope": (
        c.LongRope(
            short_factors=LONG,
            long_factors=LONG[::-1],
            original_length=ORIGINAL,
            attention_factor=math.sqrt(1 + math.log(4) / math.log(ORIGINAL)),
        ),
        {"short_factor": LONG, "long_factor": LONG[::-1], "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    ),
    "llama3": (
        c.Llama3Scaling(original_length=ORIGINAL),
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    ),
}


def transformers_config(kind: str, fields: dict) -> LlamaConfig:
    rope = {"rope_type": kind, "rope_theta": THETA} | fields
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 24}
    return LlamaConfig(
        vocab_size=61,
        num_hidden_layers=2,
        max_position_embeddings=ORIGINAL,
        rope_parameters=rope,
        head_dim=WIDTH,
        **sizes,
    )


@pytest.mark.parametrize("length", [20, 90])
@pytest.mark.parametrize("kind", SCALINGS)
def test_rope_frequencies_match_transformers(kind: str, length: int) -> None:
    """Below and above original_length."""
    scaling, fields = SCALINGS[kind]
    rope = Rope(c.Rope(theta=THETA, scaling=scaling), WIDTH)
    expected, expected_factor = ROPE_INIT_FUNCTIONS[kind](transformers_config(kind, fields), "cpu", seq_len=length)
    frequencies = rope.select_frequencies(TokenPositions(torch.arange(length).unsqueeze(0))).flatten()
    assert torch.allclose(frequencies, expected, rtol=2e-6, atol=0)
    assert rope.attention_factor == pytest.approx(expected_factor)


@pytest.mark.parametrize("causal", [False, True])
def test_t5_buckets_match_transformers(causal: bool) -> None:
    bias = RelativeBias(c.RelativeBias(), 2, causal=causal)
    relative = torch.arange(-300, 301)
    expected = T5Attention._relative_position_bucket(
        relative, bidirectional=not causal, num_buckets=32, max_distance=128
    )
    assert torch.equal(bias.relative_position_bucket(relative), expected)


@pytest.mark.parametrize("heads", [1, 4, 6, 12, 32])
def test_alibi_slopes_match_transformers(heads: int) -> None:
    expected = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    assert torch.allclose(Alibi(c.Alibi(), heads).slope, expected)
