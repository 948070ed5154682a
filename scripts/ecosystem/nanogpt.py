"""nanoGPT: learned positions, no KV cache; `forward` returns all logits only if targets are passed."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

NAME = "nanoGPT"
HOMEPAGE = "https://github.com/karpathy/nanoGPT"
REPOSITORY = ("karpathy/nanoGPT", "3adf61e154c3fe3fca428ad6bc3818b27a3b8291")


def configurations() -> Iterator[tuple[str, Any]]:
    for flash in (True, False):
        for bias in (True, False):
            name = f"{'flash' if flash else 'manual'} attention, bias={bias}"
            yield name, lambda flash=flash, bias=bias: make(flash, bias)
    yield "dropout=0.1", lambda: make(True, True, dropout=0.1)


def make(flash: bool, bias: bool, dropout: float = 0.0) -> tuple[nn.Module, dict[str, Any]]:
    from model import GPT, GPTConfig

    def build() -> nn.Module:
        config = GPTConfig(block_size=96, vocab_size=64, n_layer=2, n_head=4, n_embd=32, dropout=dropout, bias=bias)
        model = GPT(config)
        for block in model.transformer.h if not flash else ():
            block.attn.flash = False
            block.attn.register_buffer("bias", causal_mask(96))
        return model.eval()

    model = build()

    def logits(tokens: Tensor) -> Tensor:
        return model(tokens, tokens)[0]

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        # train.py passes targets that are shifted by one, with -1 for positions without a target
        targets = labels[:, 1:].masked_fill(labels[:, 1:] == -100, -1)
        return model(tokens[:, :-1], targets)[1]

    def generate(tokens: Tensor, count: int) -> Tensor:
        return model.generate(tokens, count, top_k=1)[:, tokens.shape[1] :]

    return model, {
        "logits": logits,
        "loss": loss,
        "generate": generate,
        "build_module": build,
        "vocab_size": 64,
        "max_seq_len": 96,
        "tied_embeddings": True,
        "relative_positions": False,
        "trained": False,
    }


def causal_mask(length: int) -> Tensor:
    import torch

    return torch.tril(torch.ones(length, length)).view(1, 1, length, length)
