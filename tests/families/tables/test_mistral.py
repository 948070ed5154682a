"""Mistral: config fields and weight mappings against transformers."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from support.family_configs import random_config_optional_head_dim, random_llama_config
from support.family_parity import PeerModel, assert_close, check_family, randomize_weights, rng

import cutaway as ct
from cutaway.config import Rope
from cutaway.errors import ConfigError
from cutaway.families import families


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_mistral_matches_transformers(seed: int, tmp_path: Path) -> None:
    r = rng(seed)
    settings = random_config_optional_head_dim(
        seed,
        sliding_window=[3, None, 7, 2, 64, None, 5, 13][seed],
        hidden_act=r.choice(["silu", "gelu", "relu2"]),
        attention_dropout=r.choice([0.0, 0.1]),
    )
    check_family(PeerModel(transformers.MistralConfig(**settings), long_seq_len=40), tmp_path, seed)


def test_window_of_one_token_matches_transformers(tmp_path: Path) -> None:
    """Without a cache: the cache of transformers keeps all keys here (it slices [-window + 1 :])."""
    config = transformers.MistralConfig(**random_llama_config(0, sliding_window=1))
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    randomize_weights(model, 0)
    model.save_pretrained(tmp_path)
    tokens = torch.arange(5, 30)[None]
    with torch.no_grad():
        assert_close(ct.load(tmp_path).model(tokens), model(tokens, use_cache=False).logits, 0.0, "logits")


def test_mistral_with_layer_types_matches_ministral(tmp_path: Path) -> None:
    """transformers loads such a file as Ministral, with sliding and full attention; the saved checkpoint, too."""
    config = transformers.MinistralConfig(
        **random_llama_config(0, num_hidden_layers=3, sliding_window=4),
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    randomize_weights(model, 0)
    model.save_pretrained(tmp_path / "transformers")
    file = tmp_path / "transformers" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "mistral"}))
    checkpoint = ct.load(tmp_path / "transformers")
    tokens = torch.arange(5, 30)[None]
    with torch.no_grad():
        assert_close(checkpoint.model(tokens), model(tokens).logits, 0.0, "logits")
        checkpoint.hf_config = {}
        opened = transformers.AutoModelForCausalLM.from_pretrained(ct.save(checkpoint, tmp_path / "cutaway"))
        assert opened.config.layer_types == config.layer_types
        assert_close(opened(tokens).logits, model(tokens).logits, 0.0, "logits after export")


@pytest.mark.parametrize("name", ["mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "olmo2", "granite", "smollm3"])
def test_partial_rotary_factor_is_an_error(name: str) -> None:
    """transformers always rotates full heads in these families."""
    family = families()[name]
    with pytest.raises(ConfigError, match="supports only"):
        family.config_from_hf({"partial_rotary_factor": 0.5})
    config = family.config_from_hf({})[0]
    block = config.stacks["decoder"].blocks[0]
    half = block.replace(attention=block.attention.replace(position=Rope(rotary_dim=32)))
    with pytest.raises(ConfigError, match="supports only"):
        family.config_to_hf(config.replace(decoder=config.stacks["decoder"].replace(block=half, leading_blocks=())))
