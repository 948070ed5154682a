"""Llama 1 to 3.2, and components shared with the families in its format. https://arxiv.org/abs/2302.13971"""

from collections.abc import Mapping

from cutaway.families.config_fields import ConfigFields, HFConfigReader, Key, activation, flag
from cutaway.families.config_tree import Node
from cutaway.families.family import Family
from cutaway.families.rope_fields import RopeField
from cutaway.families.weight_conversion import WeightMapping, add_prefix

ATTENTION = "decoder.block.attention"
FFN = "decoder.block.ffn"
QKVO = ("q", "k", "v", "o")
RMSNORM = {"kind": "rmsnorm"}
LAYERNORM = {"kind": "layernorm"}


def build_template(
    attention: Node | None = None,
    ffn: Node | None = None,
    *,
    norm: Node = RMSNORM,
    placement: str = "pre",
    head: Node | None = None,
    **stack: object,
) -> Node:
    """Config template of a Llama decoder. Arguments add or replace fields of the node that they name."""
    block = {"attention": {"kind": "multi-head", **(attention or {})}, "ffn": {"kind": "gated", **(ffn or {})}}
    return {
        "form": "decoder",
        "decoder": {"block": block, "norm": norm, "placement": {"kind": placement}, **stack},
        "head": {"kind": "lm", **(head or {})},
    }


def size_fields(
    vocab_size: int,
    d_model: int,
    intermediate_size: int | None,
    num_layers: int,
    max_position_embeddings: int,
    *,
    tie_word_embeddings: bool = False,
) -> ConfigFields:
    """Config fields of vocabulary, dimensions, layers and context length. The arguments are default values.

    If `intermediate_size` is None, the family has another key for the FFN dimension.
    """
    ffn = () if intermediate_size is None else (Key("intermediate_size", f"{FFN}.hidden", intermediate_size),)
    return (
        Key("vocab_size", "vocab_size", vocab_size),
        Key("hidden_size", "d_model", d_model),
        Key("num_hidden_layers", "decoder.layers", num_layers),
        *ffn,
        Key("max_position_embeddings", "context", max_position_embeddings),
        flag("tie_word_embeddings", "head.tied", tie_word_embeddings),
    )


def head_fields(num_heads: int = 32, num_kv_heads: int | None = None, head_dim: object = None) -> ConfigFields:
    """Config fields of the attention heads. The arguments are default values.

    If `num_kv_heads` is None, the default is the number of heads; if `head_dim` is None, d_model / heads.
    """
    return (
        Key("num_attention_heads", f"{ATTENTION}.heads", num_heads),
        Key("num_key_value_heads", f"{ATTENTION}.kv_heads", num_kv_heads),
        Key("head_dim", f"{ATTENTION}.d_head", head_dim),
    )


def computed_head_fields(d_model: int, num_heads: int, num_kv_heads: int | None) -> ConfigFields:
    """Config fields of the attention heads. An absent or null `head_dim` is hidden_size / num_attention_heads."""

    def head_dim(hf_config: HFConfigReader) -> int:
        width = hf_config.get_number("hidden_size", d_model)
        return int(width // hf_config.get_number("num_attention_heads", num_heads))

    return head_fields(num_heads, num_kv_heads, head_dim)


def block_fields(eps: float = 1e-6, *, qk_norm: bool = False) -> ConfigFields:
    """Config fields of a block: eps of the norms (and of QK-norm, if `qk_norm`), activation, attention dropout."""
    eps_paths = ("decoder.norm.eps", f"{ATTENTION}.qk_norm.norm.eps") if qk_norm else "decoder.norm.eps"
    act = activation("hidden_act", f"{FFN}.activation", "silu")
    return (Key("rms_norm_eps", eps_paths, eps), act, ATTENTION_DROPOUT)


ATTENTION_DROPOUT = Key("attention_dropout", f"{ATTENTION}.dropout", 0.0)
ATTENTION_BIAS = flag("attention_bias", f"{ATTENTION}.bias", False, on=QKVO, off=())
MLP_BIAS = flag("mlp_bias", f"{FFN}.bias", False)

FIELDS = (
    *size_fields(32000, 4096, 11008, 32, 2048),
    *head_fields(),
    *block_fields(),
    ATTENTION_BIAS,
    MLP_BIAS,
    RopeField(full_rotary_only=True),
)

NORM_WEIGHTS = (
    WeightMapping("input_layernorm", "attn.norm_in"),
    WeightMapping("post_attention_layernorm", "ffn.norm_in"),
)
ATTENTION_WEIGHTS = tuple(WeightMapping(f"self_attn.{p}_proj", f"attn.f.{p}") for p in "qkvo")
QK_NORM_WEIGHTS = tuple(WeightMapping(f"self_attn.{p}_norm", f"attn.f.{p}_norm.norm") for p in "qk")
FFN_WEIGHTS = tuple(WeightMapping(f"mlp.{p}_proj", f"ffn.f.{p}") for p in ("gate", "up", "down"))


def weights(
    *mappings: WeightMapping,
    embed: str = "model.embed_tokens",
    norm: str = "model.norm",
    head: str = "lm_head",
    layer: str = "model.layers",
) -> tuple[WeightMapping, ...]:
    """Weight mappings of a decoder: token embedding, final norm, head, and `mappings` for each layer.

    The other arguments are the checkpoint keys of embedding, final norm, head and the list of layers.
    """
    return (
        WeightMapping(embed, "decoder.embed.token"),
        WeightMapping(norm, "decoder.final_norm"),
        WeightMapping(head, "head.matrix"),
        *add_prefix(f"{layer}.{{i}}", "decoder.blocks.{i}", *mappings),
    )


WEIGHTS = weights(*NORM_WEIGHTS, *ATTENTION_WEIGHTS, *FFN_WEIGHTS)
IGNORED_CLASSIFIER_WEIGHTS = {r"(score|classifier|qa_outputs|v_head)\..*": "classification or value head, not loaded"}
IGNORED_WEIGHTS = {
    r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq": "RoPE frequencies, computed from the configuration",
    **IGNORED_CLASSIFIER_WEIGHTS,
}
"""Ignored tensors of files in the Llama format."""


def build_family(
    name: str,
    architecture: str,
    template: Node,
    fields: ConfigFields,
    weight_mappings: tuple[WeightMapping, ...] = WEIGHTS,
    *,
    ignored_weights: Mapping[str, str] = IGNORED_WEIGHTS,
    ignored_config_keys: Mapping[str, str] | None = None,
    attribute_map: Mapping[str, str] | None = None,
) -> Family:
    """Build a family with the prefix of checkpoint keys (`model.`) and the ignored tensors of the Llama format."""
    return Family(
        name,
        architecture,
        template,
        fields,
        weight_mappings,
        base_model_prefix="model.",
        ignored_weights=ignored_weights,
        ignored_config_keys=ignored_config_keys or {},
        attribute_map=attribute_map or {},
    )


FAMILY = build_family("llama", "LlamaForCausalLM", build_template(), FIELDS)
