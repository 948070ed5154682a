"""Marian, of the OPUS-MT translators. https://arxiv.org/abs/1804.00344 https://aclanthology.org/2020.eamt-1.61"""

from typing import Any

from cutaway.config import Config
from cutaway.errors import ConfigError
from cutaway.families.family import Family
from cutaway.families.fields import Custom, Theirs, flag, padding_within_vocab
from cutaway.families.rows import Row
from cutaway.families.tables.bart import ALIASES, HARMLESS, IGNORED, fields, old_flags, rows, template
from cutaway.families.tables.pegasus import POSITIONS, SINUSOIDS
from cutaway.families.tree import Tree

VOCABS = ("vocab_size", "decoder_vocab_size", "share_encoder_decoder_embeddings")


def read_vocabs(theirs: Theirs, ours: Tree) -> None:
    """One table for both sides, or one each. Their `vocab_size` is the source's."""
    source = theirs.number(VOCABS[0], 58101)
    target = theirs.get(VOCABS[1]) or source
    shared = theirs.get(VOCABS[2], True)
    if shared and source != target:
        raise ConfigError(f"both sides share one table, and yet '{VOCABS[0]}' is {source} and '{VOCABS[1]}' {target}")
    ours.set("vocab_size", target)
    ours.set("source_vocab_size", None if shared else source)


def write_vocabs(ours: Tree, theirs: dict[str, Any]) -> None:
    source, target = ours.get("source_vocab_size"), ours.get("vocab_size")
    theirs.update(zip(VOCABS, (source or target, target, source is None), strict=True))


def shared(config: Config) -> bool:
    return getattr(config, "source_vocab_size", None) is None


def check_untied_is_apart(theirs: Theirs, ours: Tree) -> None:
    if not ours.get("head.tied") and ours.get("source_vocab_size") is None:
        raise ConfigError(
            "config.json's 'tie_word_embeddings' is false for a table that both sides share; it cannot be told whether"
            " they still do, so say it with 'share_encoder_decoder_embeddings'"
        )


FAMILY = Family(
    name="marian",
    architecture="MarianMTModel",
    template=template("post", SINUSOIDS),
    fields=(
        Custom(VOCABS, read_vocabs, write_vocabs),
        padding_within_vocab(58100),
        *fields("table"),
        flag("tie_word_embeddings", "head.tied", True),
        Custom((), check_untied_is_apart, lambda ours, theirs: None),
        *old_flags(pre=False, normed=False, sinusoids=True),
    ),
    rows=(Row("model.shared", "decoder.embed.token", where=shared), *POSITIONS, *rows(pre=False)),
    prefix="model.",
    aliases=ALIASES,
    ignored=IGNORED,
    harmless=HARMLESS,
)
