"""StarCoder2: tensor names of Llama; LayerNorm, biases and an ungated FFN. https://arxiv.org/abs/2402.19173"""

from cutaway.families.config_fields import Key, SupportedValues, activation, flag
from cutaway.families.rope_fields import RopeField
from cutaway.families.tables import llama
from cutaway.families.weight_conversion import WeightMapping

FAMILY = llama.build_family(
    "starcoder2",
    "Starcoder2ForCausalLM",
    llama.build_template(ffn={"kind": "mlp"}, norm=llama.LAYERNORM),
    fields=(
        *llama.size_fields(49152, 3072, 12288, 30, 4096, tie_word_embeddings=True),
        *llama.head_fields(24, 2),
        Key("norm_epsilon", "decoder.norm.eps", 1e-5),
        activation("hidden_act", f"{llama.FFN}.activation", "gelu_pytorch_tanh"),
        flag("use_bias", f"{llama.ATTENTION}.bias", True, on=llama.QKVO, off=()),
        flag("use_bias", f"{llama.FFN}.bias", True),
        Key("sliding_window", f"{llama.ATTENTION}.window", None),
        llama.ATTENTION_DROPOUT,
        Key("embedding_dropout", "decoder.embedding.dropout", 0.0),
        Key("residual_dropout", "decoder.dropout", 0.0),
        RopeField(default_max_positions=4096, full_rotary_only=True),
        SupportedValues("mlp_type", ("default", None), "the model would have another FFN"),
        SupportedValues("norm_type", ("layer_norm", None), "the model would have another norm"),
    ),
    weight_mappings=llama.weights(
        *llama.NORM_WEIGHTS,
        *llama.ATTENTION_WEIGHTS,
        WeightMapping("mlp.c_fc", "ffn.f.up"),
        WeightMapping("mlp.c_proj", "ffn.f.down"),
    ),
)
