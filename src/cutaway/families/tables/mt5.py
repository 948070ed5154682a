"""mT5: multilingual T5 1.1. https://arxiv.org/abs/2010.11934"""

from cutaway.families.config_fields import flag
from cutaway.families.tables import t5

FAMILY = t5.build_family(
    "mt5",
    "MT5ForConditionalGeneration",
    (*t5.common_fields(250112, 1024, 8, 6, "gated-gelu"), flag("tie_word_embeddings", "head.tied", True)),
)
