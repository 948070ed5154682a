"""StarCoder2: LayerNorm, biases and a two-matrix FFN in a Llama's names. https://arxiv.org/abs/2402.19173"""

from cutaway.families.family import Family
from cutaway.families.fields import Key, Only, activation, flag, heads
from cutaway.families.rope import Rope
from cutaway.families.rows import Row
from cutaway.families.tables.llama import ALL, ATTENTION, BESIDE, ENDS, NORMS, layer, sizes

FAMILY = Family(
    name="starcoder2",
    architecture="Starcoder2ForCausalLM",
    template={
        "form": "decoder",
        "decoder": {
            "block": {"attention": {"kind": "multi-head"}, "ffn": {"kind": "mlp"}},
            "norm": {"kind": "layernorm"},
            "placement": {"kind": "pre"},
        },
        "head": {"kind": "lm"},
    },
    fields=(
        *sizes(49152, 3072, 12288, 30, 4096, tied=True),
        *heads(n=("num_attention_heads", 24), kv=("num_key_value_heads", 2)),
        Key("norm_epsilon", "decoder.norm.eps", 1e-5),
        activation("hidden_act", "decoder.block.ffn.activation", "gelu_pytorch_tanh"),
        flag("use_bias", "decoder.block.attention.bias", True, on=ALL, off=()),
        flag("use_bias", "decoder.block.ffn.bias", True),
        Key("sliding_window", "decoder.block.attention.window", None),
        Key("attention_dropout", "decoder.block.attention.dropout", 0.0),
        Key("embedding_dropout", "decoder.embedding.dropout", 0.0),
        Key("residual_dropout", "decoder.dropout", 0.0),
        Rope(length_default=4096, whole=True),
        Only("mlp_type", ("default", None), "it would be another FFN"),
        Only("norm_type", ("layer_norm", None), "it would be another norm"),
    ),
    rows=(*ENDS, *layer(*NORMS, *ATTENTION, Row("mlp.c_fc", "ffn.f.up"), Row("mlp.c_proj", "ffn.f.down"))),
    prefix="model.",
    ignored=BESIDE,
)
