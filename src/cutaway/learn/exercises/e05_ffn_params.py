# %% [markdown]
# # 5 · FFN against attention
#
# Attention moves information between tokens; the feed-forward layer works on each token alone, and has most of the
# parameters. The classic one has two matrices, $d \to 4d \to d$. The gated one (SwiGLU, [Shazeer
# 2020](https://arxiv.org/abs/2002.05202)) has **three**: up and gate both make the hidden vector, their product goes
# down. To cost as much as the classic one its hidden width is $\tfrac23 \cdot 4d$, rounded up to a multiple that
# hardware likes.
#
# ```
#   classic   up d × h                 down h × d
#   gated     up d × h   gate d × h    down h × d
# ```
#
# **Numbers to begin with.** $d = 4096$, classic: $2 \cdot 4096 \cdot 16384 = 134{,}217{,}728$. Llama-3 8B, gated with
# hidden width 14,336: $3 \cdot 4096 \cdot 14336 = 176{,}160{,}768$. In a classic block attention has $4d^2$ and the
# feed-forward layer $8d^2$: two to one. The theory is in notebooks 4, feed-forward layers, and 8, costs.


# %%
def ffn_params(d_model: int, d_hidden: int, gated: bool, bias: bool) -> int:
    """The parameters of one feed-forward layer."""
    # begin solution
    into = 2 if gated else 1
    return (into + 1) * d_model * d_hidden + (into * d_hidden + d_model if bias else 0)
    # end solution


# %%
def swiglu_hidden(d_model: int, multiple: int) -> int:
    """The hidden width that makes a gated layer cost as much as the classic one, rounded up to a multiple."""
    # begin solution
    least = (8 * d_model + 2) // 3  # 2/3 · 4d, rounded up
    return (least + multiple - 1) // multiple * multiple
    # end solution


# %%
def ffn_attention_ratio(d_model: int, d_hidden: int, gated: bool, n_heads: int, n_kv_heads: int) -> float:
    """How many parameters the feed-forward layer has for each of attention (heads of d_model / n_heads; no biases)."""
    # begin solution
    attention = 2 * d_model * d_model + 2 * d_model * (n_kv_heads * d_model // n_heads)
    return ffn_params(d_model, d_hidden, gated, False) / attention
    # end solution


# %% [markdown]
# Try the numbers from above, then ask: `cutaway learn check 5`.

# %%
ffn_params(4096, 14336, True, False)

# %% checker
from cutaway.learn.exercises.task import Case, FunctionTask, MistakeSet  # noqa: E402

MINUTES = 10
NOTEBOOK = "04_ffn_norms_residuals"
SITE = "ffn.hidden"
HINTS = (
    "Draw the matrices: how many go into the hidden width, and how many come out of it?",
    "Biases: one for each output. Rounding up to a multiple of m: add m − 1, divide by // and multiply by m.",
    "Attention: d² for Q and for O, and d · n_kv_heads · (d / n_heads) for K and for V.",
)


def wrong_ffn_params(mistakes: MistakeSet, d_model: int, d_hidden: int, gated: bool, bias: bool) -> int:
    hidden = 4 * d_model if "4d in place of d_hidden" in mistakes else d_hidden
    into = 2 if gated and "third SwiGLU matrix" not in mistakes else 1
    out = 0 if "down forgotten" in mistakes else 1
    total = (into + out) * d_model * hidden
    if not bias or "biases forgotten" in mistakes:
        return total
    last = hidden if "down's bias as wide as the hidden" in mistakes else d_model
    return total + into * hidden + out * last


def wrong_swiglu_hidden(mistakes: MistakeSet, d_model: int, multiple: int) -> int:
    least = (8 * d_model + 2) // 3
    least = (
        4 * d_model if "2/3 forgotten" in mistakes else 8 * d_model // 3 if "cut before rounding" in mistakes else least
    )
    if "not rounded" in mistakes:
        return least
    if "rounded down" in mistakes:
        return least // multiple * multiple
    if "rounded to the nearest" in mistakes:
        return round(least / multiple) * multiple
    if "one multiple too many" in mistakes:
        return (least // multiple + 1) * multiple
    return -(-least // multiple) * multiple


def wrong_ffn_attention_ratio(
    mistakes: MistakeSet, d_model: int, d_hidden: int, gated: bool, n_heads: int, n_kv_heads: int
) -> float:
    groups = n_heads if "GQA forgotten" in mistakes else n_kv_heads
    keys = groups * d_model // n_heads
    attention = (1 if "O forgotten" in mistakes else 2) * d_model * d_model + 2 * d_model * keys
    ratio = wrong_ffn_params(mistakes, d_model, d_hidden, gated, False) / attention
    if "a share of both" in mistakes:
        return ratio / (1 + ratio)
    return 1 / ratio if "upside down" in mistakes else ratio


GATED_HINT = "a gated layer has three matrices: up, gate and down"
HIDDEN_WIDTH_HINT = "the hidden width is given, and is not always 4 · d_model"
TASKS = [
    FunctionTask(
        ffn_params,
        [
            Case("for the classic layer of d = 4096", (4096, 16384, False, False)),
            Case("for Llama-3 8B", (4096, 14336, True, False)),
            Case("for GPT-2 small, with biases", (768, 3072, False, True)),
            Case("for a gated layer with biases", (6, 16, True, True)),
            Case("for a hidden width of 1", (5, 1, False, True)),
        ],
        wrong_ffn_params,
        {
            "third SwiGLU matrix": GATED_HINT,
            "4d in place of d_hidden": HIDDEN_WIDTH_HINT,
            "biases forgotten": "with `bias` each matrix has one number more for each of its outputs",
            "down forgotten": "the hidden vector goes down again, by a matrix of its own",
            "down's bias as wide as the hidden": "a bias is as long as what its matrix gives, and down gives d_model "
            "numbers",
        },
    ),
    FunctionTask(
        swiglu_hidden,
        [
            Case(f"for d = {d} and multiples of {m}", (d, m))
            for d, m in ((4096, 256), (2048, 256), (768, 64), (3072, 256), (100, 1), (64, 300), (5, 7))
        ],
        wrong_swiglu_hidden,
        {
            "2/3 forgotten": "that is 4d, half as wide again: three matrices of it cost 12d², not 8d²",
            "rounded down": "rounded up was asked: add multiple − 1 before //",
            "rounded to the nearest": "rounded up was asked, not to the nearest multiple",
            "not rounded": "the width must be a multiple of `multiple`",
            "one multiple too many": "what is a multiple already stays as it is: add multiple − 1 before //, not a "
            "whole one after it",
            "cut before rounding": "8d/3 was cut to a whole number first, and may then lie below 2/3 · 4d: round up "
            "once",
        },
    ),
    FunctionTask(
        ffn_attention_ratio,
        [
            Case("for GPT-2 small", (768, 3072, False, 12, 12)),
            Case("for Llama-3 8B", (4096, 14336, True, 32, 8)),
            Case("for one key head", (64, 100, False, 4, 1)),
        ],
        wrong_ffn_attention_ratio,
        {
            "upside down": "that is attention for each of the feed-forward layer: divide the other way round",
            "a share of both": "that is the share of both together; asked is one divided by the other",
            "GQA forgotten": "K and V have n_kv_heads heads, not n_heads",
            "O forgotten": "attention has a fourth matrix, O, of d²",
            "third SwiGLU matrix": GATED_HINT,
            "4d in place of d_hidden": HIDDEN_WIDTH_HINT,
        },
    ),
]
