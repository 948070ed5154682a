"""GLM-4 (`glm`): Llama with RoPE on half of a head, interleaved, and fused gate and up. https://arxiv.org/abs/2406.12793"""

from cutaway.families.config_fields import ConfigFields, clear_out_of_vocab_pad_token, flag
from cutaway.families.rope_fields import RopeField
from cutaway.families.tables import llama
from cutaway.families.weight_conversion import Split, WeightMapping

FIELDS: ConfigFields = (
    *llama.size_fields(151552, 4096, 13696, 40, 131072),
    *llama.head_fields(32, 2, 128),
    *llama.block_fields(1.5625e-7),
    flag("attention_bias", f"{llama.ATTENTION}.bias", True, on=("q", "k", "v"), off=()),
    RopeField(default_partial_rotary_factor=0.5, default_max_positions=131072, layout="interleaved"),
    clear_out_of_vocab_pad_token(151329),
)
SUBLAYER_WEIGHTS = (
    *llama.ATTENTION_WEIGHTS,
    WeightMapping("mlp.gate_up_proj", ("ffn.f.gate", "ffn.f.up"), Split()),
    WeightMapping("mlp.down_proj", "ffn.f.down"),
)

FAMILY = llama.build_family(
    "glm",
    "GlmForCausalLM",
    llama.build_template(),
    FIELDS,
    llama.weights(*llama.NORM_WEIGHTS, *SUBLAYER_WEIGHTS),
)
