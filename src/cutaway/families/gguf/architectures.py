"""GGUF architectures: config fields and weight mappings under GGUF key names."""

from collections.abc import Mapping
from typing import Any

from cutaway.errors import ConfigError
from cutaway.families.config_fields import ConfigField, Custom, HFConfigReader, Key, SupportedValues
from cutaway.families.config_tree import ConfigTree
from cutaway.families.family import Family
from cutaway.families.gguf.rope_fields import GGUFRopeField
from cutaway.families.weight_conversion import (
    ConversionOp,
    Identity,
    PermuteForRope,
    Split,
    SubtractOffset,
    WeightMapping,
    add_prefix,
)

TIED_HEAD_KEY = "head.tied"
"""Not a GGUF key: whether the head is tied follows from the absence of its matrix."""


def common_fields(arch: str, *, eps_key: str = "attention.layer_norm_rms_epsilon") -> tuple[ConfigField, ...]:
    """Fields of every architecture."""
    attention_path = "decoder.block.attention"
    return (
        Key(f"{arch}.vocab_size", "vocab_size"),
        Key(f"{arch}.embedding_length", "d_model"),
        Key(f"{arch}.block_count", "decoder.layers"),
        Key(f"{arch}.context_length", "context"),
        Key(f"{arch}.feed_forward_length", "decoder.block.ffn.hidden"),
        Key(f"{arch}.attention.head_count", f"{attention_path}.heads"),
        Key(f"{arch}.attention.head_count_kv", f"{attention_path}.kv_heads", None),
        Key(f"{arch}.attention.key_length", f"{attention_path}.d_head", None),
        Key(f"{arch}.{eps_key}", "decoder.norm.eps"),
        Key(TIED_HEAD_KEY, "head.tied", True),
        Custom((f"{arch}.attention.value_length",), _check_value_length, lambda tree, metadata: None),
        SupportedValues(
            f"{arch}.expert_count", (0,), "its FFNs are mixtures of experts, which cutaway does not load from GGUF"
        ),
        SupportedValues(f"{arch}.attention.causal", (True,), "its attention is not causal"),
    )


def _check_value_length(metadata: HFConfigReader, tree: ConfigTree) -> None:
    """Raise if the value dimension differs from the key dimension."""
    for key, length in metadata.data.items():
        if key.endswith(".attention.value_length") and length != metadata.get(key.replace("value", "key")):
            raise ConfigError(
                f"'{key}' is {length!r}, which differs from the key length; cutaway supports only equal lengths"
            )


def sliding_window_field(arch: str, full_attention_period: int | None) -> Custom:
    """Sliding-window layers, with full attention in every n-th layer; if n is None, in no layer."""
    key = f"{arch}.attention.sliding_window"

    def from_hf(metadata: HFConfigReader, tree: ConfigTree) -> None:
        window = metadata.get(key) or None
        for layer_number, block in enumerate(tree.blocks("decoder"), 1):
            block["attention"]["window"] = (
                None if full_attention_period is not None and layer_number % full_attention_period == 0 else window
            )

    def to_hf(tree: ConfigTree, metadata: dict[str, Any]) -> None:
        windows = {block["attention"]["window"] for block in tree.blocks("decoder")} - {None}
        if windows:
            metadata[key] = max(windows)

    return Custom((key, f"{arch}.attention.sliding_window_pattern"), from_hf, to_hf)


