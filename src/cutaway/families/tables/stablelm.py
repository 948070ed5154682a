"""StableLM 3B, 2 1.6B and 2 12B: a Llama with LayerNorm that turns a quarter of a head. https://arxiv.org/abs/2402.17834"""

from cutaway.families.family import Family
from cutaway.families.fields import Key, activation, flag, heads
from cutaway.families.rope import Rope
from cutaway.families.rows import Row, Stacked
from cutaway.families.tables.llama import ATTENTION, BESIDE, BLOCK, ENDS, FFN, NORMS, layer, sizes
from cutaway.families.tables.phi import qk_layernorm

FAMILY = Family(
    name="stablelm",
    architecture="StableLmForCausalLM",
    template={
        "form": "decoder",
        "decoder": {"block": BLOCK, "norm": {"kind": "layernorm"}, "attention_dropout": 0.0},
        "head": {"kind": "lm"},
    },
    fields=(
        *sizes(50304, 2560, 6912, 32, 4096),
        *heads(kv=("num_key_value_heads", 32), width=None),
        Key("layer_norm_eps", "decoder.norm.eps", 1e-5),
        qk_layernorm(gain_per_head=True),
        activation("hidden_act", "decoder.block.ffn.activation", "silu"),
        flag("use_qkv_bias", "decoder.block.attention.bias", False, on=("q", "k", "v"), off=()),
        flag(
            "use_parallel_residual",
            "decoder.placement",
            False,
            on={"kind": "parallel", "norms": "one"},
            off={"kind": "pre"},
        ),
        Key("attention_dropout", "decoder.block.attention.dropout", 0.0),
        Key("hidden_dropout", "decoder.dropout", 0.0),
        Rope(share=0.25, length_default=4096),
    ),
    rows=(
        *ENDS,
        *layer(
            Row("input_layernorm", "norm"),
            *NORMS,
            *ATTENTION,
            *(Row(f"self_attn.{p}_layernorm.norms.{{e}}", f"attn.f.{p}_norm.norm", Stacked()) for p in "qk"),
            *FFN,
        ),
    ),
    prefix="model.",
    ignored=BESIDE,
)
