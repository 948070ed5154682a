"""RoBERTa: BERT whose positions are numbered from behind the padding token's. https://arxiv.org/abs/1907.11692"""

from typing import Any

from cutaway.families.family import Family
from cutaway.families.fields import Custom, Follows, Theirs
from cutaway.families.tables.bert import DROPOUTS, LAYER, RENAMED, TEMPLATE, TIE, TYPES, ignored, mlm, sizes, trunk
from cutaway.families.tree import Tree

AT = "encoder.embedding.position"


def read_positions(theirs: Theirs, ours: Tree) -> None:
    """The first position is the row after the padding token's number, and the rows before it count as positions too."""
    offset = theirs.number("pad_token_id", 1) + 1
    ours.set(f"{AT}.offset", offset)
    ours.set(f"{AT}.length", theirs.number("max_position_embeddings", 512) - offset)


def write_positions(ours: Tree, theirs: dict[str, Any]) -> None:
    offset = ours.get(f"{AT}.offset")
    theirs["pad_token_id"] = offset - 1
    theirs["max_position_embeddings"] = ours.get(f"{AT}.length") + offset


POSITIONS = (
    Custom(("max_position_embeddings", "pad_token_id"), read_positions, write_positions),
    Follows("context", f"{AT}.length"),
)

FAMILY = Family(
    name="roberta",
    architecture="RobertaForMaskedLM",
    trunk="RobertaModel",
    template=TEMPLATE,
    fields=(*sizes(50265, 768, 12, 12, 3072), *POSITIONS, TYPES, *DROPOUTS, TIE),
    rows=(*trunk("roberta", *LAYER), *mlm("lm_head", "dense", "layer_norm")),
    prefix="roberta.",
    ignored=ignored(),
    renamed=RENAMED,
)
