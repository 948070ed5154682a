"""GPT-NeoX: config fields and weight mappings against transformers."""

from pathlib import Path

import pytest
import torch
import transformers
from support.family_configs import random_config_without_head_dim, set_partial_rotary_factor
from support.family_parity import PeerModel, check_extra_tensors, check_family, rng

import cutaway as ct
from cutaway.families.config_tree import diff_configs


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_gpt_neox_matches_transformers(seed: int, tmp_path: Path) -> None:
    r = rng(seed)
    settings = random_config_without_head_dim(seed, "num_key_value_heads", "rms_norm_eps")
    set_partial_rotary_factor(settings, settings["hidden_size"] // settings["num_attention_heads"], seed)
    settings |= {
        "hidden_act": r.choice(["gelu", "gelu_pytorch_tanh", "relu"]),
        "layer_norm_eps": r.choice([1e-5, 1e-3]),
        "use_parallel_residual": seed % 2 == 0,
        "attention_bias": r.random() < 0.7,
    }
    check_family(PeerModel(transformers.GPTNeoXConfig(**settings), long_seq_len=40), tmp_path, seed)


def test_published_config_equals_preset() -> None:
    """EleutherAI/pythia-160m has its own key names for RoPE."""
    hf_config = {
        "model_type": "gpt_neox",
        "hidden_act": "gelu",
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "rotary_emb_base": 10000,
        "rotary_pct": 0.25,
        "use_parallel_residual": True,
        "vocab_size": 50304,
    }
    assert not diff_configs(ct.config(hf_config), ct.config("pythia-160m"))
    assert (
        ct.config(hf_config | {"rotary_pct": 1.0, "rotary_emb_base": 500}).decoder.block[0].attention.position.theta
        == 500
    )


def test_extra_tensors_are_ignored(tmp_path: Path) -> None:
    """RoPE frequencies of the model, a classification head, and the per-layer buffers of the first releases."""
    settings = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 1}
    model = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**settings, num_attention_heads=2))
    prefix = "gpt_neox.layers.0.attention"
    extra = {"gpt_neox.rotary_emb.inv_freq": torch.ones(2), "score.weight": torch.ones(2, 32)}
    extra |= {f"{prefix}.rotary_emb.inv_freq": torch.ones(2), f"{prefix}.bias": torch.ones(1, 1, 8, 8).tril().bool()}
    check_extra_tensors(model, tmp_path, extra | {f"{prefix}.masked_bias": torch.tensor(-1e9)})
