"""Command R and Aya: parallel attention and FFN after one LayerNorm without bias. https://docs.cohere.com/docs/command-r"""

from cutaway.families.config_fields import Custom, HFConfigReader, Key, activation
from cutaway.families.config_tree import ConfigTree
from cutaway.families.rope_fields import RopeField
from cutaway.families.tables import llama
from cutaway.families.weight_conversion import WeightMapping

TEMPLATE = llama.build_template(norm={"kind": "layernorm", "bias": False}, placement="parallel")
QK_NORM_PATH = f"{llama.ATTENTION}.qk_norm"
COMMON_FIELDS = (
    *llama.size_fields(256000, 8192, 22528, 40, 8192, tie_word_embeddings=True),
    Key("layer_norm_eps", "decoder.norm.eps", 1e-5),
    activation("hidden_act", f"{llama.FFN}.activation", "silu"),
    llama.ATTENTION_BIAS,
    llama.ATTENTION_DROPOUT,
    Key("logit_scale", "head.scale", 0.0625),
)
BLOCK_WEIGHTS = (WeightMapping("input_layernorm", "norm"), *llama.ATTENTION_WEIGHTS, *llama.FFN_WEIGHTS)


def _read_qk_norm(hf_config: HFConfigReader, tree: ConfigTree) -> None:
    """QK-norm with one gain per head and the eps of the other norms."""
    norm = {"kind": "layernorm", "bias": False, "eps": hf_config.get_number("layer_norm_eps", 1e-5)}
    qk_norm = {"norm": norm, "gain_per_head": True}
    tree.set(QK_NORM_PATH, qk_norm if hf_config.get("use_qk_norm", False) else None)


def _write_qk_norm(tree: ConfigTree, hf_config: dict[str, object]) -> None:
    hf_config["use_qk_norm"] = tree.get(QK_NORM_PATH) is not None


FAMILY = llama.build_family(
    "cohere",
    "CohereForCausalLM",
    TEMPLATE,
    fields=(
        *COMMON_FIELDS,
        *llama.computed_head_fields(8192, 64, None),
        Custom(("use_qk_norm",), _read_qk_norm, _write_qk_norm),
        RopeField(default_theta=500000.0, layout="interleaved", default_max_positions=8192, full_rotary_only=True),
    ),
    weight_mappings=llama.weights(*BLOCK_WEIGHTS, *llama.QK_NORM_WEIGHTS),
    ignored_config_keys={"model_max_length": "maximum length for the tokenizer"},
)
