"""Embedding, FFN, norms, blocks and the stream between them, initialization, activation checkpointing."""

from typing import Any

import torch
from matplotlib.figure import Figure

import cutaway as ct
from component_figures.figure_style import (
    BLUE,
    COLORS,
    GREEN,
    ORANGE,
    PURPLE,
    TEXT_COLOR,
    FigureFn,
    decoder_config,
    draw_bars,
    draw_matrix,
    label_cells,
    make_figure,
)
from cutaway import config as c
from cutaway.lens.analysis import gradient_by_depth, resid_norms, update_norm_ratios
from cutaway.model.activations import ACTIVATIONS
from cutaway.model.norms import build_norm

PROMPT = "for name in sorted(os."
PLACEMENTS = ("pre", "post", "sandwich", "output", "parallel")


def plot_embedding() -> Figure:
    """Lengths of token vectors as the 2017 Transformer draws them, before and after its scale; of a position."""
    config = ct.config("transformer-base")
    model: Any = ct.build(
        config.replace(
            vocab_size=4000, encoder=config.encoder.replace(layers=1), decoder=config.decoder.replace(layers=1)
        ),
        seed=0,
    )
    embed = model.encoder.embed
    lengths = embed.token.weight.detach().norm(dim=-1)
    place = embed.position(torch.arange(1)[None])[0, 0].norm().item()
    figure, (axis,) = make_figure(height=2.6)
    axis.hist(lengths, 40, color=ORANGE, label="E[token]")
    axis.hist(lengths * embed.scale, 40, color=BLUE, label=f"E[token] · sqrt({config.d_model})")
    axis.axvline(place, color=GREEN, label=f"PE(position): {place:g}")
    axis.set(xlabel="length of the vector", ylabel="tokens", xscale="log", title="4,000 fresh token vectors, d = 512")
    axis.set_xticks([1, 4, 16, 23], ["1", "4", "16", "22.6"])
    axis.minorticks_off()
    axis.legend(loc="upper center")
    return figure


def plot_ffn() -> Figure:
    figure, (axis,) = make_figure()
    x = torch.linspace(-4, 3, 141)
    for name, colour in zip(("relu", "gelu", "silu", "relu2"), COLORS, strict=False):
        axis.plot(x, ACTIVATIONS[name](x), color=colour, label=name)
    axis.axhline(0, color=TEXT_COLOR, lw=0.5)
    axis.set(ylim=(-0.6, 4), xlabel="up(x)", ylabel="hidden", title="what stands between up and down")
    axis.legend()
    return figure


def plot_gated_ffn() -> Figure:
    figure, (curve, field) = make_figure(2, width_ratios=(1.2, 1))
    gate = torch.linspace(-5, 4, 121)
    for up, colour in zip((2.0, 1.0, 0.5, -1.0), COLORS, strict=False):
        curve.plot(gate, ACTIVATIONS["silu"](gate) * up, color=colour, label=f"up = {up:g}")
    curve.set(xlabel="gate(x)", ylabel="hidden", title="silu(gate) · up", ylim=(-4, 6))
    curve.legend()
    widths = {"MLP, 4d": c.Mlp(bias=False), "gated, 4d": c.Gated(hidden=4 * 768), "gated, 8d/3": c.Gated()}
    values = [
        ct.size(decoder_config(768, 1, ffn=each.model_dump())).parameters.unique_layers[0].ffn / 1e6
        for each in widths.values()
    ]
    draw_bars(field, list(widths), values, unit="million parameters", format_spec="{:.2f}")
    field.set_title("d = 768, one layer")
    field.margins(x=0.3)
    return figure


