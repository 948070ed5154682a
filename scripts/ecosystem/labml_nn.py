"""labml-nn: annotated layers for texts of shape (T, B); the models here add an embedding and an output layer."""

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

NAME = "labml-nn"
HOMEPAGE = "https://github.com/labmlai/annotated_deep_learning_paper_implementations"
REQUIREMENTS = ("labml==0.4.168", "einops==0.8.2")  # later versions lack `tracker.debug`, which the layers call
WITHOUT_DEPENDENCIES = ("labml-nn==0.5.1",)  # torchtext, which the layers do not use, has no release for this PyTorch
LENGTH, VOCAB, WIDTH, HEADS = 96, 64, 32, 4
Options = dict[str, Any]
ATTENTION: dict[str, tuple[str, str, Options]] = {
    "attention": ("mha", "MultiHeadAttention", {}),
    "ALiBi": ("alibi", "AlibiMultiHeadAttention", {}),
    "RoPE in half of the head": ("rope", "RotaryPEMultiHeadAttention", {}),
    "RoPE": ("rope", "RotaryPEMultiHeadAttention", {"rope_percentage": 1.0}),
    "RoPE of keys and values": ("rope.value_pe", "RotaryValuePEMultiHeadAttention", {}),
    "convolutions of q, k and v (Primer)": ("primer_ez", "MultiDConvHeadAttention", {}),
    "relative positions (Transformer-XL)": ("xl.relative_mha", "RelativeMultiHeadAttention", {}),
}


def configurations() -> Iterator[tuple[str, Callable[[], Any]]]:
    for name in ATTENTION:
        yield f"decoder, {name}", partial(make_layers, name)
    yield "encoder, attention", partial(make_layers, "attention", causal=False)
    yield "encoder, relative positions", partial(make_layers, "relative positions (Transformer-XL)", causal=False)
    yield "Transformer-XL, memories", make_memories
    yield "GPT-NeoX, cache", make_neox
    yield "GPT-NeoX, bf16", partial(make_neox, torch.bfloat16)
    yield "hourglass, shortened by 2", partial(make_function, "hour_glass", (2,))
    yield "hourglass, shortened by 3 and 2", partial(make_function, "hour_glass", (3, 2))
    yield "feedback", partial(make_function, "feedback", ())
    yield "fast weights", partial(make_function, "fast_weights", ())
    yield "attention-free (AFT)", make_attention_free
    yield "gated MLP", make_gated_mlp
    yield "switch feed-forward", make_switch


def load(name: str) -> Any:
    return import_module(f"labml_nn.transformers.{name}")


class LanguageModel(nn.Module):
    """Embedding, body and output layer; texts are (B, T) outside and (T, B) inside."""

    def __init__(self, body: nn.Module, positions: bool) -> None:
        super().__init__()
        models = load("models")
        embedding = models.EmbeddingsWithLearnedPositionalEncoding if positions else None
        self.embed = embedding(WIDTH, VOCAB, LENGTH) if embedding else nn.Embedding(VOCAB, WIDTH)
        self.body, self.generator = body, models.Generator(VOCAB, WIDTH)

    def forward(self, tokens: Tensor, *arguments: Any, **options: Any) -> Tensor:
        return self.generator(self.body(self.embed(tokens.t()), *arguments, **options)).transpose(0, 1)


def build_attention(name: str) -> nn.Module:
    module, class_name, options = ATTENTION[name]
    attention = getattr(load(module), class_name)(HEADS, WIDTH, dropout_prob=0.1, **options)
    draw_positions(attention)
    return attention


def draw_positions(module: nn.Module) -> None:
    """Relative positions and biases are initially zero, so no check could see them."""
    for name, parameter in module.named_parameters():
        if "pos_" in name:
            nn.init.normal_(parameter, std=0.3)


def build_feed_forward() -> nn.Module:
    return load("feed_forward").FeedForward(WIDTH, 2 * WIDTH)


def make_layers(name: str, causal: bool = True) -> tuple[nn.Module, Options]:
    models, subsequent_mask = load("models"), load("utils").subsequent_mask
    positions = name in ("attention", "convolutions of q, k and v (Primer)")

    def build() -> nn.Module:
        parts = {"self_attn": build_attention(name), "feed_forward": build_feed_forward()}
        layer = models.TransformerLayer(d_model=WIDTH, src_attn=None, dropout_prob=0.1, **parts)
        return LanguageModel(models.Encoder(layer, 2), positions).eval()

    def attention_mask(length: int) -> Tensor:
        return subsequent_mask(length) if causal else torch.ones(length, length, 1, dtype=torch.bool)

    model = build()

    def logits_with_mask(tokens: Tensor, mask: Tensor) -> Tensor:
        return model(tokens, attention_mask(tokens.shape[1]) & mask.t()[None])

    arguments = describe(build) | {
        "kind": "decoder" if causal else "encoder",
        "logits": lambda tokens: model(tokens, attention_mask(tokens.shape[1])),
        "logits_with_mask": logits_with_mask,
        "positions_skip_padding": False,
        "padding_side": "right",
        "relative_positions": not positions,
    }
    if name == "ALiBi":  # takes the same mask for all rows
        del arguments["logits_with_mask"]
    return model, arguments


def describe(build: Callable[[], nn.Module]) -> Options:
    return {"build_module": build, "vocab_size": VOCAB, "max_seq_len": LENGTH, "trained": False}


