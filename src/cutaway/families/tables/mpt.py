"""MPT: ALiBi, no biases. https://www.databricks.com/blog/mpt-7b"""

from dataclasses import dataclass

from cutaway.errors import ConfigError
from cutaway.families.config_fields import ConfigFields, Custom, HFConfigReader, Key, SupportedValues, flag
from cutaway.families.config_tree import ConfigTree
from cutaway.families.family import Family
from cutaway.families.tables.llama import ATTENTION, IGNORED_CLASSIFIER_WEIGHTS, build_template, weights
from cutaway.families.weight_conversion import QKV, Split, WeightMapping


@dataclass(frozen=True)
class _NestedFields:
    """Applies `fields` to the nested object of config.json at `key`."""

    key: str
    fields: ConfigFields

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key,)

    def from_hf(self, hf_config: HFConfigReader, tree: ConfigTree) -> None:
        inner = hf_config.get(self.key) or {}
        if not isinstance(inner, dict):
            raise ConfigError(f"config.json's '{self.key}' is {inner!r}, not a JSON object; correct it")
        for field in self.fields:
            field.from_hf(HFConfigReader(inner), tree)

    def to_hf(self, tree: ConfigTree, hf_config: dict[str, object]) -> None:
        inner: dict[str, object] = {}
        hf_config[self.key] = inner
        for field in self.fields:
            field.to_hf(tree, inner)


def _write_softmax_scale(tree: ConfigTree, hf_config: dict[str, object]) -> None:
    """Write the attention scale to `softmax_scale`, or null if the scale is 1/sqrt(d_head)."""
    scale = tree.get(f"{ATTENTION}.scale")
    hf_config["softmax_scale"] = None if scale == tree.get(f"{ATTENTION}.d_head") ** -0.5 else scale


def _read_softmax_scale(hf_config: HFConfigReader, tree: ConfigTree) -> None:
    tree.set(f"{ATTENTION}.scale", hf_config.get("softmax_scale"))


ATTENTION_FIELDS = (
    Key("clip_qkv", f"{ATTENTION}.clip_qkv", None, decode=lambda clip: clip or None),
    Custom(("softmax_scale",), _read_softmax_scale, _write_softmax_scale),
    Key("alibi_bias_max", f"{ATTENTION}.position.max_bias", 8, encode=int),
    Key("attn_pdrop", (f"{ATTENTION}.dropout", "decoder.dropout"), 0, encode=lambda rate: rate or 0),
    SupportedValues("alibi", (True,), "positions would be learned, and the file has no position table"),
    SupportedValues("attn_type", ("multihead_attention",), "heads would share keys and values"),
    SupportedValues("qk_ln", (False,), "queries and keys would be normalized"),
    SupportedValues("prefix_lm", (False,), "attention within a prefix would be bidirectional"),
)

FAMILY = Family(
    name="mpt",
    architecture="MptForCausalLM",
    template=build_template(
        {"position": {"kind": "alibi"}},
        {"kind": "mlp", "activation": "gelu", "bias": False},
        norm={"kind": "layernorm", "bias": False},
    ),
    fields=(
        Key("vocab_size", "vocab_size", 50368),
        Key("d_model", "d_model", 2048),
        Key("n_layers", "decoder.layers", 24),
        Key("n_heads", f"{ATTENTION}.heads", 16),
        Key("max_seq_len", "context", 2048),
        Key("layer_norm_epsilon", "decoder.norm.eps", 1e-5),
        flag("tie_word_embeddings", "head.tied", True),
        _NestedFields("attn_config", ATTENTION_FIELDS),
        SupportedValues("expansion_ratio", (4,), "the FFN hidden dimension is always 4 · d_model"),
        SupportedValues("no_bias", (True,), "the model would have biases"),
        SupportedValues("norm_type", ("low_precision_layernorm", "layernorm"), "the model would have another norm"),
        SupportedValues("logit_scale", (None,), "implementations differ in whether they apply it"),
        SupportedValues("resid_pdrop", (0.0,), "implementations differ in whether they apply it in training"),
        SupportedValues("emb_pdrop", (0.0,), "implementations differ in whether they apply it in training"),
    ),
    weight_mappings=weights(
        WeightMapping("norm_1", "attn.norm_in"),
        WeightMapping("norm_2", "ffn.norm_in"),
        WeightMapping("attn.Wqkv", QKV, Split()),
        WeightMapping("attn.out_proj", "attn.f.o"),
        WeightMapping("ffn.up_proj", "ffn.f.up"),
        WeightMapping("ffn.down_proj", "ffn.f.down"),
        embed="transformer.wte",
        norm="transformer.norm_f",
        layer="transformer.blocks",
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
