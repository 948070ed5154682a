"""Figures: embedding, FFN, MoE, norms, placement, residual stream, heads, initialization, activation checkpointing."""

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
from cutaway.model.head import pool
from cutaway.model.norms import build_norm

PROMPT = "The cat sat on the"
PLACEMENTS = ("pre", "post", "sandwich", "output", "parallel")


def plot_embedding() -> Figure:
    """Plot the norms of untrained token embeddings of the 2017 Transformer, unscaled and scaled, and of a position."""
    config = ct.config("transformer-base")
    model: Any = ct.build(
        config.replace(
            vocab_size=4000, encoder=config.encoder.replace(layers=1), decoder=config.decoder.replace(layers=1)
        ),
        seed=0,
    )
    embed = model.encoder.embed
    norms = embed.token.weight.detach().norm(dim=-1)
    position_norm = embed.position(torch.arange(1)[None])[0, 0].norm().item()
    figure, (axis,) = make_figure(height=2.6)
    axis.hist(norms, 40, color=ORANGE, label="E[token]")
    axis.hist(norms * embed.scale, 40, color=BLUE, label=f"E[token] · sqrt({config.d_model})")
    axis.axvline(position_norm, color=GREEN, label=f"PE(position): {position_norm:g}")
    axis.set(
        xlabel="norm of the vector",
        ylabel="tokens",
        xscale="log",
        title="4,000 token embeddings at initialization, d = 512",
    )
    axis.set_xticks([1, 4, 16, 23], ["1", "4", "16", "22.6"])
    axis.minorticks_off()
    axis.legend(loc="upper center")
    return figure


def plot_ffn() -> Figure:
    figure, (axis,) = make_figure()
    x = torch.linspace(-4, 3, 141)
    for name, color in zip(("relu", "gelu", "silu", "relu2"), COLORS, strict=False):
        axis.plot(x, ACTIVATIONS[name](x), color=color, label=name)
    axis.axhline(0, color=TEXT_COLOR, lw=0.5)
    axis.set(ylim=(-0.6, 4), xlabel="up(x)", ylabel="hidden", title="activation function")
    axis.legend()
    return figure


def plot_gated_ffn() -> Figure:
    figure, (curve, count_axis) = make_figure(2, width_ratios=(1.2, 1))
    gate = torch.linspace(-5, 4, 121)
    for up, color in zip((2.0, 1.0, 0.5, -1.0), COLORS, strict=False):
        curve.plot(gate, ACTIVATIONS["silu"](gate) * up, color=color, label=f"up = {up:g}")
    curve.set(xlabel="gate(x)", ylabel="hidden", title="silu(gate) · up", ylim=(-4, 6))
    curve.legend()
    ffns = {"MLP, 4d": c.Mlp(bias=False), "gated, 4d": c.Gated(hidden=4 * 768), "gated, 8d/3": c.Gated()}
    values = [
        ct.size(decoder_config(768, 1, ffn=ffn.model_dump())).parameters.unique_layers[0].ffn / 1e6
        for ffn in ffns.values()
    ]
    draw_bars(count_axis, list(ffns), values, unit="million parameters", format_spec="{:.2f}")
    count_axis.set_title("d = 768, one layer")
    count_axis.margins(x=0.3)
    return figure


def plot_mixture_of_experts() -> Figure:
    """Plot the router weights of each token, which is routed to two of eight experts."""
    moe = {"kind": "moe", "experts": 8, "router": {"top_k": 2}, "expert": {"hidden": 64}}
    model: Any = ct.build(decoder_config(64, 2, ffn=moe), seed=3)
    tokens = torch.tensor([list(b"only attention mixes tokens")])
    figure, (routed, load) = make_figure(2, width_ratios=(1.9, 1), height=2.7)
    weights_by_expert = torch.zeros(8, tokens.shape[1])

    def record(module: Any, inputs: Any, out: Any) -> None:
        weights, selected = out
        weights_by_expert.scatter_(0, selected.T, weights.T)

    handle = model.decoder.blocks[1].ffn.f.router.register_forward_hook(record)
    with torch.no_grad():
        model(tokens)
    handle.remove()
    draw_matrix(routed, weights_by_expert, PURPLE, vmin=0, vmax=1)
    label_cells(routed, [chr(token) for token in tokens[0]], [str(i) for i in range(8)])
    routed.set(ylabel="expert", title="router weights (top 2)")
    load.bar(range(8), (weights_by_expert > 0).sum(1), color=PURPLE)
    load.axhline(2 * tokens.shape[1] / 8, color=TEXT_COLOR, lw=1, ls=":")
    load.set(xlabel="expert", ylabel="tokens", title="load")
    load.set_xticks(range(8))
    return figure


