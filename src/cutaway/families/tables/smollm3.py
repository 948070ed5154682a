"""SmolLM3: Llama with some layers without RoPE. https://huggingface.co/blog/smollm3"""

from cutaway.families.config_fields import Custom, HFConfigReader, LayerTypes, clear_out_of_vocab_pad_token
from cutaway.families.config_tree import ConfigTree
from cutaway.families.rope_fields import RopeField
from cutaway.families.tables import llama


def _rope_layers(hf_config: HFConfigReader, num_layers: int) -> list[int]:
    """Return 1 for a layer with RoPE, 0 without, as in `no_rope_layers`. By default every fourth layer has no RoPE."""
    layers = hf_config.get("no_rope_layers")
    interval = hf_config.get_number("no_rope_layer_interval", 4)
    return [int((i + 1) % interval != 0) for i in range(num_layers)] if layers is None else list(layers)


def _read_rope_layers(hf_config: HFConfigReader, tree: ConfigTree) -> None:
    blocks = tree.blocks("decoder")
    has_rope = _rope_layers(hf_config, len(blocks))
    for i, block in enumerate(blocks):
        block["attention"]["position"] = {"kind": "rope" if has_rope[i] else "none"}


def _write_rope_layers(tree: ConfigTree, hf_config: dict[str, object]) -> None:
    has_rope = [int(block["attention"]["position"]["kind"] == "rope") for block in tree.blocks("decoder")]
    hf_config["no_rope_layers"] = has_rope
    if 0 in has_rope:
        hf_config["no_rope_layer_interval"] = has_rope.index(0) + 1


def _sliding_nope_layers(hf_config: HFConfigReader, num_layers: int) -> list[str]:
    """Default `layer_types`: a sliding window, if enabled, in the layers without RoPE."""
    is_sliding = hf_config.get("use_sliding_window", False) and hf_config.get("sliding_window") is not None
    has_rope = _rope_layers(hf_config, num_layers)
    return ["sliding_attention" if is_sliding and not rope else "full_attention" for rope in has_rope]


def _write_use_sliding_window(tree: ConfigTree, hf_config: dict[str, object]) -> None:
    hf_config["use_sliding_window"] = any(block["attention"]["window"] is not None for block in tree.blocks("decoder"))


FAMILY = llama.build_family(
    "smollm3",
    "SmolLM3ForCausalLM",
    llama.build_template(),
    fields=(
        *llama.size_fields(128256, 2048, 11008, 36, 32768, tie_word_embeddings=True),
        *llama.computed_head_fields(2048, 16, 4),
        *llama.block_fields(),
        llama.ATTENTION_BIAS,
        llama.MLP_BIAS,
        Custom(("no_rope_layers", "no_rope_layer_interval"), _read_rope_layers, _write_rope_layers),
        LayerTypes(_sliding_nope_layers),
        Custom(("use_sliding_window",), to_hf=_write_use_sliding_window),
        clear_out_of_vocab_pad_token(128004),
        RopeField(default_theta=2e6, default_max_positions=32768, full_rotary_only=True),
    ),
    ignored_config_keys={"max_window_layers": "layer_types is used instead"},
)
