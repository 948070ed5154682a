"""OPT: config fields and weight mappings against transformers."""

from pathlib import Path

import pytest
import torch
import transformers
from support.family_parity import PeerModel, check_extra_tensors, check_family, rng

import cutaway as ct
from cutaway.errors import ConfigError
from cutaway.families.config_tree import diff_configs


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_opt_matches_transformers(seed: int, tmp_path: Path) -> None:
    r = rng(seed)
    heads = r.choice([1, 2, 3, 4])
    hidden = heads * r.choice([5, 8])
    pre_norm, factorized = seed % 3 != 0, seed % 2 == 0  # OPT-350m: post-norm and factorized embedding
    config = transformers.OPTConfig(
        vocab_size=r.choice([61, 97, 130]),
        hidden_size=hidden,
        num_hidden_layers=r.choice([1, 2, 3]),
        ffn_dim=r.choice([30, 48]),
        max_position_embeddings=40,
        do_layer_norm_before=pre_norm,
        _remove_final_layer_norm=seed in (4, 7),
        word_embed_proj_dim=r.choice([4, 12]) if factorized else None,
        num_attention_heads=heads,
        activation_function=r.choice(["relu", "gelu"]),
        enable_bias=seed not in (2, 5),
        layer_norm_elementwise_affine=seed not in (3, 5),
        tie_word_embeddings=seed not in (1, 7),
        pad_token_id=r.choice([None, 1]),
        bos_token_id=2,
        eos_token_id=None,
    )
    check_family(PeerModel(config, long_seq_len=40), tmp_path, seed)


def test_published_config_equals_preset() -> None:
    """facebook/opt-350m: post-norm and factorized embedding."""
    hf_config = {
        "model_type": "opt",
        "_remove_final_layer_norm": False,
        "activation_dropout": 0.0,
        "do_layer_norm_before": False,
        "dropout": 0.1,
        "ffn_dim": 4096,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "word_embed_proj_dim": 512,
    }
    assert not diff_configs(ct.config(hf_config), ct.config("opt-350m"))
    with pytest.raises(ConfigError, match="requires a tied head"):
        ct.config(hf_config | {"tie_word_embeddings": False})


def test_legacy_version_tensor_is_ignored(tmp_path: Path) -> None:
    """The first releases have the base model and a version tensor."""
    settings = {"vocab_size": 61, "hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 24, "num_hidden_layers": 2}
    model = transformers.OPTForCausalLM(transformers.OPTConfig(**settings, num_attention_heads=2))
    check_extra_tensors(
        model, tmp_path, {"decoder.version": torch.tensor([3.0])}, rename=lambda name: name[len("model.") :]
    )
