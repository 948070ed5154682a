"""ELECTRA: the generator with its masked-LM head, or the encoder of the discriminator. https://arxiv.org/abs/2003.10555"""

from cutaway.families.config_fields import Custom, HFConfigReader, Key, SupportedValues, activation
from cutaway.families.config_tree import ConfigTree
from cutaway.families.head_classes import head_class
from cutaway.families.tables import bert
from cutaway.families.tables.albert import TIED_FACTORIZED_HEAD
from cutaway.families.weight_conversion import WeightMapping


def _read_embedding_size(hf_config: HFConfigReader, tree: ConfigTree) -> None:
    """Read the embedding dimension. If it is not d_model, the embedding is factorized: a projection follows it."""
    width = hf_config.get_number("embedding_size", 128)
    tree.set("encoder.embedding.factorization", None if width == tree.data["d_model"] else {"width": width})


def write_embedding_size(tree: ConfigTree, hf_config: dict[str, object]) -> None:
    factorization = tree.get("encoder.embedding.factorization")
    hf_config["embedding_size"] = tree.data["d_model"] if factorization is None else factorization["width"]


FAMILY = bert.build_family(
    "electra",
    "Electra",
    bert.build_template(),
    fields=(
        *bert.size_fields(30522, 256, 12, 4, 1024),
        *bert.POSITION_FIELDS,
        bert.TOKEN_TYPES_FIELD,
        *bert.DROPOUT_FIELDS,
        Custom(("embedding_size",), _read_embedding_size, write_embedding_size),
        bert.TIE_EMBEDDINGS_FIELD,
        TIED_FACTORIZED_HEAD,
    ),
    weight_mappings=(
        *bert.encoder_weights("electra", *bert.LAYER_WEIGHTS),
        WeightMapping("electra.embeddings_project", "encoder.embed.project"),
        WeightMapping("generator_predictions.dense", "head.transform.dense"),
        WeightMapping("generator_predictions.LayerNorm", "head.transform.norm"),
        WeightMapping("generator_lm_head", "head.matrix"),
        WeightMapping("generator_lm_head.bias", "head.bias"),
    ),
    other_heads=("sequence_summary", "discriminator_predictions"),
    head_classes=(
        bert.dense_head_class("Electra", bert.CLASSIFIER_DROPOUT, activation="gelu"),
        head_class(
            "Electra",
            "multiple-choice",
            WeightMapping("sequence_summary.summary", "head.transform.dense"),
            bert.CLASSIFIER,
            fields=(
                SupportedValues("summary_type", ("first",), "the scores would be those of other tokens"),
                SupportedValues("summary_use_proj", (True,), "the head would have no dense layer"),
                activation("summary_activation", "head.transform.activation", "gelu"),
                Key("summary_last_dropout", "head.dropout", 0.1),
            ),
            transform={},
        ),
        bert.token_head_class("Electra"),
    ),
    ignored_config_keys=dict.fromkeys(
        ("summary_type", "summary_use_proj", "summary_activation", "summary_last_dropout"),
        "for the multiple choice head",
    ),
)
