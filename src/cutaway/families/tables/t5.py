"""T5, 1.0 and 1.1 (FLAN). https://arxiv.org/abs/1910.10683 https://arxiv.org/abs/2002.05202"""

from typing import Any

from cutaway.config import Config
from cutaway.families.config_fields import HF_ACTIVATIONS, Choice, ConfigField, Custom, HFConfigReader, Key
from cutaway.families.config_tree import ConfigTree
from cutaway.families.family import Family
from cutaway.families.weight_conversion import WeightMapping, add_prefix

ATTENTION_TEMPLATE = {"kind": "multi-head", "scale": 1.0, "position": {"kind": "relative-bias"}}
STACK_TEMPLATE = {"norm": {"kind": "rmsnorm"}, "placement": {"kind": "pre"}}
TEMPLATE: dict[str, Any] = {
    "form": "encoder-decoder",
    "encoder": STACK_TEMPLATE | {"block": {"attention": ATTENTION_TEMPLATE}},
    "decoder": STACK_TEMPLATE | {"block": {"attention": ATTENTION_TEMPLATE, "cross": {"kind": "cross", "scale": 1.0}}},
    "head": {"kind": "lm"},
}
STACKS = ("encoder", "decoder")
SELF_ATTENTION_PATHS = tuple(f"{side}.block.attention" for side in STACKS)
ATTENTION_PATHS = (*SELF_ATTENTION_PATHS, "decoder.block.cross")
FFN_PATHS = tuple(f"{side}.block.ffn" for side in STACKS)
FFN_KEYS = ("feed_forward_proj", "dense_act_fn", "is_gated_act")


def ffn_field(default_feed_forward_proj: str) -> Custom:
    """`gated-gelu` or `relu`, in one word; files may also hold the two that it is made of, which then count."""

    def from_hf(hf_config: HFConfigReader, tree: ConfigTree) -> None:
        word = hf_config.get(FFN_KEYS[0]) or default_feed_forward_proj
        gate, _, act = word.rpartition("-")
        given = hf_config.get(FFN_KEYS[2])
        gated = gate == "gated" if given is None else given
        act = hf_config.get(FFN_KEYS[1]) or ("gelu_new" if word == "gated-gelu" else act)
        Choice(FFN_KEYS[1], tuple(f"{at}.activation" for at in FFN_PATHS), act, HF_ACTIVATIONS).from_hf(
            HFConfigReader({}), tree
        )
        for at in FFN_PATHS:
            tree.set(f"{at}.kind", "gated" if gated else "mlp")
            tree.set(f"{at}.bias", False)

    def to_hf(tree: ConfigTree, hf_config: dict[str, Any]) -> None:
        gated, act = tree.get(f"{FFN_PATHS[0]}.kind") == "gated", tree.get(f"{FFN_PATHS[0]}.activation")
        word = (
            "gelu_new" if act == "gelu_tanh" else next(word for word, meant in HF_ACTIVATIONS.items() if meant == act)
        )
        short = "gelu" if gated and word == "gelu_new" else word
        hf_config.update(zip(FFN_KEYS, (f"gated-{short}" if gated else word, word, gated), strict=True))

    return Custom(FFN_KEYS, from_hf, to_hf)


def common_fields(
    vocab_size: int, d_ff: int, num_layers: int, num_heads: int, feed_forward_proj: str
) -> tuple[ConfigField, ...]:
    """What T5 and mT5 say in the same words."""
    rates = (*ATTENTION_PATHS, *FFN_PATHS, *STACKS, *(f"{side}.embedding" for side in STACKS))
    finals = tuple(f"{side}.final_dropout" for side in STACKS)
    return (
        Key("vocab_size", "vocab_size", vocab_size),
        Key("d_model", "d_model", 512),
        Key("num_layers", "encoder.layers", num_layers),
        Key("num_decoder_layers", "decoder.layers", lambda hf_config: hf_config.get_number("num_layers", num_layers)),
        Key("num_heads", tuple(f"{at}.heads" for at in ATTENTION_PATHS), num_heads),
        Key("d_kv", tuple(f"{at}.d_head" for at in ATTENTION_PATHS), 64),
        ffn_field(feed_forward_proj),
        Key("d_ff", tuple(f"{at}.hidden" for at in FFN_PATHS), d_ff),
        Key("relative_attention_num_buckets", tuple(f"{at}.position.buckets" for at in SELF_ATTENTION_PATHS), 32),
        Key(
            "relative_attention_max_distance", tuple(f"{at}.position.max_distance" for at in SELF_ATTENTION_PATHS), 128
        ),
        Key("layer_norm_epsilon", tuple(f"{side}.norm.eps" for side in STACKS), 1e-6),
        Key("dropout_rate", (*(f"{at}.dropout" for at in rates), *finals), 0.1),
        Key("n_positions", "context", None),
    )


