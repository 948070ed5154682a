"""Seed-OSS: Llama with biases on queries, keys and values. https://huggingface.co/ByteDance-Seed/Seed-OSS-36B-Base"""

from cutaway.families.config_fields import Custom, HFConfigReader, Key
from cutaway.families.config_tree import ConfigTree
from cutaway.families.rope_fields import RopeField
from cutaway.families.tables import llama

BIAS_KEYS = {"attention_bias": ("q", "k", "v"), "attention_out_bias": ("o",)}
"""Key → the projections whose biases it enables."""
BIAS_DEFAULTS = {"attention_bias": True, "attention_out_bias": False}


def _read_biases(hf_config: HFConfigReader, tree: ConfigTree) -> None:
    enabled = [names for key, names in BIAS_KEYS.items() if hf_config.get(key, BIAS_DEFAULTS[key])]
    tree.set(f"{llama.ATTENTION}.bias", [name for names in enabled for name in names])


def _write_biases(tree: ConfigTree, hf_config: dict[str, object]) -> None:
    biases = tree.get(f"{llama.ATTENTION}.bias")
    hf_config.update({key: names[0] in biases for key, names in BIAS_KEYS.items()})


FAMILY = llama.build_family(
    "seed_oss",
    "SeedOssForCausalLM",
    llama.build_template(),
    fields=(
        *llama.size_fields(155136, 4096, 27648, 64, 524288),
        *llama.head_fields(80, 8, 128),
        *(field for field in llama.block_fields() if "attention_dropout" not in field.keys),
        Key("attention_dropout", f"{llama.ATTENTION}.dropout", 0.1),
        Key("residual_dropout", "decoder.dropout", 0.1),
        Custom(tuple(BIAS_KEYS), _read_biases, _write_biases),
        llama.MLP_BIAS,
        RopeField(default_max_positions=524288, full_rotary_only=True),
    ),
)
