"""Arcee AFM: Llama with an ungated FFN and squared ReLU. https://www.arcee.ai/blog/deep-dive-afm-4-5b-the-first-arcee-foundational-model"""

from cutaway.families.config_fields import Key, activation
from cutaway.families.rope_fields import RopeField
from cutaway.families.tables import llama

FAMILY = llama.build_family(
    "arcee",
    "ArceeForCausalLM",
    llama.build_template(ffn={"kind": "mlp"}),
    fields=(
        *llama.size_fields(32000, 2560, 18432, 32, 4096),
        *llama.computed_head_fields(2560, 32, None),
        Key("rms_norm_eps", "decoder.norm.eps", 1e-5),
        activation("hidden_act", f"{llama.FFN}.activation", "relu2"),
        llama.ATTENTION_DROPOUT,
        llama.ATTENTION_BIAS,
        llama.MLP_BIAS,
        RopeField(default_max_positions=4096, full_rotary_only=True),
    ),
)
