"""M2M100 and NLLB: pre-norm BART with sinusoidal positions. https://arxiv.org/abs/2010.11125 https://arxiv.org/abs/2207.04672"""

from cutaway.families.config_fields import Custom, HFConfigReader, Key
from cutaway.families.config_tree import ConfigTree
from cutaway.families.tables import bart

SINUSOIDAL_EMBEDDING = {"position": {"kind": "sinusoidal", "layout": "halves", "endpoint": True}}


def _read_offset(hf_config: HFConfigReader, tree: ConfigTree) -> None:
    """Read the number of the first position, which is pad_token_id + 1."""
    for path in bart.both_stacks("embedding.position.offset"):
        tree.set(path, hf_config.get_number("pad_token_id", 1) + 1)


def _write_offset(tree: ConfigTree, hf_config: dict[str, object]) -> None:
    hf_config["pad_token_id"] = tree.get("decoder.embedding.position.offset") - 1


FAMILY = bart.build_family(
    "m2m_100",
    "M2M100ForConditionalGeneration",
    bart.build_template("pre", SINUSOIDAL_EMBEDDING, head_bias="none"),
    fields=(
        Key("vocab_size", "vocab_size", 128112),
        *bart.stack_fields("relu", 0.1, scale_embedding=True),
        Key("max_position_embeddings", "context", 1024),
        Custom(("pad_token_id",), _read_offset, _write_offset),
        bart.TIED_EMBEDDINGS_ONLY,
        *bart.legacy_flags(pre_norm=True, embedding_norm=False, sinusoidal=True),
    ),
    weight_mappings=(
        bart.SHARED_EMBEDDING,
        *bart.FINAL_NORM_WEIGHTS,
        *bart.stack_weights(pre_norm=True),
    ),
    ignored_config_keys={
        **bart.IGNORED_CONFIG_KEYS,
        "encoder_layerdrop": "LayerDrop, which skips layers in training only; cutaway does not skip layers",
        "decoder_layerdrop": "LayerDrop, which skips layers in training only; cutaway does not skip layers",
    },
)
