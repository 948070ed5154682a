"""Gemma 3 without its eyes: qk-norm, five near layers to a far one with a RoPE of its own.

https://arxiv.org/abs/2503.19786
"""

from cutaway.families.family import Family
from cutaway.families.fields import Key, Only
from cutaway.families.mixed import LayerTypes, every
from cutaway.families.rope import RopeByLayerType
from cutaway.families.tables.gemma import template
from cutaway.families.tables.gemma2 import HARMLESS, SANDWICH, SECOND
from cutaway.families.tables.llama import ATTENTION, BESIDE, ENDS, FFN, layer, sizes
from cutaway.families.tables.qwen3 import QK_NORMS

QK_NORM = {"norm": {"kind": "rmsnorm", "unit_offset": True}}

FAMILY = Family(
    name="gemma3_text",
    architecture="Gemma3ForCausalLM",
    template=template("sandwich", qk_norm=QK_NORM),
    fields=(
        *sizes(262208, 2304, 9216, 26, 131072, tied=True),
        *SECOND,
        Key("rms_norm_eps", ("decoder.norm.eps", "decoder.block.attention.qk_norm.norm.eps"), 1e-6),
        Only("attn_logit_softcapping", (None,), "the published code never caps this family's scores"),
        Key("final_logit_softcapping", "head.softcap", None),
        LayerTypes(every(6, "sliding_window_pattern"), window_default=4096, extra=("sliding_window_pattern",)),
        RopeByLayerType(length_default=131072, whole=True),
    ),
    rows=(*ENDS, *layer(*SANDWICH, *ATTENTION, *QK_NORMS, *FFN)),
    prefix="model.",
    ignored=BESIDE,
    harmless=HARMLESS | {"_sliding_window_pattern": "an older form of layer_types, which is written beside it"},
)
