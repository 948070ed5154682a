"""GPT-NeoX and Pythia. https://arxiv.org/abs/2204.06745"""

from cutaway.families.config_fields import Key, SupportedValues, activation, attention_heads, flag
from cutaway.families.family import Family
from cutaway.families.rope_fields import RopeField
from cutaway.families.tables.llama import IGNORED_CLASSIFIER_WEIGHTS, NORM_WEIGHTS, QKVO, size_fields
from cutaway.families.weight_conversion import SplitGroupedQKV, WeightMapping, add_prefix

QKV = ("attn.f.q", "attn.f.k", "attn.f.v")


def megatron_weights(attention_prefix: str) -> tuple[WeightMapping, ...]:
    """Weight mappings in Megatron names: fused q, k and v, interleaved by head."""
    return (
        WeightMapping(f"{attention_prefix}.query_key_value", QKV, SplitGroupedQKV()),
        WeightMapping(f"{attention_prefix}.dense", "attn.f.o"),
        WeightMapping("mlp.dense_h_to_4h", "ffn.f.up"),
        WeightMapping("mlp.dense_4h_to_h", "ffn.f.down"),
    )


FAMILY = Family(
    name="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    template={
        "form": "decoder",
        "decoder": {
            "block": {"attention": {"kind": "multi-head"}, "ffn": {"kind": "mlp"}},
            "norm": {"kind": "layernorm"},
        },
        "head": {"kind": "lm"},
    },
    fields=(
        *size_fields(50432, 6144, 24576, 44, 2048),
        *attention_heads(num_heads=("num_attention_heads", 64), num_kv_heads=None, head_dim=None),
        Key("layer_norm_eps", "decoder.norm.eps", 1e-5),
        activation("hidden_act", "decoder.block.ffn.activation", "gelu"),
        flag("attention_bias", "decoder.block.attention.bias", True, on=QKVO, off=()),
        Key("attention_dropout", "decoder.block.attention.dropout", 0.0),
        Key("hidden_dropout", ("decoder.dropout", "decoder.embedding.dropout"), 0.0),
        flag(
            "use_parallel_residual",
            "decoder.placement",
            True,
            on={"kind": "parallel", "norms": "two"},
            off={"kind": "pre"},
        ),
        RopeField(
            default_partial_rotary_factor=0.25, partial_rotary_factor_key="rotary_pct", theta_key="rotary_emb_base"
        ),
        SupportedValues("is_decoder", (False, True, None), "the family is always a decoder"),
    ),
    weight_mappings=(
        WeightMapping("gpt_neox.embed_in", "decoder.embed.token"),
        WeightMapping("gpt_neox.final_layer_norm", "decoder.final_norm"),
        WeightMapping("embed_out", "head.matrix"),
        WeightMapping("lm_head", "head.matrix"),
        *add_prefix("gpt_neox.layers.{i}", "decoder.blocks.{i}", *NORM_WEIGHTS, *megatron_weights("attention")),
    ),
    base_model_prefix="gpt_neox.",
    ignored_weights={
        r"gpt_neox\.layers\.\d+\.attention\.(masked_)?bias": "causal mask, computed from positions",
        r"gpt_neox\.(layers\.\d+\.attention\.)?rotary_emb\.inv_freq": "RoPE frequencies, which are computed",
        **IGNORED_CLASSIFIER_WEIGHTS,
    },
    ignored_config_keys={
        "rope_theta": "duplicate of rotary_emb_base",
        "partial_rotary_factor": "duplicate of rotary_pct",
    },
)
