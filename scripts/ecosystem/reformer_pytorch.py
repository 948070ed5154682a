"""reformer-pytorch: LSH attention, full attention and local heads.

The hashes of LSH attention are random in each forward pass. With one hash and texts of two buckets, every token can
attend to all others, so the logits are deterministic: the checks run on texts of exactly that length.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

NAME = "reformer-pytorch"
HOMEPAGE = "https://github.com/lucidrains/reformer-pytorch"
REQUIREMENTS = (
    "reformer-pytorch==1.4.4",
    "einops==0.8.2",
    "local-attention==1.11.2",
    "axial-positional-embedding==0.3.12",
    "product-key-memory==0.3.0",
    "hyper-connections==0.4.11",
    "torch-einops-utils==0.2.0",
)
LENGTH, VOCAB = 64, 64
Options = dict[str, Any]
SIZES: Options = {
    "num_tokens": VOCAB,
    "max_seq_len": LENGTH,
    "dim": 32,
    "depth": 2,
    "heads": 4,
    "dim_head": 8,
    "ff_chunks": 1,
    "bucket_size": LENGTH // 2,
    "n_hashes": 1,
}
LEARNED: Options = {"absolute_position_emb": True}
FULL: Options = {"use_full_attn": True}
OPTIONS: dict[str, Options] = {
    "LSH attention, rotary": {},
    "LSH attention, learned positions": LEARNED,
    "LSH attention, axial positions": {"axial_position_emb": True},
    "LSH attention, learned positions, one value head": {**LEARNED, "one_value_head": True},
    "LSH attention, learned positions, local heads": {**LEARNED, "n_local_attn_heads": 2},
    "LSH attention, learned positions, tied layers": {**LEARNED, "weight_tie": True},
    "LSH attention, learned positions, attention in chunks": {**LEARNED, "attn_chunks": 2, "ff_chunks": 4},
    "full attention, learned positions": {**FULL, **LEARNED},
    "full attention, sinusoidal positions": {**FULL, "fixed_position_emb": True},
    "full attention, rotary": FULL,
    "full attention, learned positions, memory keys and values": {**FULL, **LEARNED, "num_mem_kv": 4},
    "full attention, learned positions, tied embeddings": {**FULL, **LEARNED, "weight_tie_embedding": True},
    "full attention, learned positions, factorized embeddings": {**FULL, **LEARNED, "emb_dim": 16},
    "full attention, learned positions, scale norm, GLU": {**FULL, **LEARNED, "use_scale_norm": True, "ff_glu": True},
}


def configurations() -> Iterator[tuple[str, Callable[[], Any]]]:
    for kind in ("decoder", "encoder"):
        for name, options in OPTIONS.items():
            yield f"{kind}, {name}", partial(make, kind, options)


def make(kind: str, options: Options) -> tuple[nn.Module, Options]:
    from reformer_pytorch import ReformerLM
    from reformer_pytorch.generative_tools import TrainingWrapper

    def build() -> nn.Module:
        return ReformerLM(**SIZES | options, causal=kind == "decoder").eval()

    model = build()
    wrapper = TrainingWrapper(model)
    full = "use_full_attn" in options
    arguments = {
        "kind": kind,
        "build_module": build,
        "vocab_size": VOCAB,
        "max_seq_len": LENGTH,
        "multiple": None if full else LENGTH,
        "logits": lambda tokens: model(tokens),
        "logits_with_mask": lambda tokens, mask: model(tokens, input_mask=mask),
        "positions_skip_padding": False,
        "tied_embeddings": options.get("weight_tie_embedding", False),
        "trained": False,
    }
    if kind == "decoder":
        arguments["padding_side"] = "right"
        if full:
            arguments["generate"] = partial(generate, wrapper)
    return model, arguments


def generate(wrapper: nn.Module, tokens: Tensor, count: int) -> Tensor:
    """`filter_thres` is the share of tokens that are removed; one of 64 remains."""
    wrapper.net.train(wrapper.net.net.training)
    return wrapper.generate(tokens, count, filter_thres=0.98)