def _read_head(hf_config: HFConfigReader, tree: ConfigTree) -> None:
    """1.0 reads its tied table with the stream made smaller; 1.1 has a matrix of its own. New files say both apart."""
    tied = hf_config.get("tie_word_embeddings") is not False
    given = hf_config.get("scale_decoder_outputs")
    tree.set("head.tied", tied)
    tree.set("head.scale", tree.data["d_model"] ** -0.5 if (tied if given is None else given) else 1.0)


def _write_head(tree: ConfigTree, hf_config: dict[str, Any]) -> None:
    hf_config["tie_word_embeddings"] = tree.get("head.tied")
    hf_config["scale_decoder_outputs"] = tree.get("head.scale") != 1.0


def _is_gated(config: Config) -> bool:
    return config.stacks["decoder"].blocks[0].ffn.kind == "gated"


def layer_weights(stack: str, *attentions: tuple[str, str]) -> tuple[WeightMapping, ...]:
    """The rows of a layer: its sublayers are numbered, and the FFN is the last."""
    last = len(attentions)
    return add_prefix(
        f"{stack}.block.{{i}}.layer",
        f"{stack}.blocks.{{i}}",
        *(
            WeightMapping(f"{n}.{name}.{p}", f"{branch}.f.{p}")
            for n, (name, branch) in enumerate(attentions)
            for p in "qkvo"
        ),
        *(WeightMapping(f"{n}.layer_norm", f"{branch}.norm_in") for n, (_, branch) in enumerate(attentions)),
        WeightMapping(f"{last}.layer_norm", "ffn.norm_in"),
        WeightMapping(f"{last}.DenseReluDense.wi_0", "ffn.f.gate"),
        WeightMapping(f"{last}.DenseReluDense.wi_1", "ffn.f.up", condition=_is_gated),
        WeightMapping(f"{last}.DenseReluDense.wi", "ffn.f.up", condition=lambda config: not _is_gated(config)),
        WeightMapping(f"{last}.DenseReluDense.wo", "ffn.f.down"),
    )


WEIGHTS = (
    WeightMapping("shared", "decoder.embed.token"),
    *(WeightMapping(f"{side}.embed_tokens", f"{side}.embed.token") for side in STACKS),
    *(WeightMapping(f"{side}.final_layer_norm", f"{side}.final_norm") for side in STACKS),
    *(
        WeightMapping(f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias", f"{side}.positions.0.table")
        for side in STACKS
    ),
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
    r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight": "nothing reads it: the decoder"
    " sees all of the source alike",
    r"(qa_outputs|classification_head)\..*": "a head for another task",
}
WEIGHT_RENAMINGS = ((r"^transformer\.", ""),)
"""A classifier's file has the whole model one level down."""
IGNORED_CONFIG_KEYS = {"is_decoder": "each stack knows which it is", "output_past": "a cache changes no result"}

FAMILY = Family(
    name="t5",
    architecture="T5ForConditionalGeneration",
    template=TEMPLATE,
    fields=(
        *common_fields(32128, 2048, 6, 8, "relu"),
        Custom(("tie_word_embeddings", "scale_decoder_outputs"), _read_head, _write_head),
    ),
    weight_mappings=WEIGHTS,
    attribute_map=ATTRIBUTE_MAP,
    ignored_weights=IGNORED_WEIGHTS,
    ignored_config_keys=IGNORED_CONFIG_KEYS,
    weight_renamings=WEIGHT_RENAMINGS,
)
