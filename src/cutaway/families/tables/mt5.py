"""mT5: multilingual T5 1.1. https://arxiv.org/abs/2010.11934"""

from cutaway.families.config_fields import flag
from cutaway.families.family import Family
from cutaway.families.tables.t5 import (
    ATTRIBUTE_MAP,
    IGNORED_CONFIG_KEYS,
    IGNORED_WEIGHTS,
    TEMPLATE,
    WEIGHT_RENAMINGS,
    WEIGHTS,
    common_fields,
)

FAMILY = Family(
    name="mt5",
    architecture="MT5ForConditionalGeneration",
    template=TEMPLATE,
    fields=(*common_fields(250112, 1024, 8, 6, "gated-gelu"), flag("tie_word_embeddings", "head.tied", True)),
    weight_mappings=WEIGHTS,
    attribute_map=ATTRIBUTE_MAP,
    ignored_weights=IGNORED_WEIGHTS,
    ignored_config_keys=IGNORED_CONFIG_KEYS,
    weight_renamings=WEIGHT_RENAMINGS,
)
