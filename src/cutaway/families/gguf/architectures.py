"""GGUF architectures: config fields and weight mappings under GGUF key names."""

from dataclasses import replace
from functools import partial

from cutaway.errors import ConfigError
from cutaway.families.config_fields import ConfigField, ConfigFields, Custom, HFConfigReader, Key, SupportedValues
from cutaway.families.config_tree import ConfigTree, Node
from cutaway.families.family import Family
from cutaway.families.gguf.rope_fields import GGUFRopeField
from cutaway.families.tables import gemma, gpt2, llama
from cutaway.families.weight_conversion import QKV, PermuteForRope, Split, SubtractOffset, WeightMapping

_TIED_HEAD_KEY = "head.tied"
"""Internal key for a tied head, because GGUF has no key for it: the head is tied if the file has no head matrix."""


def _common_fields(arch: str, norm: str) -> ConfigFields:
    """Config fields that all GGUF architectures share.

    `arch` and `norm` are parts of the metadata keys, e.g. of `{arch}.attention.{norm}_epsilon`.
    """
    attention = f"{arch}.attention"
    no_experts = "the FFNs are mixtures of experts, which cutaway does not load from GGUF"
    return (
        Key(f"{arch}.vocab_size", "vocab_size"),
        Key(f"{arch}.embedding_length", "d_model"),
        Key(f"{arch}.block_count", "decoder.layers"),
        Key(f"{arch}.context_length", "context"),
        Key(f"{arch}.feed_forward_length", f"{llama.FFN}.hidden"),
        Key(f"{attention}.head_count", f"{llama.ATTENTION}.heads"),
        Key(f"{attention}.head_count_kv", f"{llama.ATTENTION}.kv_heads", None),
        Key(f"{attention}.key_length", f"{llama.ATTENTION}.d_head", None),
        Key(f"{attention}.{norm}_epsilon", "decoder.norm.eps"),
        Key(_TIED_HEAD_KEY, "head.tied", True),
        Custom((f"{attention}.value_length",), _check_value_length),
        SupportedValues(f"{arch}.expert_count", (0,), no_experts),
        SupportedValues(f"{attention}.causal", (True,), "attention is not causal"),
    )


def _qk_norm_field(arch: str) -> Key:
    """Field that sets the eps of QK-norm. GGUF stores one eps for all norms."""
    return Key(f"{arch}.attention.layer_norm_rms_epsilon", f"{llama.ATTENTION}.qk_norm.norm.eps")


def _check_value_length(metadata: HFConfigReader, tree: ConfigTree) -> None:
    """Raise if the value vectors of a head have another dimension than its key vectors."""
    for key, length in metadata.data.items():
        if key.endswith(".attention.value_length") and length != metadata.get(key.replace("value", "key")):
            raise ConfigError(f"'{key}' is {length!r}, but it must equal the key length; cutaway supports no other")


def _sliding_window_field(arch: str, full_attention_period: int | None) -> Custom:
    """Field of the window size. Every `full_attention_period`-th layer has full attention; if None, no layer has it."""
    key = f"{arch}.attention.sliding_window"

    def from_hf(metadata: HFConfigReader, tree: ConfigTree) -> None:
        window = metadata.get(key) or None
        for layer_number, block in enumerate(tree.blocks("decoder"), 1):
            is_full = full_attention_period is not None and layer_number % full_attention_period == 0
            block["attention"]["window"] = None if is_full else window

    def to_hf(tree: ConfigTree, metadata: dict[str, object]) -> None:
        windows = {block["attention"]["window"] for block in tree.blocks("decoder")} - {None}
        if windows:
            metadata[key] = max(windows)

    return Custom((key, f"{arch}.attention.sliding_window_pattern"), from_hf, to_hf)


def _query_scale_field(largest_num_layers: int) -> Custom:
    """Config field of Gemma's attention scale, which a GGUF file does not store.

    The scale is 1/sqrt(d_head). The largest model, which has `largest_num_layers` layers, has 1/sqrt(d_model / heads).
    """

    def from_hf(metadata: HFConfigReader, tree: ConfigTree) -> None:
        blocks = tree.blocks("decoder")
        for attention in (block["attention"] for block in blocks):
            dim = tree.data["d_model"] // attention["heads"]
            dim = dim if len(blocks) == largest_num_layers else attention.get("d_head") or dim
            attention["scale"] = dim**-0.5

    return Custom((), from_hf)


