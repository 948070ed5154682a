"""MiniMax-M2: Mixtral with QK-norm, partial RoPE and a sigmoid router. https://huggingface.co/MiniMaxAI/MiniMax-M2"""

from cutaway.families.config_fields import HFConfigReader, Key, SupportedValues, activation
from cutaway.families.config_tree import ConfigTree
from cutaway.families.family import keys_by_reason
from cutaway.families.rope_fields import RopeField, resolve_head_dim
from cutaway.families.tables import llama
from cutaway.families.tables.llama import ATTENTION, FFN
from cutaway.families.weight_conversion import MergeModulelist, WeightMapping


class RotaryDimRopeField(RopeField):
    """RoPE whose rotated fraction of a head may be given by `rotary_dim`, as in the published files."""

    @property
    def keys(self) -> tuple[str, ...]:
        return (*super().keys, "rotary_dim")

    def from_hf(self, hf_config: HFConfigReader, tree: ConfigTree) -> None:
        rotary_dim, key = hf_config.get("rotary_dim"), self.partial_rotary_factor_key
        if rotary_dim is not None and key not in hf_config.data:
            factor = hf_config.get_number("rotary_dim") / resolve_head_dim(tree, self.stack)
            hf_config = HFConfigReader({**hf_config.data, key: factor})
        super().from_hf(hf_config, tree)


MOE = "block_sparse_moe"
SIGMOID_ROUTER = {"score": "sigmoid", "selection_bias": True}

FAMILY = llama.build_family(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    llama.build_template(
        {"qk_norm": {"norm": llama.RMSNORM, "over": "full"}},
        {"kind": "moe", "router": SIGMOID_ROUTER, "expert": {"kind": "gated"}},
    ),
    fields=(
        *llama.size_fields(200064, 3072, None, 62, 196608),
        *llama.head_fields(48, 8, 128),
        Key("rms_norm_eps", ("decoder.norm.eps", f"{ATTENTION}.qk_norm.norm.eps"), 1e-6),
        llama.ATTENTION_DROPOUT,
        Key("intermediate_size", f"{FFN}.expert.hidden", 1536),
        activation("hidden_act", f"{FFN}.expert.activation", "silu"),
        Key("num_local_experts", f"{FFN}.experts", 256),
        Key("num_experts_per_tok", f"{FFN}.router.top_k", 8),
        SupportedValues("router_jitter_noise", (0.0, None), "it adds noise to the input of the experts in training"),
        SupportedValues("use_qk_norm", (True,), "transformers always builds QK-norm in this family"),
        SupportedValues("qk_norm_type", ("per_layer",), "QK-norm of this family is over all heads"),
        SupportedValues("scoring_func", ("sigmoid",), "router scores of this family are sigmoids"),
        SupportedValues("use_routing_bias", (True,), "the router of this family selects with a load-balancing bias"),
        SupportedValues("shared_intermediate_size", (0, None), "transformers builds no shared expert in this family"),
        RotaryDimRopeField(default_theta=5_000_000.0, default_max_positions=196608),
    ),
    weight_mappings=llama.weights(
        *llama.NORM_WEIGHTS,
        *llama.ATTENTION_WEIGHTS,
        *llama.QK_NORM_WEIGHTS,
        WeightMapping(f"{MOE}.gate", "ffn.f.router"),
        WeightMapping(f"{MOE}.e_score_correction_bias", "ffn.f.router.selection_bias"),
        WeightMapping(f"{MOE}.experts.{{e}}.w1", "ffn.f.experts.gate", MergeModulelist()),
        WeightMapping(f"{MOE}.experts.{{e}}.w3", "ffn.f.experts.up", MergeModulelist()),
        WeightMapping(f"{MOE}.experts.{{e}}.w2", "ffn.f.experts.down", MergeModulelist()),
    ),
    ignored_weights={
        **llama.IGNORED_WEIGHTS,
        r"model\.layers\.{past}\..*": "multi-token prediction layer, which is not loaded",
    },
    attribute_map={"num_experts": "num_local_experts"},
    ignored_config_keys=keys_by_reason(
        {
            "multi-token prediction layers, which are not loaded": "use_mtp num_mtp_modules mtp_transformer_layers",
            "all layers of this family have full attention": "attn_type_list",
        }
    ),
)