def query_scale_field(arch: str, largest_num_layers: int) -> Custom:
    """Attention scale, which GGUF does not store.

    It is 1/sqrt(d_head), except for the largest Gemma, identified by its number of layers: 1/sqrt(d_model / heads).
    """

    def from_hf(metadata: HFConfigReader, tree: ConfigTree) -> None:
        for block in tree.blocks("decoder"):
            attention = block["attention"]
            is_largest = len(tree.blocks("decoder")) == largest_num_layers
            head_dim = attention.get("d_head") or tree.data["d_model"] // attention["heads"]
            attention["scale"] = (tree.data["d_model"] // attention["heads"] if is_largest else head_dim) ** -0.5

    return Custom((), from_hf, lambda tree, metadata: None)


def build_template(block: Mapping[str, Any], **stack: Any) -> dict[str, Any]:
    """Decoder template with a tied head; it is untied on loading if the file has a different head matrix."""
    return {"form": "decoder", "head": {"kind": "lm", "tied": True}, "decoder": {"block": block, **stack}}


PRE_RMSNORM = {"norm": {"kind": "rmsnorm"}, "placement": {"kind": "pre"}}
GEMMA_STACK = {
    "norm": {"kind": "rmsnorm", "unit_offset": True},
    "placement": {"kind": "sandwich"},
    "embedding": {"scale": "sqrt_d_model"},
}
SWIGLU = {"kind": "gated", "activation": "silu"}
GEGLU = {"kind": "gated", "activation": "gelu_tanh"}
EMBEDDING_AND_HEAD_WEIGHTS = (
    WeightMapping("token_embd", "decoder.embed.token"),
    WeightMapping("output_norm", "decoder.final_norm"),
    WeightMapping("output", "head.matrix"),
)
UNIT_OFFSET = SubtractOffset(1.0)


def per_layer(*mappings: WeightMapping) -> tuple[WeightMapping, ...]:
    """Weight mappings of every layer."""
    return add_prefix("blk.{i}", "decoder.blocks.{i}", *mappings)


def attention_weights(qk_op: ConversionOp = Identity()) -> tuple[WeightMapping, ...]:
    """Weight mappings of q, k, v and o."""
    qk = tuple(WeightMapping(f"attn_{p}", f"attn.f.{p}", qk_op) for p in "qk")
    return (*qk, WeightMapping("attn_v", "attn.f.v"), WeightMapping("attn_output", "attn.f.o"))


NORM_WEIGHTS = (WeightMapping("attn_norm", "attn.norm_in"), WeightMapping("ffn_norm", "ffn.norm_in"))
FFN_WEIGHTS = tuple(WeightMapping(f"ffn_{p}", f"ffn.f.{p}") for p in ("gate", "up", "down"))
QK_NORM_WEIGHTS = tuple(WeightMapping(f"attn_{p}_norm", f"attn.f.{p}_norm.norm") for p in "qk")
FUSED_QKV = WeightMapping("attn_qkv", ("attn.f.q", "attn.f.k", "attn.f.v"), Split())
SANDWICH_NORM_WEIGHTS = (
    WeightMapping("attn_norm", "attn.norm_in", UNIT_OFFSET),
    WeightMapping("post_attention_norm", "attn.norm_out", UNIT_OFFSET),
    WeightMapping("ffn_norm", "ffn.norm_in", UNIT_OFFSET),
    WeightMapping("post_ffw_norm", "ffn.norm_out", UNIT_OFFSET),
)
GEMMA_EMBEDDING_AND_HEAD_WEIGHTS = (
    EMBEDDING_AND_HEAD_WEIGHTS[0],
    WeightMapping("output_norm", "decoder.final_norm", UNIT_OFFSET),
    EMBEDDING_AND_HEAD_WEIGHTS[2],
)
IGNORED_ROPE_WEIGHTS = {r"rope_(freqs|factors_long|factors_short)\.weight": "RoPE factors, read with the metadata"}


def _build_family(
    arch: str,
    model_type: str,
    template: dict[str, Any],
    fields: tuple[ConfigField, ...],
    weights: tuple[WeightMapping, ...],
) -> Family:
    ignored_config_keys = {
        f"{arch}.rope.scaling.finetuned": "whether the scaling was fine-tuned; does not change the result",
        f"{arch}.expert_used_count": "the model has no experts",
        f"{arch}.tensor_data_layout": "layout of q and k, fixed by the architecture",
    }
    return Family(
        arch,
        model_type,
        template,
        fields,
        weights,
        ignored_weights=IGNORED_ROPE_WEIGHTS,
        ignored_config_keys=ignored_config_keys,
    )


GGUF_ARCHITECTURES = {
    "llama": _build_family(
        "llama",
        "llama",
        build_template({"attention": {"kind": "multi-head"}, "ffn": SWIGLU}, **PRE_RMSNORM),
        (*common_fields("llama"), GGUFRopeField("llama")),
        (*EMBEDDING_AND_HEAD_WEIGHTS, *per_layer(*NORM_WEIGHTS, *attention_weights(PermuteForRope()), *FFN_WEIGHTS)),
    ),
    "qwen2": _build_family(
        "qwen2",
        "qwen2",
        build_template({"attention": {"kind": "multi-head", "bias": ("q", "k", "v")}, "ffn": SWIGLU}, **PRE_RMSNORM),
        (*common_fields("qwen2"), GGUFRopeField("qwen2")),
        (*EMBEDDING_AND_HEAD_WEIGHTS, *per_layer(*NORM_WEIGHTS, *attention_weights(), *FFN_WEIGHTS)),
    ),
    "qwen3": _build_family(
        "qwen3",
        "qwen3",
        build_template(
            {"attention": {"kind": "multi-head", "qk_norm": {"norm": {"kind": "rmsnorm"}}}, "ffn": SWIGLU},
            **PRE_RMSNORM,
        ),
        (
            *common_fields("qwen3"),
            Key("qwen3.attention.layer_norm_rms_epsilon", "decoder.block.attention.qk_norm.norm.eps"),
            GGUFRopeField("qwen3"),
        ),
        (*EMBEDDING_AND_HEAD_WEIGHTS, *per_layer(*NORM_WEIGHTS, *attention_weights(), *QK_NORM_WEIGHTS, *FFN_WEIGHTS)),
    ),
    "gemma2": _build_family(
        "gemma2",
        "gemma2",
        build_template({"attention": {"kind": "multi-head"}, "ffn": GEGLU}, **GEMMA_STACK),
        (
            *common_fields("gemma2"),
            Key("gemma2.attn_logit_softcapping", "decoder.block.attention.softcap", 50.0),
            Key("gemma2.final_logit_softcapping", "head.softcap", 30.0),
            sliding_window_field("gemma2", 2),
            query_scale_field("gemma2", 46),
            GGUFRopeField("gemma2"),
        ),
        (*GEMMA_EMBEDDING_AND_HEAD_WEIGHTS, *per_layer(*SANDWICH_NORM_WEIGHTS, *attention_weights(), *FFN_WEIGHTS)),
    ),
    "gemma3": _build_family(
        "gemma3",
        "gemma3_text",
        build_template(
            {
                "attention": {"kind": "multi-head", "qk_norm": {"norm": {"kind": "rmsnorm", "unit_offset": True}}},
                "ffn": GEGLU,
            },
            **GEMMA_STACK,
        ),
        (
            *common_fields("gemma3"),
            Key("gemma3.attention.layer_norm_rms_epsilon", "decoder.block.attention.qk_norm.norm.eps"),
            Key("gemma3.final_logit_softcapping", "head.softcap", None),
            sliding_window_field("gemma3", 6),
            query_scale_field("gemma3", 62),
            GGUFRopeField("gemma3", sliding_window_theta=10000.0),
        ),
        (
            *GEMMA_EMBEDDING_AND_HEAD_WEIGHTS,
            *per_layer(
                *SANDWICH_NORM_WEIGHTS,
                *attention_weights(),
                *(WeightMapping(r.checkpoint_key, r.model_key, UNIT_OFFSET) for r in QK_NORM_WEIGHTS),
                *FFN_WEIGHTS,
            ),
        ),
    ),
    "phi3": _build_family(
        "phi3",
        "phi3",
        build_template({"attention": {"kind": "multi-head"}, "ffn": SWIGLU}, **PRE_RMSNORM),
        (*common_fields("phi3"), sliding_window_field("phi3", None), GGUFRopeField("phi3")),
        (
            *EMBEDDING_AND_HEAD_WEIGHTS,
            *per_layer(
                *NORM_WEIGHTS,
                FUSED_QKV,
                WeightMapping("attn_output", "attn.f.o"),
                WeightMapping("ffn_up", ("ffn.f.gate", "ffn.f.up"), Split()),
                WeightMapping("ffn_down", "ffn.f.down"),
            ),
        ),
    ),
    "gpt2": _build_family(
        "gpt2",
        "gpt2",
        build_template(
            {
                "attention": {"kind": "multi-head", "bias": ("q", "k", "v", "o"), "position": {"kind": "none"}},
                "ffn": {"kind": "mlp", "activation": "gelu_tanh"},
            },
            embedding={"position": {"kind": "learned"}},
            norm={"kind": "layernorm"},
            placement={"kind": "pre"},
        ),
        (
            *common_fields("gpt2", eps_key="attention.layer_norm_epsilon"),
            Key("gpt2.context_length", "decoder.embedding.position.length"),
        ),
        (
            *EMBEDDING_AND_HEAD_WEIGHTS,
            WeightMapping("position_embd", "decoder.embed.position.table"),
            *per_layer(*NORM_WEIGHTS, FUSED_QKV, WeightMapping("attn_output", "attn.f.o"), *FFN_WEIGHTS[1:]),
        ),
    ),
}
"""`general.architecture` → family; its `.architecture` is the transformers family (`model_type`)."""
