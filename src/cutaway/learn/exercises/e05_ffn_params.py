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
    """Number of parameters of one feed-forward layer, gated or classic, with or without biases."""
    # begin solution
    num_in = 2 if gated else 1
    return (num_in + 1) * d_model * d_hidden + (num_in * d_hidden + d_model if bias else 0)
    # end solution


# %%
def swiglu_hidden(d_model: int, multiple: int) -> int:
    """Hidden width at which a gated layer has as many parameters as the classic one with hidden width 4 · d_model.

    It is rounded up to a multiple of `multiple`."""
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
from cutaway.learn.exercises.task import Case, FunctionTask  # noqa: E402

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
    ),
    FunctionTask(
        swiglu_hidden,
        [
            Case(f"for d = {d} and multiples of {m}", (d, m))
            for d, m in ((4096, 256), (2048, 256), (768, 64), (3072, 256), (100, 1), (64, 300), (5, 7))
        ],
    ),
    FunctionTask(
        ffn_attention_ratio,
        [
            Case("for GPT-2 small", (768, 3072, False, 12, 12)),
            Case("for Llama-3 8B", (4096, 14336, True, 32, 8)),
            Case("for one key head", (64, 100, False, 4, 1)),
        ],
    ),
]
