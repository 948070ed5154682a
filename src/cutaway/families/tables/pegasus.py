"""Pegasus: BART with sinusoids, and norms before its sublayers. https://arxiv.org/abs/1912.08777"""

from cutaway.families.family import Family
from cutaway.families.fields import Key
from cutaway.families.rows import Row
from cutaway.families.tables import bart

SINUSOIDS = {"position": {"kind": "sinusoidal", "layout": "halves"}}
POSITIONS = tuple(Row(f"model.{side}.embed_positions.weight", f"{side}.embed.position.table") for side in bart.SIDES)

FAMILY = Family(
    name="pegasus",
    architecture="PegasusForConditionalGeneration",
    template=bart.template("pre", SINUSOIDS),
    fields=(
        Key("vocab_size", "vocab_size", 50265),
        *bart.fields("table"),
        bart.TIED,
        *bart.old_flags(pre=True, normed=False, sinusoids=True),
    ),
    rows=(
        bart.SHARED,
        *POSITIONS,
        *(Row(f"model.{side}.layer_norm", f"{side}.final_norm") for side in bart.SIDES),
        *bart.rows(pre=True),
    ),
    prefix="model.",
    aliases=bart.ALIASES,
    ignored=bart.IGNORED,
    harmless=bart.HARMLESS,
)