def plot_mixture_of_experts() -> Figure:
    """To which of eight experts each token of a text goes, and with what weight."""
    moe = {"kind": "moe", "experts": 8, "router": {"top_k": 2}, "expert": {"hidden": 64}}
    model: Any = ct.build(decoder_config(64, 2, ffn=moe), seed=3)
    tokens = torch.tensor([list(b"only attention mixes tokens")])
    figure, (routed, load) = make_figure(2, width_ratios=(1.9, 1), height=2.7)
    found = torch.zeros(8, tokens.shape[1])

    def note(module: Any, given: Any, out: Any) -> None:
        weights, chosen = out
        found.scatter_(0, chosen.T, weights.T)

    handle = model.decoder.blocks[1].ffn.f.router.register_forward_hook(note)
    with torch.no_grad():
        model(tokens)
    handle.remove()
    draw_matrix(routed, found, PURPLE, vmin=0, vmax=1)
    label_cells(routed, [chr(token) for token in tokens[0]], [str(i) for i in range(8)])
    routed.set(ylabel="expert", title="weight of each token's two experts")
    load.bar(range(8), (found > 0).sum(1), color=PURPLE)
    load.axhline(2 * tokens.shape[1] / 8, color=TEXT_COLOR, lw=1, ls=":")
    load.set(xlabel="expert", ylabel="tokens", title="who is busy")
    load.set_xticks(range(8))
    return figure


def plot_norm(which: Any, name: str) -> Figure:
    figure, axes = make_figure(3, height=2.4)
    made = build_norm(which, 4)
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    for axis, values, title in (
        (axes[0], x, "x"),
        (axes[1], made(x).detach(), f"{name}(x)"),
        (axes[2], made(10 + x).detach(), f"{name}(10 + x)"),
    ):
        axis.bar(range(4), values, color=BLUE if axis is axes[0] else ORANGE)
        for place, value in enumerate(values.tolist()):
            axis.annotate(
                f"{value:.3g}",
                (place, value),
                (0, 2 if value >= 0 else -10),
                textcoords="offset points",
                ha="center",
                fontsize=8,
            )
        axis.axhline(0, color=TEXT_COLOR, lw=0.6)
        axis.set_xticks([])
        axis.set_title(title)
        axis.margins(y=0.2)
    return figure


def plot_norm_placement() -> Figure:
    """Fresh models of 24 blocks with the 2017 Transformer's norm, FFN and weights: their stream, and its gradient."""
    figure, (length, slope) = make_figure(2, height=3.0)
    tokens = torch.randint(256, (1, 32))
    like_2017 = {"init": {"kind": "xavier"}, "norm": {"kind": "layernorm"}}
    for kind, colour in zip(PLACEMENTS, COLORS, strict=False):
        sizes, found = [], []
        for seed in range(3):
            how: Any = {**like_2017, "placement": {"kind": kind}, "ffn": {"kind": "mlp", "activation": "relu"}}
            model = ct.build(decoder_config(64, 24, **how), seed=seed)
            gradient = gradient_by_depth(model, tokens).values[1:]
            found.append((gradient / gradient[-1]).log())
            sizes.append(resid_norms(model, tokens).values[1:].mean(-1).log())
        length.plot(range(24), torch.stack(sizes).mean(0).exp(), color=colour, label=kind)
        slope.plot(range(24), torch.stack(found).mean(0).exp(), color=colour)
    length.set(yscale="log", xlabel="after block", title="length of the stream")
    slope.set(yscale="log", xlabel="after block", title="gradient, share of the last block's")
    figure.legend(loc="outside lower center", ncols=5)
    return figure


