"""Figures: KV cache, sampling, speculative decoding, training objectives."""

from typing import Any

import torch
from matplotlib.figure import Figure

import cutaway as ct
from component_figures.figure_style import BLUE, COLORS, ORANGE, PURPLE, TEXT_COLOR, FigureFn, make_figure
from cutaway.generate import EngineConfig, SamplingParams
from cutaway.generate.sampling.logits_processing import logits_to_probs
from cutaway.generate.sampling.sampler import Sampler
from cutaway.generate.speculative.ngram_draft import NgramConfig
from cutaway.generate.speculative.rejection_sampler import expected_tokens
from cutaway.generate.speculative.speculative_decoder import SpeculativeDecoder
from cutaway.train import objectives

PROMPT = "The cat sat on the"
CERTAIN_PROMPT = "He drank a glass of"
LEAST_PROBABILITY = 1e-6
"""Lower end of the axis of the sampling figure."""
SAMPLING_CASES: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("temperature 1", {"temperature": 1.0}, "-"),
    ("temperature 0.5", {"temperature": 0.5}, "-"),
    ("temperature 2", {"temperature": 2.0}, "-"),
    ("top_k 5", {"temperature": 1.0, "top_k": 5}, "-"),
    ("top_p 0.8", {"temperature": 1.0, "top_p": 0.8}, "--"),
    ("min_p 0.1", {"temperature": 1.0, "min_p": 0.1}, ":"),
)
"""Name, sampling parameters and line style of each curve."""


def plot_kv_cache() -> Figure:
    figure, (axis,) = make_figure(height=3.1)
    lengths = [2**n for n in range(9, 18)]
    cases = (
        ("llama-2-7b: 32 key-value heads", "llama-2-7b", None),
        ("llama-3-8b: 8 key-value heads", "llama-3-8b", None),
        ("llama-3-8b in int8", "llama-3-8b", "int8"),
        ("mistral-7b-v0.1: window 4,096, ring buffer", "mistral-7b-v0.1", None),
        ("deepseek-v2-lite: latents", "deepseek-v2-lite", None),
    )
    for (name, preset, dtype), color in zip(cases, COLORS, strict=False):
        gib = [ct.size(preset, context=n, kv_cache_dtype=dtype).kv_cache.total_bytes / 2**30 for n in lengths]
        axis.plot(lengths, gib, color=color, label=name)
    axis.set(xscale="log", yscale="log", xlabel="context (tokens)", ylabel="KV cache (GiB)")
    axis.set_xticks(lengths[::2], [f"{n:,}" for n in lengths[::2]])
    axis.minorticks_off()
    axis.set_title("bf16, except where noted")
    axis.legend(fontsize=7.5)
    return figure


def plot_sampling() -> Figure:
    """Plot the next-token probabilities of two prompts by rank, with each of several sampling settings.

    On the logarithmic scale, temperature changes the slope, and a filter cuts the curve off and shifts it up.
    """
    checkpoint = ct.load("tiny-english", dtype=torch.float32)
    tokenizer: Any = checkpoint.tokenizer
    figure, axes = make_figure(2, height=3.9, sharex=True, sharey=True)
    for axis, prompt in zip(axes, (PROMPT, CERTAIN_PROMPT), strict=True):
        with torch.no_grad():
            logits = checkpoint.model(torch.tensor([tokenizer.encode(prompt)]))[0, -1:]
        order = logits[0].argsort(descending=True)
        for (name, params, style), color in zip(SAMPLING_CASES, COLORS, strict=False):
            probs = sampling_probabilities(logits, SamplingParams(**params))[order]
            num_left = int((probs > 0).sum())
            ranks = sorted({min(round(1.02**n), num_left) for n in range(430)})  # equidistant on the logarithmic axis
            heights = [*probs[[rank - 1 for rank in ranks]].tolist(), LEAST_PROBABILITY]
            axis.plot([*ranks, num_left], heights, style, color=color, label=f"{name}: {num_left:,} left")
        axis.set(
            xscale="log", yscale="log", xlim=(0.9, 6000), ylim=(LEAST_PROBABILITY, 1.5), xlabel="rank of the token"
        )
        axis.set_xticks([1, 10, 100, 1000], ["1", "10", "100", "1,000"])
        axis.minorticks_off()
        axis.set_title(prompt, family="monospace", fontsize=8.5)
        axis.legend(fontsize=7, loc="upper right")
    axes[0].set_ylabel("probability")
    return figure


