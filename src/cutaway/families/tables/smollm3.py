"""SmolLM3: Llama with some layers without RoPE. https://huggingface.co/blog/smollm3"""

from typing import Any

from cutaway.families.config_fields import Custom, HFConfigReader, Key, LayerTypes, activation, flag
from cutaway.families.config_tree import ConfigTree
from cutaway.families.family import Family
from cutaway.families.rope_fields import RopeField
from cutaway.families.tables.llama import IGNORED_WEIGHTS, QKVO, size_fields
from cutaway.families.tables.mistral import WEIGHTS, build_template, head_fields

NO_ROPE_KEYS = ("no_rope_layers", "no_rope_layer_interval")


def _rope_layers(hf_config: HFConfigReader, num_layers: int) -> list[Any]:
    """1 for a layer with RoPE, 0 for one without (despite the name of the key); by default every fourth has none."""
    layers = hf_config.get(NO_ROPE_KEYS[0])
    interval = hf_config.get_number(NO_ROPE_KEYS[1], 4)
    return [int((i + 1) % interval != 0) for i in range(num_layers)] if layers is None else list(layers)


def _read_rope_layers(hf_config: HFConfigReader, tree: ConfigTree) -> None:
    blocks = tree.blocks("decoder")
    has_rope = _rope_layers(hf_config, len(blocks))
    for i, block in enumerate(blocks):
        block["attention"]["position"] = {"kind": "rope" if has_rope[i] else "none"}


def _write_rope_layers(tree: ConfigTree, hf_config: dict[str, Any]) -> None:
    has_rope = [int(block["attention"]["position"]["kind"] == "rope") for block in tree.blocks("decoder")]
    hf_config[NO_ROPE_KEYS[0]] = has_rope
    if 0 in has_rope:
        hf_config[NO_ROPE_KEYS[1]] = has_rope.index(0) + 1


def _sliding_nope_layers(hf_config: HFConfigReader, num_layers: int) -> list[str]:
    """Default `layer_types`: a sliding window, if enabled, in the layers without RoPE."""
    is_sliding = hf_config.get("use_sliding_window", False) and hf_config.get("sliding_window") is not None
    return [
        "sliding_attention" if is_sliding and not has_rope else "full_attention"
        for has_rope in _rope_layers(hf_config, num_layers)
    ]


def _write_use_sliding_window(tree: ConfigTree, hf_config: dict[str, Any]) -> None:
    hf_config["use_sliding_window"] = any(block["attention"]["window"] is not None for block in tree.blocks("decoder"))


def _write_pad_token_id(tree: ConfigTree, hf_config: dict[str, Any]) -> None:
    """Write a null pad_token_id if the default 128004 is outside of the vocabulary."""
    if hf_config["vocab_size"] <= 128004:
        hf_config["pad_token_id"] = None


FAMILY = Family(
    name="smollm3",
    architecture="SmolLM3ForCausalLM",
    template=build_template({}, {}),
    fields=(
        *size_fields(128256, 2048, 11008, 36, 32768, tie_word_embeddings=True),
        *head_fields(2048, 16, 4),
        Key("rms_norm_eps", "decoder.norm.eps", 1e-6),
        activation("hidden_act", "decoder.block.ffn.activation", "silu"),
        flag("attention_bias", "decoder.block.attention.bias", False, on=QKVO, off=()),
        flag("mlp_bias", "decoder.block.ffn.bias", False),
        Key("attention_dropout", "decoder.block.attention.dropout", 0.0),
        Custom(NO_ROPE_KEYS, _read_rope_layers, _write_rope_layers),
        LayerTypes(_sliding_nope_layers),
        Custom(("use_sliding_window",), lambda hf_config, tree: None, _write_use_sliding_window),
        Custom(("pad_token_id",), lambda hf_config, tree: None, _write_pad_token_id),
        RopeField(default_theta=2e6, default_max_positions=32768, full_rotary_only=True),
    ),
    weight_mappings=WEIGHTS,
    base_model_prefix="model.",
    ignored_weights=IGNORED_WEIGHTS,
    ignored_config_keys={"max_window_layers": "layer_types is used instead"},
)
