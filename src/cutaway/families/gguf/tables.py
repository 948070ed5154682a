"""GGUF's architectures: the same fields and rows as any family, under the format's own names."""

from collections.abc import Mapping
from typing import Any

from cutaway.errors import ConfigError
from cutaway.families.family import Family
from cutaway.families.fields import Custom, Field, Key, Only, Theirs
from cutaway.families.gguf.rope import GgufRope
from cutaway.families.rows import Joined, Row, Same, Shifted, TurnedPairs, within
from cutaway.families.tree import Tree

TIED = "head.tied"
"""No setting of the format: a file without a matrix for the head says so by not having it."""


def fields(arch: str, *, eps: str = "attention.layer_norm_rms_epsilon") -> tuple[Field, ...]:
    """What every architecture tells."""
    at = "decoder.block.attention"
    return (
        Key(f"{arch}.vocab_size", "vocab_size"),
        Key(f"{arch}.embedding_length", "d_model"),
        Key(f"{arch}.block_count", "decoder.layers"),
        Key(f"{arch}.context_length", "context"),
        Key(f"{arch}.feed_forward_length", "decoder.block.ffn.hidden"),
        Key(f"{arch}.attention.head_count", f"{at}.heads"),
        Key(f"{arch}.attention.head_count_kv", f"{at}.kv_heads", None),
        Key(f"{arch}.attention.key_length", f"{at}.d_head", None),
        Key(f"{arch}.{eps}", "decoder.norm.eps"),
        Key(TIED, "head.tied", True),
        Custom((f"{arch}.attention.value_length",), check_value_width, lambda ours, theirs: None),
        Only(f"{arch}.expert_count", (0,), "its FFNs are mixtures of experts"),
        Only(f"{arch}.attention.causal", (True,), "its tokens all see each other"),
    )


def check_value_width(theirs: Theirs, ours: Tree) -> None:
    """Values are as wide as keys, in all of these."""
    for key, width in theirs.data.items():
        if key.endswith(".attention.value_length") and width != theirs.get(key.replace("value", "key")):
            raise ConfigError(f"'{key}' is {width!r}, another width than the keys', which cutaway does not have")


def windows(arch: str, every: int | None) -> Custom:
    """Near layers, with a far one after every so many; without a pattern, all are near."""
    key = f"{arch}.attention.sliding_window"

    def read(theirs: Theirs, ours: Tree) -> None:
        window = theirs.get(key) or None
        for n, block in enumerate(ours.blocks("decoder"), 1):
            block["attention"]["window"] = None if every is not None and n % every == 0 else window

    def write(ours: Tree, theirs: dict[str, Any]) -> None:
        widths = {block["attention"]["window"] for block in ours.blocks("decoder")} - {None}
        if widths:
            theirs[key] = max(widths)

    return Custom((key, f"{arch}.attention.sliding_window_pattern"), read, write)