def sampling_probabilities(logits: torch.Tensor, settings: SamplingParams) -> torch.Tensor:
    """Return the distribution from which these sampling parameters sample the next token."""
    sampler = Sampler(1, logits.shape[-1])
    sampler.set_row(0, settings, [], seed=0)
    return logits_to_probs(logits, sampler.sampling_state, sampler.row_features[0])[0]


def plot_speculative_decoding() -> Figure:
    """Plot the tokens per step of speculative decoding: the closed form, and measurements of the pretrained model.

    The measurements use n-gram drafts on partly repetitive text.
    """
    figure, (axis,) = make_figure(height=3.0)
    acceptance = [n / 50 for n in range(51)]
    for num_draft, color in zip((2, 4, 8), COLORS, strict=False):
        axis.plot(
            acceptance,
            [expected_tokens(a, num_draft) for a in acceptance],
            color=color,
            label=f"{num_draft} draft tokens",
        )
    checkpoint = ct.load("tiny-english", dtype=torch.float32)
    tokenizer: Any = checkpoint.tokenizer
    params = SamplingParams(max_new_tokens=60)
    for text in (
        "The cat said meow. The dog said woof. The cat said meow. The dog",
        "Lily has a ball. Lily has a dog. Lily has a",
        PROMPT,
    ):
        prompt = tokenizer.encode(text)
        engine = SpeculativeDecoder(
            EngineConfig(checkpoint.model, max_num_seqs=1, eos_token_ids=[tokenizer.eos_token_id]),
            tokenizer=tokenizer,
            draft_model=NgramConfig(),
            num_draft_tokens=4,
        )
        engine.submit(prompt, params, seed=0)
        engine.run()
        axis.plot(engine.stats.acceptance_rate, engine.stats.tokens_per_forward_pass, "o", color=PURPLE, ms=5)
    axis.plot([], [], "o", color=PURPLE, label="measured: n-gram, up to 4")
    axis.set(xlabel="acceptance rate", ylabel="tokens per forward pass", ylim=(0.8, 9.2))
    axis.axhline(1, color=TEXT_COLOR, lw=0.6)
    axis.legend()
    return figure


def objective_examples() -> dict[str, tuple[list[str], list[str]]]:
    """Return for each objective the input tokens and the target token of each position ('' for no target)."""
    words = ["the", "cat", "sat", "on", "the", "mat", "."]
    ids = torch.arange(1, 8)[None]
    token_names = dict(enumerate(["[mask]", *words]))

    def describe(objective: Any, inputs: torch.Tensor) -> tuple[list[str], list[str]]:
        targets = zip(objective.targets[0].tolist(), objective.weights[0].tolist(), strict=True)
        return [token_names[i] for i in inputs[0].tolist()], [token_names[i] if weight else "" for i, weight in targets]

    causal = objectives.causal_lm(ids)
    prefix = objectives.prefix_lm(ids, None, torch.tensor([3]))
    masked = objectives.masked_lm(ids, mask_id=0, vocab_size=8, mlm_probability=0.3, seed=5, positions=[0])
    seq2seq = objectives.seq2seq(torch.tensor([[2, 1]]), None, ids[:, :4], None)
    return {
        "next token": describe(causal, causal.inputs[0]),
        "prefix of 3": describe(prefix, prefix.inputs[0]),
        "masked": describe(masked, masked.inputs[0]),
        "sequence to sequence\n(the decoder)": describe(seq2seq, seq2seq.inputs[1]),
    }


def plot_objectives() -> Figure:
    rows = objective_examples()
    figure, (axis,) = make_figure(height=3.4)
    for row, (title, (inputs, targets)) in enumerate(rows.items()):
        top = -2.6 * row
        axis.text(-0.7, top - 0.5, title, ha="right", va="center")
        for column, (input_token, target_token) in enumerate(zip(inputs, targets, strict=True)):
            axis.text(column, top, input_token, ha="center", va="center", color=BLUE)
            if target_token:
                axis.annotate(
                    "", (column, top - 0.85), (column, top - 0.25), arrowprops={"arrowstyle": "->", "color": TEXT_COLOR}
                )
                axis.text(column, top - 1.15, target_token, ha="center", va="center", color=ORANGE)
    axis.text(0, 1.1, "input", color=BLUE, ha="center")
    axis.text(1, 1.1, "target", color=ORANGE, ha="center")
    axis.set(xlim=(-3.4, 6.6), ylim=(-9.6, 1.6))
    axis.axis("off")
    return figure


FIGURES: dict[str, FigureFn] = {
    "kv-cache": plot_kv_cache,
    "sampling": plot_sampling,
    "speculative-decoding": plot_speculative_decoding,
    "objectives": plot_objectives,
}
