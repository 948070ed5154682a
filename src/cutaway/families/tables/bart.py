"""BART, and components shared with mBART, M2M100, Marian and Pegasus. https://arxiv.org/abs/1910.13461"""

from collections.abc import Mapping

from cutaway.families.config_fields import (
    ConfigFields,
    Custom,
    HFConfigReader,
    Key,
    SameAs,
    SupportedValues,
    activation,
)
from cutaway.families.config_tree import ConfigTree, Node
from cutaway.families.family import Family
from cutaway.families.head_classes import HeadClass, encoder_decoder_head_class
from cutaway.families.tables.llama import LAYERNORM, QKVO
from cutaway.families.weight_conversion import SqueezeLeadingDim, WeightMapping, add_prefix

SELF_ATTENTION = {"kind": "multi-head", "bias": QKVO, "position": {"kind": "none"}}
CROSS_ATTENTION = {"kind": "cross", "bias": QKVO}
STACKS = ("encoder", "decoder")


def build_template(placement: str, embedding: Node, *, head_bias: str = "fixed") -> Node:
    """Config template of an encoder-decoder with biases on all projections. `head_bias` is the bias on the logits."""
    stack = {"embedding": embedding, "norm": LAYERNORM, "placement": {"kind": placement}}
    block = {"attention": SELF_ATTENTION, "ffn": {"kind": "mlp"}}
    return {
        "form": "encoder-decoder",
        "encoder": stack | {"block": block},
        "decoder": stack | {"block": block | {"cross": CROSS_ATTENTION}},
        "head": {"kind": "lm", "bias": head_bias},
    }


def _write_embedding_scale(tree: ConfigTree, hf_config: dict[str, object]) -> None:
    hf_config["scale_embedding"] = tree.get("decoder.embedding.scale") != 1.0


def both_stacks(*paths: str) -> tuple[str, ...]:
    """Return each Config path twice: with the prefix `encoder.` and with the prefix `decoder.`."""
    return tuple(f"{side}.{path}" for path in paths for side in STACKS)


def common_fields(position_attribute: str) -> ConfigFields:
    """Config fields of BART, mBART, Marian and Pegasus. `position_attribute` is `length` or `table_length`."""
    return (
        *stack_fields("gelu", 0.0),
        Key("max_position_embeddings", both_stacks(f"embedding.position.{position_attribute}"), 1024),
        SameAs("context", f"decoder.embedding.position.{position_attribute}"),
        SupportedValues("encoder_layerdrop", (0.0, None), "LayerDrop would skip layers in training"),
        SupportedValues("decoder_layerdrop", (0.0, None), "LayerDrop would skip layers in training"),
    )


def stack_fields(activation_function: str, attention_dropout: float, *, scale_embedding: bool = False) -> ConfigFields:
    """Config fields of dimensions, layers, activation, dropout and embedding scale. The arguments are defaults."""

    def read_embedding_scale(hf_config: HFConfigReader, tree: ConfigTree) -> None:
        scale = "sqrt_d_model" if hf_config.get("scale_embedding", scale_embedding) else 1.0
        for path in both_stacks("embedding.scale"):
            tree.set(path, scale)

    return (
        Key("d_model", "d_model", 1024),
        *(Key(f"{side}_layers", f"{side}.layers", 12) for side in STACKS),
        Key("encoder_attention_heads", "encoder.block.attention.heads", 16),
        Key("decoder_attention_heads", ("decoder.block.attention.heads", "decoder.block.cross.heads"), 16),
        *(Key(f"{side}_ffn_dim", f"{side}.block.ffn.hidden", 4096) for side in STACKS),
        activation("activation_function", both_stacks("block.ffn.activation"), activation_function),
        Key("dropout", both_stacks("dropout", "embedding.dropout"), 0.1),
        Key(
            "attention_dropout",
            (*both_stacks("block.attention.dropout"), "decoder.block.cross.dropout"),
            attention_dropout,
        ),
        Key("activation_dropout", both_stacks("block.ffn.dropout"), 0.0),
        Custom(("scale_embedding",), read_embedding_scale, _write_embedding_scale),
    )


TIED_EMBEDDINGS_ONLY = SupportedValues("tie_word_embeddings", (True, None), "the shared embedding would be unused")


def legacy_flags(*, pre_norm: bool, embedding_norm: bool, sinusoidal: bool) -> ConfigFields:
    """Fields of legacy config.json keys, which must have the family's values. The arguments are these values."""
    reason = "the family has a fixed value for it"
    return (
        SupportedValues("normalize_before", (pre_norm, None), reason),
        SupportedValues("add_final_layer_norm", (pre_norm, None), reason),
        SupportedValues("normalize_embedding", (embedding_norm, None), reason),
        SupportedValues("static_position_embeddings", (sinusoidal, None), reason),
    )


