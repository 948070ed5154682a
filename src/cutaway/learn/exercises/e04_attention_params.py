# %% [markdown]
# # 4 · Count Q, K, V and O
#
# Attention has four matrices. Three read the stream of width $d$: $W_Q$ makes one query for each query head, $W_K$ and
# $W_V$ one key and one value for each key head (with grouped-query attention these are fewer). The fourth, $W_O$,
# takes all heads' results side by side back to width $d$. A matrix from $n$ numbers to $m$ has $n \cdot m$ parameters,
# and its bias one for each **output**, $m$. Heads times their width is often $d$, but it need not be: the width of a
# head is a setting of its own.
#
# **A number to begin with.** GPT-2 small: $d = 768$, 12 heads of width 64 for queries and for keys, with biases: $4
# \cdot 768 \cdot 768 + 4 \cdot 768 = 2{,}362{,}368$. `cutaway size gpt2` counts 28,348,416 in twelve such layers. The
# theory is in notebook 8, costs.


# %%
def qkvo_params(d_model: int, n_heads: int, n_kv_heads: int, d_head: int, bias: bool) -> int:
    """The parameters of Q, K, V and O of one layer."""
    # begin solution
    queries, keys = n_heads * d_head, n_kv_heads * d_head
    matrices = d_model * (queries + 2 * keys) + queries * d_model
    return matrices + (queries + 2 * keys + d_model if bias else 0)
    # end solution


# %%
def gqa_savings(d_model: int, n_heads: int, n_kv_heads: int, d_head: int) -> float:
    """The share of these parameters (no biases) that is saved, against as many key heads as query heads: 0 to 1."""
    # begin solution
    whole = qkvo_params(d_model, n_heads, n_heads, d_head, False)
    return 1 - qkvo_params(d_model, n_heads, n_kv_heads, d_head, False) / whole
    # end solution


# %% [markdown]
# Try the number from above, then ask: `cutaway learn check 4`.

# %%
qkvo_params(768, 12, 12, 64, True)

# %% checker
from cutaway.learn.exercises.task import Case, FunctionTask, MistakeSet  # noqa: E402

MINUTES = 10
NOTEBOOK = "08_costs"
SITE = "attn.out"
HINTS = (
    "Write four lines, one a matrix: what it reads times what it gives.",
    "Q gives n_heads · d_head numbers, K and V give n_kv_heads · d_head each; O reads n_heads · d_head and gives "
    "d_model.",
    "A bias is as long as what its matrix gives: three times the widths above for Q, K and V, but d_model for O.",
)


def wrong_qkvo_params(
    mistakes: MistakeSet, d_model: int, n_heads: int, n_kv_heads: int, d_head: int, bias: bool
) -> int:
    if "d_head taken for d_model / n_heads" in mistakes:
        d_head = d_model // n_heads
    groups = n_heads if "GQA forgotten" in mistakes else n_kv_heads
    queries, keys = n_heads * d_head, groups * d_head
    sides = 1 if "K and V counted once" in mistakes else 2
    o = 0 if "O forgotten" in mistakes else queries * d_model
    total = d_model * (queries + sides * keys) + o
    if "as if every head were as wide as the model" in mistakes:
        total = d_model * d_model * (n_heads + sides * groups) + (
            0 if "O forgotten" in mistakes else n_heads * d_model * d_model
        )
    if not bias or "biases forgotten" in mistakes:
        return total
    last = queries if "O's bias as wide as the heads" in mistakes else d_model
    return total + queries + sides * keys + (0 if "O forgotten" in mistakes else last)


def wrong_gqa_savings(mistakes: MistakeSet, d_model: int, n_heads: int, n_kv_heads: int, d_head: int) -> float:
    counted = MistakeSet(mistakes - {"what is left", "of K and V alone"})
    part = wrong_qkvo_params(counted, d_model, n_heads, n_kv_heads, d_head, False)
    share = part / wrong_qkvo_params(counted, d_model, n_heads, n_heads, d_head, False)
    if "of K and V alone" in mistakes:
        share = n_kv_heads / n_heads
    return share if "what is left" in mistakes else 1 - share


MODEL_SHAPES = {
    "for GPT-2 small": (768, 12, 12, 64, True),
    "for Llama-3 8B": (4096, 32, 8, 128, False),
    "for Gemma 2B, one key head": (2048, 8, 1, 256, False),
    "for Mistral Nemo, whose heads are narrower than d_model / n_heads": (5120, 32, 8, 128, False),
    "for Qwen2's widths with all biases": (896, 14, 2, 64, True),
    "for wide heads with biases": (6, 3, 1, 4, True),
    "for one head": (5, 1, 1, 5, True),
}
KV_HEADS_HINT = "K and V are counted as wide as Q: with grouped queries they have n_kv_heads heads"
TASKS = [
    FunctionTask(
        qkvo_params,
        [Case(what, shape) for what, shape in MODEL_SHAPES.items()],
        wrong_qkvo_params,
        {
            "biases forgotten": "with `bias` each matrix has one number more for each of its outputs",
            "GQA forgotten": KV_HEADS_HINT,
            "O forgotten": "there is a fourth matrix: O takes the heads' results back to the stream",
            "d_head taken for d_model / n_heads": "d_head is given, and need not be d_model / n_heads: Mistral Nemo "
            "has 32 heads of 128 in a width of 5,120",
            "O's bias as wide as the heads": "a bias is as long as what its matrix gives, and O gives d_model numbers",
            "K and V counted once": "keys and values have a matrix each",
            "as if every head were as wide as the model": "a head reads d_model numbers and gives d_head, not d_model",
        },
    ),
    FunctionTask(
        gqa_savings,
        [Case(what, shape[:4]) for what, shape in MODEL_SHAPES.items()],
        wrong_gqa_savings,
        {
            "what is left": "that is the share that remains; asked is what is saved, 1 less that",
            "of K and V alone": "that is the share of K and V; asked is the share of all four matrices",
            "GQA forgotten": KV_HEADS_HINT,
            "O forgotten": "O is one of the four matrices, and is not saved",
        },
    ),
]
