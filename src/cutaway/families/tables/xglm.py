"""XGLM: multilingual GPT with sinusoidal positions. https://arxiv.org/abs/2112.10668"""

from cutaway.families.config_fields import Key, activation, flag
from cutaway.families.tables import biogpt, llama

FAMILY = llama.build_family(
    "xglm",
    "XGLMForCausalLM",
    llama.build_template(
        {"bias": llama.QKVO, "position": {"kind": "none"}},
        {"kind": "mlp"},
        norm=llama.LAYERNORM,
        embedding={"position": {"kind": "sinusoidal", "layout": "halves", "endpoint": True, "offset": 2}},
    ),
    fields=(
        Key("vocab_size", "vocab_size", 256008),
        Key("d_model", "d_model", 1024),
        Key("num_layers", "decoder.layers", 24),
        Key("attention_heads", f"{llama.ATTENTION}.heads", 16),
        Key("ffn_dim", f"{llama.FFN}.hidden", 4096),
        activation("activation_function", f"{llama.FFN}.activation", "gelu"),
        Key("max_position_embeddings", "context", 2048),
        Key("dropout", ("decoder.dropout", "decoder.embedding.dropout"), 0.1),
        Key("attention_dropout", f"{llama.ATTENTION}.dropout", 0.1),
        Key("activation_dropout", f"{llama.FFN}.dropout", 0.0),
        biogpt.SCALE_EMBEDDING,
        biogpt.LAYERDROP,
        flag("tie_word_embeddings", "head.tied", True),
    ),
    weight_mappings=llama.weights(*biogpt.LAYER_WEIGHTS, norm="model.layer_norm"),
    attribute_map={
        "num_attention_heads": "attention_heads",
        "hidden_size": "d_model",
        "num_hidden_layers": "num_layers",
    },
    ignored_weights={
        r"model\.embed_positions\.weights": "sinusoidal positions, computed from the configuration",
        **llama.IGNORED_CLASSIFIER_WEIGHTS,
    },
    ignored_config_keys={"init_std": "initialization; weights are loaded"},
)
