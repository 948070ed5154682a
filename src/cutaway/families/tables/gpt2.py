"""GPT-2. https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf"""

from typing import Any

from cutaway.families.family import Family
from cutaway.families.fields import Custom, Key, Only, Theirs, activation, flag
from cutaway.families.rows import Joined, Row, Transposed, within
from cutaway.families.tables.llama import CLASSIFIER
from cutaway.families.tree import Tree

FLAGS = ("scale_attn_weights", "scale_attn_by_inverse_layer_idx")


def read_scale(theirs: Theirs, ours: Tree) -> None:
    """Scores are divided by sqrt(d_head), unless told not to, and by the layer's number if told to."""
    for number, block in enumerate(ours.blocks("decoder"), 1):
        width = ours.data["d_model"] // block["attention"]["heads"]
        scale = width**-0.5 if theirs.get(FLAGS[0], True) else 1.0
        block["attention"]["scale"] = scale / (number if theirs.get(FLAGS[1], False) else 1)


def write_scale(ours: Tree, theirs: dict[str, Any]) -> None:
    scales = [block["attention"]["scale"] for block in ours.blocks("decoder")]
    theirs[FLAGS[0]] = scales[0] != 1.0
    theirs[FLAGS[1]] = len(scales) > 1 and scales[1] != scales[0]


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
        Key("n_inner", "decoder.block.ffn.hidden", lambda theirs: 4 * theirs.number("n_embd", 768)),
        activation("activation_function", "decoder.block.ffn.activation", "gelu_new"),
        Key("layer_norm_epsilon", "decoder.norm.eps", 1e-5),
        Key("attn_pdrop", "decoder.block.attention.dropout", 0.1),
        Key("embd_pdrop", "decoder.embedding.dropout", 0.1),
        Key("resid_pdrop", "decoder.dropout", 0.1),
        flag("tie_word_embeddings", "head.tied", True),
        Custom(FLAGS, read_scale, write_scale),
        Only("is_decoder", (False, True, None), "this family always is one"),
    ),
    rows=(
        Row("transformer.wte", "decoder.embed.token"),
        Row("transformer.wpe", "decoder.embed.position.table"),
        Row("transformer.ln_f", "decoder.final_norm"),
        Row("lm_head", "head.matrix"),
        *within(
            "transformer.h.{i}",
            "decoder.blocks.{i}",
            Row("ln_1", "attn.norm_in"),
            Row("ln_2", "ffn.norm_in"),
            Row("attn.c_attn", ("attn.f.q", "attn.f.k", "attn.f.v"), Joined(transposed=True)),
            Row("attn.c_proj", "attn.f.o", Transposed()),
            Row("mlp.c_fc", "ffn.f.up", Transposed()),
            Row("mlp.c_proj", "ffn.f.down", Transposed()),
        ),
    ),
    prefix="transformer.",
    aliases={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    ignored={
        r"transformer\.h\.\d+\.attn\.(masked_)?bias": "the causal mask, which follows from positions",
        **CLASSIFIER,
    },
    harmless={
        "n_ctx": "the same as n_positions",
        "reorder_and_upcast_attn": "scores in higher precision; the same in fp32",
        **dict.fromkeys(
            (
                "summary_activation",
                "summary_first_dropout",
                "summary_proj_to_labels",
                "summary_type",
                "summary_use_proj",
            ),
            "for a classifier, which is not loaded",
        ),
    },
)
