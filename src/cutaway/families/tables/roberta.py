"""RoBERTa, and components shared with XLM-R and CamemBERT: BERT with positions that start after the padding token id. https://arxiv.org/abs/1907.11692"""

from cutaway.families.config_fields import Custom, HFConfigReader, SameAs
from cutaway.families.config_tree import ConfigTree
from cutaway.families.family import Family
from cutaway.families.tables import bert

POSITION_PATH = "encoder.embedding.position"


def _read_positions(hf_config: HFConfigReader, tree: ConfigTree) -> None:
    """Read the position table: row pad_token_id + 1 is position 0; `max_position_embeddings` counts all rows."""
    offset = hf_config.get_number("pad_token_id", 1) + 1
    tree.set(f"{POSITION_PATH}.offset", offset)
    tree.set(f"{POSITION_PATH}.length", hf_config.get_number("max_position_embeddings", 512) - offset)


def _write_positions(tree: ConfigTree, hf_config: dict[str, object]) -> None:
    offset = tree.get(f"{POSITION_PATH}.offset")
    hf_config["pad_token_id"] = offset - 1
    hf_config["max_position_embeddings"] = tree.get(f"{POSITION_PATH}.length") + offset


def build_family(name: str, class_prefix: str, vocab_size: int) -> Family:
    """Build a family of RoBERTa's architecture. Keys of the base model start with `roberta`."""
    return bert.build_family(
        name,
        class_prefix,
        bert.build_template(),
        fields=(
            *bert.size_fields(vocab_size, 768, 12, 12, 3072),
            Custom(("max_position_embeddings", "pad_token_id"), _read_positions, _write_positions),
            SameAs("context", f"{POSITION_PATH}.length"),
            bert.TOKEN_TYPES_FIELD,
            *bert.DROPOUT_FIELDS,
            bert.TIE_EMBEDDINGS_FIELD,
        ),
        weight_mappings=(
            *bert.encoder_weights("roberta", *bert.LAYER_WEIGHTS),
            *bert.mlm_head_weights("lm_head", "dense", "layer_norm"),
        ),
        base_model_prefix="roberta",
        head_classes=(
            bert.dense_head_class(class_prefix, bert.CLASSIFIER_DROPOUT),
            bert.pooler_head_class(class_prefix, "multiple-choice", "roberta.pooler.dense", bert.HIDDEN_DROPOUT),
            bert.token_head_class(class_prefix),
        ),
    )


FAMILY = build_family("roberta", "Roberta", 50265)
