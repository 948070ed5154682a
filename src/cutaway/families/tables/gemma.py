"""Gemma: Llama with wide heads, RMSNorm gains stored as offsets from 1 and scaled embeddings. https://arxiv.org/abs/2403.08295"""

from cutaway.families.config_fields import HF_ACTIVATIONS, Choice, Key, SupportedValues
from cutaway.families.config_tree import Node
from cutaway.families.rope_fields import RopeField
from cutaway.families.tables import llama

NORM = {"kind": "rmsnorm", "unit_offset": True}


def build_template(
    placement: str, attention: Node | None = None, ffn: Node | None = None, head: Node | None = None
) -> Node:
    """Config template shared by Gemma 1 to 3. `attention`, `ffn` and `head` add fields of the node that they name."""
    embedding = {"scale": "sqrt_d_model"}
    return llama.build_template(attention, ffn, norm=NORM, placement=placement, head=head, embedding=embedding)


COMMON_FIELDS = (
    Key("rms_norm_eps", "decoder.norm.eps", 1e-6),
    llama.ATTENTION_BIAS,
    llama.ATTENTION_DROPOUT,
    SupportedValues("use_bidirectional_attention", (None, False), "attention would not be causal"),
)
GEMMA_ACTIVATIONS = HF_ACTIVATIONS | {"gelu": "gelu_tanh"}
"""In the config.json of the first releases, 'gelu' means the tanh approximation."""
TANH_GELU = "gelu_pytorch_tanh"

FAMILY = llama.build_family(
    "gemma",
    "GemmaForCausalLM",
    build_template("pre"),
    fields=(
        *llama.size_fields(256000, 3072, 24576, 28, 8192, tie_word_embeddings=True),
        *llama.head_fields(16, 16, 256),
        *COMMON_FIELDS,
        Choice("hidden_act", f"{llama.FFN}.activation", TANH_GELU, GEMMA_ACTIVATIONS),
        SupportedValues("hidden_activation", (None, TANH_GELU), "it contradicts hidden_act, which transformers uses"),
        RopeField(default_max_positions=8192, full_rotary_only=True),
    ),
)
