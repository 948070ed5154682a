"""Figures of position methods: sinusoidal, learned, RoPE and its scalings, ALiBi, relative bias, disentangled, none."""

import math
from typing import Any

import torch
from matplotlib.figure import Figure

import cutaway as ct
from component_figures.figure_style import (
    BLUE,
    COLORS,
    GREEN,
    ORANGE,
    TEXT_COLOR,
    FigureFn,
    decoder_config,
    diverging_colormap,
    draw_matrix,
    make_figure,
    transparent_colormap,
)
from cutaway import config as c
from cutaway.model.kernels import ProjectedPositions
from cutaway.model.masks import TokenPositions
from cutaway.model.positions import Alibi, Disentangled, RelativeBias, SinusoidalPosition
from cutaway.model.rope import Rope
from cutaway.train import objectives


def plot_sinusoidal() -> Figure:
    figure, (table_axis, product_axis) = make_figure(2)
    encoding = SinusoidalPosition(c.SinusoidalPosition(), 32)(torch.arange(48)[None])[0]
    table_axis.imshow(encoding.T, cmap=diverging_colormap(), aspect="auto", vmin=-1, vmax=1, interpolation="nearest")
    table_axis.set(xlabel="position", ylabel="dimension", title="PE(position), 32 dimensions")
    encoding_256 = SinusoidalPosition(c.SinusoidalPosition(), 256)(torch.arange(200)[None])[0]
    for start, color in ((0, BLUE), (60, ORANGE)):
        product_axis.plot(
            range(100),
            encoding_256[start] @ encoding_256[start : start + 100].T,
            color=color,
            label=f"from position {start}",
        )
    product_axis.set(xlabel="distance", ylabel="PE(a)·PE(b)", title="products depend on the distance only")
    product_axis.legend()
    product_axis.lines[1].set_linestyle((0, (2, 3)))
    return figure


def plot_learned() -> Figure:
    """Plot learned position embeddings before and after 300 training steps, and the pattern of one head.

    In the copy task, most tokens equal the token three positions earlier. The head attends to that token.
    """
    position = {"position": {"kind": "learned", "length": 24}}
    config = decoder_config(48, 2, vocab=16, attention={"position": {"kind": "none"}}, embedding=position)
    model: Any = ct.build(config, seed=0).train()
    table = model.decoder.embed.position.table.weight
    before = table.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(300):
        tokens = copy_task_tokens(32)
        objective = objectives.causal_lm(tokens)
        optimizer.zero_grad()
        (objective.loss(model).loss / objective.weights.sum()).backward()
        optimizer.step()
    with ct.trace(model.eval(), "attn.pattern", layers=[0]) as t, torch.no_grad():
        model(copy_task_tokens(64)[:, :24])
    pattern = t["blocks.0.attn.pattern"].mean(0)
    head = int(pattern.diagonal(-2, 1, 2).mean(-1).argmax())
    figure, axes = make_figure(3, height=2.4)
    for axis, rows, title in ((axes[0], before, "at initialization"), (axes[1], table.detach(), "after 300 steps")):
        normalized = rows / rows.norm(dim=-1, keepdim=True)
        draw_matrix(axis, normalized @ normalized.T, diverging_colormap(), vmin=-1, vmax=1)
        axis.set(xlabel="position", title=title)
    draw_matrix(axes[2], pattern[head], ORANGE, vmin=0, vmax=1)
    axes[2].set(xlabel="key", title=f"head {head} attends 2 back")
    axes[0].set_ylabel("position")
    return figure


def copy_task_tokens(rows: int) -> torch.Tensor:
    """Return `rows` sequences of random tokens, 80 % of which equal the token three positions earlier."""
    tokens = torch.randint(16, (rows, 25))
    for position in range(3, 25):
        tokens[:, position] = torch.where(torch.rand(rows) < 0.8, tokens[:, position - 3], tokens[:, position])
    return tokens


