"""Jais 2: Llama with LayerNorm, biases and an ungated FFN with squared ReLU. https://huggingface.co/inceptionai/Jais-2-8B-Chat"""

from cutaway.families.config_fields import Key, activation, flag
from cutaway.families.rope_fields import RopeField
from cutaway.families.tables import llama

FAMILY = llama.build_family(
    "jais2",
    "Jais2ForCausalLM",
    llama.build_template(ffn={"kind": "mlp"}, norm=llama.LAYERNORM),
    fields=(
        *llama.size_fields(150272, 3328, 26624, 32, 8192),
        *llama.computed_head_fields(3328, 26, None),
        Key("layer_norm_eps", "decoder.norm.eps", 1e-5),
        activation("hidden_act", f"{llama.FFN}.activation", "relu2"),
        llama.ATTENTION_DROPOUT,
        flag("attention_bias", f"{llama.ATTENTION}.bias", True, on=llama.QKVO, off=()),
        flag("mlp_bias", f"{llama.FFN}.bias", True),
        RopeField(default_max_positions=8192, full_rotary_only=True),
    ),
)
