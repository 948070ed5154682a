"""Gemma 3, text only: QK-norm, five sliding-window layers per full-attention layer, one RoPE per layer type.

https://arxiv.org/abs/2503.19786
"""

from cutaway.families.config_fields import Key, LayerTypes, SupportedValues, full_attention_every
from cutaway.families.family import Family
from cutaway.families.rope_fields import RopeFieldByLayerType
from cutaway.families.tables.gemma import build_template
from cutaway.families.tables.gemma2 import GEMMA2_FIELDS, IGNORED_CONFIG_KEYS, SANDWICH_NORM_WEIGHTS
from cutaway.families.tables.llama import (
    ATTENTION_WEIGHTS,
    EMBEDDING_AND_HEAD_WEIGHTS,
    FFN_WEIGHTS,
    IGNORED_WEIGHTS,
    per_layer,
    size_fields,
)
from cutaway.families.tables.qwen3 import QK_NORM_WEIGHTS

QK_NORM = {"norm": {"kind": "rmsnorm", "unit_offset": True}}

FAMILY = Family(
    name="gemma3_text",
    architecture="Gemma3ForCausalLM",
    template=build_template("sandwich", qk_norm=QK_NORM),
    fields=(
        *size_fields(262208, 2304, 9216, 26, 131072, tie_word_embeddings=True),
        *GEMMA2_FIELDS,
        Key("rms_norm_eps", ("decoder.norm.eps", "decoder.block.attention.qk_norm.norm.eps"), 1e-6),
        SupportedValues("attn_logit_softcapping", (None,), "transformers does not softcap the scores of this family"),
        Key("final_logit_softcapping", "head.softcap", None),
        LayerTypes(
            full_attention_every(6, "sliding_window_pattern"),
            default_window=4096,
            extra_keys=("sliding_window_pattern",),
        ),
        RopeFieldByLayerType(default_max_positions=131072, full_rotary_only=True),
    ),
    weight_mappings=(
        *EMBEDDING_AND_HEAD_WEIGHTS,
        *per_layer(*SANDWICH_NORM_WEIGHTS, *ATTENTION_WEIGHTS, *QK_NORM_WEIGHTS, *FFN_WEIGHTS),
    ),
    base_model_prefix="model.",
    ignored_weights=IGNORED_WEIGHTS,
    ignored_config_keys=IGNORED_CONFIG_KEYS
    | {"_sliding_window_pattern": "legacy form of layer_types, which is present, too"},
)