def plot_residual_stream() -> Figure:
    checkpoint = ct.load("tiny-python", dtype=torch.float32)
    norms, added = resid_norms(checkpoint, PROMPT), update_norm_ratios(checkpoint, PROMPT)
    figure, (length, share) = make_figure(2)
    length.plot(norms.values.mean(-1), "o-", color=BLUE)
    length.set_xticks(range(len(norms.labels[0])), norms.labels[0], rotation=90, fontsize=7)
    length.set(ylabel="length, mean over tokens", title="the stream")
    values = added.values.mean(-1)
    share.bar(range(len(values)), values, color=[GREEN, ORANGE] * (len(values) // 2))
    share.set_xticks(range(len(values)), added.labels[0], rotation=90, fontsize=7)
    share.set(ylabel="share of the stream it is added to", title="what each sublayer adds")
    return figure


def plot_head() -> Figure:
    checkpoint = ct.load("tiny-python", dtype=torch.float32)
    words: Any = checkpoint.tokenizer
    with torch.no_grad():
        logits = checkpoint.model(torch.tensor([words.encode(PROMPT)]))[0, -1]
    best = logits.topk(8)
    figure, axes = make_figure(2, sharey=True, height=2.7)
    names = [repr(words.decode([token])) for token in best.indices.tolist()]
    chance = logits.softmax(-1)[best.indices]
    for axis, values, unit in ((axes[0], best.values, "logit"), (axes[1], chance, "probability")):
        axis.barh(range(8), values.tolist(), color=BLUE if unit == "logit" else ORANGE)
        axis.set_xlabel(unit)
        for place, value in enumerate(values.tolist()):
            axis.annotate(f"{value:.2f}", (value, place), (3, 0), textcoords="offset points", va="center", fontsize=8)
        axis.margins(x=0.18)
    axes[0].set_yticks(range(8), names)
    axes[0].invert_yaxis()
    figure.suptitle(f"after {PROMPT!r}, the eight likeliest of {len(logits):,}", fontsize=9.5)
    return figure


def plot_initialization() -> Figure:
    """Spread of the stream by depth: 24 blocks of fresh weights."""
    figure, (axis,) = make_figure(height=3.0)
    tokens = torch.randint(256, (1, 64))
    for name, init in (
        ("normal, 0.02, scaled by depth", {"kind": "normal"}),
        ("normal, 0.02, not scaled", {"kind": "normal", "depth_scaled": False}),
        ("small", {"kind": "small"}),
        ("xavier", {"kind": "xavier"}),
    ):
        model = ct.build(decoder_config(256, 24, 4, init=init, ffn={"kind": "mlp"}), seed=0)
        with ct.trace(model, "resid_post") as t, torch.no_grad():
            model(tokens)
        spread = [t[f"blocks.{i}.resid_post"].std().item() for i in range(24)]
        axis.plot(spread, label=name, color=COLORS[len(axis.lines)])
    axis.set(yscale="log", ylim=(0.01, 60), xlabel="after block", ylabel="standard deviation")
    axis.set_title("the stream of fresh models, d = 256")
    axis.legend(ncols=2, loc="upper left")
    return figure


def plot_activation_checkpointing() -> Figure:
    figure, (kept, work) = make_figure(2)
    modes = ("none", "selective", "full")
    sizes = [
        ct.size("gpt2", mode="train", batch_size=8, context=1024, dtype="bf16", activation_checkpointing=mode)
        for mode in modes
    ]
    held = [size.memory.total_bytes / 2**30 for size in sizes]
    draw_bars(kept, list(modes), held, unit="GiB at the fullest moment", format_spec="{:.1f}")
    draw_bars(work, list(modes), [size.flops.total / 1e12 for size in sizes], unit="TFLOP a step", format_spec="{:.2f}")
    figure.suptitle("GPT-2 124M, 8 texts of 1,024 tokens, bf16", fontsize=9.5)
    return figure


FIGURES: dict[str, FigureFn] = {
    "embedding": plot_embedding,
    "ffn": plot_ffn,
    "gated-ffn": plot_gated_ffn,
    "mixture-of-experts": plot_mixture_of_experts,
    "layernorm": lambda: plot_norm(c.LayerNorm(), "LayerNorm"),
    "rmsnorm": lambda: plot_norm(c.RMSNorm(), "RMSNorm"),
    "norm-placement": plot_norm_placement,
    "residual-stream": plot_residual_stream,
    "head": plot_head,
    "initialization": plot_initialization,
    "activation-checkpointing": plot_activation_checkpointing,
}
