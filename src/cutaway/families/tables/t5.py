"""T5 1.0 and 1.1 (FLAN): relative position bias, unscaled scores. https://arxiv.org/abs/1910.10683 https://arxiv.org/abs/2002.05202"""

from dataclasses import replace

from cutaway.config import Config
from cutaway.families.config_fields import (
    HF_ACTIVATIONS,
    ConfigFields,
    Custom,
    HFConfigReader,
    IfHead,
    Key,
    activation,
)
from cutaway.families.config_tree import ConfigTree
from cutaway.families.family import Family
from cutaway.families.head_classes import class_prefix, encoder_decoder_head_class
from cutaway.families.tables.bart import STACKS, both_stacks
from cutaway.families.weight_conversion import WeightMapping, add_prefix

ATTENTION_TEMPLATE = {"kind": "multi-head", "scale": 1.0, "position": {"kind": "relative-bias"}}
STACK_TEMPLATE = {"norm": {"kind": "rmsnorm"}, "placement": {"kind": "pre"}}
TEMPLATE = {
    "form": "encoder-decoder",
    "encoder": STACK_TEMPLATE | {"block": {"attention": ATTENTION_TEMPLATE}},
    "decoder": STACK_TEMPLATE | {"block": {"attention": ATTENTION_TEMPLATE, "cross": {"kind": "cross", "scale": 1.0}}},
    "head": {"kind": "lm"},
}
ATTENTION_PATHS = (*both_stacks("block.attention"), "decoder.block.cross")
FFN_PATHS = both_stacks("block.ffn")
FFN_KEYS = ("feed_forward_proj", "dense_act_fn", "is_gated_act")


def _ffn_field(default_feed_forward_proj: str) -> Custom:
    """Field of the FFN: `feed_forward_proj` ('relu', 'gated-gelu' …). `dense_act_fn` and `is_gated_act` override it."""

    def from_hf(hf_config: HFConfigReader, tree: ConfigTree) -> None:
        feed_forward_proj = hf_config.get(FFN_KEYS[0]) or default_feed_forward_proj
        gate, _, act = feed_forward_proj.rpartition("-")
        is_gated_act = hf_config.get(FFN_KEYS[2])
        gated = gate == "gated" if is_gated_act is None else is_gated_act
        act = hf_config.get(FFN_KEYS[1]) or ("gelu_new" if feed_forward_proj == "gated-gelu" else act)
        paths = tuple(f"{path}.activation" for path in FFN_PATHS)
        activation(FFN_KEYS[1], paths, act).from_hf(HFConfigReader({}), tree)
        for path in FFN_PATHS:
            tree.set(f"{path}.kind", "gated" if gated else "mlp")
            tree.set(f"{path}.bias", False)

    def to_hf(tree: ConfigTree, hf_config: dict[str, object]) -> None:
        gated, act = tree.get(f"{FFN_PATHS[0]}.kind") == "gated", tree.get(f"{FFN_PATHS[0]}.activation")
        names = [name for name, value in HF_ACTIVATIONS.items() if value == act]
        name = "gelu_new" if act == "gelu_tanh" else names[0]
        short_name = "gelu" if gated and name == "gelu_new" else name
        hf_config.update(zip(FFN_KEYS, (f"gated-{short_name}" if gated else name, name, gated), strict=True))

    return Custom(FFN_KEYS, from_hf, to_hf)


def common_fields(vocab_size: int, d_ff: int, num_layers: int, num_heads: int, feed_forward_proj: str) -> ConfigFields:
    """Config fields of T5 and mT5. The arguments are default values of config.json keys."""
    dropout_paths = (*ATTENTION_PATHS, *FFN_PATHS, *STACKS, *both_stacks("embedding"))
    return (
        Key("vocab_size", "vocab_size", vocab_size),
        Key("d_model", "d_model", 512),
        Key("num_layers", "encoder.layers", num_layers),
        Key("num_decoder_layers", "decoder.layers", lambda hf_config: hf_config.get_number("num_layers", num_layers)),
        Key("num_heads", tuple(f"{path}.heads" for path in ATTENTION_PATHS), num_heads),
        Key("d_kv", tuple(f"{path}.d_head" for path in ATTENTION_PATHS), 64),
        _ffn_field(feed_forward_proj),
        Key("d_ff", tuple(f"{path}.hidden" for path in FFN_PATHS), d_ff),
        Key("relative_attention_num_buckets", both_stacks("block.attention.position.buckets"), 32),
        Key("relative_attention_max_distance", both_stacks("block.attention.position.max_distance"), 128),
        Key("layer_norm_epsilon", both_stacks("norm.eps"), 1e-6),
        Key("dropout_rate", (*(f"{path}.dropout" for path in dropout_paths), *both_stacks("final_dropout")), 0.1),
        Key("n_positions", "context", None),
    )


