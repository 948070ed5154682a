"""Phi-1, 1.5 and 2: parallel attention and FFN, partial RoPE. https://arxiv.org/abs/2309.05463"""

from cutaway.families.config_fields import Custom, HFConfigReader, Key, activation
from cutaway.families.config_tree import ConfigTree
from cutaway.families.rope_fields import RopeField
from cutaway.families.tables import llama
from cutaway.families.weight_conversion import WeightMapping


def qk_layernorm_field(key: str = "qk_layernorm", *, gain_per_head: bool = False) -> Custom:
    """Field of QK-norm: LayerNorm with the eps of the other norms. If each head has its own gain, it has no bias."""
    path = f"{llama.ATTENTION}.qk_norm"

    def from_hf(hf_config: HFConfigReader, tree: ConfigTree) -> None:
        eps = hf_config.get_number("layer_norm_eps", 1e-5)
        norm = {"kind": "layernorm", "eps": eps, "bias": not gain_per_head}
        qk_norm = {"norm": norm, "gain_per_head": True} if gain_per_head else {"norm": norm}
        tree.set(path, qk_norm if hf_config.get(key, False) else None)

    def to_hf(tree: ConfigTree, hf_config: dict[str, object]) -> None:
        hf_config[key] = tree.get(path) is not None

    return Custom((key,), from_hf, to_hf)


FAMILY = llama.build_family(
    "phi",
    "PhiForCausalLM",
    llama.build_template(
        {"bias": llama.QKVO}, {"kind": "mlp"}, norm=llama.LAYERNORM, placement="parallel", head={"bias": "learned"}
    ),
    fields=(
        *llama.size_fields(51200, 2048, 8192, 24, 2048),
        *llama.head_fields(),
        Key("layer_norm_eps", "decoder.norm.eps", 1e-5),
        qk_layernorm_field(),
        activation("hidden_act", f"{llama.FFN}.activation", "gelu_new"),
        llama.ATTENTION_DROPOUT,
        Key("embd_pdrop", "decoder.embedding.dropout", 0.0),
        Key("resid_pdrop", "decoder.dropout", 0.0),
        RopeField(default_partial_rotary_factor=0.5),
    ),
    weight_mappings=(
        WeightMapping("lm_head.bias", "head.bias"),
        *llama.weights(
            WeightMapping("input_layernorm", "norm"),
            *llama.ATTENTION_WEIGHTS[:3],
            WeightMapping("self_attn.dense", "attn.f.o"),
            *(WeightMapping(f"self_attn.{p}_layernorm", f"attn.f.{p}_norm.norm") for p in "qk"),
            WeightMapping("mlp.fc1", "ffn.f.up"),
            WeightMapping("mlp.fc2", "ffn.f.down"),
            norm="model.final_layernorm",
        ),
    ),
)
