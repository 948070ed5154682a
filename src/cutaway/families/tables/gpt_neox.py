"""GPT-NeoX and Pythia. https://arxiv.org/abs/2204.06745"""

from cutaway.families.config_fields import Key, SupportedValues, activation, flag
from cutaway.families.family import Family
from cutaway.families.rope_fields import RopeField
from cutaway.families.tables import llama
from cutaway.families.weight_conversion import QKV, SplitGroupedQKV, WeightMapping, add_prefix

PARALLEL = {"kind": "parallel", "norms": "two"}
MEGATRON_KEYS = {"embed": "transformer.word_embeddings", "norm": "transformer.ln_f", "layer": "transformer.h"}
"""Keys of BLOOM and Falcon for `llama.weights`."""


def megatron_weights(attention_prefix: str) -> tuple[WeightMapping, ...]:
    """Weight mappings of a layer in Megatron's format, which stores q, k and v as one tensor, interleaved by head."""
    return (
        WeightMapping(f"{attention_prefix}.query_key_value", QKV, SplitGroupedQKV()),
        WeightMapping(f"{attention_prefix}.dense", "attn.f.o"),
        WeightMapping("mlp.dense_h_to_4h", "ffn.f.up"),
        WeightMapping("mlp.dense_4h_to_h", "ffn.f.down"),
    )


FAMILY = Family(
    name="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    template=llama.build_template(ffn={"kind": "mlp"}, norm=llama.LAYERNORM),
    fields=(
        *llama.size_fields(50432, 6144, 24576, 44, 2048),
        Key("num_attention_heads", f"{llama.ATTENTION}.heads", 64),
        Key("layer_norm_eps", "decoder.norm.eps", 1e-5),
        activation("hidden_act", f"{llama.FFN}.activation", "gelu"),
        flag("attention_bias", f"{llama.ATTENTION}.bias", True, on=llama.QKVO, off=()),
        llama.ATTENTION_DROPOUT,
        Key("hidden_dropout", ("decoder.dropout", "decoder.embedding.dropout"), 0.0),
        flag("use_parallel_residual", "decoder.placement", True, on=PARALLEL, off={"kind": "pre"}),
        RopeField(
            default_partial_rotary_factor=0.25, partial_rotary_factor_key="rotary_pct", theta_key="rotary_emb_base"
        ),
        SupportedValues("is_decoder", (False, True, None), "the family is always a decoder"),
    ),
    weight_mappings=(
        WeightMapping("gpt_neox.embed_in", "decoder.embed.token"),
        WeightMapping("gpt_neox.final_layer_norm", "decoder.final_norm"),
        WeightMapping("embed_out", "head.matrix"),
        WeightMapping("lm_head", "head.matrix"),
        *add_prefix("gpt_neox.layers.{i}", "decoder.blocks.{i}", *llama.NORM_WEIGHTS, *megatron_weights("attention")),
    ),
    base_model_prefix="gpt_neox.",
    ignored_weights={
        r"gpt_neox\.layers\.\d+\.attention\.(masked_)?bias": "causal mask, computed from positions",
        r"gpt_neox\.(layers\.\d+\.attention\.)?rotary_emb\.inv_freq": "RoPE frequencies, which are computed",
        **llama.IGNORED_CLASSIFIER_WEIGHTS,
    },
    ignored_config_keys={
        "rope_theta": "duplicate of rotary_emb_base",
        "partial_rotary_factor": "duplicate of rotary_pct",
    },
)
