"""OLMo: Llama with norms that have no weights, and q, k and v clamped. https://arxiv.org/abs/2402.00838"""

from cutaway.families.family import Family
from cutaway.families.fields import Key, activation, flag
from cutaway.families.rope import Rope
from cutaway.families.tables.llama import ALL, ATTENTION, BESIDE, ENDS, FFN, layer, sizes
from cutaway.families.tables.mistral import split, template

AT = "decoder.block.attention"
PLAIN = {"kind": "layernorm", "eps": 1e-5, "gain": False, "bias": False}

FAMILY = Family(
    name="olmo",
    architecture="OlmoForCausalLM",
    template=template({}, {}) | {"decoder": template({}, {})["decoder"] | {"norm": PLAIN}},
    fields=(
        *sizes(50304, 4096, 11008, 32, 2048),
        *split(4096, 32, None),
        activation("hidden_act", "decoder.block.ffn.activation", "silu"),
        flag("attention_bias", f"{AT}.bias", False, on=ALL, off=()),
        Key("clip_qkv", f"{AT}.clip", None),
        Key("attention_dropout", f"{AT}.dropout", 0.0),
        Rope(whole=True),
    ),
    rows=(*ENDS, *layer(*ATTENTION, *FFN)),
    prefix="model.",
    ignored=BESIDE,
)
