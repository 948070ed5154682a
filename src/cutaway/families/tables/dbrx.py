"""DBRX: LayerNorm without bias, clamped q, k and v, and a mixture of experts in every layer.

https://www.databricks.com/blog/introducing-dbrx-new-state-art-open-llm
"""

from typing import Any

from cutaway.errors import ConfigError
from cutaway.families.config_fields import HF_ACTIVATIONS, Custom, HFConfigReader, Key, Nested, SupportedValues
from cutaway.families.config_tree import ConfigTree
from cutaway.families.family import Family
from cutaway.families.rope_fields import RopeField
from cutaway.families.tables import llama
from cutaway.families.tables.llama import ATTENTION, FFN
from cutaway.families.tables.mixtral import MOE_TEMPLATE
from cutaway.families.weight_conversion import QKV, Split, SplitExperts, WeightMapping

NO_BIAS_LAYERNORM = {"kind": "layernorm", "eps": 1e-5, "bias": False}


class _DbrxRopeField(RopeField):
    """RoPE whose theta is `attn_config.rope_theta` if there are no RoPE settings at the top level."""

    def from_hf(self, hf_config: HFConfigReader, tree: ConfigTree) -> None:
        theta = (hf_config.get("attn_config") or {}).get("rope_theta")
        defaults = {"max_position_embeddings": hf_config.get_number("max_seq_len", 2048), "rope_theta": theta}
        super().from_hf(HFConfigReader(defaults | dict(hf_config.data)), tree)

    def to_hf(self, tree: ConfigTree, hf_config: dict[str, object]) -> None:
        super().to_hf(tree, hf_config)
        if "max_position_embeddings" in hf_config:
            hf_config["max_seq_len"] = hf_config.pop("max_position_embeddings")
        attention, rope_parameters = hf_config["attn_config"], hf_config["rope_parameters"]
        assert isinstance(attention, dict)  # written by the field `attn_config`
        assert isinstance(rope_parameters, dict)
        attention["rope_theta"] = rope_parameters["rope_theta"]


def _default_activation(hf_config: HFConfigReader) -> dict[str, str]:
    return {"name": "silu"}


def _read_activation(value: dict[str, Any]) -> str:
    """Convert {"name": activation name of transformers} to the name in Config."""
    name = value.get("name", "silu")
    if name not in HF_ACTIVATIONS or value.keys() - {"name"}:
        raise ConfigError(f"config.json's 'ffn_config.ffn_act_fn' is {value!r}, which cutaway does not support")
    return HF_ACTIVATIONS[name]


def _write_activation(activation: str) -> dict[str, str]:
    return {"name": next(name for name, target in HF_ACTIVATIONS.items() if target == activation)}


def _read_renormalize(hf_config: HFConfigReader, tree: ConfigTree) -> None:
    """Read whether the weights of experts are divided by their p-norm: p is 1, or null for no division."""
    p = hf_config.get("moe_normalize_expert_weights", 1.0)
    if p not in (None, 1):
        raise ConfigError(f"config.json's 'ffn_config.moe_normalize_expert_weights' is {p!r}; cutaway supports 1, null")
    tree.set(f"{FFN}.router.renormalize", p is not None)


def _write_renormalize(tree: ConfigTree, hf_config: dict[str, object]) -> None:
    hf_config["moe_normalize_expert_weights"] = 1.0 if tree.get(f"{FFN}.router.renormalize") else None


ATTENTION_FIELDS = (
    Key("kv_n_heads", f"{ATTENTION}.kv_heads", 1),
    Key("clip_qkv", f"{ATTENTION}.clip_qkv", None),
    Key("attn_pdrop", f"{ATTENTION}.dropout", 0.0),
)
FFN_FIELDS = (
    Key("ffn_hidden_size", f"{FFN}.expert.hidden", 3584),
    Key("ffn_act_fn", f"{FFN}.expert.activation", _default_activation, _read_activation, _write_activation),
    Key("moe_num_experts", f"{FFN}.experts", 4),
    Key("moe_top_k", f"{FFN}.router.top_k", 1),
    Custom(("moe_normalize_expert_weights",), _read_renormalize, _write_renormalize),
    SupportedValues("moe_jitter_eps", (None,), "it adds noise to the input of the experts in training"),
)

FAMILY = Family(
    name="dbrx",
    architecture="DbrxForCausalLM",
    template=llama.build_template(ffn=MOE_TEMPLATE, norm=NO_BIAS_LAYERNORM, head={"tied": False}),
    fields=(
        Key("vocab_size", "vocab_size", 32000),
        Key("d_model", "d_model", 2048),
        Key("n_layers", "decoder.layers", 24),
        Key("n_heads", f"{ATTENTION}.heads", 16),
        Key("max_seq_len", "context", 2048),
        Key("resid_pdrop", "decoder.dropout", 0.0),
        Key("emb_pdrop", "decoder.embedding.dropout", 0.0),
        Nested("attn_config", ATTENTION_FIELDS),
        Nested("ffn_config", FFN_FIELDS),
        _DbrxRopeField(full_rotary_only=True),
        SupportedValues("tie_word_embeddings", (False, None), "the head of this family is always untied"),
    ),
    weight_mappings=llama.weights(
        WeightMapping("norm_attn_norm.norm_1", "attn.norm_in"),
        WeightMapping("norm_attn_norm.norm_2", "ffn.norm_in"),
        WeightMapping("norm_attn_norm.attn.Wqkv", QKV, Split()),
        WeightMapping("norm_attn_norm.attn.out_proj", "attn.f.o"),
        WeightMapping("ffn.router.layer", "ffn.f.router"),
        WeightMapping("ffn.experts.mlp.w1", "ffn.f.experts.gate.weight", SplitExperts()),
        WeightMapping("ffn.experts.mlp.v1", "ffn.f.experts.up.weight", SplitExperts()),
        WeightMapping("ffn.experts.mlp.w2", "ffn.f.experts.down.weight", SplitExperts(transposed=True)),
        embed="transformer.wte",
        norm="transformer.norm_f",
        layer="transformer.blocks",
    ),
    base_model_prefix="transformer.",
    ignored_weights=llama.IGNORED_CLASSIFIER_WEIGHTS,
    ignored_config_keys={"num_key_value_heads": "duplicate of attn_config.kv_n_heads"},
    attribute_map={
        "num_attention_heads": "n_heads",
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "max_position_embeddings": "max_seq_len",
    },
)
