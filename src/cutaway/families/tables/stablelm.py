"""StableLM 3B, StableLM 2 1.6B and StableLM 2 12B: Llama with LayerNorm and RoPE on 25% of a head. https://arxiv.org/abs/2402.17834"""

from cutaway.families.config_fields import Key, activation, flag
from cutaway.families.rope_fields import RopeField
from cutaway.families.tables import llama
from cutaway.families.tables.phi import qk_layernorm_field
from cutaway.families.weight_conversion import MergeModulelist, WeightMapping

PARALLEL = {"kind": "parallel", "norms": "one"}

FAMILY = llama.build_family(
    "stablelm",
    "StableLmForCausalLM",
    llama.build_template(norm=llama.LAYERNORM, attention_resid_dropout=0.0),
    fields=(
        *llama.size_fields(50304, 2560, 6912, 32, 4096),
        Key("num_attention_heads", f"{llama.ATTENTION}.heads", 32),
        Key("num_key_value_heads", f"{llama.ATTENTION}.kv_heads", 32),
        Key("layer_norm_eps", "decoder.norm.eps", 1e-5),
        qk_layernorm_field(gain_per_head=True),
        activation("hidden_act", f"{llama.FFN}.activation", "silu"),
        flag("use_qkv_bias", f"{llama.ATTENTION}.bias", False, on=("q", "k", "v"), off=()),
        flag("use_parallel_residual", "decoder.placement", False, on=PARALLEL, off={"kind": "pre"}),
        llama.ATTENTION_DROPOUT,
        Key("hidden_dropout", "decoder.dropout", 0.0),
        RopeField(default_partial_rotary_factor=0.25, default_max_positions=4096),
    ),
    weight_mappings=llama.weights(
        WeightMapping("input_layernorm", "norm"),
        *llama.NORM_WEIGHTS,
        *llama.ATTENTION_WEIGHTS,
        WeightMapping("self_attn.q_layernorm.norms.{e}", "attn.f.q_norm.norm", MergeModulelist()),
        WeightMapping("self_attn.k_layernorm.norms.{e}", "attn.f.k_norm.norm", MergeModulelist()),
        *llama.FFN_WEIGHTS,
    ),
)
