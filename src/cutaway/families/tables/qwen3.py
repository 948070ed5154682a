"""Qwen3. https://arxiv.org/abs/2505.09388"""

from cutaway.families.family import Family
from cutaway.families.fields import Key, activation, flag, heads
from cutaway.families.rope import Rope
from cutaway.families.rows import Row
from cutaway.families.tables.llama import ALL, ATTENTION, BESIDE, ENDS, FFN, NORMS, layer, sizes
from cutaway.families.tables.mistral import template
from cutaway.families.tables.qwen2 import WINDOWS

AT = "decoder.block.attention"
QK_NORM = {"qk_norm": {"norm": {"kind": "rmsnorm"}, "over": "head"}}
QK_NORMS = (Row("self_attn.q_norm", "attn.f.q_norm.norm"), Row("self_attn.k_norm", "attn.f.k_norm.norm"))
ATTENTION_FIELDS = (
    Key("rms_norm_eps", ("decoder.norm.eps", f"{AT}.qk_norm.norm.eps"), 1e-6),
    flag("attention_bias", f"{AT}.bias", False, on=ALL, off=()),
    Key("attention_dropout", f"{AT}.dropout", 0.0),
)

FAMILY = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    template=template(QK_NORM, {}),
    fields=(
        *sizes(151936, 4096, 22016, 32, 32768),
        *heads(kv=("num_key_value_heads", 32), width=("head_dim", 128)),
        *ATTENTION_FIELDS,
        activation("hidden_act", "decoder.block.ffn.activation", "silu"),
        *WINDOWS,
        Rope(length_default=32768, whole=True),
    ),
    rows=(*ENDS, *layer(*NORMS, *ATTENTION, *QK_NORMS, *FFN)),
    prefix="model.",
    ignored=BESIDE,
)
