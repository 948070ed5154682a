"""Mixtral. https://arxiv.org/abs/2401.04088"""

from cutaway.families.family import Family
from cutaway.families.fields import Key, Only, activation, flag
from cutaway.families.rope import Rope
from cutaway.families.rows import Row, Stacked
from cutaway.families.tables.llama import ATTENTION, BESIDE, ENDS, NORMS, layer
from cutaway.families.tables.mistral import split, template

FFN = "decoder.block.ffn"
MOE = {"kind": "moe", "router": {}, "expert": {"kind": "gated"}}

FAMILY = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    template=template({}, MOE),
    fields=(
        Key("vocab_size", "vocab_size", 32000),
        Key("hidden_size", "d_model", 4096),
        Key("num_hidden_layers", "decoder.layers", 32),
        Key("max_position_embeddings", "context", 131072),
        flag("tie_word_embeddings", "head.tied", False),
        *split(4096, 32, 8),
        Key("rms_norm_eps", "decoder.norm.eps", 1e-5),
        Key("attention_dropout", "decoder.block.attention.dropout", 0.0),
        Key("intermediate_size", f"{FFN}.expert.hidden", 14336),
        activation("hidden_act", f"{FFN}.expert.activation", "silu"),
        Key("num_local_experts", f"{FFN}.experts", 8),
        Key("num_experts_per_tok", f"{FFN}.router.top_k", 2),
        Only("router_jitter_noise", (0.0, None), "it shakes what the experts read in training"),
        Key("sliding_window", "decoder.block.attention.window", None),
        Rope(theta=1e6, length_default=131072, whole=True),
    ),
    rows=(
        *ENDS,
        *layer(
            *NORMS,
            *ATTENTION,
            Row("block_sparse_moe.gate", "ffn.f.router"),
            Row("block_sparse_moe.experts.{e}.w1", "ffn.f.experts.gate", Stacked()),
            Row("block_sparse_moe.experts.{e}.w3", "ffn.f.experts.up", Stacked()),
            Row("block_sparse_moe.experts.{e}.w2", "ffn.f.experts.down", Stacked()),
        ),
    ),
    prefix="model.",
    ignored=BESIDE,
    aliases={"num_experts": "num_local_experts"},
)
