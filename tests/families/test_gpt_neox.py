"""GPT-NeoX: fields and rows against transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from family_parity import Peer, check_family, check_stored, rng
from test_llama import kin

import cutaway as ct
from cutaway.families.tree import differences


def whole_heads(seed: int, *dropped: str) -> dict[str, Any]:
    """`kin` for families whose heads always are hidden_size / num_attention_heads wide."""
    settings = kin(seed)
    settings["hidden_size"] = settings["num_attention_heads"] * settings.pop("head_dim")
    return {key: value for key, value in settings.items() if key not in dropped}


def partly_turned(settings: dict[str, Any], width: int, seed: int) -> None:
    """Only a part of each head turns; a scaling by length needs four dimensions."""
    rope = settings["rope_parameters"]
    least = 4 if rope["rope_type"] == "dynamic" else 2
    shares = [share for share in (0.25, 0.4, 0.5, 0.75, 1.0) if width * share % 2 == 0 and width * share >= least]
    rope["partial_rotary_factor"] = rng(seed).choice(shares)
    for name in ("short_factor", "long_factor"):
        if name in rope:
            rope[name] = rope[name][: int(width * rope["partial_rotary_factor"]) // 2]


@pytest.mark.parametrize("seed", range(8))
def test_gpt_neox_is_the_peers(seed: int, tmp_path: Path) -> None:
    r = rng(seed)
    settings = whole_heads(seed, "num_key_value_heads", "rms_norm_eps")
    partly_turned(settings, settings["hidden_size"] // settings["num_attention_heads"], seed)
    settings |= {
        "hidden_act": r.choice(["gelu", "gelu_pytorch_tanh", "relu"]),
        "layer_norm_eps": r.choice([1e-5, 1e-3]),
        "use_parallel_residual": seed % 2 == 0,
        "attention_bias": r.random() < 0.7,
    }
    check_family(Peer(transformers.GPTNeoXConfig(**settings), long=40), tmp_path, seed)


def test_a_published_file_is_the_preset() -> None:
    """EleutherAI/pythia-160m has RoPE's settings under names of its own."""
    theirs = {
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
    assert not differences(ct.config(theirs), ct.config("pythia-160m"))
    assert (
        ct.config(theirs | {"rotary_pct": 1.0, "rotary_emb_base": 500}).decoder.block[0].attention.position.theta == 500
    )


def test_what_may_lie_beside_the_model(tmp_path: Path) -> None:
    """The frequencies once for all layers, a classifier's matrix, and what each layer kept in the first releases."""
    settings = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 1}
    model = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**settings, num_attention_heads=2))
    at = "gpt_neox.layers.0.attention"
    beside = {"gpt_neox.rotary_emb.inv_freq": torch.ones(2), "score.weight": torch.ones(2, 32)}
    beside |= {f"{at}.rotary_emb.inv_freq": torch.ones(2), f"{at}.bias": torch.ones(1, 1, 8, 8).tril().bool()}
    check_stored(model, tmp_path, beside | {f"{at}.masked_bias": torch.tensor(-1e9)})