def plot_norm(config: Any, name: str) -> Figure:
    figure, axes = make_figure(3, height=2.4)
    norm = build_norm(config, 4)
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    for axis, values, title in (
        (axes[0], x, "x"),
        (axes[1], norm(x).detach(), f"{name}(x)"),
        (axes[2], norm(10 + x).detach(), f"{name}(10 + x)"),
    ):
        axis.bar(range(4), values, color=BLUE if axis is axes[0] else ORANGE)
        for index, value in enumerate(values.tolist()):
            axis.annotate(
                f"{value:.3g}",
                (index, value),
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
    """Plot the norm of the residual stream and of its gradient by depth, for several norm placements.

    The models are untrained. They have 24 blocks, and the norm, FFN and initialization of the 2017 Transformer.
    """
    figure, (norm_axis, gradient_axis) = make_figure(2, height=3.0)
    tokens = torch.randint(256, (1, 32))
    fields_2017 = {"init": {"kind": "xavier"}, "norm": {"kind": "layernorm"}}
    for kind, color in zip(PLACEMENTS, COLORS, strict=False):
        norms, gradients = [], []
        for seed in range(3):
            fields: Any = {**fields_2017, "placement": {"kind": kind}, "ffn": {"kind": "mlp", "activation": "relu"}}
            model = ct.build(decoder_config(64, 24, **fields), seed=seed)
            gradient = gradient_by_depth(model, tokens).values[1:]
            gradients.append((gradient / gradient[-1]).log())
            norms.append(resid_norms(model, tokens).values[1:].mean(-1).log())
        norm_axis.plot(range(24), torch.stack(norms).mean(0).exp(), color=color, label=kind)
        gradient_axis.plot(range(24), torch.stack(gradients).mean(0).exp(), color=color)
    norm_axis.set(yscale="log", xlabel="after block", title="residual stream norm")
    gradient_axis.set(yscale="log", xlabel="after block", title="gradient norm relative to the last block")
    figure.legend(loc="outside lower center", ncols=5)
    return figure


def plot_residual_stream() -> Figure:
    checkpoint = ct.load("tiny-english", dtype=torch.float32)
    norms, added = resid_norms(checkpoint, PROMPT), update_norm_ratios(checkpoint, PROMPT)
    figure, (norm_axis, update_axis) = make_figure(2)
    norm_axis.plot(norms.values.mean(-1), "o-", color=BLUE)
    norm_axis.set_xticks(range(len(norms.labels[0])), norms.labels[0], rotation=90, fontsize=7)
    norm_axis.set(ylabel="norm, mean over tokens", title="residual stream")
    values = added.values.mean(-1)
    update_axis.bar(range(len(values)), values, color=[GREEN, ORANGE] * (len(values) // 2))
    update_axis.set_xticks(range(len(values)), added.labels[0], rotation=90, fontsize=7)
    update_axis.set(ylabel="norm relative to the residual stream", title="sublayer outputs")
    return figure


def plot_head() -> Figure:
    checkpoint = ct.load("tiny-english", dtype=torch.float32)
    tokenizer: Any = checkpoint.tokenizer
    with torch.no_grad():
        logits = checkpoint.model(torch.tensor([tokenizer.encode(PROMPT)]))[0, -1]
    best = logits.topk(8)
    figure, axes = make_figure(2, sharey=True, height=2.7)
    names = [repr(tokenizer.decode([token])) for token in best.indices.tolist()]
    probs = logits.softmax(-1)[best.indices]
    for axis, values, unit, digits in ((axes[0], best.values, "logit", 2), (axes[1], probs, "probability", 3)):
        axis.barh(range(8), values.tolist(), color=BLUE if unit == "logit" else ORANGE)
        axis.set_xlabel(unit)
        axis.locator_params("x", nbins=4)
        for index, value in enumerate(values.tolist()):
            axis.annotate(
                f"{value:.{digits}f}", (value, index), (3, 0), textcoords="offset points", va="center", fontsize=8
            )
        axis.margins(x=0.18)
    axes[0].set_yticks(range(8), names)
    axes[0].invert_yaxis()
    figure.suptitle(f"after {PROMPT!r}, the 8 most likely of {len(logits):,}", fontsize=9.5)
    return figure


def plot_task_heads() -> Figure:
    """Plot how much each token contributes to the pooled vector: the derivative with respect to its hidden state."""
    mask = torch.ones(3, 8, dtype=torch.bool)
    mask[1, 5:] = mask[2, :3] = False
    figure, axes = make_figure(4, sharey=True, height=2.0)
    for axis, pooling, color in zip(axes, ("first", "last", "mean", "max"), COLORS, strict=False):
        x = torch.randn(3, 8, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        pool(x, mask, pooling).sum().backward()
        assert x.grad is not None
        share = x.grad.mean(-1)
        draw_matrix(axis, torch.where(mask, share, torch.nan), color, vmin=0, vmax=1)
        axis.set_title(pooling)
        label_cells(axis, [str(i) for i in range(8)], ["no padding", "on the right", "on the left"])
    figure.suptitle("share of each token in the pooled vector", fontsize=9.5)
    return figure


def plot_initialization() -> Figure:
    """Plot the standard deviation of the residual stream by depth in untrained models of 24 blocks."""
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
        std_by_layer = [t[f"blocks.{i}.resid_post"].std().item() for i in range(24)]
        axis.plot(std_by_layer, label=name, color=COLORS[len(axis.lines)])
    axis.set(yscale="log", ylim=(0.01, 60), xlabel="after block", ylabel="standard deviation")
    axis.set_title("residual stream at initialization, d = 256")
    axis.legend(ncols=2, loc="upper left")
    return figure


def plot_activation_checkpointing() -> Figure:
    figure, (memory_axis, flops_axis) = make_figure(2)
    modes = ("none", "selective", "full")
    sizes = [
        ct.size("gpt2", mode="train", batch_size=8, context=1024, dtype="bf16", activation_checkpointing=mode)
        for mode in modes
    ]
    memory_gib = [size.memory.total_bytes / 2**30 for size in sizes]
    draw_bars(memory_axis, list(modes), memory_gib, unit="peak memory (GiB)", format_spec="{:.1f}")
    draw_bars(
        flops_axis,
        list(modes),
        [size.flops.total / 1e12 for size in sizes],
        unit="TFLOP per step",
        format_spec="{:.2f}",
    )
    figure.suptitle("GPT-2 124M, 8 sequences of 1,024 tokens, bf16", fontsize=9.5)
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
    "task-heads": plot_task_heads,
    "initialization": plot_initialization,
    "activation-checkpointing": plot_activation_checkpointing,
}
