"""Pegasus: BART with sinusoidal positions and pre-norm. https://arxiv.org/abs/1912.08777"""

from cutaway.families.config_fields import Key
from cutaway.families.tables import bart
from cutaway.families.weight_conversion import WeightMapping

SINUSOIDAL_EMBEDDING = {"position": {"kind": "sinusoidal", "layout": "halves"}}
POSITION_WEIGHTS = tuple(
    WeightMapping(f"model.{side}.embed_positions.weight", f"{side}.embed.position.table") for side in bart.STACKS
)

FAMILY = bart.build_family(
    "pegasus",
    "PegasusForConditionalGeneration",
    bart.build_template("pre", SINUSOIDAL_EMBEDDING),
    fields=(
        Key("vocab_size", "vocab_size", 50265),
        *bart.common_fields("table_length"),
        bart.TIED_EMBEDDINGS_ONLY,
        *bart.legacy_flags(pre_norm=True, embedding_norm=False, sinusoidal=True),
    ),
    weight_mappings=(
        bart.SHARED_EMBEDDING,
        *POSITION_WEIGHTS,
        *bart.FINAL_NORM_WEIGHTS,
        *bart.stack_weights(pre_norm=True),
    ),
)
