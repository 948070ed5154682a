"""OLMo 2. https://arxiv.org/abs/2501.00656"""

from cutaway.families.family import Family
from cutaway.families.fields import Key, activation, flag
from cutaway.families.rope import Rope
from cutaway.families.rows import Row
from cutaway.families.tables.llama import ALL, ATTENTION, BESIDE, ENDS, FFN, layer, sizes
from cutaway.families.tables.mistral import split, template
from cutaway.families.tables.qwen3 import QK_NORMS

AT = "decoder.block.attention"

FAMILY = Family(
    name="olmo2",
    architecture="Olmo2ForCausalLM",
    template=template({"qk_norm": {"norm": {"kind": "rmsnorm"}, "over": "full"}}, {}, "output"),
    fields=(
        *sizes(50304, 4096, 11008, 32, 2048),
        *split(4096, 32, None),
        Key("rms_norm_eps", ("decoder.norm.eps", f"{AT}.qk_norm.norm.eps"), 1e-5),
        activation("hidden_act", "decoder.block.ffn.activation", "silu"),
        flag("attention_bias", f"{AT}.bias", False, on=ALL, off=()),
        Key("attention_dropout", f"{AT}.dropout", 0.0),
        Rope(whole=True),
    ),
    rows=(
        *ENDS,
        *layer(
            Row("post_attention_layernorm", "attn.norm_out"),
            Row("post_feedforward_layernorm", "ffn.norm_out"),
            *ATTENTION,
            *QK_NORMS,
            *FFN,
        ),
    ),
    prefix="model.",
    ignored=BESIDE,
)