def stack_weights(*, pre_norm: bool) -> tuple[WeightMapping, ...]:
    """Weight mappings of encoder, decoder and head, with pre-norm or post-norm."""

    def layer(side: str, *attentions: tuple[str, str]) -> tuple[WeightMapping, ...]:
        norms = *attentions, ("final", "ffn")
        return add_prefix(
            f"model.{side}.layers.{{i}}",
            f"{side}.blocks.{{i}}",
            *(WeightMapping(f"{a}.{p}_proj", f"{b}.f.{p[0]}") for a, b in attentions for p in ("q", "k", "v", "out")),
            *(WeightMapping(f"{a}_layer_norm", f"{b}.norm_in" if pre_norm else f"norm_after_{b}") for a, b in norms),
            WeightMapping("fc1", "ffn.f.up"),
            WeightMapping("fc2", "ffn.f.down"),
        )

    return (
        *(WeightMapping(f"model.{side}.embed_tokens", f"{side}.embed.token") for side in STACKS),
        *layer("encoder", ("self_attn", "attn")),
        *layer("decoder", ("self_attn", "attn"), ("encoder_attn", "cross")),
        WeightMapping("lm_head", "head.matrix"),
        WeightMapping("final_logits_bias", "head.bias", SqueezeLeadingDim()),
    )


SHARED_EMBEDDING = WeightMapping("model.shared", "decoder.embed.token")
ATTRIBUTE_MAP = {
    "num_attention_heads": "encoder_attention_heads",
    "hidden_size": "d_model",
    "num_hidden_layers": "encoder_layers",
}
IGNORED_WEIGHTS = {
    r"model\.(encoder|decoder)\.embed_positions\.weights": "sinusoidal positions, computed from the configuration",
    r"model\.(encoder|decoder)\.version": "version of a legacy file layout",
    r"(model\.)?(classification_head|qa_outputs)\..*": "head of another task, which is not loaded",
}
IGNORED_CONFIG_KEYS = {
    "is_decoder": "fixed by the family",
    "init_std": "initialization; weights are loaded",
    "add_bias_logits": "unused; a bias on the logits is in the file or is zero",
    "output_past": "a KV cache does not change the result",
    "classif_dropout": "unused legacy name of classifier_dropout",
}


def build_family(
    name: str,
    architecture: str,
    template: Node,
    fields: ConfigFields,
    weight_mappings: tuple[WeightMapping, ...],
    *,
    ignored_config_keys: Mapping[str, str] = IGNORED_CONFIG_KEYS,
    head_classes: tuple[HeadClass, ...] = (),
) -> Family:
    """Build a family with BART's prefix of checkpoint keys, config.json aliases, ignored tensors and ignored keys."""
    return Family(
        name,
        architecture,
        template,
        fields,
        weight_mappings,
        base_model_prefix="model.",
        attribute_map=ATTRIBUTE_MAP,
        ignored_weights=IGNORED_WEIGHTS,
        ignored_config_keys=ignored_config_keys,
        head_classes=head_classes,
    )


LEARNED_EMBEDDING = {"position": {"kind": "learned", "offset": 2}, "norm": LAYERNORM}
LEARNED_EMBEDDING_WEIGHTS = (
    *(WeightMapping(f"model.{side}.embed_positions", f"{side}.embed.position.table") for side in STACKS),
    *(WeightMapping(f"model.{side}.layernorm_embedding", f"{side}.embed.norm") for side in STACKS),
)
FINAL_NORM_WEIGHTS = tuple(WeightMapping(f"model.{side}.layer_norm", f"{side}.final_norm") for side in STACKS)

FAMILY = build_family(
    "bart",
    "BartForConditionalGeneration",
    build_template("post", LEARNED_EMBEDDING),
    fields=(
        Key("vocab_size", "vocab_size", 50265),
        *common_fields("length"),
        TIED_EMBEDDINGS_ONLY,
        *legacy_flags(pre_norm=False, embedding_norm=True, sinusoidal=False),
    ),
    weight_mappings=(
        SHARED_EMBEDDING,
        *LEARNED_EMBEDDING_WEIGHTS,
        *stack_weights(pre_norm=False),
    ),
    head_classes=(encoder_decoder_head_class("Bart", num_labels=3),),
)
