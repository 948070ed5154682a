"""Helium 1: Llama with interleaved RoPE. https://kyutai.org/2025/01/13/helium.html"""

from cutaway.errors import ConfigError
from cutaway.families.config_fields import Custom, HFConfigReader, flag
from cutaway.families.config_tree import ConfigTree
from cutaway.families.rope_fields import RopeField
from cutaway.families.tables import llama
from cutaway.families.tables.llama import ATTENTION


def _check_head_dim(hf_config: HFConfigReader, tree: ConfigTree) -> None:
    """Raise unless heads · head_dim is hidden_size, as the output projection requires."""
    heads, d_head = tree.get(f"{ATTENTION}.heads"), tree.get(f"{ATTENTION}.d_head")
    if heads * d_head != tree.data["d_model"]:
        raise ConfigError(
            f"{heads} heads of dimension {d_head} do not have the {tree.data['d_model']} dimensions of 'hidden_size',"
            " which the output projection of this family requires; correct 'head_dim'"
        )


FAMILY = llama.build_family(
    "helium",
    "HeliumForCausalLM",
    llama.build_template(),
    fields=(
        *llama.size_fields(48000, 2560, 7040, 24, 4096),
        *llama.head_fields(20, 20, 128),
        Custom((), _check_head_dim),
        *llama.block_fields(1e-8),
        flag("attention_bias", f"{ATTENTION}.bias", False, on=("q", "k", "v"), off=()),
        llama.MLP_BIAS,
        RopeField(default_theta=100000.0, default_max_positions=4096, layout="interleaved", full_rotary_only=True),
    ),
)
