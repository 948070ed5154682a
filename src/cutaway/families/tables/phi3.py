"""Phi-3, Phi-3.5 and Phi-4: Llama with fused q, k, v and fused gate, up.

https://arxiv.org/abs/2404.14219
"""

from cutaway.errors import ConfigError
from cutaway.families.config_fields import HFConfigReader, Key, clear_out_of_vocab_pad_token
from cutaway.families.config_tree import ConfigTree
from cutaway.families.rope_fields import RopeField
from cutaway.families.tables import llama
from cutaway.families.weight_conversion import QKV, Split, WeightMapping


class _LongRopeField(RopeField):
    """RoPE without scaling, or LongRoPE ('su' or 'yarn' in older files)."""

    def from_hf(self, hf_config: HFConfigReader, tree: ConfigTree) -> None:
        super().from_hf(hf_config, tree)
        kind = tree.get(f"{llama.ATTENTION}.position.scaling.kind")
        if kind not in ("none", "longrope"):
            raise ConfigError(f"config.json's 'rope_type' is '{kind}'; this family supports only longrope and default")


FAMILY = llama.build_family(
    "phi3",
    "Phi3ForCausalLM",
    llama.build_template(),
    fields=(
        *llama.size_fields(32064, 3072, 8192, 32, 4096),
        *llama.computed_head_fields(3072, 32, None),
        *llama.block_fields(1e-5),
        Key("resid_pdrop", "decoder.dropout", 0.0),
        Key("sliding_window", f"{llama.ATTENTION}.window", None),
        _LongRopeField(
            default_max_positions=4096,
            original_max_positions_key="original_max_position_embeddings",
            default_original_max_positions=4096,
            rope_type_aliases=(("su", "longrope"), ("yarn", "longrope")),
        ),
        clear_out_of_vocab_pad_token(32000),
    ),
    weight_mappings=llama.weights(
        *llama.NORM_WEIGHTS,
        WeightMapping("self_attn.qkv_proj", QKV, Split()),
        WeightMapping("self_attn.o_proj", "attn.f.o"),
        WeightMapping("mlp.gate_up_proj", ("ffn.f.gate", "ffn.f.up"), Split()),
        WeightMapping("mlp.down_proj", "ffn.f.down"),
    ),
    ignored_config_keys={"embd_pdrop": "transformers does not apply it"},
)
