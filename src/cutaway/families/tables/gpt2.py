"""GPT-2. https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf"""

from cutaway.families.config_fields import (
    ConfigFields,
    Custom,
    HFConfigReader,
    Key,
    SupportedValues,
    activation,
    flag,
    four_times,
)
from cutaway.families.config_tree import ConfigTree, Node
from cutaway.families.family import Family, keys_by_reason
from cutaway.families.tables import llama
from cutaway.families.weight_conversion import QKV, Split, Transpose, WeightMapping

SCALE_KEYS = ("scale_attn_weights", "scale_attn_by_inverse_layer_idx")


def build_template(attention: Node, ffn: Node | None = None, head: Node | None = None) -> Node:
    """Config template of GPT-2 and GPT-Neo: learned positions, LayerNorm before each sublayer, ungated FFN."""
    return llama.build_template(
        {"position": {"kind": "none"}, **attention},
        {"kind": "mlp", **(ffn or {})},
        norm=llama.LAYERNORM,
        head=head,
        embedding={"position": {"kind": "learned"}},
    )


def _read_attention_scale(hf_config: HFConfigReader, tree: ConfigTree) -> None:
    """Set the attention scale: 1/sqrt(d_head), or 1 if `scale_attn_weights` is false.

    If `scale_attn_by_inverse_layer_idx` is true, the scale is divided by the layer index + 1.
    """
    for number, block in enumerate(tree.blocks("decoder"), 1):
        head_dim = tree.data["d_model"] // block["attention"]["heads"]
        scale = head_dim**-0.5 if hf_config.get(SCALE_KEYS[0], True) else 1.0
        block["attention"]["scale"] = scale / (number if hf_config.get(SCALE_KEYS[1], False) else 1)


def _write_attention_scale(tree: ConfigTree, hf_config: dict[str, object]) -> None:
    scales = [block["attention"]["scale"] for block in tree.blocks("decoder")]
    hf_config[SCALE_KEYS[0]] = scales[0] != 1.0
    hf_config[SCALE_KEYS[1]] = len(scales) > 1 and scales[1] != scales[0]


def common_fields(
    vocab_size: int, n_embd: int, n_layer: int, n_head: int, *, tie_word_embeddings: bool, dropout: float
) -> ConfigFields:
    """Config fields of GPT-2 and GPT-J. The arguments are default values of config.json keys."""
    return (
        Key("vocab_size", "vocab_size", vocab_size),
        Key("n_embd", "d_model", n_embd),
        Key("n_layer", "decoder.layers", n_layer),
        Key("n_head", f"{llama.ATTENTION}.heads", n_head),
        Key("n_inner", f"{llama.FFN}.hidden", four_times("n_embd", n_embd)),
        activation("activation_function", f"{llama.FFN}.activation", "gelu_new"),
        Key("layer_norm_epsilon", "decoder.norm.eps", 1e-5),
        Key("attn_pdrop", f"{llama.ATTENTION}.dropout", dropout),
        Key("embd_pdrop", "decoder.embedding.dropout", dropout),
        Key("resid_pdrop", "decoder.dropout", dropout),
        flag("tie_word_embeddings", "head.tied", tie_word_embeddings),
    )


CHECKPOINT_KEYS = {"embed": "transformer.wte", "norm": "transformer.ln_f", "layer": "transformer.h"}
"""Keys of GPT-2, GPT-Neo and GPT-J for `llama.weights`."""
POSITION_WEIGHT = WeightMapping("transformer.wpe", "decoder.embed.position.table")
NORM_WEIGHTS = (WeightMapping("ln_1", "attn.norm_in"), WeightMapping("ln_2", "ffn.norm_in"))

FAMILY = Family(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    template=build_template({"bias": llama.QKVO}),
    fields=(
        *common_fields(50257, 768, 12, 12, tie_word_embeddings=True, dropout=0.1),
        Key("n_positions", ("decoder.embedding.position.length", "context"), 1024),
        Custom(SCALE_KEYS, _read_attention_scale, _write_attention_scale),
        SupportedValues("is_decoder", (False, True, None), "the family is always a decoder"),
    ),
    weight_mappings=(
        POSITION_WEIGHT,
        *llama.weights(
            *NORM_WEIGHTS,
            WeightMapping("attn.c_attn", QKV, Split(transposed=True)),
            WeightMapping("attn.c_proj", "attn.f.o", Transpose()),
            WeightMapping("mlp.c_fc", "ffn.f.up", Transpose()),
            WeightMapping("mlp.c_proj", "ffn.f.down", Transpose()),
            **CHECKPOINT_KEYS,
        ),
    ),
    base_model_prefix="transformer.",
    attribute_map={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    ignored_weights={
        r"transformer\.h\.\d+\.attn\.(masked_)?bias": "causal mask, computed from positions",
        **llama.IGNORED_CLASSIFIER_WEIGHTS,
    },
    ignored_config_keys=keys_by_reason(
        {
            "the same as n_positions": "n_ctx",
            "computes scores in fp32; no difference in fp32": "reorder_and_upcast_attn",
            "classification head, which is not loaded": "summary_activation summary_first_dropout"
            " summary_proj_to_labels summary_type summary_use_proj",
        }
    ),
)
