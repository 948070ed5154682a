"""Gemma 3, text only: config fields and weight mappings against transformers."""

from pathlib import Path

import pytest
import transformers
from support.family_configs import random_gemma2_config
from support.family_parity import PeerModel, check_family, check_legacy_config, rng

from cutaway.errors import ConfigError
from cutaway.families import families


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(8))
def test_gemma3_text_matches_transformers(seed: int, tmp_path: Path) -> None:
    settings = random_gemma2_config(seed)
    sliding = {"rope_type": "default", "rope_theta": rng(seed).choice([1e4, 3e3])}
    settings["rope_parameters"] = {"full_attention": settings["rope_parameters"], "sliding_attention": sliding}
    if "full_attention" not in settings["layer_types"]:
        settings["rope_parameters"]["full_attention"] = {"rope_type": "default", "rope_theta": 1e6}
    check_family(
        PeerModel(transformers.Gemma3TextConfig(**settings), long_seq_len=40, use_cache=settings["sliding_window"] > 1),
        tmp_path,
        seed,
    )


PUBLISHED = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}


def test_published_config_is_read_as_in_transformers() -> None:
    check_legacy_config(PUBLISHED, "gemma-3-1b")


@pytest.mark.parametrize(
    "change",
    [
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window_pattern": 2},
        {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": None},
        {"layer_types": ["full_attention"] * 26},
    ],
)
def test_legacy_keys_are_read_as_in_transformers(change: dict[str, object]) -> None:
    check_legacy_config(PUBLISHED | change)


@pytest.mark.parametrize("change", [{"use_bidirectional_attention": True}, {"attn_logit_softcapping": 50.0}])
def test_unsupported_value_is_an_error(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="does not support"):
        families()["gemma3_text"].config_from_hf(PUBLISHED | change)
