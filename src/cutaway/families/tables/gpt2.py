"""GPT-2. https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf"""

from typing import Any

from cutaway.families.config_fields import Custom, HFConfigReader, Key, SupportedValues, activation, flag
from cutaway.families.config_tree import ConfigTree
from cutaway.families.family import Family
from cutaway.families.tables.llama import IGNORED_CLASSIFIER_WEIGHTS
from cutaway.families.weight_conversion import Split, Transpose, WeightMapping, add_prefix

SCALE_KEYS = ("scale_attn_weights", "scale_attn_by_inverse_layer_idx")


def _read_attention_scale(hf_config: HFConfigReader, tree: ConfigTree) -> None:
    """Score scale: 1/sqrt(d_head) unless disabled, divided by the layer number (from 1) if enabled."""
    for number, block in enumerate(tree.blocks("decoder"), 1):
        head_dim = tree.data["d_model"] // block["attention"]["heads"]
        scale = head_dim**-0.5 if hf_config.get(SCALE_KEYS[0], True) else 1.0
        block["attention"]["scale"] = scale / (number if hf_config.get(SCALE_KEYS[1], False) else 1)


def _write_attention_scale(tree: ConfigTree, hf_config: dict[str, Any]) -> None:
    scales = [block["attention"]["scale"] for block in tree.blocks("decoder")]
    hf_config[SCALE_KEYS[0]] = scales[0] != 1.0
    hf_config[SCALE_KEYS[1]] = len(scales) > 1 and scales[1] != scales[0]


FAMILY = Family(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    template={
        "form": "decoder",
        "decoder": {
            "block": {
                "attention": {"kind": "multi-head", "bias": ("q", "k", "v", "o"), "position": {"kind": "none"}},
                "ffn": {"kind": "mlp"},
            },
            "embedding": {"position": {"kind": "learned"}},
            "norm": {"kind": "layernorm"},
            "placement": {"kind": "pre"},
        },
        "head": {"kind": "lm"},
    },
    fields=(
        Key("vocab_size", "vocab_size", 50257),
        Key("n_embd", "d_model", 768),
        Key("n_layer", "decoder.layers", 12),
        Key("n_head", "decoder.block.attention.heads", 12),
        Key("n_positions", ("decoder.embedding.position.length", "context"), 1024),
        Key("n_inner", "decoder.block.ffn.hidden", lambda hf_config: 4 * hf_config.get_number("n_embd", 768)),
        activation("activation_function", "decoder.block.ffn.activation", "gelu_new"),
        Key("layer_norm_epsilon", "decoder.norm.eps", 1e-5),
        Key("attn_pdrop", "decoder.block.attention.dropout", 0.1),
        Key("embd_pdrop", "decoder.embedding.dropout", 0.1),
        Key("resid_pdrop", "decoder.dropout", 0.1),
        flag("tie_word_embeddings", "head.tied", True),
        Custom(SCALE_KEYS, _read_attention_scale, _write_attention_scale),
        SupportedValues("is_decoder", (False, True, None), "the family is always a decoder"),
    ),
    weight_mappings=(
        WeightMapping("transformer.wte", "decoder.embed.token"),
        WeightMapping("transformer.wpe", "decoder.embed.position.table"),
        WeightMapping("transformer.ln_f", "decoder.final_norm"),
        WeightMapping("lm_head", "head.matrix"),
        *add_prefix(
            "transformer.h.{i}",
            "decoder.blocks.{i}",
            WeightMapping("ln_1", "attn.norm_in"),
            WeightMapping("ln_2", "ffn.norm_in"),
            WeightMapping("attn.c_attn", ("attn.f.q", "attn.f.k", "attn.f.v"), Split(transposed=True)),
            WeightMapping("attn.c_proj", "attn.f.o", Transpose()),
            WeightMapping("mlp.c_fc", "ffn.f.up", Transpose()),
            WeightMapping("mlp.c_proj", "ffn.f.down", Transpose()),
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
        **IGNORED_CLASSIFIER_WEIGHTS,
    },
    ignored_config_keys={
        "n_ctx": "the same as n_positions",
        "reorder_and_upcast_attn": "computes scores in fp32; no difference in fp32",
        **dict.fromkeys(
            (
                "summary_activation",
                "summary_first_dropout",
                "summary_proj_to_labels",
                "summary_type",
                "summary_use_proj",
            ),
            "classification head, which is not loaded",
        ),
    },
)
