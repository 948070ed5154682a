"""MPNet: BERT with the positions of RoBERTa and the relative position bias of T5. https://arxiv.org/abs/2004.09297"""

from cutaway.families.config_fields import Key, SameAs, SupportedValues
from cutaway.families.tables import bert
from cutaway.families.weight_conversion import WeightMapping

POSITION_OFFSET = 2
RELATIVE_BIAS = {"kind": "relative-bias", "buckets": 32, "max_distance": 128}

FAMILY = bert.build_family(
    "mpnet",
    "MPNet",
    bert.build_template(position=RELATIVE_BIAS, embedding={"position": {"kind": "learned", "offset": POSITION_OFFSET}}),
    fields=(
        *bert.size_fields(30527, 768, 12, 12, 3072),
        Key(
            "max_position_embeddings",
            "encoder.embedding.position.length",
            512,
            decode=lambda length: length - POSITION_OFFSET,
            encode=lambda length: length + POSITION_OFFSET,
        ),
        SameAs("context", "encoder.embedding.position.length"),
        *bert.DROPOUT_FIELDS,
        bert.TIE_EMBEDDINGS_FIELD,
        SupportedValues("relative_attention_num_buckets", (32,), "transformers always uses 32 buckets"),
    ),
    weight_mappings=(
        *bert.encoder_weights(
            "mpnet",
            *(WeightMapping(f"attention.attn.{p}", f"attn.f.{p}") for p in "qkvo"),
            WeightMapping("attention.LayerNorm", "norm_after_attn"),
            *bert.FFN_WEIGHTS,
        ),
        WeightMapping("mpnet.encoder.relative_attention_bias", "encoder.positions.0.table"),
        *bert.mlm_head_weights("lm_head", "dense", "layer_norm"),
    ),
    head_classes=(
        bert.dense_head_class("MPNet", bert.HIDDEN_DROPOUT),
        bert.pooler_head_class("MPNet", "multiple-choice", "mpnet.pooler.dense", bert.HIDDEN_DROPOUT),
        bert.token_head_class("MPNet", bert.HIDDEN_DROPOUT),
    ),
)
