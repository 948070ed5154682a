"""BLOOM: ALiBi and a norm on the embedding. https://arxiv.org/abs/2211.05100"""

from cutaway.families.config_fields import Key, SupportedValues, flag
from cutaway.families.family import Family
from cutaway.families.tables import llama
from cutaway.families.tables.gpt_neox import MEGATRON_KEYS, megatron_weights
from cutaway.families.weight_conversion import WeightMapping

FAMILY = Family(
    name="bloom",
    architecture="BloomForCausalLM",
    template=llama.build_template(
        {"bias": llama.QKVO, "position": {"kind": "alibi"}},
        {"kind": "mlp", "activation": "gelu_tanh"},
        norm=llama.LAYERNORM,
        embedding={"norm": llama.LAYERNORM},
    ),
    fields=(
        Key("vocab_size", "vocab_size", 250880),
        Key("hidden_size", "d_model", 64),
        Key("n_layer", "decoder.layers", 2),
        Key("n_head", f"{llama.ATTENTION}.heads", 8),
        Key("seq_length", "context", None),
        Key("layer_norm_epsilon", ("decoder.norm.eps", "decoder.embedding.norm.eps"), 1e-5),
        llama.ATTENTION_DROPOUT,
        Key("hidden_dropout", "decoder.dropout", 0.0),
        flag("tie_word_embeddings", "head.tied", True),
        flag("apply_residual_connection_post_layernorm", "decoder.placement.norm_skip", False),
        SupportedValues("slow_but_exact", (False,), "this tensor-parallel sum leaves the biases out"),
        SupportedValues("n_inner", (None,), "the FFN hidden dimension is always 4 · d_model"),
    ),
    weight_mappings=(
        WeightMapping("transformer.word_embeddings_layernorm", "decoder.embed.norm"),
        *llama.weights(*llama.NORM_WEIGHTS, *megatron_weights("self_attention"), **MEGATRON_KEYS),
    ),
    base_model_prefix="transformer.",
    attribute_map={"n_embed": "hidden_size", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
    ignored_weights=llama.IGNORED_CLASSIFIER_WEIGHTS,
)
