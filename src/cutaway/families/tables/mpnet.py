"""MPNet: BERT with RoBERTa's positions and T5's bias. https://arxiv.org/abs/2004.09297"""

from cutaway.families.family import Family
from cutaway.families.fields import Follows, Key, Only
from cutaway.families.rows import Row
from cutaway.families.tables.bert import BLOCK, DROPOUTS, FFN, RENAMED, TEMPLATE, TIE, ignored, mlm, sizes, trunk

OFFSET = 2
ATTENTION = BLOCK["attention"] | {"position": {"kind": "relative-bias", "buckets": 32, "max_distance": 128}}
POSITION = {"kind": "learned", "offset": OFFSET}
ENCODER = TEMPLATE["encoder"] | {
    "block": BLOCK | {"attention": ATTENTION},
    "embedding": {"position": POSITION, "norm": {"kind": "layernorm"}},
}

FAMILY = Family(
    name="mpnet",
    architecture="MPNetForMaskedLM",
    trunk="MPNetModel",
    template=TEMPLATE | {"encoder": ENCODER},
    fields=(
        *sizes(30527, 768, 12, 12, 3072),
        Key(
            "max_position_embeddings",
            "encoder.embedding.position.length",
            512,
            to=lambda length: length - OFFSET,
            back=lambda length: length + OFFSET,
        ),
        Follows("context", "encoder.embedding.position.length"),
        *DROPOUTS,
        TIE,
        Only("relative_attention_num_buckets", (32,), "its own code sorts distances into 32 whatever this says"),
    ),
    rows=(
        *trunk(
            "mpnet",
            *(Row(f"attention.attn.{p}", f"attn.f.{p}") for p in "qkvo"),
            Row("attention.LayerNorm", "after_attn"),
            *FFN,
        ),
        Row("mpnet.encoder.relative_attention_bias", "encoder.positions.0.table"),
        *mlm("lm_head", "dense", "layer_norm"),
    ),
    prefix="mpnet.",
    ignored=ignored(),
    renamed=RENAMED,
)
