"""Granite 3 MoE and PowerMoE: Granite with a mixture of experts in every layer. https://arxiv.org/abs/2408.13359"""

from cutaway.families.config_fields import Key, activation
from cutaway.families.rope_fields import RopeField
from cutaway.families.tables import llama
from cutaway.families.tables.granite import MULTIPLIER_FIELDS
from cutaway.families.tables.mixtral import MOE_TEMPLATE
from cutaway.families.weight_conversion import Split, WeightMapping

FAMILY = llama.build_family(
    "granitemoe",
    "GraniteMoeForCausalLM",
    llama.build_template(ffn=MOE_TEMPLATE),
    fields=(
        *llama.size_fields(32000, 4096, None, 32, 2048),
        *llama.computed_head_fields(4096, 32, None),
        Key("rms_norm_eps", "decoder.norm.eps", 1e-6),
        llama.ATTENTION_BIAS,
        llama.ATTENTION_DROPOUT,
        *MULTIPLIER_FIELDS,
        Key("intermediate_size", f"{llama.FFN}.expert.hidden", 11008),
        activation("hidden_act", f"{llama.FFN}.expert.activation", "silu"),
        Key("num_local_experts", f"{llama.FFN}.experts", 8),
        Key("num_experts_per_tok", f"{llama.FFN}.router.top_k", 2),
        RopeField(full_rotary_only=True),
    ),
    weight_mappings=llama.weights(
        *llama.NORM_WEIGHTS,
        *llama.ATTENTION_WEIGHTS,
        WeightMapping("block_sparse_moe.router.layer", "ffn.f.router"),
        WeightMapping("block_sparse_moe.input_linear", ("ffn.f.experts.gate", "ffn.f.experts.up"), Split(dim=1)),
        WeightMapping("block_sparse_moe.output_linear", "ffn.f.experts.down"),
    ),
)
