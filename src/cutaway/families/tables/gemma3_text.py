"""Gemma 3, text only: QK-norm, five sliding-window layers per full-attention layer, one RoPE per layer type.

https://arxiv.org/abs/2503.19786
"""

from cutaway.families.config_fields import Key, LayerTypes, SupportedValues, full_attention_every
from cutaway.families.rope_fields import RopeFieldByLayerType
from cutaway.families.tables import gemma, llama
from cutaway.families.tables.gemma2 import GEMMA2_FIELDS, IGNORED_CONFIG_KEYS, SANDWICH_NORM_WEIGHTS

PERIOD_KEY = "sliding_window_pattern"

FAMILY = llama.build_family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    gemma.build_template("sandwich", {"qk_norm": {"norm": gemma.NORM}}),
    fields=(
        *llama.size_fields(262208, 2304, 9216, 26, 131072, tie_word_embeddings=True),
        *GEMMA2_FIELDS,
        Key("rms_norm_eps", ("decoder.norm.eps", f"{llama.ATTENTION}.qk_norm.norm.eps"), 1e-6),
        SupportedValues("attn_logit_softcapping", (None,), "transformers does not softcap the scores of this family"),
        Key("final_logit_softcapping", "head.softcap", None),
        LayerTypes(full_attention_every(6, PERIOD_KEY), default_window=4096, extra_keys=(PERIOD_KEY,)),
        RopeFieldByLayerType(default_max_positions=131072, full_rotary_only=True),
    ),
    weight_mappings=llama.weights(
        *SANDWICH_NORM_WEIGHTS, *llama.ATTENTION_WEIGHTS, *llama.QK_NORM_WEIGHTS, *llama.FFN_WEIGHTS
    ),
    ignored_config_keys={
        **IGNORED_CONFIG_KEYS,
        "_sliding_window_pattern": "legacy form of layer_types, which is present, too",
    },
)
