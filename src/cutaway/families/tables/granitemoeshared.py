"""Granite MoE with a shared expert. https://arxiv.org/abs/2408.13359"""

from cutaway.families.config_fields import Custom, HFConfigReader
from cutaway.families.config_tree import ConfigTree
from cutaway.families.tables import granitemoe, llama
from cutaway.families.tables.llama import FFN
from cutaway.families.weight_conversion import Split, WeightMapping, add_prefix


def _read_shared_expert(hf_config: HFConfigReader, tree: ConfigTree) -> None:
    hidden = hf_config.get_number("shared_intermediate_size", 0)
    shared = {"kind": "gated", "hidden": hidden, "activation": tree.get(f"{FFN}.expert.activation")}
    tree.set(f"{FFN}.shared", shared if hidden else None)


def _write_shared_expert(tree: ConfigTree, hf_config: dict[str, object]) -> None:
    shared = tree.get(f"{FFN}.shared")
    hf_config["shared_intermediate_size"] = 0 if shared is None else shared["hidden"]


FAMILY = llama.build_family(
    "granitemoeshared",
    "GraniteMoeSharedForCausalLM",
    granitemoe.FAMILY.template,
    fields=(
        *granitemoe.FAMILY.fields,
        Custom(("shared_intermediate_size",), _read_shared_expert, _write_shared_expert),
    ),
    weight_mappings=(
        *granitemoe.FAMILY.weight_mappings,
        *add_prefix(
            "model.layers.{i}.shared_mlp",
            "decoder.blocks.{i}.ffn.f.shared",
            WeightMapping("input_linear", ("gate", "up"), Split()),
            WeightMapping("output_linear", "down"),
        ),
    ),
)
