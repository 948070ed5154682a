"""ERNIE 4.5 (dense): Llama with interleaved RoPE. https://ernie.baidu.com/blog/publication/ERNIE_Technical_Report.pdf"""

from cutaway.families.config_fields import Key, activation, flag
from cutaway.families.rope_fields import RopeField
from cutaway.families.tables import llama

FAMILY = llama.build_family(
    "ernie4_5",
    "Ernie4_5ForCausalLM",
    llama.build_template(),
    fields=(
        *llama.size_fields(103424, 1024, 3072, 18, 131072, tie_word_embeddings=True),
        *llama.head_fields(16, 2, 128),
        Key("rms_norm_eps", "decoder.norm.eps", 1e-5),
        activation("hidden_act", f"{llama.FFN}.activation", "silu"),
        flag("use_bias", f"{llama.ATTENTION}.bias", False, on=llama.QKVO, off=()),
        flag("use_bias", f"{llama.FFN}.bias", False),
        RopeField(default_theta=500000.0, default_max_positions=131072, layout="interleaved", full_rotary_only=True),
    ),
)
