"""MPT: ALiBi, no biases. https://www.databricks.com/blog/mpt-7b"""

from dataclasses import dataclass
from typing import Any

from cutaway.errors import ConfigError
from cutaway.families.config_fields import ConfigField, Custom, HFConfigReader, Key, SupportedValues, flag
from cutaway.families.config_tree import ConfigTree
from cutaway.families.family import Family
from cutaway.families.tables.gpt_neox import QKV
from cutaway.families.tables.llama import IGNORED_CLASSIFIER_WEIGHTS
from cutaway.families.weight_conversion import Split, WeightMapping, add_prefix

ATTENTION_PATH = "decoder.block.attention"


@dataclass(frozen=True)
class NestedFields:
    """Fields of a nested object of config.json."""

    key: str
    fields: tuple[ConfigField, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key,)

    def from_hf(self, hf_config: HFConfigReader, tree: ConfigTree) -> None:
        inner = hf_config.get(self.key) or {}
        if not isinstance(inner, dict):
            raise ConfigError(f"config.json's '{self.key}' is {inner!r}, not a JSON object; correct it")
        for field in self.fields:
            field.from_hf(HFConfigReader(inner), tree)

    def to_hf(self, tree: ConfigTree, hf_config: dict[str, Any]) -> None:
        inner = hf_config[self.key] = {}
        for field in self.fields:
            field.to_hf(tree, inner)


def _write_softmax_scale(tree: ConfigTree, hf_config: dict[str, Any]) -> None:
    """Write null if it is 1/sqrt(d_head)."""
    scale = tree.get(f"{ATTENTION_PATH}.scale")
    hf_config["softmax_scale"] = None if scale == tree.get(f"{ATTENTION_PATH}.d_head") ** -0.5 else scale


FAMILY = Family(
    name="mpt",
    architecture="MptForCausalLM",
    template={
        "form": "decoder",
        "decoder": {
            "block": {
                "attention": {"kind": "multi-head", "position": {"kind": "alibi"}},
                "ffn": {"kind": "mlp", "activation": "gelu", "bias": False},
            },
            "norm": {"kind": "layernorm", "bias": False},
            "placement": {"kind": "pre"},
        },
        "head": {"kind": "lm"},
    },
    fields=(
        Key("vocab_size", "vocab_size", 50368),
        Key("d_model", "d_model", 2048),
        Key("n_layers", "decoder.layers", 24),
        Key("n_heads", f"{ATTENTION_PATH}.heads", 16),
        Key("max_seq_len", "context", 2048),
        Key("layer_norm_epsilon", "decoder.norm.eps", 1e-5),
        flag("tie_word_embeddings", "head.tied", True),
        NestedFields(
            "attn_config",
            (
                Key("clip_qkv", f"{ATTENTION_PATH}.clip_qkv", None, decode=lambda clip: clip or None),
                Custom(
                    ("softmax_scale",),
                    lambda hf_config, tree: tree.set(f"{ATTENTION_PATH}.scale", hf_config.get("softmax_scale")),
                    _write_softmax_scale,
                ),
                Key("alibi_bias_max", f"{ATTENTION_PATH}.position.max_bias", 8, encode=int),
                Key("attn_pdrop", (f"{ATTENTION_PATH}.dropout", "decoder.dropout"), 0, encode=lambda rate: rate or 0),
                SupportedValues("alibi", (True,), "positions would be learned, and the file has no position table"),
                SupportedValues("attn_type", ("multihead_attention",), "heads would share keys and values"),
                SupportedValues("qk_ln", (False,), "queries and keys would be normalized"),
                SupportedValues("prefix_lm", (False,), "attention within a prefix would be bidirectional"),
            ),
        ),
        SupportedValues("expansion_ratio", (4,), "the FFN hidden dimension is always 4 · d_model"),
        SupportedValues("no_bias", (True,), "the model would have biases"),
        SupportedValues("norm_type", ("low_precision_layernorm", "layernorm"), "the model would have another norm"),
        SupportedValues("logit_scale", (None,), "implementations differ in whether they apply it"),
        SupportedValues("resid_pdrop", (0.0,), "implementations differ in whether they apply it in training"),
        SupportedValues("emb_pdrop", (0.0,), "implementations differ in whether they apply it in training"),
    ),
    weight_mappings=(
        WeightMapping("transformer.wte", "decoder.embed.token"),
        WeightMapping("transformer.norm_f", "decoder.final_norm"),
        WeightMapping("lm_head", "head.matrix"),
        *add_prefix(
            "transformer.blocks.{i}",
            "decoder.blocks.{i}",
            WeightMapping("norm_1", "attn.norm_in"),
            WeightMapping("norm_2", "ffn.norm_in"),
            WeightMapping("attn.Wqkv", QKV, Split()),
            WeightMapping("attn.out_proj", "attn.f.o"),
            WeightMapping("ffn.up_proj", "ffn.f.up"),
            WeightMapping("ffn.down_proj", "ffn.f.down"),
        ),
    ),
    base_model_prefix="transformer.",
    attribute_map={"hidden_size": "d_model", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"},
    ignored_weights=IGNORED_CLASSIFIER_WEIGHTS,
    ignored_config_keys={
        "learned_pos_emb": "ALiBi is used instead",
        "embedding_fraction": "gradient scale of the embedding",
        "init_device": "device of the initialization",
        "init_config": "initialization; weights are loaded",
    },
)