def _read_head(hf_config: HFConfigReader, tree: ConfigTree) -> None:
    """Read the head. By default, a tied head (T5 1.0) is scaled by 1/sqrt(d_model), an untied head (T5 1.1) is not."""
    tied = hf_config.get("tie_word_embeddings") is not False
    scaled = hf_config.get("scale_decoder_outputs")
    scaled = tied if scaled is None else scaled
    tree.set("head.tied", tied)
    tree.set("head.scale", tree.data["d_model"] ** -0.5 if scaled else 1.0)


def _write_head(tree: ConfigTree, hf_config: dict[str, object]) -> None:
    hf_config["tie_word_embeddings"] = tree.get("head.tied")
    hf_config["scale_decoder_outputs"] = tree.get("head.scale") != 1.0


def _is_gated(config: Config) -> bool:
    return config.stacks["decoder"].blocks[0].ffn.kind == "gated"


def layer_weights(stack: str, *attentions: tuple[str, str]) -> tuple[WeightMapping, ...]:
    """Weight mappings of a layer. `attentions` are (checkpoint name, model name) of its sublayers before the FFN."""
    mappings = []
    for n, (name, branch) in enumerate(attentions):
        mappings += [WeightMapping(f"{n}.{name}.{p}", f"{branch}.f.{p}") for p in "qkvo"]
        mappings.append(WeightMapping(f"{n}.layer_norm", f"{branch}.norm_in"))
    last = len(attentions)
    return add_prefix(
        f"{stack}.block.{{i}}.layer",
        f"{stack}.blocks.{{i}}",
        *mappings,
        WeightMapping(f"{last}.layer_norm", "ffn.norm_in"),
        WeightMapping(f"{last}.DenseReluDense.wi_0", "ffn.f.gate"),
        WeightMapping(f"{last}.DenseReluDense.wi_1", "ffn.f.up", condition=_is_gated),
        WeightMapping(f"{last}.DenseReluDense.wi", "ffn.f.up", condition=lambda config: not _is_gated(config)),
        WeightMapping(f"{last}.DenseReluDense.wo", "ffn.f.down"),
    )


RELATIVE_BIAS_KEY = "block.0.layer.0.SelfAttention.relative_attention_bias"
WEIGHTS = (
    WeightMapping("shared", "decoder.embed.token"),
    *(WeightMapping(f"{side}.embed_tokens", f"{side}.embed.token") for side in STACKS),
    *(WeightMapping(f"{side}.final_layer_norm", f"{side}.final_norm") for side in STACKS),
    *(WeightMapping(f"{side}.{RELATIVE_BIAS_KEY}", f"{side}.positions.0.table") for side in STACKS),
    *layer_weights("encoder", ("SelfAttention", "attn")),
    *layer_weights("decoder", ("SelfAttention", "attn"), ("EncDecAttention", "cross")),
    WeightMapping("lm_head", "head.matrix"),
)
ATTRIBUTE_MAP = {
    "hidden_size": "d_model",
    "num_attention_heads": "num_heads",
    "num_hidden_layers": "num_layers",
    "head_dim": "d_kv",
}
IGNORED_WEIGHTS = {
    r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight": "unused: cross-attention has"
    " no position bias",
    r"(qa_outputs|classification_head)\..*": "head of another task, which is not loaded",
}
CLASSIFICATION_PREFIX = "transformer."
"""In classification checkpoints, the keys of the model have this prefix."""
WEIGHT_RENAMINGS = ((r"^transformer\.", ""),)
IGNORED_CONFIG_KEYS = {"is_decoder": "fixed by the family", "output_past": "a KV cache does not change the result"}


def build_family(name: str, architecture: str, fields: ConfigFields) -> Family:
    """Build the family T5 or mT5. The two differ in their defaults and heads."""
    classification = encoder_decoder_head_class(class_prefix(architecture))
    return Family(
        name,
        architecture,
        TEMPLATE,
        fields,
        WEIGHTS,
        attribute_map=ATTRIBUTE_MAP,
        ignored_weights=IGNORED_WEIGHTS,
        ignored_config_keys=IGNORED_CONFIG_KEYS,
        weight_renamings=WEIGHT_RENAMINGS,
        head_classes=(replace(classification, body_prefix=CLASSIFICATION_PREFIX),),
    )


HEAD_FIELD = IfHead(Custom(("tie_word_embeddings", "scale_decoder_outputs"), _read_head, _write_head))
FAMILY = build_family("t5", "T5ForConditionalGeneration", (*common_fields(32128, 2048, 6, 8, "relu"), HEAD_FIELD))
