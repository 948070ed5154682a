"""local-attention: a token attends to the tokens of its bucket and of the bucket before it."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

NAME = "local-attention"
HOMEPAGE = "https://github.com/lucidrains/local-attention"
REQUIREMENTS = ("local-attention==1.11.2", "einops==0.8.2", "hyper-connections==0.4.11", "torch-einops-utils==0.2.0")
LENGTH, VOCAB, WINDOW = 96, 64, 8
Options = dict[str, Any]
SIZES: Options = {
    "num_tokens": VOCAB,
    "max_seq_len": LENGTH,
    "dim": 32,
    "depth": 2,
    "heads": 4,
    "dim_head": 8,
    "local_attn_window_size": WINDOW,
}
DYNAMIC: Options = {"use_dynamic_pos_bias": True}
XPOS: Options = {"use_xpos": True, "xpos_scale_base": 8}
BUCKETS: Options = {"exact_windowsize": False}
DECODERS: dict[str, Options] = {
    "rotary": {},
    "rotary, one residual stream": {"num_residual_streams": 1},
    "rotary, whole buckets": BUCKETS,
    "xpos": XPOS,
    "xpos, whole buckets": {**XPOS, **BUCKETS},
    "dynamic position bias": DYNAMIC,
    "dynamic position bias, whole buckets": {**DYNAMIC, **BUCKETS},
    "rotary, qk RMSNorm": {"qk_rmsnorm": True},
    "rotary, gated heads": {"gate_values_per_head": True},
    "rotary, two buckets back": {"look_backward": 2},
    "rotary, two buckets back, whole buckets": {"look_backward": 2, **BUCKETS},
}
ENCODERS: dict[str, Options] = {
    "rotary": {},
    "rotary, whole buckets": BUCKETS,
    "rotary, qk RMSNorm": {"qk_rmsnorm": True},
    "rotary, one residual stream": {"num_residual_streams": 1},
}


def configurations() -> Iterator[tuple[str, Callable[[], Any]]]:
    for name, options in DECODERS.items():
        yield f"decoder, {name}", partial(make, "decoder", options)
    for name, options in ENCODERS.items():
        yield f"encoder, {name}", partial(make, "encoder", options)


def make(kind: str, options: Options) -> tuple[nn.Module, Options]:
    from local_attention import LocalTransformer

    def build() -> nn.Module:
        return LocalTransformer(**SIZES, causal=kind == "decoder", ignore_index=-100, **options).eval()

    model = build()

    def logits_with_cache(tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        """The cache takes one token at a time, after a prompt of any length."""
        if state is None:
            logits, cache = model(tokens, return_cache=True)
            return logits, (tokens, cache)
        seen, cache = state
        parts = []
        for token in tokens.split(1, dim=1):
            seen = torch.cat([seen, token], dim=1)
            logits, cache = model(seen, cache=cache, return_cache=True)
            parts.append(logits)
        return torch.cat(parts, dim=1), (seen, cache)

    arguments = {
        "kind": kind,
        "build_module": build,
        "vocab_size": VOCAB,
        "max_seq_len": LENGTH,
        "logits": lambda tokens: model(tokens),
        "logits_with_mask": lambda tokens, mask: model(tokens, mask=mask),
        "positions_skip_padding": False,
        "trained": False,
    }
    if kind == "decoder":
        exact = options.get("exact_windowsize", True)
        arguments |= {
            "window": WINDOW * options.get("look_backward", 1) + 1 if exact else None,
            "padding_side": "right",
            "logits_with_cache": logits_with_cache,
            "generate": lambda tokens, count: model.generate(tokens, count, temperature=0.0),
        }
    return model, arguments
