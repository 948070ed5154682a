"""nanochat: forward passes without a cache are for training; `Engine` generates with a KV cache.

Value embeddings, smear (the previous token's embedding), backout, windows, grouped heads, softcapping.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

HOMEPAGE = "https://github.com/karpathy/nanochat"
REQUIREMENTS = ("rustbpe==0.1.0", "tiktoken==0.14.0", "filelock==4.2.10", "requests==2.34.2", "tokenizers==0.23.3")
REPOSITORY = ("karpathy/nanochat", "92d63d4e8bb4df75c3b71618f31ddde2378b2bcd")
LENGTH, VOCAB = 96, 50


def configurations() -> Iterator[tuple[str, Callable[[], Any]]]:
    yield "full attention", partial(make, heads=4, window=None)
    yield "grouped heads", partial(make, heads=2, window=None)
    yield "grouped heads, window", partial(make, heads=2, window=8)
    yield "one kv head, window", partial(make, heads=1, window=8)
    yield "one kv head, window, prefill in one call", partial(make, heads=1, window=8, one_prefill=True)
    yield "grouped heads, GPT.generate", partial(make, heads=2, window=None, naive=True)


class Tokenizer:
    """Special tokens that are never generated."""

    def encode_special(self, text: str) -> int:
        return VOCAB + len(text)

    def get_bos_token_id(self) -> int:
        return VOCAB


def build(heads: int, window: int | None) -> nn.Module:
    from nanochat.gpt import GPT, GPTConfig

    config = GPTConfig(
        sequence_len=LENGTH, vocab_size=VOCAB, n_layer=3, n_head=4, n_kv_head=heads, n_embd=32, window_pattern="L"
    )
    model = GPT(config)
    model.init_weights()
    for parameter in model.parameters():  # projections and smear_lambda are zero, and lm_head almost
        if parameter.abs().max() < 0.1:
            parameter.data.normal_(0, 0.5 if parameter.dim() < 2 else 0.1)
    if window is not None:  # window_pattern has multiples of 128 tokens; FlashAttention counts without the own token
        model.window_sizes = [(window - 1, 0)] * 2 + model.window_sizes[-1:]
    return model.eval()


def make(
    heads: int, window: int | None, naive: bool = False, one_prefill: bool = False
) -> tuple[nn.Module, dict[str, Any]]:
    from nanochat.engine import Engine, KVCache, sample_next_token

    model = build(heads, window)
    sizes = {"num_heads": heads, "head_dim": 8, "num_layers": 3}

    def logits_with_cache(tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        cache = state or KVCache(len(tokens), seq_len=LENGTH, device="cpu", dtype=model.cos.dtype, **sizes)
        if not one_prefill or cache.get_pos() == 0:
            return model(tokens, kv_cache=cache), cache
        steps = [model(tokens[:, i : i + 1], kv_cache=cache) for i in range(tokens.shape[1])]
        return torch.cat(steps, dim=1), cache

    def logits(tokens: Tensor) -> Tensor:
        # the forward pass for training needs two tokens
        return model(tokens) if naive or tokens.shape[1] > 1 else logits_with_cache(tokens, None)[0]

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        targets = labels[:, 1:].masked_fill(labels[:, 1:] == -100, -1)
        return model(tokens[:, :-1], targets)

    def generate(tokens: Tensor, count: int) -> Tensor:
        if naive:
            rows = [list(model.generate(row.tolist(), count, temperature=0.0)) for row in tokens]
        else:
            engine = Engine(model, Tokenizer())
            texts = [engine.generate_batch(row.tolist(), max_tokens=count, temperature=0.0)[0][0] for row in tokens]
            rows = [text[tokens.shape[1] :] for text in texts]
        return torch.tensor(rows)

    def sample(logits: Tensor, count: int, temperature: float = 1.0, top_k: int | None = None) -> Tensor:
        rows = logits.expand(count, -1).clone()
        generator = torch.Generator().manual_seed(int(torch.randint(2**31, ())))
        return sample_next_token(rows, generator, temperature, top_k).view(-1)

    return model, {
        "logits": logits,
        "logits_with_cache": logits_with_cache,
        "loss": loss,
        "generate": generate,
        "sample": sample,
        "build_module": partial(build, heads, window),
        "vocab_size": VOCAB,
        "max_seq_len": LENGTH,
        "kv_heads": heads,
        "windows": () if window is None else (window,),
        "attention_scale": 1.2**2 * 8**-0.5,  # queries and keys are multiplied by 1.2 after their norm
        "tied_embeddings": False,
        "trained": True,  # the weights that are zero at first are random
    }