def query_scale(arch: str, layers: int) -> Custom:
    """The file keeps no score scale: the largest Gemma, told by its depth, divides by sqrt(d_model / heads)."""

    def read(theirs: Theirs, ours: Tree) -> None:
        for block in ours.blocks("decoder"):
            attention = block["attention"]
            largest = len(ours.blocks("decoder")) == layers
            width = attention.get("d_head") or ours.data["d_model"] // attention["heads"]
            attention["scale"] = (ours.data["d_model"] // attention["heads"] if largest else width) ** -0.5

    return Custom((), read, lambda ours, theirs: None)


def template(block: Mapping[str, Any], **stack: Any) -> dict[str, Any]:
    """A decoder. Every head is taken as tied; a file with another matrix for it says so by having one."""
    return {"form": "decoder", "head": {"kind": "lm", "tied": True}, "decoder": {"block": block, **stack}}


RMS = {"norm": {"kind": "rmsnorm"}, "placement": {"kind": "pre"}}
GEMMA = {
    "norm": {"kind": "rmsnorm", "unit_offset": True},
    "placement": {"kind": "sandwich"},
    "embedding": {"scale": "sqrt_d_model"},
}
SWIGLU = {"kind": "gated", "activation": "silu"}
GEGLU = {"kind": "gated", "activation": "gelu_tanh"}
ENDS = (
    Row("token_embd", "decoder.embed.token"),
    Row("output_norm", "decoder.final_norm"),
    Row("output", "head.matrix"),
)
PLUS_ONE = Shifted(1.0)


def blocks(*rows: Row) -> tuple[Row, ...]:
    return within("blk.{i}", "decoder.blocks.{i}", *rows)


def attention(op: Same = Same()) -> tuple[Row, ...]:
    qk = tuple(Row(f"attn_{p}", f"attn.f.{p}", op) for p in "qk")
    return (*qk, Row("attn_v", "attn.f.v"), Row("attn_output", "attn.f.o"))


NORMS = (Row("attn_norm", "attn.norm_in"), Row("ffn_norm", "ffn.norm_in"))
FFN = tuple(Row(f"ffn_{p}", f"ffn.f.{p}") for p in ("gate", "up", "down"))
QK_NORMS = tuple(Row(f"attn_{p}_norm", f"attn.f.{p}_norm.norm") for p in "qk")
FUSED = Row("attn_qkv", ("attn.f.q", "attn.f.k", "attn.f.v"), Joined())
FOUR_NORMS = (
    Row("attn_norm", "attn.norm_in", PLUS_ONE),
    Row("post_attention_norm", "attn.norm_out", PLUS_ONE),
    Row("ffn_norm", "ffn.norm_in", PLUS_ONE),
    Row("post_ffw_norm", "ffn.norm_out", PLUS_ONE),
)
GEMMA_ENDS = (ENDS[0], Row("output_norm", "decoder.final_norm", PLUS_ONE), ENDS[2])
ROPE_TENSORS = {r"rope_(freqs|factors_long|factors_short)\.weight": "RoPE's factors, read with the settings"}


def _family(arch: str, opens: str, shape: dict[str, Any], own: tuple[Field, ...], rows: tuple[Row, ...]) -> Family:
    harmless = {
        f"{arch}.rope.scaling.finetuned": "whether the scaling was trained, not what it is",
        f"{arch}.expert_used_count": "of no experts",
        f"{arch}.tensor_data_layout": "the order of q and k, which the architecture fixes",
    }
    return Family(arch, opens, shape, own, rows, ignored=ROPE_TENSORS, harmless=harmless)


ARCHITECTURES = {
    "llama": _family(
        "llama",
        "llama",
        template({"attention": {"kind": "multi-head"}, "ffn": SWIGLU}, **RMS),
        (*fields("llama"), GgufRope("llama")),
        (*ENDS, *blocks(*NORMS, *attention(TurnedPairs()), *FFN)),
    ),
    "qwen2": _family(
        "qwen2",
        "qwen2",
        template({"attention": {"kind": "multi-head", "bias": ("q", "k", "v")}, "ffn": SWIGLU}, **RMS),
        (*fields("qwen2"), GgufRope("qwen2")),
        (*ENDS, *blocks(*NORMS, *attention(), *FFN)),
    ),
    "qwen3": _family(
        "qwen3",
        "qwen3",
        template({"attention": {"kind": "multi-head", "qk_norm": {"norm": {"kind": "rmsnorm"}}}, "ffn": SWIGLU}, **RMS),
        (
            *fields("qwen3"),
            Key("qwen3.attention.layer_norm_rms_epsilon", "decoder.block.attention.qk_norm.norm.eps"),
            GgufRope("qwen3"),
        ),
        (*ENDS, *blocks(*NORMS, *attention(), *QK_NORMS, *FFN)),
    ),
    "gemma2": _family(
        "gemma2",
        "gemma2",
        template({"attention": {"kind": "multi-head"}, "ffn": GEGLU}, **GEMMA),
        (
            *fields("gemma2"),
            Key("gemma2.attn_logit_softcapping", "decoder.block.attention.softcap", 50.0),
            Key("gemma2.final_logit_softcapping", "head.softcap", 30.0),
            windows("gemma2", 2),
            query_scale("gemma2", 46),
            GgufRope("gemma2"),
        ),
        (*GEMMA_ENDS, *blocks(*FOUR_NORMS, *attention(), *FFN)),
    ),
    "gemma3": _family(
        "gemma3",
        "gemma3_text",
        template(
            {
                "attention": {"kind": "multi-head", "qk_norm": {"norm": {"kind": "rmsnorm", "unit_offset": True}}},
                "ffn": GEGLU,
            },
            **GEMMA,
        ),
        (
            *fields("gemma3"),
            Key("gemma3.attention.layer_norm_rms_epsilon", "decoder.block.attention.qk_norm.norm.eps"),
            Key("gemma3.final_logit_softcapping", "head.softcap", None),
            windows("gemma3", 6),
            query_scale("gemma3", 62),
            GgufRope("gemma3", local_theta=10000.0),
        ),
        (
            *GEMMA_ENDS,
            *blocks(*FOUR_NORMS, *attention(), *(Row(r.theirs, r.ours, PLUS_ONE) for r in QK_NORMS), *FFN),
        ),
    ),
    "phi3": _family(
        "phi3",
        "phi3",
        template({"attention": {"kind": "multi-head"}, "ffn": SWIGLU}, **RMS),
        (*fields("phi3"), windows("phi3", None), GgufRope("phi3")),
        (
            *ENDS,
            *blocks(
                *NORMS,
                FUSED,
                Row("attn_output", "attn.f.o"),
                Row("ffn_up", ("ffn.f.gate", "ffn.f.up"), Joined()),
                Row("ffn_down", "ffn.f.down"),
            ),
        ),
    ),
    "gpt2": _family(
        "gpt2",
        "gpt2",
        template(
            {
                "attention": {"kind": "multi-head", "bias": ("q", "k", "v", "o"), "position": {"kind": "none"}},
                "ffn": {"kind": "mlp", "activation": "gelu_tanh"},
            },
            embedding={"position": {"kind": "learned"}},
            norm={"kind": "layernorm"},
            placement={"kind": "pre"},
        ),
        (
            *fields("gpt2", eps="attention.layer_norm_epsilon"),
            Key("gpt2.context_length", "decoder.embedding.position.length"),
        ),
        (
            *ENDS,
            Row("position_embd", "decoder.embed.position.table"),
            *blocks(*NORMS, FUSED, Row("attn_output", "attn.f.o"), *FFN[1:]),
        ),
    ),
}
"""By the name in `general.architecture`; `.architecture` names the family that transformers opens it with."""
