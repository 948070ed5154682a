"""ALBERT: factorized embedding and weights shared across layers. https://arxiv.org/abs/1909.11942"""

from cutaway.errors import ConfigError
from cutaway.families.config_fields import Custom, HFConfigReader, Key
from cutaway.families.config_tree import ConfigTree
from cutaway.families.family import keys_by_reason
from cutaway.families.tables import bert
from cutaway.families.weight_conversion import WeightMapping, add_prefix


def _check_factorized_head_is_tied(hf_config: HFConfigReader, tree: ConfigTree) -> None:
    """Raise if the head is untied and the embedding factorized: the head matrix would have the embedding dimension."""
    width = hf_config.get_number("embedding_size", 128)
    if tree.get("head.tied") is False and width != tree.data["d_model"]:
        raise ConfigError(
            f"config.json's 'tie_word_embeddings' is false, but cutaway has no untied head of 'embedding_size'"
            f" {width}; tie the embeddings or use 'embedding_size' {tree.data['d_model']}, the hidden size"
        )


TIED_FACTORIZED_HEAD = Custom((), _check_factorized_head_is_tied)


def _read_layers(hf_config: HFConfigReader, tree: ConfigTree) -> None:
    """Read the layers: `num_hidden_layers` is how often a group runs, and a group has `inner_group_num` layers."""
    size = hf_config.get_number("inner_group_num", 1)
    tree.set("encoder.layers", hf_config.get_number("num_hidden_layers", 12) * size)
    tree.set("encoder.layers_per_group", size)


def _write_layers(tree: ConfigTree, hf_config: dict[str, object]) -> None:
    size = tree.get("encoder.layers_per_group")
    hf_config["inner_group_num"] = size
    hf_config["num_hidden_layers"] = tree.get("encoder.layers") // size


CLASSIFIER_DROPOUT = Key("classifier_dropout_prob", "head.dropout", 0.1)
SIZE_FIELDS = bert.size_fields(30000, 4096, 12, 64, 16384, "gelu_new")

FAMILY = bert.build_family(
    "albert",
    "Albert",
    bert.build_template(embedding={"factorization": {}}, dropout=0.0),
    fields=(
        Custom(("num_hidden_layers", "inner_group_num"), _read_layers, _write_layers),
        *(field for field in SIZE_FIELDS if "num_hidden_layers" not in field.keys),
        *bert.POSITION_FIELDS,
        bert.TOKEN_TYPES_FIELD,
        Key("embedding_size", "encoder.embedding.factorization.width", 128),
        Key("num_hidden_groups", "encoder.layer_groups", 1),
        Key("hidden_dropout_prob", ("encoder.embedding.dropout", "encoder.attention_resid_dropout"), 0.0),
        Key("attention_probs_dropout_prob", "encoder.block.attention.dropout", 0.0),
        bert.TIE_EMBEDDINGS_FIELD,
        TIED_FACTORIZED_HEAD,
        bert.HEAD_ACTIVATION_FIELD,
    ),
    weight_mappings=(
        *bert.embedding_weights("albert"),
        WeightMapping("albert.encoder.embedding_hidden_mapping_in", "encoder.embed.project"),
        *add_prefix(
            "albert.encoder.albert_layer_groups.{g}.albert_layers.{j}",
            "encoder.blocks.{i}",
            *(WeightMapping(f"attention.{p}", f"attn.f.{p[0]}") for p in ("query", "key", "value")),
            WeightMapping("attention.dense", "attn.f.o"),
            WeightMapping("attention.LayerNorm", "norm_after_attn"),
            WeightMapping("ffn", "ffn.f.up"),
            WeightMapping("ffn_output", "ffn.f.down"),
            WeightMapping("full_layer_layer_norm", "norm_after_ffn"),
        ),
        WeightMapping("albert.pooler", "pooler.dense"),
        *bert.mlm_head_weights("predictions", "dense", "LayerNorm"),
    ),
    other_heads=("sop_classifier",),
    head_classes=(
        bert.pooler_head_class("Albert", "sequence-classification", "albert.pooler", CLASSIFIER_DROPOUT),
        bert.pooler_head_class("Albert", "multiple-choice", "albert.pooler", CLASSIFIER_DROPOUT),
        bert.token_head_class("Albert", CLASSIFIER_DROPOUT),
    ),
    ignored_config_keys=keys_by_reason(
        {
            "for classification heads": "classifier_dropout_prob",
            "unused": "net_structure_type gap_size num_memory_blocks down_scale_factor",
        }
    ),
)
