"""ring-attention-pytorch: attention in buckets, here on one process, compared with the library's regular attention."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

NAME = "ring-attention-pytorch"
HOMEPAGE = "https://github.com/lucidrains/ring-attention-pytorch"
REQUIREMENTS = ("ring-attention-pytorch==0.5.20", "einops==0.8.2")
LENGTH, VOCAB = 96, 64
Options = dict[str, Any]
SIZES: Options = {"num_tokens": VOCAB, "dim": 32, "depth": 2, "dim_head": 8, "heads": 4, "bucket_size": 8}
OPTIONS: dict[str, Options] = {
    "buckets": {},
    "buckets, grouped heads": {"num_grouped_query_heads": 2},
    "buckets, one kv head": {"num_grouped_query_heads": 4},
    "regular attention": {"force_regular_attn": True},
}
LOOKBACK: Options = {"max_lookback_seq_len": 16}


def configurations() -> Iterator[tuple[str, Callable[[], Any]]]:
    for name, options in OPTIONS.items():
        yield f"decoder, {name}", partial(make, "decoder", options)
        yield f"encoder, {name}", partial(make, "encoder", options)
    yield "decoder, lookback of two buckets", partial(make, "decoder", LOOKBACK)


def make(kind: str, options: Options) -> tuple[nn.Module, Options]:
    from ring_attention_pytorch import RingTransformer

    def build(**changes: Any) -> nn.Module:
        return RingTransformer(**SIZES, **options | changes, causal=kind == "decoder", ignore_index=-100).eval()

    model, regular = build(), build(force_regular_attn=True)

    def regular_logits(tokens: Tensor) -> Tensor:
        regular.load_state_dict(model.state_dict())
        return regular.to(next(model.parameters()).dtype)(tokens)

    arguments = {
        "kind": kind,
        "build_module": build,
        "vocab_size": VOCAB,
        "max_seq_len": LENGTH,
        "logits": lambda tokens: model(tokens),
        "logits_with_mask": lambda tokens, mask: model(tokens, mask=mask),
        "positions_skip_padding": False,
        "relative_positions": True,
        "trained": False,
    }
    if kind == "decoder":
        arguments["padding_side"] = "right"
    if "max_lookback_seq_len" not in options:
        arguments["logits_by_kernel"] = {"buckets": lambda tokens: model(tokens), "regular": regular_logits}
    return model, arguments
