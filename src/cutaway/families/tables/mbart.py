"""mBART and mBART-50: BART with pre-norm, for 25 or 50 languages. https://arxiv.org/abs/2001.08210"""

from cutaway.families.config_fields import Key
from cutaway.families.head_classes import encoder_decoder_head_class
from cutaway.families.tables import bart

FAMILY = bart.build_family(
    "mbart",
    "MBartForConditionalGeneration",
    bart.build_template("pre", bart.LEARNED_EMBEDDING),
    fields=(
        Key("vocab_size", "vocab_size", 50265),
        *bart.common_fields("length"),
        bart.TIED_EMBEDDINGS_ONLY,
        *bart.legacy_flags(pre_norm=True, embedding_norm=True, sinusoidal=False),
    ),
    weight_mappings=(
        bart.SHARED_EMBEDDING,
        *bart.LEARNED_EMBEDDING_WEIGHTS,
        *bart.FINAL_NORM_WEIGHTS,
        *bart.stack_weights(pre_norm=True),
    ),
    head_classes=(encoder_decoder_head_class("MBart"),),
)