def plot_rope() -> Figure:
    figure, (cos_axis, product_axis) = make_figure(2)
    rope = Rope(c.Rope(), 32)
    angle = torch.arange(64).unsqueeze(-1) * rope.frequency
    cos_axis.imshow(angle.cos().T, cmap=diverging_colormap(), aspect="auto", vmin=-1, vmax=1, interpolation="nearest")
    cos_axis.set(xlabel="position", ylabel="pair", title="cos(position · frequency)")
    q, k = torch.randn(2, 1, 1, 1, 32)
    positions = torch.arange(120)[None]
    rotation = rope(TokenPositions(positions), torch.float32)
    rotated_q, rotated_k = (rotation(x.expand(1, 120, 1, 32))[0, :, 0] for x in (q, k))
    for query, color, size in ((50, BLUE, 5), (110, ORANGE, 2)):
        distances = range(0, 50)
        product_axis.plot(
            distances,
            [rotated_q[query] @ rotated_k[query - j] for j in distances],
            "o",
            ms=size,
            color=color,
            label=f"query at {query}",
        )
    product_axis.set(xlabel="distance i − j", ylabel="q·k", title="the same q and k, rotated")
    product_axis.legend(ncols=2, loc="upper center")
    product_axis.margins(y=0.22)
    return figure


def plot_rope_scalings() -> Figure:
    """Plot the RoPE frequencies of each scaling: head dimension 128, theta 500,000, 8,192 tokens extended by 4."""
    figure, (axis,) = make_figure(height=3.2)
    longrope_scaling: Any = ct.config("phi-3.5-mini").decoder.block[0].attention.position.scaling
    scalings = {
        "linear": c.LinearScaling(factor=4),
        "dynamic NTK, at 32,768": c.DynamicNTK(factor=1.0, original_length=8192),
        "YaRN": c.Yarn(factor=4, original_length=8192),
        "Llama-3": c.Llama3Scaling(factor=4),
    }
    unscaled = Rope(c.Rope(theta=5e5), 128).frequency
    wavelength = 2 * math.pi / unscaled
    for (name, scaling), color in zip(scalings.items(), COLORS, strict=False):
        rope = Rope(c.Rope(theta=5e5, scaling=scaling), 128)
        scaled = rope.select_frequencies(TokenPositions(torch.arange(32768)[None])).flatten()
        axis.plot(wavelength, scaled / unscaled, color=color, label=name)
    longrope = Rope(c.Rope(scaling=longrope_scaling), 96)
    unscaled_96 = Rope(c.Rope(), 96).frequency
    axis.plot(
        2 * math.pi / unscaled_96,
        longrope.long_frequency / unscaled_96,
        color="#cf5c5c",
        label="LongRoPE (phi-3.5-mini, long)",
    )
    axis.axvline(8192, color=TEXT_COLOR, lw=0.8, ls=":")
    axis.annotate("8,192", (8192, 0.9), (3, 0), textcoords="offset points", fontsize=8)
    axis.set(xscale="log", yscale="log", xlabel="wavelength of a pair, tokens", ylabel="frequency, scaled / unscaled")
    axis.set_yticks([1, 1 / 2, 1 / 4, 1 / 16, 1 / 64], ["1", "1/2", "1/4", "1/16", "1/64"])
    axis.minorticks_off()
    axis.set_title("frequency ratio by pair")
    axis.legend(loc="center right", bbox_to_anchor=(1, 0.36))
    return figure


