"""Flax: a decoder of `MultiHeadAttention` and its cache for decoding (`decode=True`, one token per call)."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

NAME = "Flax"
HOMEPAGE = "https://github.com/google/flax"
REQUIREMENTS = ("flax==0.12.8", "jax==0.10.2", "jaxlib==0.10.2")
LENGTH, VOCAB, WIDTH, HEADS = 96, 64, 32, 4
MODELS: dict[str, dict[str, Any]] = {
    "nnx, causal mask": {},
    "nnx, is_causal": {"is_causal": True},
    "nnx, is_causal also in decode steps": {"is_causal": True, "decode_is_causal": True},
    "nnx, grouped heads": {"kv_heads": 2},
    "nnx, one kv head, is_causal": {"kv_heads": 1, "is_causal": True},
    "nnx, query and key norm, grouped heads": {"kv_heads": 2, "normalize_qk": True},
    "nnx, dropout 0.1 (attention weights computed by Flax)": {"dropout_rate": 0.1},
    "nnx, dropout 0.1, is_causal": {"dropout_rate": 0.1, "is_causal": True},
    "nnx, dropout 0.1, grouped heads, is_causal": {"dropout_rate": 0.1, "kv_heads": 2, "is_causal": True},
    "nnx, bidirectional": {"causal": False},
    "nnx, bidirectional, dropout 0.1, grouped heads": {"causal": False, "dropout_rate": 0.1, "kv_heads": 2},
}
LINEN: dict[str, dict[str, Any]] = {
    "linen, causal mask": {},
    "linen, query and key norm": {"normalize_qk": True},
    "linen, dropout 0.1": {"dropout_rate": 0.1},
    "linen, force_fp32_for_softmax": {"force_fp32_for_softmax": True},
}


def configurations() -> Iterator[tuple[str, Callable[[], Any]]]:
    for name, options in MODELS.items():
        yield name, partial(make_nnx, **options)
    for name, options in LINEN.items():
        yield name, partial(make_linen, **options)
    for name in ("plain", "weights"):
        yield f"nnx, dot_product_attention, {name}", partial(make_kernel, weights=name == "weights")


def to_numpy(tensor: Tensor) -> Any:
    return tensor.detach().numpy()


def to_tensor(array: Any) -> Tensor:
    return torch.from_numpy(np.array(array, dtype="float32"))


def make_nnx(
    kv_heads: int = HEADS,
    dropout_rate: float = 0.0,
    normalize_qk: bool = False,
    causal: bool = True,
    is_causal: bool = False,
    decode_is_causal: bool = False,
) -> tuple[Callable[[Tensor], Tensor], dict[str, Any]]:
    import jax
    import jax.numpy as jnp
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            sizes = {"num_heads": HEADS, "in_features": WIDTH, "num_kv_heads": kv_heads}
            options = {"dropout_rate": dropout_rate, "deterministic": True, "normalize_qk": normalize_qk}
            self.attention = nnx.MultiHeadAttention(**sizes, **options, decode=False, rngs=rngs)
            self.norm1, self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
            self.up, self.down = nnx.Linear(WIDTH, 64, rngs=rngs), nnx.Linear(64, WIDTH, rngs=rngs)

        def __call__(self, x: Any, mask: Any, decode: bool) -> Any:
            causal_argument = decode_is_causal if decode else is_causal
            x = x + self.attention(self.norm1(x), mask=mask, decode=decode, is_causal=causal_argument)
            return x + self.down(jax.nn.gelu(self.up(self.norm2(x))))

    class Model(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.embed, self.position = nnx.Embed(VOCAB, WIDTH, rngs=rngs), nnx.Embed(LENGTH, WIDTH, rngs=rngs)
            self.blocks = nnx.List([Block(rngs) for _ in range(2)])
            self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

        def __call__(self, tokens: Any, mask: Any = None, start: int = 0, decode: bool = False) -> Any:
            x = self.embed(tokens) + 3 * self.position(start + jnp.arange(tokens.shape[1]))
            masks = [] if mask is None else [nnx.make_attention_mask(jnp.ones((1, tokens.shape[1])), mask)]
            if is_causal and mask is not None:
                masks = [mask[:, None, None, :]]  # broadcastable, as documented
            if causal and not is_causal and not decode:
                masks.append(nnx.make_causal_mask(tokens))
            for block in self.blocks:
                x = block(x, nnx.combine_masks(*masks), decode)
            return self.head(x)

    model = Model(nnx.Rngs(0))
    run = nnx.jit(lambda model, tokens, mask: model(tokens, mask))
    decode = nnx.jit(lambda model, token, start: model(token, start=start, decode=True))

    def logits(tokens: Tensor) -> Tensor:
        return to_tensor(run(model, to_numpy(tokens), None))

    def logits_with_mask(tokens: Tensor, mask: Tensor) -> Tensor:
        return to_tensor(run(model, to_numpy(tokens), to_numpy(mask)))

    def logits_with_cache(tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        start = state or 0
        if start == 0:
            for block in model.blocks:
                block.attention.init_cache((len(tokens), LENGTH, WIDTH))
        steps = [decode(model, to_numpy(tokens[:, i : i + 1]), start + i) for i in range(tokens.shape[1])]
        return to_tensor(jnp.concatenate(steps, axis=1)), start + tokens.shape[1]

    arguments: dict[str, Any] = {
        "logits": logits,
        "logits_with_mask": logits_with_mask,
        "kind": "decoder" if causal else "encoder",
        "padding_side": "right",
        "vocab_size": VOCAB,
        "max_seq_len": LENGTH,
        "kv_heads": kv_heads,
        "relative_positions": False,
        "trained": True,
    }
    if causal:
        arguments["logits_with_cache"] = logits_with_cache
    return logits, arguments


def make_linen(**options: Any) -> tuple[Callable[[Tensor], Tensor], dict[str, Any]]:
    import jax
    import jax.numpy as jnp
    from flax import linen as nn

    class Model(nn.Module):
        decode: bool = False

        @nn.compact
        def __call__(self, tokens: Any, mask: Any = None, start: Any = 0) -> Any:
            x = nn.Embed(VOCAB, WIDTH)(tokens)
            x = x + 3 * nn.Embed(LENGTH, WIDTH)(start + jnp.arange(tokens.shape[1]))
            masks = [] if self.decode else [nn.make_causal_mask(tokens)]
            if mask is not None:
                masks.append(nn.make_attention_mask(jnp.ones_like(tokens), mask))
            for _ in range(2):
                attention = nn.MultiHeadDotProductAttention(HEADS, deterministic=True, decode=self.decode, **options)
                x = x + attention(nn.LayerNorm()(x), mask=nn.combine_masks(*masks))
                x = x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(64)(nn.LayerNorm()(x))))
            return nn.Dense(VOCAB)(x)

    model, cached_model = Model(), Model(decode=True)
    params = model.init(jax.random.key(0), jnp.zeros((1, 2), dtype=int))

    run = jax.jit(model.apply)
    decode = jax.jit(partial(cached_model.apply, mutable=["cache"]))

    def logits(tokens: Tensor) -> Tensor:
        return to_tensor(run(params, to_numpy(tokens)))

    def logits_with_mask(tokens: Tensor, mask: Tensor) -> Tensor:
        return to_tensor(run(params, to_numpy(tokens), to_numpy(mask)))

    def logits_with_cache(tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        if state is None:
            shape = jnp.zeros((len(tokens), LENGTH), dtype=int)
            state = (cached_model.init(jax.random.key(0), shape)["cache"], 0)
        cache, start = state
        steps = []
        for i in range(tokens.shape[1]):
            variables, token = {**params, "cache": cache}, to_numpy(tokens[:, i : i + 1])
            output, changed = decode(variables, token, start=start + i)
            steps.append(output)
            cache = changed["cache"]
        return to_tensor(jnp.concatenate(steps, axis=1)), (cache, start + tokens.shape[1])

    return logits, {
        "logits": logits,
        "logits_with_mask": logits_with_mask,
        "logits_with_cache": logits_with_cache,
        "padding_side": "right",
        "vocab_size": VOCAB,
        "max_seq_len": LENGTH,
        "relative_positions": False,
        "trained": True,
    }


def make_kernel(weights: bool) -> dict[str, Any]:
    """The attention function alone; with `module`, Flax computes the attention weights itself."""
    from flax import nnx

    module = nnx.Module() if weights else None

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        arrays = [to_numpy(x.transpose(1, 2)) for x in (q, k, v)]
        return to_tensor(nnx.dot_product_attention(*arrays, is_causal=True, module=module)).transpose(1, 2)

    return None, {"attention": attention}
