"""gpt-oss, from its unpacked weights: every other layer near, a sink a head, experts with biases.

https://arxiv.org/abs/2508.10925
"""

from cutaway.families.family import Family
from cutaway.families.fields import Key, Only, flag, heads
from cutaway.families.mixed import LayerTypes, every
from cutaway.families.rope import Rope
from cutaway.families.rows import Interleaved, Row, Transposed
from cutaway.families.tables.llama import ALL, ATTENTION, BESIDE, ENDS, NORMS, layer
from cutaway.families.tables.mistral import template

FFN = "decoder.block.ffn"
MOE = {"kind": "moe", "router": {"bias": True}, "expert": {"kind": "clamped-swiglu", "bias": True}}
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
EXPERTS = "ffn.f.experts"

FAMILY = Family(
    name="gpt_oss",
    architecture="GptOssForCausalLM",
    template=template({"sink": True}, MOE),
    fields=(
        Key("vocab_size", "vocab_size", 201088),
        Key("hidden_size", "d_model", 2880),
        Key("num_hidden_layers", "decoder.layers", 36),
        Key("max_position_embeddings", "context", 131072),
        flag("tie_word_embeddings", "head.tied", False),
        *heads(n=("num_attention_heads", 64), kv=("num_key_value_heads", 8), width=("head_dim", 64)),
        Key("rms_norm_eps", "decoder.norm.eps", 1e-5),
        flag("attention_bias", "decoder.block.attention.bias", True, on=ALL, off=()),
        Key("attention_dropout", "decoder.block.attention.dropout", 0.0),
        Key("intermediate_size", f"{FFN}.expert.hidden", 2880),
        Key("swiglu_limit", f"{FFN}.expert.limit", 7.0),
        Key("swiglu_alpha", f"{FFN}.expert.alpha", 1.702),
        Key("num_local_experts", f"{FFN}.experts", 128),
        Key("num_experts_per_tok", f"{FFN}.router.top_k", 4),
        Only("hidden_act", ("silu",), "its experts have an activation of their own"),
        LayerTypes(every(2), window_default=128),
        Rope(theta=150000.0, length_default=131072, whole=True, absent=tuple(YARN.items())),
    ),
    rows=(
        *ENDS,
        *layer(
            *NORMS,
            *ATTENTION,
            Row("self_attn.sinks", "attn.f.sink"),
            Row("mlp.router", "ffn.f.router"),
            Row("mlp.experts.gate_up_proj", (f"{EXPERTS}.gate.weight", f"{EXPERTS}.up.weight"), Interleaved()),
            Row("mlp.experts.gate_up_proj_bias", (f"{EXPERTS}.gate.bias", f"{EXPERTS}.up.bias"), Interleaved()),
            Row("mlp.experts.down_proj", f"{EXPERTS}.down.weight", Transposed()),
            Row("mlp.experts.down_proj_bias", f"{EXPERTS}.down.bias"),
        ),
    ),
    prefix="model.",
    ignored=BESIDE,
    aliases={"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
    harmless={"initial_context_length": "the length before YaRN, which its own table gives"},
)
