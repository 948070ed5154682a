"""GPT-Neo: alternating full and sliding-window attention, unscaled scores. https://github.com/EleutherAI/gpt-neo"""

from typing import Any

from cutaway.errors import ConfigError
from cutaway.families.config_fields import Custom, HFConfigReader, Key, activation, flag
from cutaway.families.config_tree import ConfigTree, shortest_layer_pattern
from cutaway.families.family import Family
from cutaway.families.tables.gpt2 import FAMILY as GPT2
from cutaway.families.tables.llama import IGNORED_CLASSIFIER_WEIGHTS
from cutaway.families.weight_conversion import WeightMapping, add_prefix


def _read_attention_layers(hf_config: HFConfigReader, tree: ConfigTree) -> None:
    """`attention_types` is a list of (pattern, repetitions); `attention_layers` is the expanded list."""
    blocks = tree.blocks("decoder")
    kinds = hf_config.get("attention_layers")
    if kinds is None:
        types = hf_config.get("attention_types")
        types = [[["global", "local"], 12]] if types is None else types
        limit = 1 + len(blocks)  # more are an error in any case; bounds the size of the list
        kinds = [kind for pattern, repeats in types for kind in list(pattern)[:limit] * min(repeats, limit)]
    if len(kinds) != len(blocks) or not {"global", "local"}.issuperset(kinds):
        raise ConfigError(
            f"config.json's attention layers are {kinds}; {len(blocks)} are required, each 'global' or 'local'"
        )
    for block, kind in zip(blocks, kinds, strict=True):
        block["attention"]["window"] = hf_config.get_number("window_size", 256) if kind == "local" else None


def _write_attention_layers(tree: ConfigTree, hf_config: dict[str, Any]) -> None:
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
    template={
        "form": "decoder",
        "decoder": {
            "block": {
                "attention": {"kind": "multi-head", "bias": ("o",), "scale": 1.0, "position": {"kind": "none"}},
                "ffn": {"kind": "mlp"},
            },
            "embedding": {"position": {"kind": "learned"}},
            "norm": {"kind": "layernorm"},
            "placement": {"kind": "pre"},
        },
        "head": {"kind": "lm"},
    },
    fields=(
        Key("vocab_size", "vocab_size", 50257),
        Key("hidden_size", "d_model", 2048),
        Key("num_layers", "decoder.layers", 24),
        Key("num_heads", "decoder.block.attention.heads", 16),
        Key("max_position_embeddings", ("decoder.embedding.position.length", "context"), 2048),
        Key(
            "intermediate_size",
            "decoder.block.ffn.hidden",
            lambda hf_config: 4 * hf_config.get_number("hidden_size", 2048),
        ),
        activation("activation_function", "decoder.block.ffn.activation", "gelu_new"),
        Key("layer_norm_epsilon", "decoder.norm.eps", 1e-5),
        Key("attention_dropout", "decoder.block.attention.dropout", 0.0),
        Key("embed_dropout", "decoder.embedding.dropout", 0.0),
        Key("resid_dropout", "decoder.dropout", 0.0),
        flag("tie_word_embeddings", "head.tied", True),
        Custom(("attention_types", "attention_layers", "window_size"), _read_attention_layers, _write_attention_layers),
    ),
    weight_mappings=(
        WeightMapping("transformer.wte", "decoder.embed.token"),
        WeightMapping("transformer.wpe", "decoder.embed.position.table"),
        WeightMapping("transformer.ln_f", "decoder.final_norm"),
        WeightMapping("lm_head", "head.matrix"),
        *add_prefix(
            "transformer.h.{i}",
            "decoder.blocks.{i}",
            WeightMapping("ln_1", "attn.norm_in"),
            WeightMapping("ln_2", "ffn.norm_in"),
            *(WeightMapping(f"attn.attention.{p}_proj", f"attn.f.{p}") for p in "qkv"),
            WeightMapping("attn.attention.out_proj", "attn.f.o"),
            WeightMapping("mlp.c_fc", "ffn.f.up"),
            WeightMapping("mlp.c_proj", "ffn.f.down"),
        ),
    ),
    base_model_prefix="transformer.",
    attribute_map={"num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"},
    ignored_weights={
        r"transformer\.h\.\d+\.attn\.attention\.(masked_)?bias": "causal mask, computed from positions",
        **IGNORED_CLASSIFIER_WEIGHTS,
    },
    ignored_config_keys=GPT2.ignored_config_keys,
)
