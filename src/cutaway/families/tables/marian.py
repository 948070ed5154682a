"""Marian (OPUS-MT translation models). https://arxiv.org/abs/1804.00344 https://aclanthology.org/2020.eamt-1.61"""

from cutaway.config import Config
from cutaway.errors import ConfigError
from cutaway.families.config_fields import Custom, HFConfigReader, clear_out_of_vocab_pad_token, flag
from cutaway.families.config_tree import ConfigTree
from cutaway.families.tables import bart
from cutaway.families.tables.pegasus import POSITION_WEIGHTS, SINUSOIDAL_EMBEDDING
from cutaway.families.weight_conversion import WeightMapping

VOCAB_KEYS = ("vocab_size", "decoder_vocab_size", "share_encoder_decoder_embeddings")


def _read_vocab_sizes(hf_config: HFConfigReader, tree: ConfigTree) -> None:
    """Read the vocabulary sizes of encoder (`vocab_size`) and decoder. They are equal if both share one embedding."""
    source = hf_config.get_number(VOCAB_KEYS[0], 58101)
    target = hf_config.get(VOCAB_KEYS[1]) or source
    shared = hf_config.get(VOCAB_KEYS[2], True)
    if shared and source != target:
        sizes = f"'{VOCAB_KEYS[0]}' is {source} and '{VOCAB_KEYS[1]}' is {target}"
        raise ConfigError(f"encoder and decoder share one embedding, but {sizes}; make them equal")
    tree.set("vocab_size", target)
    tree.set("source_vocab_size", None if shared else source)


def _write_vocab_sizes(tree: ConfigTree, hf_config: dict[str, object]) -> None:
    source, target = tree.get("source_vocab_size"), tree.get("vocab_size")
    hf_config.update(zip(VOCAB_KEYS, (source or target, target, source is None), strict=True))


def _shares_embeddings(config: Config) -> bool:
    return getattr(config, "source_vocab_size", None) is None


def _check_untied_not_shared(hf_config: HFConfigReader, tree: ConfigTree) -> None:
    if not tree.get("head.tied") and tree.get("source_vocab_size") is None:
        raise ConfigError(
            "config.json's 'tie_word_embeddings' is false, but encoder and decoder share one embedding, which is"
            " ambiguous; set 'share_encoder_decoder_embeddings' to false or tie the embeddings"
        )


FAMILY = bart.build_family(
    "marian",
    "MarianMTModel",
    bart.build_template("post", SINUSOIDAL_EMBEDDING),
    fields=(
        Custom(VOCAB_KEYS, _read_vocab_sizes, _write_vocab_sizes),
        clear_out_of_vocab_pad_token(58100),
        *bart.common_fields("table_length"),
        flag("tie_word_embeddings", "head.tied", True),
        Custom((), _check_untied_not_shared),
        *bart.legacy_flags(pre_norm=False, embedding_norm=False, sinusoidal=True),
    ),
    weight_mappings=(
        WeightMapping("model.shared", "decoder.embed.token", condition=_shares_embeddings),
        *POSITION_WEIGHTS,
        *bart.stack_weights(pre_norm=False),
    ),
)
