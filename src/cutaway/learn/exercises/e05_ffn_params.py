# %% [markdown]
# # 5 · FFN against attention
#
# Attention moves information between tokens; the feed-forward layer is position-wise and has most of the parameters.
# The classic one has two matrices, $d \to 4d \to d$. The gated one (SwiGLU, [Shazeer
# 2020](https://arxiv.org/abs/2002.05202)) has **three**: up and gate both project to the hidden width, and their
# product is projected down. To match the parameter count of the classic one, its hidden width is $\tfrac23 \cdot 4d$,
# rounded up to a multiple that suits the hardware.
#
# ```
#   classic   up d × h                 down h × d
#   gated     up d × h   gate d × h    down h × d
# ```
#
# **Worked examples.** $d = 4096$, classic: $2 \cdot 4096 \cdot 16384 = 134{,}217{,}728$. Llama-3 8B, gated with hidden
# width 14,336: $3 \cdot 4096 \cdot 14336 = 176{,}160{,}768$. In a classic block attention has $4d^2$ parameters and the
# feed-forward layer $8d^2$: a ratio of two. The theory is in notebooks 4, feed-forward layers, and 8, costs.


# %%
def ffn_params(d_model: int, d_hidden: int, gated: bool, bias: bool) -> int:
    """Number of parameters of one feed-forward layer."""
    # begin solution
    num_in = 2 if gated else 1
    return (num_in + 1) * d_model * d_hidden + (num_in * d_hidden + d_model if bias else 0)
    # end solution


# %%
def swiglu_hidden(d_model: int, multiple: int) -> int:
    """Hidden width at which a gated layer has as many parameters as the classic one, rounded up to a multiple."""
    # begin solution
    width = (8 * d_model + 2) // 3  # 2/3 · 4d, rounded up
    return (width + multiple - 1) // multiple * multiple
    # end solution


# %%
def ffn_attention_ratio(d_model: int, d_hidden: int, gated: bool, n_heads: int, n_kv_heads: int) -> float:
    """Parameters of the feed-forward layer divided by those of attention (d_head = d_model / n_heads; no biases)."""
    # begin solution
    attention = 2 * d_model * d_model + 2 * d_model * (n_kv_heads * d_model // n_heads)
    return ffn_params(d_model, d_hidden, gated, False) / attention
    # end solution


# %% [markdown]
# Try the worked examples, then run `cutaway learn check 5`.

# %%
ffn_params(4096, 14336, True, False)

# %% checker
from cutaway.learn.exercises.task import Case, FunctionTask, MistakeSet  # noqa: E402

MINUTES = 10
NOTEBOOK = "04_ffn_norms_residuals"
SITE = "ffn.hidden"
HINTS = (
    "Draw the matrices: how many project to the hidden width, and how many from it?",
    "Biases: one per output. Rounding up to a multiple of m: add m − 1, divide by // and multiply by m.",
    "Attention: d² for Q and for O, and d · n_kv_heads · (d / n_heads) for K and for V.",
)


def wrong_ffn_params(mistakes: MistakeSet, d_model: int, d_hidden: int, gated: bool, bias: bool) -> int:
    hidden = 4 * d_model if "4d in place of d_hidden" in mistakes else d_hidden
    num_in = 2 if gated and "third SwiGLU matrix" not in mistakes else 1
    num_out = 0 if "down forgotten" in mistakes else 1
    total = (num_in + num_out) * d_model * hidden
    if not bias or "biases forgotten" in mistakes:
        return total
    last = hidden if "down's bias as long as the hidden width" in mistakes else d_model
    return total + num_in * hidden + num_out * last


def wrong_swiglu_hidden(mistakes: MistakeSet, d_model: int, multiple: int) -> int:
    width = (8 * d_model + 2) // 3
    width = (
        4 * d_model
        if "2/3 forgotten" in mistakes
        else 8 * d_model // 3
        if "truncated before rounding" in mistakes
        else width
    )
    if "not rounded" in mistakes:
        return width
    if "rounded down" in mistakes:
        return width // multiple * multiple
    if "rounded to the nearest" in mistakes:
        return round(width / multiple) * multiple
    if "one multiple too many" in mistakes:
        return (width // multiple + 1) * multiple
    return -(-width // multiple) * multiple


def wrong_ffn_attention_ratio(
    mistakes: MistakeSet, d_model: int, d_hidden: int, gated: bool, n_heads: int, n_kv_heads: int
) -> float:
    groups = n_heads if "GQA forgotten" in mistakes else n_kv_heads
    keys = groups * d_model // n_heads
    attention = (1 if "O forgotten" in mistakes else 2) * d_model * d_model + 2 * d_model * keys
    ratio = wrong_ffn_params(mistakes, d_model, d_hidden, gated, False) / attention
    if "fraction of the total" in mistakes:
        return ratio / (1 + ratio)
    return 1 / ratio if "ratio inverted" in mistakes else ratio


GATED_HINT = "a gated layer has three matrices: up, gate and down"
HIDDEN_WIDTH_HINT = "the hidden width is an argument, and is not always 4 · d_model"
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
            "biases forgotten": "with `bias` each matrix has one additional parameter per output",
            "down forgotten": "a separate matrix projects the hidden vector down again",
            "down's bias as long as the hidden width": "a bias is as long as the output of its matrix, and down has "
            "d_model outputs",
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
            "2/3 forgotten": "that is 4d, 50 % too wide: three matrices of it cost 12d², not 8d²",
            "rounded down": "round up: add multiple − 1 before //",
            "rounded to the nearest": "round up, not to the nearest multiple",
            "not rounded": "the width must be a multiple of `multiple`",
            "one multiple too many": "a number that is a multiple already stays unchanged: add multiple − 1 before "
            "//, not a full multiple after it",
            "truncated before rounding": "8d/3 was truncated to an integer first, and may then be below 2/3 · 4d: "
            "round up once",
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
            "ratio inverted": "that is attention divided by the feed-forward layer: invert the ratio",
            "fraction of the total": "that is the fraction of the total; divide one by the other",
            "GQA forgotten": "K and V have n_kv_heads heads, not n_heads",
            "O forgotten": "attention has a fourth matrix, O, of d²",
            "third SwiGLU matrix": GATED_HINT,
            "4d in place of d_hidden": HIDDEN_WIDTH_HINT,
        },
    ),
]
