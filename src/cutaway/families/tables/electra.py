"""ELECTRA, the generator with its head or the discriminator's encoder. https://arxiv.org/abs/2003.10555"""

from typing import Any

from cutaway.families.family import Family
from cutaway.families.fields import Custom, Theirs
from cutaway.families.rows import Row
from cutaway.families.tables import bert
from cutaway.families.tables.albert import NARROW
from cutaway.families.tree import Tree


def read_factor(theirs: Theirs, ours: Tree) -> None:
    """A projection only where the token table is not as wide as the stream."""
    width = theirs.number("embedding_size", 128)
    ours.set("encoder.embedding.factor", None if width == ours.data["d_model"] else {"width": width})


def write_factor(ours: Tree, theirs: dict[str, Any]) -> None:
    factor = ours.get("encoder.embedding.factor")
    theirs["embedding_size"] = ours.data["d_model"] if factor is None else factor["width"]


FAMILY = Family(
    name="electra",
    architecture="ElectraForMaskedLM",
    trunk="ElectraModel",
    template=bert.TEMPLATE,
    fields=(
        *bert.sizes(30522, 256, 12, 4, 1024),
        *bert.POSITIONS,
        bert.TYPES,
        *bert.DROPOUTS,
        Custom(("embedding_size",), read_factor, write_factor),
        bert.TIE,
        NARROW,
    ),
    rows=(
        *bert.trunk("electra", *bert.LAYER),
        Row("electra.embeddings_project", "encoder.embed.project"),
        Row("generator_predictions.dense", "head.transform.dense"),
        Row("generator_predictions.LayerNorm", "head.transform.norm"),
        Row("generator_lm_head", "head.matrix"),
        Row("generator_lm_head.bias", "head.bias"),
    ),
    prefix="electra.",
    ignored=bert.ignored("sequence_summary")
    | {r"discriminator_predictions\..*": "tells replaced tokens; it is no language model"},
    harmless=dict.fromkeys(
        ("summary_type", "summary_use_proj", "summary_activation", "summary_last_dropout"),
        "for multiple choice, whose head is not loaded",
    ),
    renamed=bert.RENAMED,
)
