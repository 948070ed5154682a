"""Mixtral. https://arxiv.org/abs/2401.04088"""

from cutaway.families.config_fields import Key, SupportedValues, activation, flag
from cutaway.families.family import Family
from cutaway.families.rope_fields import RopeField
from cutaway.families.tables.llama import (
    ATTENTION_WEIGHTS,
    EMBEDDING_AND_HEAD_WEIGHTS,
    IGNORED_WEIGHTS,
    NORM_WEIGHTS,
    per_layer,
)
from cutaway.families.tables.mistral import build_template, head_fields
from cutaway.families.weight_conversion import MergeModulelist, WeightMapping

FFN_PATH = "decoder.block.ffn"
MOE_TEMPLATE = {"kind": "moe", "router": {}, "expert": {"kind": "gated"}}

FAMILY = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    template=build_template({}, MOE_TEMPLATE),
    fields=(
        Key("vocab_size", "vocab_size", 32000),
        Key("hidden_size", "d_model", 4096),
        Key("num_hidden_layers", "decoder.layers", 32),
        Key("max_position_embeddings", "context", 131072),
        flag("tie_word_embeddings", "head.tied", False),
        *head_fields(4096, 32, 8),
        Key("rms_norm_eps", "decoder.norm.eps", 1e-5),
        Key("attention_dropout", "decoder.block.attention.dropout", 0.0),
        Key("intermediate_size", f"{FFN_PATH}.expert.hidden", 14336),
        activation("hidden_act", f"{FFN_PATH}.expert.activation", "silu"),
        Key("num_local_experts", f"{FFN_PATH}.experts", 8),
        Key("num_experts_per_tok", f"{FFN_PATH}.router.top_k", 2),
        SupportedValues("router_jitter_noise", (0.0, None), "it adds noise to the input of the experts in training"),
        Key("sliding_window", "decoder.block.attention.window", None),
        RopeField(default_theta=1e6, default_max_positions=131072, full_rotary_only=True),
    ),
    weight_mappings=(
        *EMBEDDING_AND_HEAD_WEIGHTS,
        *per_layer(
            *NORM_WEIGHTS,
            *ATTENTION_WEIGHTS,
            WeightMapping("block_sparse_moe.gate", "ffn.f.router"),
            WeightMapping("block_sparse_moe.experts.{e}.w1", "ffn.f.experts.gate", MergeModulelist()),
            WeightMapping("block_sparse_moe.experts.{e}.w3", "ffn.f.experts.up", MergeModulelist()),
            WeightMapping("block_sparse_moe.experts.{e}.w2", "ffn.f.experts.down", MergeModulelist()),
        ),
    ),
    base_model_prefix="model.",
    ignored_weights=IGNORED_WEIGHTS,
    attribute_map={"num_experts": "num_local_experts"},
)