def make_memories() -> tuple[nn.Module, Options]:
    """Memories of all earlier tokens, so that the logits equal those of one forward pass."""
    layers, subsequent_mask = load("xl"), load("utils").subsequent_mask

    def build() -> nn.Module:
        parts = {
            "self_attn": build_attention("relative positions (Transformer-XL)"),
            "feed_forward": build_feed_forward(),
        }
        layer = layers.TransformerXLLayer(d_model=WIDTH, dropout_prob=0.1, **parts)
        model = LanguageModel(layers.TransformerXL(layer, 2), positions=False).eval()
        draw_positions(model)
        return model

    model = build()

    def logits_with_cache(tokens: Tensor, memories: Any) -> tuple[Tensor, Any]:
        memories = memories or []
        seen, length = (len(memories[0]) if memories else 0), tokens.shape[1]
        mask = torch.cat([torch.ones(length, seen, 1, dtype=torch.bool), subsequent_mask(length)], dim=1)
        out, new = model.body(model.embed(tokens.t()), memories, mask)
        kept = [torch.cat(pair) for pair in zip(memories, new, strict=True)] if memories else new
        return model.generator(out).transpose(0, 1), kept

    arguments = {
        "logits": lambda tokens: logits_with_cache(tokens, None)[0],
        "logits_with_cache": logits_with_cache,
        "relative_positions": True,
    }
    return model, describe(build) | arguments


def make_neox(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Options]:
    from labml_nn.neox import model as neox
    from labml_nn.neox.utils.cache import get_cache

    def build() -> nn.Module:
        layers = [neox.TransformerLayer(WIDTH, HEADS) for _ in range(2)]
        ends = (neox.Embedding(VOCAB, WIDTH), neox.FinalNorm(WIDTH), neox.ReadoutLayer(WIDTH, VOCAB))
        for layer in layers:
            layer.attention.rope = neox.RoPE(WIDTH // HEADS)  # the default is a quarter of 8 dimensions
        return nn.Sequential(ends[0], *layers, *ends[1:]).to(dtype).eval()

    model, cache = build(), get_cache()

    def logits(tokens: Tensor) -> Tensor:
        cache.clear_all()
        return model(tokens)

    def logits_with_cache(tokens: Tensor, step: Any) -> tuple[Tensor, Any]:
        if step is None:
            cache.clear_all()
        following = (step or 0) + 1
        cache.set("use_cache", True)
        cache.set("state_ids", (step, following))
        try:
            return model(tokens), following
        finally:
            cache.set("use_cache", False)

    arguments = {"logits": logits, "relative_positions": True}
    if dtype == torch.float32:
        arguments["logits_with_cache"] = logits_with_cache
    return model, describe(build) | arguments


def make_function(module: str, factors: tuple[int, ...]) -> tuple[nn.Module, Options]:
    layers = load(module)

    def build() -> nn.Module:
        if module == "hour_glass":
            body = layers.HourGlass(HEADS, WIDTH, 0.1, 2 * WIDTH, list(factors))
        elif module == "feedback":
            attention = layers.FeedbackAttention(HEADS, WIDTH, 0.1)
            options = {"d_model": WIDTH, "feed_forward": build_feed_forward(), "dropout_prob": 0.1}
            body = layers.FeedbackTransformer(layers.FeedbackTransformerLayer(attn=attention, **options), 2)
            draw_positions(body)
        else:
            attention = layers.FastWeightsAttention(HEADS, WIDTH, 0.1, layers.DPFP())
            options = {"d_model": WIDTH, "feed_forward": build_feed_forward(), "dropout_prob": 0.1}
            layer = layers.FastWeightsAttentionTransformerLayer(attn=attention, **options)
            body = layers.FastWeightsAttentionTransformer(layer, 2)
        return LanguageModel(body, positions=module != "feedback").eval()

    model = build()
    return model, describe(build) | {"logits": lambda tokens: model(tokens)}


def make_attention_free() -> tuple[nn.Module, Options]:
    models, aft, subsequent_mask = load("models"), load("aft"), load("utils").subsequent_mask

    def build() -> nn.Module:
        attention = aft.AFTLocal(WIDTH, LENGTH, 8)
        nn.init.normal_(attention.pos_bias)
        parts = {"self_attn": attention, "feed_forward": build_feed_forward()}
        layer = models.TransformerLayer(d_model=WIDTH, src_attn=None, dropout_prob=0.1, **parts)
        return LanguageModel(models.Encoder(layer, 2), positions=True).eval()

    model = build()
    return model, describe(build) | {"logits": lambda tokens: model(tokens, subsequent_mask(tokens.shape[1]))}


def make_gated_mlp() -> tuple[nn.Module, Options]:
    models, gmlp, subsequent_mask = load("models"), load("gmlp"), load("utils").subsequent_mask

    def build() -> nn.Module:
        return LanguageModel(models.Encoder(gmlp.GMLPBlock(WIDTH, 2 * WIDTH, LENGTH), 2), positions=True).eval()

    model = build()
    return model, describe(build) | {"logits": lambda tokens: model(tokens, subsequent_mask(tokens.shape[1]))}


def make_switch() -> tuple[nn.Module, Options]:
    switch, subsequent_mask = load("switch"), load("utils").subsequent_mask

    def build() -> nn.Module:
        options = {"capacity_factor": 1.25, "drop_tokens": False, "is_scale_prob": True, "n_experts": 4}
        experts = switch.SwitchFeedForward(**options, expert=build_feed_forward(), d_model=WIDTH)
        attention = build_attention("RoPE")
        layer = switch.SwitchTransformerLayer(d_model=WIDTH, attn=attention, feed_forward=experts, dropout_prob=0.1)
        return LanguageModel(switch.SwitchTransformer(layer, 2), positions=False).eval()

    model = build()

    def logits(tokens: Tensor) -> Tensor:
        out = model.body(model.embed(tokens.t()), subsequent_mask(tokens.shape[1]))[0]
        return model.generator(out).transpose(0, 1)

    return model, describe(build) | {"logits": logits, "relative_positions": True}
