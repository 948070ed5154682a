"""DeBERTa-v2 and DeBERTa-v3: BERT with disentangled attention. https://arxiv.org/abs/2006.03654 https://arxiv.org/abs/2111.09543"""

from cutaway.config import Config
from cutaway.errors import ConfigError
from cutaway.families.config_fields import Custom, HFConfigReader, IfHead, Key, SupportedValues, activation
from cutaway.families.config_tree import ConfigTree, Node
from cutaway.families.family import Family, keys_by_reason
from cutaway.families.head_classes import classifier_dropout, head_class
from cutaway.families.tables import bert
from cutaway.families.tables.electra import write_embedding_size
from cutaway.families.weight_conversion import WeightMapping, add_prefix

ATTENTION = "encoder.block.attention"
TERMS = ("c2p", "p2c")
LENGTH_KEY = "max_position_embeddings"
POSITION_KEYS = (
    "relative_attention",
    "pos_att_type",
    "position_buckets",
    "max_relative_positions",
    "share_att_key",
    "norm_rel_ebd",
)


def _read_terms(hf_config: HFConfigReader) -> tuple[str, ...]:
    """Return the entries of `pos_att_type`, a list or a string such as 'p2c|c2p', that transformers uses."""
    names = hf_config.get("pos_att_type") or []
    names = [name.strip() for name in names.lower().split("|")] if isinstance(names, str) else names
    return tuple(name for name in dict.fromkeys(names) if name in TERMS)


