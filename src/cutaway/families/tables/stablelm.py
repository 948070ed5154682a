"""StableLM 3B, 2 1.6B and 2 12B: Llama with LayerNorm and RoPE on 25% of a head. https://arxiv.org/abs/2402.17834"""

from cutaway.families.config_fields import Key, activation, attention_heads, flag
from cutaway.families.family import Family
from cutaway.families.rope_fields import RopeField
from cutaway.families.tables.llama import (
    ATTENTION_WEIGHTS,
    BLOCK,
    EMBEDDING_AND_HEAD_WEIGHTS,
    FFN_WEIGHTS,
    IGNORED_WEIGHTS,
    NORM_WEIGHTS,
    per_layer,
    size_fields,
)
from cutaway.families.tables.phi import qk_layernorm_field
from cutaway.families.weight_conversion import MergeModulelist, WeightMapping

FAMILY = Family(
    name="stablelm",
    architecture="StableLmForCausalLM",
    template={
        "form": "decoder",
        "decoder": {"block": BLOCK, "norm": {"kind": "layernorm"}, "attention_resid_dropout": 0.0},
        "head": {"kind": "lm"},
    },
    fields=(
        *size_fields(50304, 2560, 6912, 32, 4096),
        *attention_heads(num_kv_heads=("num_key_value_heads", 32), head_dim=None),
        Key("layer_norm_eps", "decoder.norm.eps", 1e-5),
        qk_layernorm_field(gain_per_head=True),
        activation("hidden_act", "decoder.block.ffn.activation", "silu"),
        flag("use_qkv_bias", "decoder.block.attention.bias", False, on=("q", "k", "v"), off=()),
        flag(
            "use_parallel_residual",
            "decoder.placement",
            False,
            on={"kind": "parallel", "norms": "one"},
            off={"kind": "pre"},
        ),
        Key("attention_dropout", "decoder.block.attention.dropout", 0.0),
        Key("hidden_dropout", "decoder.dropout", 0.0),
        RopeField(default_partial_rotary_factor=0.25, default_max_positions=4096),
    ),
    weight_mappings=(
        *EMBEDDING_AND_HEAD_WEIGHTS,
        *per_layer(
            WeightMapping("input_layernorm", "norm"),
            *NORM_WEIGHTS,
            *ATTENTION_WEIGHTS,
            *(
                WeightMapping(f"self_attn.{p}_layernorm.norms.{{e}}", f"attn.f.{p}_norm.norm", MergeModulelist())
                for p in "qk"
            ),
            *FFN_WEIGHTS,
        ),
    ),
    base_model_prefix="model.",
    ignored_weights=IGNORED_WEIGHTS,
)
