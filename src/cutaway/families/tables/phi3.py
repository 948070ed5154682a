"""Phi-3, Phi-3.5 and Phi-4: Llama with fused q, k, v and fused gate, up.

https://arxiv.org/abs/2404.14219
"""

from cutaway.errors import ConfigError
from cutaway.families.config_fields import HFConfigReader, Key, activation, clear_out_of_vocab_pad_token
from cutaway.families.config_tree import ConfigTree
from cutaway.families.family import Family
from cutaway.families.rope_fields import RopeField
from cutaway.families.tables.llama import (
    EMBEDDING_AND_HEAD_WEIGHTS,
    IGNORED_WEIGHTS,
    NORM_WEIGHTS,
    TEMPLATE,
    per_layer,
    size_fields,
)
from cutaway.families.tables.mistral import head_fields
from cutaway.families.weight_conversion import Split, WeightMapping


class LongRopeField(RopeField):
    """RoPE without scaling, or LongRoPE ('su' or 'yarn' in older files)."""

    def from_hf(self, hf_config: HFConfigReader, tree: ConfigTree) -> None:
        super().from_hf(hf_config, tree)
        kind = tree.get("decoder.block.attention.position.scaling.kind")
        if kind not in ("none", "longrope"):
            raise ConfigError(f"the rope_type is '{kind}', and this family supports only longrope and default")


FAMILY = Family(
    name="phi3",
    architecture="Phi3ForCausalLM",
    template=TEMPLATE,
    fields=(
        *size_fields(32064, 3072, 8192, 32, 4096),
        *head_fields(3072, 32, None),
        Key("rms_norm_eps", "decoder.norm.eps", 1e-5),
        activation("hidden_act", "decoder.block.ffn.activation", "silu"),
        Key("attention_dropout", "decoder.block.attention.dropout", 0.0),
        Key("resid_pdrop", "decoder.dropout", 0.0),
        Key("sliding_window", "decoder.block.attention.window", None),
        LongRopeField(
            default_max_positions=4096,
            original_max_positions_key="original_max_position_embeddings",
            default_original_max_positions=4096,
            rope_type_aliases=(("su", "longrope"), ("yarn", "longrope")),
        ),
        clear_out_of_vocab_pad_token(32000),
    ),
    weight_mappings=(
        *EMBEDDING_AND_HEAD_WEIGHTS,
        *per_layer(
            *NORM_WEIGHTS,
            WeightMapping("self_attn.qkv_proj", ("attn.f.q", "attn.f.k", "attn.f.v"), Split()),
            WeightMapping("self_attn.o_proj", "attn.f.o"),
            WeightMapping("mlp.gate_up_proj", ("ffn.f.gate", "ffn.f.up"), Split()),
            WeightMapping("mlp.down_proj", "ffn.f.down"),
        ),
    ),
    base_model_prefix="model.",
    ignored_weights=IGNORED_WEIGHTS,
    ignored_config_keys={"embd_pdrop": "transformers does not apply it"},
)
