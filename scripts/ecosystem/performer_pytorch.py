"""performer-pytorch: linear attention with random features. Without the CUDA package, causal sums are slower."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

NAME = "performer-pytorch"
HOMEPAGE = "https://github.com/lucidrains/performer-pytorch"
REQUIREMENTS = (
    "performer-pytorch==1.1.4",
    "einops==0.8.2",
    "local-attention==1.11.2",
    "axial-positional-embedding==0.3.12",
    "hyper-connections==0.4.11",
    "torch-einops-utils==0.2.0",
)
LENGTH, VOCAB = 96, 64
Options = dict[str, Any]
SIZES: Options = {
    "num_tokens": VOCAB,
    "max_seq_len": LENGTH,
    "dim": 32,
    "depth": 2,
    "heads": 4,
    "dim_head": 8,
    "nb_features": 64,
}
LEARNED_POSITIONS: Options = {"rotary_position_emb": False}
GENERALIZED: Options = {"generalized_attention": True}
LOCAL: Options = {"local_attn_heads": 2, "local_window_size": 8}
OPTIONS: dict[str, Options] = {
    "softmax kernel, rotary": {},
    "softmax kernel, learned positions": LEARNED_POSITIONS,
    "ReLU kernel, rotary": GENERALIZED,
    "ReLU kernel, learned positions, shifted tokens": {**GENERALIZED, **LEARNED_POSITIONS, "shift_tokens": True},
    "ReLU kernel, axial positions": {
        **GENERALIZED,
        **LEARNED_POSITIONS,
        "axial_position_emb": True,
        "axial_position_shape": (12, 8),
    },
    "ReLU kernel, local attention heads": {**GENERALIZED, **LOCAL},
    "local attention heads only": {**LOCAL, "local_attn_heads": 4},
    "ReLU kernel, reversible, GLU": {**GENERALIZED, "reversible": True, "ff_glu": True},
    "ReLU kernel, feed-forward in chunks, scale norm": {**GENERALIZED, "ff_chunks": 4, "use_scalenorm": True},
    "ReLU kernel, ReZero, tied embeddings": {**GENERALIZED, "use_rezero": True, "tie_embed": True},
    "no projection": {"no_projection": True},
    "no projection, qkv bias, shifted tokens": {"no_projection": True, "qkv_bias": True, "shift_tokens": True},
}


def configurations() -> Iterator[tuple[str, Callable[[], Any]]]:
    for kind in ("decoder", "encoder"):
        for name, options in OPTIONS.items():
            yield f"{kind}, {name}", partial(make, kind, options)


def make(kind: str, options: Options) -> tuple[nn.Module, Options]:
    from performer_pytorch import AutoregressiveWrapper, PerformerLM

    def build() -> nn.Module:
        return PerformerLM(**SIZES, causal=kind == "decoder", **options).eval()

    model = build()
    wrapper = AutoregressiveWrapper(model)
    arguments = {
        "kind": kind,
        "build_module": build,
        "vocab_size": VOCAB,
        "max_seq_len": LENGTH,
        "logits": lambda tokens: model(tokens),
        "logits_with_mask": lambda tokens, mask: model(tokens, mask=mask),
        "positions_skip_padding": False,
        "tied_embeddings": options.get("tie_embed", False),
        "trained": False,
    }
    if kind == "decoder":
        arguments |= {
            "padding_side": "right",
            "generate": partial(generate, wrapper),
        }
    return model, arguments


def generate(wrapper: nn.Module, tokens: Tensor, count: int) -> Tensor:
    """`filter_thres` is the share of tokens that are removed; one of 64 remains."""
    return wrapper.generate(tokens, count, filter_thres=0.98)
