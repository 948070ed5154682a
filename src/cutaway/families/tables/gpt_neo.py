"""GPT-Neo: alternating full and sliding-window attention, unscaled scores. https://github.com/EleutherAI/gpt-neo"""

from cutaway.errors import ConfigError
from cutaway.families.config_fields import Custom, HFConfigReader, Key, activation, flag, four_times
from cutaway.families.config_tree import ConfigTree, shortest_layer_pattern
from cutaway.families.family import Family
from cutaway.families.tables import gpt2, llama
from cutaway.families.weight_conversion import WeightMapping


def _read_attention_layers(hf_config: HFConfigReader, tree: ConfigTree) -> None:
    """Read `attention_layers`, or expand `attention_types`, which is a list of (pattern, number of repetitions)."""
    blocks = tree.blocks("decoder")
    kinds = hf_config.get("attention_layers")
    if kinds is None:
        types = hf_config.get("attention_types")
        types = [[["global", "local"], 12]] if types is None else types
        limit = 1 + len(blocks)  # limits the size of the list; more layers are an error anyway
        kinds = [kind for pattern, repeats in types for kind in list(pattern)[:limit] * min(repeats, limit)]
    if len(kinds) != len(blocks) or not {"global", "local"}.issuperset(kinds):
        raise ConfigError(f"config.json's attention layers are {kinds}; use {len(blocks)} values, each global or local")
    for block, kind in zip(blocks, kinds, strict=True):
        block["attention"]["window"] = hf_config.get_number("window_size", 256) if kind == "local" else None


def _write_attention_layers(tree: ConfigTree, hf_config: dict[str, object]) -> None:
    windows = [block["attention"]["window"] for block in tree.blocks("decoder")]
    kinds = ["global" if window is None else "local" for window in windows]
    leading, pattern = shortest_layer_pattern(kinds)
    is_periodic = not leading and len(kinds) % len(pattern) == 0
    hf_config["attention_types"] = [[pattern, len(kinds) // len(pattern)]] if is_periodic else [[kinds, 1]]
    hf_config["attention_layers"] = kinds
    hf_config["window_size"] = next((window for window in windows if window is not None), 256)


FAMILY = Family(
    name="gpt_neo",
    architecture="GPTNeoForCausalLM",
    template=gpt2.build_template({"bias": ("o",), "scale": 1.0}),
    fields=(
        Key("vocab_size", "vocab_size", 50257),
        Key("hidden_size", "d_model", 2048),
        Key("num_layers", "decoder.layers", 24),
        Key("num_heads", f"{llama.ATTENTION}.heads", 16),
        Key("max_position_embeddings", ("decoder.embedding.position.length", "context"), 2048),
        Key("intermediate_size", f"{llama.FFN}.hidden", four_times("hidden_size", 2048)),
        activation("activation_function", f"{llama.FFN}.activation", "gelu_new"),
        Key("layer_norm_epsilon", "decoder.norm.eps", 1e-5),
        llama.ATTENTION_DROPOUT,
        Key("embed_dropout", "decoder.embedding.dropout", 0.0),
        Key("resid_dropout", "decoder.dropout", 0.0),
        flag("tie_word_embeddings", "head.tied", True),
        Custom(("attention_types", "attention_layers", "window_size"), _read_attention_layers, _write_attention_layers),
    ),
    weight_mappings=(
        gpt2.POSITION_WEIGHT,
        *llama.weights(
            *gpt2.NORM_WEIGHTS,
            *(WeightMapping(f"attn.attention.{p}_proj", f"attn.f.{p}") for p in "qkv"),
            WeightMapping("attn.attention.out_proj", "attn.f.o"),
            WeightMapping("mlp.c_fc", "ffn.f.up"),
            WeightMapping("mlp.c_proj", "ffn.f.down"),
            **gpt2.CHECKPOINT_KEYS,
        ),
    ),
    base_model_prefix="transformer.",
    attribute_map={"num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"},
    ignored_weights={
        r"transformer\.h\.\d+\.attn\.attention\.(masked_)?bias": "causal mask, computed from positions",
        **llama.IGNORED_CLASSIFIER_WEIGHTS,
    },
    ignored_config_keys=gpt2.FAMILY.ignored_config_keys,
)