def _read_position(hf_config: HFConfigReader, tree: ConfigTree) -> None:
    """Read the relative positions. Their scores change the default scale even if `relative_attention` is false."""
    terms = _read_terms(hf_config)
    heads, d_model = hf_config.get_number("num_attention_heads", 24), hf_config.get_number("hidden_size", 1536)
    if terms and hf_config.get("relative_attention", False):
        buckets, distance = (hf_config.get_number(key, -1) for key in ("position_buckets", "max_relative_positions"))
        norms = [name.strip() for name in (hf_config.get("norm_rel_ebd") or "none").lower().split("|")]
        layernorm: Node = {"kind": "layernorm", "eps": hf_config.get_number("layer_norm_eps", 1e-7)}
        position: Node = {
            "kind": "disentangled",
            "pos_att_type": list(terms),
            "buckets": buckets if buckets > 0 else None,
            "max_distance": hf_config.get_number(LENGTH_KEY, 512) if distance < 1 else distance,
            "share_att_key": hf_config.get("share_att_key", False),
            "norm": layernorm if "layer_norm" in norms else {"kind": "none"},
            "dropout": hf_config.get_number("hidden_dropout_prob", 0.1),
        }
        tree.set(f"{ATTENTION}.position", position)
    elif terms:
        tree.set(f"{ATTENTION}.scale", ((1 + len(terms)) * (d_model // heads)) ** -0.5)


def _write_position(tree: ConfigTree, hf_config: dict[str, object]) -> None:
    position = tree.get(f"{ATTENTION}.position")
    hf_config["relative_attention"] = position["kind"] == "disentangled"
    if position["kind"] == "disentangled":
        hf_config |= {
            "pos_att_type": list(position["pos_att_type"]),
            "position_buckets": position["buckets"] or -1,
            "max_relative_positions": -1
            if position["max_distance"] == tree.data["context"]
            else position["max_distance"],
            "share_att_key": position["share_att_key"],
            "norm_rel_ebd": "none" if position["norm"]["kind"] == "none" else "layer_norm",
        }
        return
    scale, d_head = tree.get(f"{ATTENTION}.scale"), tree.data["d_model"] // tree.get(f"{ATTENTION}.heads")
    hf_config["pos_att_type"] = [] if scale is None else list(TERMS[: round(1 / (scale * scale * d_head)) - 1])


def _read_learned_positions(hf_config: HFConfigReader, tree: ConfigTree) -> None:
    if hf_config.get("position_biased_input", True):
        length = hf_config.get_number(LENGTH_KEY, 512)
        tree.set("encoder.embedding.position", {"kind": "learned", "length": length})


def _write_learned_positions(tree: ConfigTree, hf_config: dict[str, object]) -> None:
    hf_config["position_biased_input"] = tree.get("encoder.embedding.position.kind") == "learned"


def _read_embedding_size(hf_config: HFConfigReader, tree: ConfigTree) -> None:
    """Read the embedding dimension. If it is not d_model, a projection is between the embeddings and the norm."""
    d_model = tree.data["d_model"]
    width = hf_config.get_number("embedding_size", d_model)
    factorization = {"width": width, "bias": False, "norm_after_projection": True}
    tree.set("encoder.embedding.factorization", None if width == d_model else factorization)


def _check_head_dim(hf_config: HFConfigReader, tree: ConfigTree) -> None:
    """Raise unless `attention_head_size` is hidden_size / num_attention_heads, which the output projection requires."""
    d_head = tree.data["d_model"] // tree.get(f"{ATTENTION}.heads")
    if hf_config.get("attention_head_size") not in (None, d_head):
        raise ConfigError(
            f"config.json's 'attention_head_size' is {hf_config.get('attention_head_size')!r}, but the output"
            f" projection requires {d_head}, hidden_size / num_attention_heads; correct it"
        )


def _check_pooler_size(hf_config: HFConfigReader, tree: ConfigTree) -> None:
    d_model = tree.data["d_model"]
    if hf_config.get("pooler_hidden_size") not in (None, d_model):
        raise ConfigError(
            f"config.json's 'pooler_hidden_size' is {hf_config.get('pooler_hidden_size')!r}, but the pooler's input has"
            f" the hidden size {d_model}; correct it"
        )


def _read_tied(hf_config: HFConfigReader, tree: ConfigTree) -> None:
    """Read whether the head is tied. Without `legacy`, it always is."""
    tied = hf_config.get("tie_word_embeddings", True) or not hf_config.get("legacy", True)
    width = hf_config.get_number("embedding_size", tree.data["d_model"])
    if not tied and width != tree.data["d_model"]:
        raise ConfigError(
            f"config.json's 'tie_word_embeddings' is false, but cutaway has no untied head of 'embedding_size' {width};"
            f" tie the embeddings or use 'embedding_size' {tree.data['d_model']}, the hidden size"
        )
    tree.set("head.tied", tied)


def _write_tied(tree: ConfigTree, hf_config: dict[str, object]) -> None:
    hf_config["tie_word_embeddings"] = tree.get("head.tied")


def _is_disentangled(config: Config) -> bool:
    return config.stacks["encoder"].blocks[0].attention.position.kind == "disentangled"


PROJECTIONS = (("query", "q"), ("key", "k"), ("value", "v"))
LAYER_WEIGHTS = (
    *(WeightMapping(f"attention.self.{name}_proj", f"attn.f.{p}") for name, p in PROJECTIONS),
    WeightMapping("attention.self.pos_query_proj", "attn.f.position_q"),
    WeightMapping("attention.self.pos_key_proj", "attn.f.position_k"),
    WeightMapping("attention.output.dense", "attn.f.o"),
    WeightMapping("attention.output.LayerNorm", "norm_after_attn"),
    *bert.FFN_WEIGHTS,
)
HEAD = "cls.predictions"
UNUSED_POSITIONS = "unused: this configuration has no such positions"

FAMILY = Family(
    "deberta-v2",
    "DebertaV2ForMaskedLM",
    bert.build_template(embedding={"position": {"kind": "none"}}),
    fields=(
        *bert.size_fields(128100, 1536, 24, 24, 6144, eps=1e-7),
        Key("max_position_embeddings", "context", 512),
        Key("type_vocab_size", "encoder.embedding.token_types", 0),
        *bert.DROPOUT_FIELDS,
        bert.HEAD_ACTIVATION_FIELD,
        Custom(("position_biased_input",), _read_learned_positions, _write_learned_positions),
        Custom(POSITION_KEYS, _read_position, _write_position),
        Custom(("embedding_size",), _read_embedding_size, write_embedding_size),
        Custom(("attention_head_size",), _check_head_dim),
        IfHead(Custom(("tie_word_embeddings", "legacy"), _read_tied, _write_tied)),
        SupportedValues("conv_kernel_size", (0, None), "the first layer would have a convolution (DeBERTa-v2 xlarge)"),
    ),
    weight_mappings=(
        *bert.embedding_weights("deberta"),
        WeightMapping("deberta.embeddings.embed_proj", "encoder.embed.project"),
        WeightMapping("deberta.encoder.rel_embeddings", "encoder.positions.0.table"),
        WeightMapping("deberta.encoder.LayerNorm", "encoder.positions.0.norm"),
        *add_prefix("deberta.encoder.layer.{i}", "encoder.blocks.{i}", *LAYER_WEIGHTS),
        *bert.mlm_head_weights(HEAD, "transform.dense", "transform.LayerNorm"),
    ),
    base_model_prefix="deberta.",
    base_architecture="DebertaV2Model",
    ignored_weights={
        **bert.ignored_weights("pooler", "mask_predictions"),
        r"deberta\.embeddings\.position_embeddings\.weight": UNUSED_POSITIONS,
        r"deberta\.encoder\.(rel_embeddings|LayerNorm)\.(weight|bias)": UNUSED_POSITIONS,
    },
    head_classes=(
        *(
            head_class(
                "DebertaV2",
                kind,
                WeightMapping("pooler.dense", "head.transform.dense"),
                bert.CLASSIFIER,
                fields=(
                    classifier_dropout("hidden_dropout_prob", 0.1, key="cls_dropout"),
                    Key("pooler_dropout", "head.transform.dropout", 0.0),
                    activation("pooler_hidden_act", "head.transform.activation", "gelu"),
                    Custom(("pooler_hidden_size",), _check_pooler_size),
                ),
                transform={},
            )
            for kind in ("sequence-classification", "multiple-choice")
        ),
        bert.token_head_class("DebertaV2", bert.HIDDEN_DROPOUT),
    ),
    weight_renamings=(
        *bert.WEIGHT_RENAMINGS,
        (r"^lm_predictions\.lm_head\.bias$", f"{HEAD}.bias"),
        (r"^lm_predictions\.lm_head\.", f"{HEAD}.transform."),
    ),
    ignored_config_keys=keys_by_reason(
        {
            "for classification heads": "cls_dropout pooler_dropout pooler_hidden_act pooler_hidden_size",
            "the convolution is not supported": "conv_act conv_groups",
        }
    ),
)
"""Files of DeBERTa-v3 have the head `lm_predictions.lm_head`, which transformers loads only if `legacy` is false.

Both heads compute the same function. They are saved under the names of the legacy head."""
