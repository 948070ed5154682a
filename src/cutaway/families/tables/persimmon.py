"""Persimmon: squared ReLU, QK-norm and RoPE on half of a head. https://www.adept.ai/blog/persimmon-8b"""

from cutaway.families.config_fields import Custom, HFConfigReader, Key, activation
from cutaway.families.config_tree import ConfigTree
from cutaway.families.rope_fields import RopeField
from cutaway.families.tables import llama
from cutaway.families.tables.llama import ATTENTION
from cutaway.families.weight_conversion import QKV, SplitGroupedQKV, WeightMapping


def _read_qk_norm(hf_config: HFConfigReader, tree: ConfigTree) -> None:
    norm = {"kind": "layernorm", "eps": tree.get("decoder.norm.eps")}
    tree.set(f"{ATTENTION}.qk_norm", {"norm": norm} if hf_config.get("qk_layernorm", True) else None)


def _write_qk_norm(tree: ConfigTree, hf_config: dict[str, object]) -> None:
    hf_config["qk_layernorm"] = tree.get(f"{ATTENTION}.qk_norm") is not None


FAMILY = llama.build_family(
    "persimmon",
    "PersimmonForCausalLM",
    llama.build_template({"bias": llama.QKVO}, {"kind": "mlp"}, norm=llama.LAYERNORM),
    fields=(
        *llama.size_fields(262144, 4096, 16384, 36, 16384),
        Key("num_attention_heads", f"{ATTENTION}.heads", 64),
        Key("layer_norm_eps", "decoder.norm.eps", 1e-5),
        activation("hidden_act", f"{llama.FFN}.activation", "relu2"),
        Key("hidden_dropout", "decoder.dropout", 0.0),
        llama.ATTENTION_DROPOUT,
        Custom(("qk_layernorm",), _read_qk_norm, _write_qk_norm),
        RopeField(default_partial_rotary_factor=0.5, default_max_positions=16384),
    ),
    weight_mappings=llama.weights(
        *llama.NORM_WEIGHTS,
        WeightMapping("self_attn.query_key_value", QKV, SplitGroupedQKV()),
        WeightMapping("self_attn.dense", "attn.f.o"),
        *(WeightMapping(f"self_attn.{p}_layernorm", f"attn.f.{p}_norm.norm") for p in "qk"),
        WeightMapping("mlp.dense_h_to_4h", "ffn.f.up"),
        WeightMapping("mlp.dense_4h_to_h", "ffn.f.down"),
        norm="model.final_layernorm",
    ),
)
