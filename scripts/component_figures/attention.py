"""Figures: multi-head, GQA, MLA, masks, sliding windows, sinks, QK-norm, softcap, biases, cross-attention."""

from typing import Any

import torch
from matplotlib.figure import Figure

import cutaway as ct
from component_figures.figure_style import (
    BLUE,
    COLORS,
    GREEN,
    ORANGE,
    FigureFn,
    decoder_config,
    draw_bars,
    draw_matrix,
    hide_axes,
    label_cells,
    make_figure,
)
from cutaway.model.kernels import Softmax
from cutaway.model.masks import cross_attention_mask, number_tokens, self_attention_mask

CPU = torch.device("cpu")
PROMPT = "Tom had a red ball. He gave the ball to Anna."


def plot_multi_head() -> Figure:
    """Plot the attention patterns of all eight heads of one block of the pretrained model, on two sentences."""
    checkpoint = ct.load("tiny-english", dtype=torch.float32)
    tokenizer: Any = checkpoint.tokenizer
    tokens = tokenizer.encode(PROMPT)
    with ct.trace(checkpoint.model, "attn.pattern", layers=[2]) as t:
        checkpoint.model(torch.tensor([tokens]))
    pattern = t["blocks.2.attn.pattern"][0]
    figure = Figure(figsize=(6.4, 3.5), layout="constrained")
    axes = figure.subplots(2, 4)
    names = [tokenizer.decode([token]) for token in tokens]
    for head, axis in enumerate(axes.flat):
        draw_matrix(axis, pattern[head], COLORS[head // 4], vmin=0, vmax=1)
        hide_axes(axis, title=f"head {head}")
        if head == 0:
            axis.set_yticks([i + 0.5 for i in range(len(names))], names, fontsize=5.5)
            axis.tick_params(length=0)
    figure.supylabel("query", fontsize=8.5)
    figure.supxlabel("key", fontsize=8.5)
    return figure


def plot_grouped_query() -> Figure:
    figure, (lines, cost) = make_figure(2, width_ratios=(1.25, 1))
    for column, kv in enumerate((8, 2, 1)):
        keys = [column * 10 + 3.5 + (i - (kv - 1) / 2) * (8 / kv) * 0.95 for i in range(kv)]
        for head in range(8):
            key_x = keys[head * kv // 8]
            lines.plot([column * 10 + head, key_x], [1, 0], color=COLORS[head * kv // 8 % 6], lw=1.1)
        lines.plot([column * 10 + i for i in range(8)], [1] * 8, "o", color=BLUE, ms=5)
        lines.plot(keys, [0] * kv, "s", color=ORANGE, ms=4)
        lines.text(column * 10 + 3.5, -0.32, ("multi-head", "grouped", "multi-query")[column], ha="center")
    lines.set(ylim=(-0.5, 1.3), title="query heads and key-value heads")
    lines.axis("off")
    names, values = [], []
    for kv in (32, 8, 1):
        config = ct.config("llama-3-8b").model_dump()
        config["decoder"]["block"][0]["attention"]["kv_heads"] = kv
        names.append(f"{kv} kv_heads")
        values.append(ct.size(ct.config(config), context=8192).kv_cache.total_bytes / 2**30)
    draw_bars(cost, names, values, unit="GiB", format_spec="{:.3g}")
    cost.set_title("KV cache of 8,192 tokens,\nLlama-3 8B, bf16")
    return figure


def plot_latent() -> Figure:
    figure, (axis,) = make_figure(height=2.4)
    cache = ct.size("deepseek-v3", context=4096).kv_cache
    grouped = ct.config("llama-3.1-405b")
    other = ct.size(grouped, context=4096).kv_cache
    names = ["DeepSeek-V3: latents", "DeepSeek-V3: up-projected", "Llama-3.1 405B: 8 kv_heads"]
    values = [cache.bytes_per_token / 1024, cache.expanded_bytes / cache.context / 1024, other.bytes_per_token / 1024]
    draw_bars(axis, names, values, unit="KiB of KV cache per token, bf16", format_spec="{:,.1f}")
    axis.set_xscale("log")
    axis.set_xlim(20, 20000)
    return figure


def visible_mask(
    seq_len: int = 12, *, is_causal: bool = True, window: int | None = None, **kwargs: Any
) -> torch.Tensor:
    """Return (query, key): 1 where the key is visible to the query. Padding is neither a query nor a key."""
    positions = number_tokens(1, seq_len, CPU, **kwargs)
    mask, fully_masked = self_attention_mask(positions, positions, is_causal=is_causal, window=window).to_dense()
    return (mask & ~fully_masked)[0, 0] & (positions.position[0] >= 0).unsqueeze(-1)


def plot_window() -> Figure:
    figure, (global_axis, window_axis, reach_axis) = make_figure(3, width_ratios=(1, 1, 1.3), height=2.5)
    draw_matrix(global_axis, visible_mask(16))
    hide_axes(global_axis, x="key", y="query", title="global")
    draw_matrix(window_axis, visible_mask(16, window=4), ORANGE)
    hide_axes(window_axis, x="key", title="window of 4")
    model = ct.build(decoder_config(32, 6, attention={"window": 4}), seed=0, dtype=torch.float64)
    tokens = torch.randint(256, (1, 32))
    names = [f"blocks.{i}.resid_post" for i in range(6)]
    with torch.no_grad():
        for weight in model.parameters():  # scaled up so that the effect at the maximum distance exceeds rounding
            weight.mul_(1 if weight.ndim < 2 else 4)
    reached = []
    with ct.trace(model, *names) as t:
        model(tokens)
        baseline = [t[name][0, -1] for name in names]
    for distance in range(32):
        changed = tokens.clone()
        changed[0, 31 - distance] = (changed[0, 31 - distance] + 1) % 256
        with ct.trace(model, *names) as t:
            model(changed)
            reached.append(
                [
                    bool((t[name][0, -1] - before).abs().max() > 1e-13)
                    for name, before in zip(names, baseline, strict=True)
                ]
            )
    max_distance = torch.tensor(reached).sum(0)
    reach_axis.plot(range(1, 7), max_distance, "o", color=ORANGE, label="measured")
    reach_axis.plot(range(1, 7), [1 + 3 * n for n in range(1, 7)], color=BLUE, lw=1, label="1 + layers · (4 − 1)")
    reach_axis.set(xlabel="layers", ylabel="tokens", title="receptive field")
    reach_axis.legend(loc="lower right")
    return figure


def plot_sinks() -> Figure:
    figure, axes = make_figure(3, height=2.4, sharey=True)
    scores = torch.tensor([0.2, -0.4, 1.1, 0.3])[None, None, None]
    fully_masked = torch.zeros(1, 1, 1, 1, dtype=torch.bool)
    for axis, sink in zip(axes, (None, 0.0, 2.0), strict=True):
        sink_score = None if sink is None else torch.tensor([sink])
        weights = Softmax()(scores, fully_masked, sink_score)[0, 0, 0].tolist()
        axis.bar([0, 1, 2, 3], weights, color=BLUE)
        axis.bar([4], [1 - sum(weights)], color=ORANGE)
        axis.set_xticks(range(5), ["k0", "k1", "k2", "k3", "sink"])
        axis.set_title("no sink" if sink is None else f"sink {sink:g}: keys get {sum(weights):.2f}")
    axes[0].set_ylabel("weight")
    return figure


def largest_scores_by_weight_scale(qk_norm: bool) -> list[float]:
    """Return the largest score for each factor (1, 2, 4 …) by which the q and k matrices are multiplied."""
    attention_fields = {"qk_norm": {}} if qk_norm else {}
    scores = []
    tokens = torch.randint(256, (1, 64))
    for factor in (1, 2, 4, 8, 16, 32):
        model = ct.build(decoder_config(64, 1, attention=attention_fields), seed=0)
        attention: Any = model.decoder.blocks[0].attn.f  # type: ignore[union-attr]
        with torch.no_grad():
            for matrix in (attention.q, attention.k):
                matrix.weight.mul_(5 * factor)
            with ct.trace(model, "attn.scores") as t:
                model(tokens)
        score = t["blocks.0.attn.scores"]
        scores.append(float(score[score.isfinite()].abs().max()))
    return scores


def plot_qk_norm() -> Figure:
    figure, (axis,) = make_figure()
    factors = (1, 2, 4, 8, 16, 32)
    torch.manual_seed(1)
    axis.plot(factors, largest_scores_by_weight_scale(False), "o-", color=ORANGE, label="without")
    torch.manual_seed(1)
    axis.plot(factors, largest_scores_by_weight_scale(True), "o-", color=BLUE, label="with qk-norm")
    axis.axhline(4, color=GREEN, lw=1, ls=":")
    axis.annotate("sqrt(d_head) = 4: upper bound", (5, 4), (0, 4), textcoords="offset points", color=GREEN)
    axis.set(xscale="log", yscale="log", xlabel="factor on the q and k matrices", ylabel="largest score")
    axis.set_xticks(factors, [str(n) for n in factors])
    axis.minorticks_off()
    axis.legend(loc="upper left")
    return figure


def plot_softcap() -> Figure:
    figure, (axis,) = make_figure()
    score = torch.linspace(-160, 160, 161)
    axis.plot(score, score, color=COLORS[-1], lw=1, ls=":", label="without")
    for cap, color in ((50, BLUE), (30, ORANGE)):
        axis.plot(score, cap * torch.tanh(score / cap), color=color, label=f"cap {cap}")
    axis.set(ylim=(-70, 70), xlabel="score or logit", ylabel="softmax input", title="cap · tanh(score / cap)")
    axis.legend()
    return figure


def plot_biases() -> Figure:
    presets = ("gpt2", "opt-125m", "qwen2.5-7b", "gpt-oss-20b", "starcoder2-3b", "stablelm-2-1.6b", "gpt-neo-125m")
    presets += ("llama-3-8b", "bert-base", "t5-base")
    rows = []
    for name in presets:
        stack = next(iter(ct.config(name).stacks.values()))
        rows.append([float(projection in stack.block[0].attention.bias) for projection in "qkvo"])  # type: ignore[union-attr]
    figure, (axis,) = make_figure(width=3.6, height=3.1)
    draw_matrix(axis, rows, BLUE, vmin=0, vmax=1)
    label_cells(axis, list("qkvo"), presets)
    axis.xaxis.tick_top()
    return figure


def plot_cross_attention() -> Figure:
    """Plot the cross-attention pattern of a target of 5 tokens and a source of 7, two of which are padding."""
    source_mask = torch.tensor([[True] * 5 + [False] * 2])
    source, target = number_tokens(1, 7, CPU, source_mask), number_tokens(1, 5, CPU)
    panels = (
        (visible_mask(7, is_causal=False, mask=source_mask), "encoder self-attention", BLUE, "source"),
        (visible_mask(5), "decoder self-attention", ORANGE, "target"),
        (
            cross_attention_mask(target, source).to_dense()[0][0, 0].expand(5, 7),
            "cross-attention",
            GREEN,
            "source",
        ),
    )
    figure, axes = make_figure(3, height=2.4)
    for axis, (mask, title, color, key) in zip(axes, panels, strict=True):
        draw_matrix(axis, mask, color, vmin=0, vmax=1)
        hide_axes(axis, x=f"key: {key}", title=title)
    axes[0].set_ylabel("query")
    return figure


def plot_masks() -> Figure:
    full = torch.ones(1, 12, dtype=torch.bool)
    left, right = full.clone(), full.clone()
    left[:, :3], right[:, 9:] = False, False
    packed = torch.tensor([[0] * 5 + [1] * 4 + [2] * 3])
    masks = {
        "causal": visible_mask(),
        "bidirectional, padded right": visible_mask(is_causal=False, mask=right),
        "causal, padded left": visible_mask(mask=left),
        "window of 4": visible_mask(window=4),
        "prefix of 5": visible_mask(prefix_lengths=torch.tensor([5])),
        "three packed documents": visible_mask(document_ids=packed),
    }
    figure = Figure(figsize=(6.4, 4.3), layout="constrained")
    for axis, (name, mask), color in zip(figure.subplots(2, 3).flat, masks.items(), COLORS, strict=False):
        draw_matrix(axis, mask, color, vmin=0, vmax=1)
        hide_axes(axis, title=name)
    figure.supxlabel("key", fontsize=9)
    figure.supylabel("query", fontsize=9)
    return figure


FIGURES: dict[str, FigureFn] = {
    "multi-head": plot_multi_head,
    "grouped-query": plot_grouped_query,
    "latent": plot_latent,
    "sliding-window": plot_window,
    "sinks": plot_sinks,
    "qk-norm": plot_qk_norm,
    "soft-cap": plot_softcap,
    "biases": plot_biases,
    "cross-attention": plot_cross_attention,
    "masks": plot_masks,
}
