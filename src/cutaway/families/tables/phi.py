"""Phi-1, 1.5 and 2: parallel attention and FFN, partial RoPE. https://arxiv.org/abs/2309.05463"""

from typing import Any

from cutaway.families.config_fields import Custom, HFConfigReader, Key, activation, attention_heads
from cutaway.families.config_tree import ConfigTree
from cutaway.families.family import Family
from cutaway.families.rope_fields import RopeField
from cutaway.families.tables.llama import IGNORED_WEIGHTS, QKVO, per_layer, size_fields
from cutaway.families.weight_conversion import WeightMapping


def qk_layernorm_field(**extra: Any) -> Custom:
    """QK-norm with LayerNorm, with the eps of the other norms."""
    path = "decoder.block.attention.qk_norm"
    bias = not extra.get("gain_per_head", False)

    def from_hf(hf_config: HFConfigReader, tree: ConfigTree) -> None:
        norm = {"kind": "layernorm", "eps": hf_config.get_number("layer_norm_eps", 1e-5), "bias": bias}
        tree.set(path, {"norm": norm, **extra} if hf_config.get("qk_layernorm", False) else None)

    def to_hf(tree: ConfigTree, hf_config: dict[str, Any]) -> None:
        hf_config["qk_layernorm"] = tree.get(path) is not None

    return Custom(("qk_layernorm",), from_hf, to_hf)


FAMILY = Family(
    name="phi",
    architecture="PhiForCausalLM",
    template={
        "form": "decoder",
        "decoder": {
            "block": {"attention": {"kind": "multi-head", "bias": QKVO}, "ffn": {"kind": "mlp"}},
            "norm": {"kind": "layernorm"},
            "placement": {"kind": "parallel"},
        },
        "head": {"kind": "lm", "bias": "learned"},
    },
    fields=(
        *size_fields(51200, 2048, 8192, 24, 2048),
        *attention_heads(),
        Key("layer_norm_eps", "decoder.norm.eps", 1e-5),
        qk_layernorm_field(),
        activation("hidden_act", "decoder.block.ffn.activation", "gelu_new"),
        Key("attention_dropout", "decoder.block.attention.dropout", 0.0),
        Key("embd_pdrop", "decoder.embedding.dropout", 0.0),
        Key("resid_pdrop", "decoder.dropout", 0.0),
        RopeField(default_partial_rotary_factor=0.5),
    ),
    weight_mappings=(
        WeightMapping("model.embed_tokens", "decoder.embed.token"),
        WeightMapping("model.final_layernorm", "decoder.final_norm"),
        WeightMapping("lm_head", "head.matrix"),
        WeightMapping("lm_head.bias", "head.bias"),
        *per_layer(
            WeightMapping("input_layernorm", "norm"),
            *(WeightMapping(f"self_attn.{p}_proj", f"attn.f.{p}") for p in "qkv"),
            WeightMapping("self_attn.dense", "attn.f.o"),
            *(WeightMapping(f"self_attn.{p}_layernorm", f"attn.f.{p}_norm.norm") for p in "qk"),
            WeightMapping("mlp.fc1", "ffn.f.up"),
            WeightMapping("mlp.fc2", "ffn.f.down"),
        ),
    ),
    base_model_prefix="model.",
    ignored_weights=IGNORED_WEIGHTS,
)