# The head is tied in every template; it is untied on loading if the file has a different head matrix.
_TIED = {"tied": True}
_SWIGLU = {"kind": "gated", "activation": "silu"}
_GEGLU = {"kind": "gated", "activation": "gelu_tanh"}
_QK_NORM = {"qk_norm": {"norm": llama.RMSNORM}}
_weights = partial(llama.weights, embed="token_embd", norm="output_norm", head="output", layer="blk")
_QK_WEIGHTS = tuple(WeightMapping(f"attn_{p}", f"attn.f.{p}") for p in "qk")
_PERMUTED_QK_WEIGHTS = tuple(replace(mapping, op=PermuteForRope()) for mapping in _QK_WEIGHTS)
_VO_WEIGHTS = (WeightMapping("attn_v", "attn.f.v"), WeightMapping("attn_output", "attn.f.o"))
_NORM_WEIGHTS = (WeightMapping("attn_norm", "attn.norm_in"), WeightMapping("ffn_norm", "ffn.norm_in"))
_FFN_WEIGHTS = tuple(WeightMapping(f"ffn_{p}", f"ffn.f.{p}") for p in ("gate", "up", "down"))
_QK_NORM_WEIGHTS = tuple(WeightMapping(f"attn_{p}_norm", f"attn.f.{p}_norm.norm") for p in "qk")
_FUSED_QKV_WEIGHTS = (WeightMapping("attn_qkv", QKV, Split()), WeightMapping("attn_output", "attn.f.o"))
_LLAMA_WEIGHTS = _weights(*_NORM_WEIGHTS, *_QK_WEIGHTS, *_VO_WEIGHTS, *_FFN_WEIGHTS)
_PLAIN_GEMMA_WEIGHTS = _weights(
    *_NORM_WEIGHTS,
    WeightMapping("post_attention_norm", "attn.norm_out"),
    WeightMapping("post_ffw_norm", "ffn.norm_out"),
    *_QK_NORM_WEIGHTS,
    *_QK_WEIGHTS,
    *_VO_WEIGHTS,
    *_FFN_WEIGHTS,
)
# The file stores gain + 1 of every norm.
_GEMMA_WEIGHTS = tuple(
    replace(mapping, op=SubtractOffset(1.0)) if "norm" in mapping.checkpoint_key else mapping
    for mapping in _PLAIN_GEMMA_WEIGHTS
)
_IGNORED_ROPE_WEIGHTS = {r"rope_(freqs|factors_long|factors_short)\.weight": "RoPE factors, read with the metadata"}


def _build_family(
    arch: str,
    template: Node,
    *fields: ConfigField,
    norm: str = "layer_norm_rms",
    weights: tuple[WeightMapping, ...] = _LLAMA_WEIGHTS,
    model_type: str | None = None,
) -> Family:
    ignored_keys = {
        f"{arch}.rope.scaling.finetuned": "whether the scaling was fine-tuned; does not change the result",
        f"{arch}.expert_used_count": "the model has no experts",
        f"{arch}.tensor_data_layout": "layout of q and k, fixed by the architecture",
    }
    all_fields = (*_common_fields(arch, norm), *fields)
    family = Family(arch, model_type or arch, template, all_fields, weights, ignored_weights=_IGNORED_ROPE_WEIGHTS)
    return replace(family, ignored_config_keys=ignored_keys)


_FAMILIES = (
    _build_family(
        "llama",
        llama.build_template(ffn=_SWIGLU, head=_TIED),
        GGUFRopeField("llama"),
        weights=_weights(*_NORM_WEIGHTS, *_PERMUTED_QK_WEIGHTS, *_VO_WEIGHTS, *_FFN_WEIGHTS),
    ),
    _build_family(
        "qwen2", llama.build_template({"bias": ("q", "k", "v")}, _SWIGLU, head=_TIED), GGUFRopeField("qwen2")
    ),
    _build_family(
        "qwen3",
        llama.build_template(_QK_NORM, _SWIGLU, head=_TIED),
        _qk_norm_field("qwen3"),
        GGUFRopeField("qwen3"),
        weights=_weights(*_NORM_WEIGHTS, *_QK_WEIGHTS, *_VO_WEIGHTS, *_FFN_WEIGHTS, *_QK_NORM_WEIGHTS),
    ),
    _build_family(
        "gemma2",
        gemma.build_template("sandwich", ffn=_GEGLU, head=_TIED),
        Key("gemma2.attn_logit_softcapping", f"{llama.ATTENTION}.softcap", 50.0),
        Key("gemma2.final_logit_softcapping", "head.softcap", 30.0),
        _sliding_window_field("gemma2", 2),
        _query_scale_field(46),
        GGUFRopeField("gemma2"),
        weights=_GEMMA_WEIGHTS,
    ),
    _build_family(
        "gemma3",
        gemma.build_template("sandwich", {"qk_norm": {"norm": gemma.NORM}}, ffn=_GEGLU, head=_TIED),
        _qk_norm_field("gemma3"),
        Key("gemma3.final_logit_softcapping", "head.softcap", None),
        _sliding_window_field("gemma3", 6),
        _query_scale_field(62),
        GGUFRopeField("gemma3", sliding_window_theta=10000.0),
        weights=_GEMMA_WEIGHTS,
        model_type="gemma3_text",
    ),
    _build_family(
        "phi3",
        llama.build_template(ffn=_SWIGLU, head=_TIED),
        _sliding_window_field("phi3", None),
        GGUFRopeField("phi3"),
        weights=_weights(
            *_NORM_WEIGHTS,
            *_FUSED_QKV_WEIGHTS,
            WeightMapping("ffn_up", ("ffn.f.gate", "ffn.f.up"), Split()),
            WeightMapping("ffn_down", "ffn.f.down"),
        ),
    ),
    _build_family(
        "gpt2",
        gpt2.build_template({"bias": llama.QKVO}, {"activation": "gelu_tanh"}, head=_TIED),
        Key("gpt2.context_length", "decoder.embedding.position.length"),
        norm="layer_norm",
        weights=(
            WeightMapping("position_embd", "decoder.embed.position.table"),
            *_weights(*_NORM_WEIGHTS, *_FUSED_QKV_WEIGHTS, *_FFN_WEIGHTS[1:]),
        ),
    ),
)
GGUF_ARCHITECTURES = {family.name: family for family in _FAMILIES}
"""`general.architecture` → Family, whose field `architecture` is the `model_type` of transformers."""
