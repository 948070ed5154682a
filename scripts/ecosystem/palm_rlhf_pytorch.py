"""PaLM-rlhf-pytorch: a decoder with parallel layers, one kv head and xpos. `generate` has no cache."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

NAME = "PaLM-rlhf-pytorch"
HOMEPAGE = "https://github.com/lucidrains/PaLM-rlhf-pytorch"
REQUIREMENTS = ("PaLM-rlhf-pytorch==0.8.0", "einops==0.8.2", "einx==0.4.3", "torch-einops-utils==0.2.0")
LENGTH, VOCAB = 96, 64
Options = dict[str, Any]
SIZES: Options = {"num_tokens": VOCAB, "dim": 32, "depth": 2, "dim_head": 8, "heads": 4}
OPTIONS: dict[str, Options] = {
    "xpos": {},
    "xpos with a short scale": {"rotary_xpos_scale_base": 32},
    "qk RMSNorm": {"qk_rmsnorm": True},
    "dropout": {"attn_dropout": 0.1, "ff_dropout": 0.1},
    "LoRA": {"finetune_scopes": ("default",)},
}


def configurations() -> Iterator[tuple[str, Callable[[], Any]]]:
    for kind in ("decoder", "encoder"):
        for name, options in OPTIONS.items():
            yield f"{kind}, {name}", partial(make, kind, options)


def make(kind: str, options: Options) -> tuple[nn.Module, Options]:
    from palm_rlhf_pytorch import PaLM

    causal, scope = kind == "decoder", "default" if "finetune_scopes" in options else None

    def build(**changes: Any) -> nn.Module:
        return PaLM(**SIZES, **options, **changes, causal=causal, cross_entropy_ignore_index=-100).eval()

    model, flash = build(), build(flash_attn=True)

    def flash_logits(tokens: Tensor) -> Tensor:
        flash.load_state_dict(model.state_dict())
        return flash.to(next(model.parameters()).dtype)(tokens, finetune_scope=scope)

    def generate(tokens: Tensor, count: int) -> Tensor:
        return model.generate(
            tokens.shape[1] + count, tokens, temperature=0.0, filter_logits_fn=None, finetune_scope=scope
        )

    arguments = {
        "kind": kind,
        "build_module": build,
        "vocab_size": VOCAB,
        "max_seq_len": LENGTH,
        "logits": lambda tokens: model(tokens, finetune_scope=scope),
        "logits_by_kernel": {"explicit": lambda tokens: model(tokens, finetune_scope=scope), "flash": flash_logits},
        "kv_heads": 1,
        "tied_embeddings": True,
        "relative_positions": True,
        "trained": False,
    }
    if causal:
        arguments["generate"] = generate
    else:  # negative token ids are padding
        arguments["logits_with_mask"] = lambda tokens, mask: model(torch.where(mask, tokens, -1), finetune_scope=scope)
        arguments["positions_skip_padding"] = False
    return model, arguments
