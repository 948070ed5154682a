"""mT5: T5 1.1 in a hundred languages. https://arxiv.org/abs/2010.11934"""

from cutaway.families.family import Family
from cutaway.families.fields import flag
from cutaway.families.tables.t5 import ALIASES, HARMLESS, IGNORED, RENAMED, ROWS, TEMPLATE, fields

FAMILY = Family(
    name="mt5",
    architecture="MT5ForConditionalGeneration",
    template=TEMPLATE,
    fields=(*fields(250112, 1024, 8, 6, "gated-gelu"), flag("tie_word_embeddings", "head.tied", True)),
    rows=ROWS,
    aliases=ALIASES,
    ignored=IGNORED,
    harmless=HARMLESS,
    renamed=RENAMED,
)
