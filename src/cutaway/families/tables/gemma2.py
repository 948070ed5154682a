"""Gemma 2: norms on both sides, capped scores and logits, every other layer near. https://arxiv.org/abs/2408.00118"""

from cutaway.families.family import Family
from cutaway.families.fields import Field, Key, activation, heads
from cutaway.families.mixed import LayerTypes, every
from cutaway.families.rope import Rope
from cutaway.families.rows import Row
from cutaway.families.tables.gemma import COMMON, template
from cutaway.families.tables.llama import ATTENTION, BESIDE, ENDS, FFN, layer, sizes

SECOND: tuple[Field, ...] = (
    *heads(n=("num_attention_heads", 8), kv=("num_key_value_heads", 4), width=("head_dim", 256)),
    *COMMON,
    activation("hidden_activation", "decoder.block.ffn.activation", "gelu_pytorch_tanh"),
    Key(
        "query_pre_attn_scalar",
        "decoder.block.attention.scale",
        256,
        to=lambda scalar: scalar**-0.5,
        back=lambda scale: round(scale**-2),
    ),
)
"""What Gemma 2 began and Gemma 3 kept."""
SANDWICH = (
    Row("input_layernorm", "attn.norm_in"),
    Row("post_attention_layernorm", "attn.norm_out"),
    Row("pre_feedforward_layernorm", "ffn.norm_in"),
    Row("post_feedforward_layernorm", "ffn.norm_out"),
)
HARMLESS = {
    "hidden_act": "the model goes by hidden_activation",
    "cache_implementation": "for generation",
}

FAMILY = Family(
    name="gemma2",
    architecture="Gemma2ForCausalLM",
    template=template("sandwich"),
    fields=(
        *sizes(256000, 2304, 9216, 26, 8192, tied=True),
        *SECOND,
        Key("attn_logit_softcapping", "decoder.block.attention.softcap", 50.0),
        Key("final_logit_softcapping", "head.softcap", 30.0),
        LayerTypes(every(2), window_default=4096),
        Rope(length_default=8192, whole=True),
    ),
    rows=(*ENDS, *layer(*SANDWICH, *ATTENTION, *FFN)),
    prefix="model.",
    ignored=BESIDE,
    harmless=HARMLESS,
)