def plot_alibi() -> Figure:
    figure, (matrix, lines) = make_figure(2, width_ratios=(1, 1.3))
    alibi = Alibi(c.Alibi(), 8)
    positions = torch.arange(12)[None]
    bias = alibi.dense_bias(positions, positions)[0, 1].masked_fill(
        ~torch.ones(12, 12, dtype=torch.bool).tril(), float("nan")
    )
    draw_matrix(matrix, bias, transparent_colormap(ORANGE).reversed())
    matrix.set(xlabel="key", ylabel="query", title="slope 1/4")
    matrix.set_xticks(range(0, 13, 4))
    for head in range(8):
        slope = float(alibi.slope[head])
        lines.plot([0, 32], [0, -32 * slope], color=BLUE, alpha=1 - head / 11, label=f"1/{round(1 / slope)}")
    lines.set(ylim=(-8, 0.3), xlabel="distance", ylabel="added to the score", title="the eight slopes")
    lines.legend(title="slope", loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def plot_relative_bias() -> Figure:
    figure, (axis,) = make_figure()
    distances = torch.arange(-160, 161)
    for causal, color, name in ((False, BLUE, "encoder: bidirectional"), (True, ORANGE, "decoder: causal")):
        bias = RelativeBias(c.RelativeBias(), 1, causal=causal)
        visible = distances[distances <= 0] if causal else distances
        axis.step(visible, bias.relative_position_bucket(visible), where="mid", color=color, label=name)
    axis.set(xlabel="key − query", ylabel="bucket (row of the table)", title="32 buckets, max_distance 128")
    axis.legend(loc="lower right")
    return figure


def plot_disentangled() -> Figure:
    """Plot the row by distance, and the terms of the scores of one head of a model with random weights."""
    figure, axes = make_figure(4, width_ratios=(1.5, 1, 1, 1))
    distances = torch.arange(-60, 61)
    for buckets, color in ((None, ORANGE), (16, BLUE)):
        table = Disentangled(c.Disentangled(buckets=buckets, max_distance=48), 4)
        label = "no buckets" if buckets is None else "16 buckets"
        axes[0].step(distances, table.relative_position_row(distances), where="mid", color=color, label=label)
    axes[0].set(xlabel="query − key", ylabel="row of the table", title="max_distance 48")
    axes[0].legend(loc="upper left", fontsize=8)
    generator = torch.Generator().manual_seed(0)
    length, width, span = 12, 16, 16
    q, k = (torch.randn(1, length, 1, width, generator=generator) for _ in range(2))
    q_r, k_r = (torch.randn(2 * span, 1, width, generator=generator) for _ in range(2))
    table = Disentangled(c.Disentangled(max_distance=span), 4)
    position = torch.arange(length)
    rows = table.relative_position_row(position[:, None] - position)[None, None]
    terms = {
        "content, content": torch.einsum("bthd,bshd->bhts", q, k),
        "content, position": ProjectedPositions(rows, k_r, None).scores(q, k),
        "position, content": ProjectedPositions(rows, None, q_r).scores(q, k),
    }
    limit = 8.0  # two standard deviations
    for axis, (title, term) in zip(axes[1:], terms.items(), strict=True):
        draw_matrix(axis, term[0, 0], diverging_colormap(), vmin=-limit, vmax=limit)
        axis.set(xlabel="key", title=title)
        axis.set_xticks(range(0, 13, 4))
    axes[1].set(ylabel="query")
    return figure


def plot_no_positions() -> Figure:
    """Plot by how much a token's logits change when the tokens before it (in an encoder, around it) are permuted."""
    tokens = torch.randint(4, 256, (1, 24))
    order = torch.cat((torch.randperm(22), torch.tensor([22, 23])))
    changes = {}
    for form in ("encoder", "decoder"):
        for kind in ("none", "rope", "alibi"):
            block = {"attention": {"heads": 4, "position": {"kind": kind}}}
            config = {"form": form, "vocab_size": 256, "d_model": 64, form: {"layers": 2, "block": block}}
            model = ct.build(config, seed=0)
            with torch.no_grad():
                for weight in model.parameters():
                    weight.mul_(1 if weight.ndim < 2 else 4)
                difference = model(tokens)[0, -1] - model(tokens[:, order])[0, -1]
            changes[form, kind] = float(difference.abs().max())
    figure, (axis,) = make_figure(height=2.6)
    for offset, (form, color) in zip((0.2, -0.2), (("encoder", BLUE), ("decoder", GREEN)), strict=True):
        values = [max(changes[form, kind], 1e-8) for kind in ("none", "rope", "alibi")]
        axis.barh([i + offset for i in range(3)], values, 0.36, color=color, label=form)
        for index, value in enumerate(values):
            axis.annotate(
                f"{value:.2g}", (value, index + offset), (4, 0), textcoords="offset points", va="center", fontsize=8
            )
    axis.set_yticks(range(3), ["no positions", "RoPE", "ALiBi"])
    axis.set(xscale="log", xlim=(1e-8, 20), xlabel="largest change of the last token's logits")
    axis.set_title("22 earlier tokens are permuted")
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


FIGURES: dict[str, FigureFn] = {
    "sinusoidal": plot_sinusoidal,
    "learned": plot_learned,
    "rope": plot_rope,
    "rope-scaling": plot_rope_scalings,
    "alibi": plot_alibi,
    "relative-bias": plot_relative_bias,
    "disentangled": plot_disentangled,
    "no-positions": plot_no_positions,
}
