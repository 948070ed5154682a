"""GPT-NeoX and Pythia. https://arxiv.org/abs/2204.06745"""

from cutaway.families.family import Family
from cutaway.families.fields import Key, Only, activation, flag, heads
from cutaway.families.rope import Rope
from cutaway.families.rows import JoinedByGroup, Row, within
from cutaway.families.tables.llama import ALL, CLASSIFIER, NORMS, sizes

QKV = ("attn.f.q", "attn.f.k", "attn.f.v")


def megatron(attention: str) -> tuple[Row, ...]:
    """Megatron's names: q, k and v in one tensor, head by head."""
    return (
        Row(f"{attention}.query_key_value", QKV, JoinedByGroup()),
        Row(f"{attention}.dense", "attn.f.o"),
        Row("mlp.dense_h_to_4h", "ffn.f.up"),
        Row("mlp.dense_4h_to_h", "ffn.f.down"),
    )


FAMILY = Family(
    name="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    template={
        "form": "decoder",
        "decoder": {
            "block": {"attention": {"kind": "multi-head"}, "ffn": {"kind": "mlp"}},
            "norm": {"kind": "layernorm"},
        },
        "head": {"kind": "lm"},
    },
    fields=(
        *sizes(50432, 6144, 24576, 44, 2048),
        *heads(n=("num_attention_heads", 64), kv=None, width=None),
        Key("layer_norm_eps", "decoder.norm.eps", 1e-5),
        activation("hidden_act", "decoder.block.ffn.activation", "gelu"),
        flag("attention_bias", "decoder.block.attention.bias", True, on=ALL, off=()),
        Key("attention_dropout", "decoder.block.attention.dropout", 0.0),
        Key("hidden_dropout", ("decoder.dropout", "decoder.embedding.dropout"), 0.0),
        flag(
            "use_parallel_residual",
            "decoder.placement",
            True,
            on={"kind": "parallel", "norms": "two"},
            off={"kind": "pre"},
        ),
        Rope(share=0.25, share_key="rotary_pct", theta_key="rotary_emb_base"),
        Only("is_decoder", (False, True, None), "this family always is one"),
    ),
    rows=(
        Row("gpt_neox.embed_in", "decoder.embed.token"),
        Row("gpt_neox.final_layer_norm", "decoder.final_norm"),
        Row("embed_out", "head.matrix"),
        Row("lm_head", "head.matrix"),
        *within("gpt_neox.layers.{i}", "decoder.blocks.{i}", *NORMS, *megatron("attention")),
    ),
    prefix="gpt_neox.",
    ignored={
        r"gpt_neox\.layers\.\d+\.attention\.(masked_)?bias": "the causal mask, which follows from positions",
        r"gpt_neox\.(layers\.\d+\.attention\.)?rotary_emb\.inv_freq": "RoPE's frequencies follow from its settings",
        **CLASSIFIER,
    },
    harmless={"rope_theta": "repeats rotary_emb_base", "partial_rotary_factor": "repeats rotary_pct"},
)
