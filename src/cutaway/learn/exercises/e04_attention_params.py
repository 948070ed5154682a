# %% [markdown]
# # 4 · Count Q, K, V and O
#
# Attention has four matrices. Three project the residual stream of dimension $d$: $W_Q$ computes one query per query
# head, $W_K$ and $W_V$ one key and one value per key head (with grouped-query attention there are fewer of these). The
# fourth, $W_O$, projects the concatenated head outputs back to dimension $d$. A matrix from $n$ to $m$ dimensions has
# $n \cdot m$ parameters, and its bias has one per **output**, $m$. Heads times head dimension is often $d$, but it need
# not be: the head dimension is a separate setting.
#
# **A worked example.** GPT-2 small: $d = 768$, 12 heads of dimension 64 for queries and for keys, with biases: $4 \cdot
# 768 \cdot 768 + 4 \cdot 768 = 2{,}362{,}368$. `cutaway size gpt2` counts 28,348,416 in twelve such layers. The theory
# is in notebook 8, costs.


# %%
def qkvo_params(d_model: int, n_heads: int, n_kv_heads: int, d_head: int, bias: bool) -> int:
    """Number of parameters of Q, K, V and O in one layer."""
    # begin solution
    queries, keys = n_heads * d_head, n_kv_heads * d_head
    matrices = d_model * (queries + 2 * keys) + queries * d_model
    return matrices + (queries + 2 * keys + d_model if bias else 0)
    # end solution


# %%
def gqa_savings(d_model: int, n_heads: int, n_kv_heads: int, d_head: int) -> float:
    """Fraction (0 to 1) of the parameters without biases that GQA saves, compared with n_kv_heads = n_heads."""
    # begin solution
    mha_params = qkvo_params(d_model, n_heads, n_heads, d_head, False)
    return 1 - qkvo_params(d_model, n_heads, n_kv_heads, d_head, False) / mha_params
    # end solution


# %% [markdown]
# Try the worked example, then run `cutaway learn check 4`.

# %%
qkvo_params(768, 12, 12, 64, True)

# %% checker
from cutaway.learn.exercises.task import Case, FunctionTask, MistakeSet  # noqa: E402

MINUTES = 10
NOTEBOOK = "08_costs"
SITE = "attn.out"
HINTS = (
    "Write four lines, one per matrix: input dimension times output dimension.",
    "Q has n_heads · d_head outputs, K and V have n_kv_heads · d_head each; O has n_heads · "
    "d_head inputs and d_model outputs.",
    "A bias is as long as the output of its matrix: the dimensions above for Q, K and V, but d_model for O.",
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
    if "head dimension taken for d_model" in mistakes:
        total = d_model * d_model * (n_heads + sides * groups) + (
            0 if "O forgotten" in mistakes else n_heads * d_model * d_model
        )
    if not bias or "biases forgotten" in mistakes:
        return total
    last = queries if "O's bias as long as the heads" in mistakes else d_model
    return total + queries + sides * keys + (0 if "O forgotten" in mistakes else last)


def wrong_gqa_savings(mistakes: MistakeSet, d_model: int, n_heads: int, n_kv_heads: int, d_head: int) -> float:
    shared_mistakes = MistakeSet(mistakes - {"remaining fraction", "fraction of K and V alone"})
    gqa_params = wrong_qkvo_params(shared_mistakes, d_model, n_heads, n_kv_heads, d_head, False)
    fraction = gqa_params / wrong_qkvo_params(shared_mistakes, d_model, n_heads, n_heads, d_head, False)
    if "fraction of K and V alone" in mistakes:
        fraction = n_kv_heads / n_heads
    return fraction if "remaining fraction" in mistakes else 1 - fraction


MODEL_SHAPES = {
    "for GPT-2 small": (768, 12, 12, 64, True),
    "for Llama-3 8B": (4096, 32, 8, 128, False),
    "for Gemma 2B, one key head": (2048, 8, 1, 256, False),
    "for Mistral Nemo, whose heads are narrower than d_model / n_heads": (5120, 32, 8, 128, False),
    "for Qwen2's widths with all biases": (896, 14, 2, 64, True),
    "for wide heads with biases": (6, 3, 1, 4, True),
    "for one head": (5, 1, 1, 5, True),
}
KV_HEADS_HINT = "K and V are counted with as many heads as Q: with grouped-query attention they have n_kv_heads heads"
TASKS = [
    FunctionTask(
        qkvo_params,
        [Case(name, shape) for name, shape in MODEL_SHAPES.items()],
        wrong_qkvo_params,
        {
            "biases forgotten": "with `bias` each matrix has one additional parameter per output",
            "GQA forgotten": KV_HEADS_HINT,
            "O forgotten": "there is a fourth matrix: O projects the head outputs back to the residual stream",
            "d_head taken for d_model / n_heads": "d_head is an argument and need not equal d_model / n_heads: "
            "Mistral Nemo has 32 heads of 128 with d_model 5,120",
            "O's bias as long as the heads": "a bias is as long as the output of its matrix, and O has d_model outputs",
            "K and V counted once": "keys and values have separate matrices",
            "head dimension taken for d_model": "a head has d_model inputs and d_head outputs, not d_model",
        },
    ),
    FunctionTask(
        gqa_savings,
        [Case(name, shape[:4]) for name, shape in MODEL_SHAPES.items()],
        wrong_gqa_savings,
        {
            "remaining fraction": "that is the fraction that remains; the fraction saved is 1 minus that",
            "fraction of K and V alone": "that is the fraction of K and V; compute the fraction of all four matrices",
            "GQA forgotten": KV_HEADS_HINT,
            "O forgotten": "O is one of the four matrices, and GQA does not reduce it",
        },
    ),
]
