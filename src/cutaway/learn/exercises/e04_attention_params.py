# %% [markdown]
# # 4 · Count Q, K, V and O
#
# Attention has four matrices. Three project the residual stream of dimension $d$: $W_Q$ computes one query per query
# head, $W_K$ and $W_V$ one key and one value per key head (with grouped-query attention there are fewer key heads than
# query heads). The fourth, $W_O$, projects the concatenated head outputs back to dimension $d$. A matrix from $n$ to
# $m$ dimensions has $n \cdot m$ parameters, and its bias has $m$, one per **output**. Heads times head dimension is
# often $d$, but it need not be: the head dimension is a separate setting.
#
# **A worked example.** GPT-2 small: $d = 768$, 12 heads of dimension 64 for queries and for keys, with biases: $4 \cdot
# 768 \cdot 768 + 4 \cdot 768 = 2{,}362{,}368$. `cutaway size gpt2` counts 28,348,416 in twelve such layers. The theory
# is in notebook 8, costs.


# %%
def qkvo_params(d_model: int, n_heads: int, n_kv_heads: int, d_head: int, bias: bool) -> int:
    """Number of parameters of the matrices Q, K, V and O of one layer, and of their biases if `bias` is True."""
    # begin solution
    queries, keys = n_heads * d_head, n_kv_heads * d_head
    w_q, w_k, w_v, w_o = d_model * queries, d_model * keys, d_model * keys, queries * d_model
    biases = queries + 2 * keys + d_model
    return sum([w_q, w_k, w_v, w_o]) + (biases if bias else 0)
    # end solution


# %%
def gqa_savings(d_model: int, n_heads: int, n_kv_heads: int, d_head: int) -> float:
    """Fraction (0 to 1) of the QKVO parameters without biases that GQA saves, compared with n_kv_heads = n_heads."""
    # begin solution
    mha_params = qkvo_params(d_model, n_heads, n_heads, d_head, False)
    return 1 - qkvo_params(d_model, n_heads, n_kv_heads, d_head, False) / mha_params
    # end solution


# %% [markdown]
# Try the worked example, then run `cutaway learn check 4`.

# %%
qkvo_params(768, 12, 12, 64, True)

# %% checker
from cutaway.learn.exercises.task import Case, FunctionTask  # noqa: E402

MODEL_SHAPES = {
    "for GPT-2 small": (768, 12, 12, 64, True),
    "for Llama-3 8B": (4096, 32, 8, 128, False),
    "for Gemma 2B, one key head": (2048, 8, 1, 256, False),
    "for Mistral Nemo, whose heads are narrower than d_model / n_heads": (5120, 32, 8, 128, False),
    "for Qwen2's widths with all biases": (896, 14, 2, 64, True),
    "for wide heads with biases": (6, 3, 1, 4, True),
    "for one head": (5, 1, 1, 5, True),
}
TASKS = [
    FunctionTask(qkvo_params, [Case(name, shape) for name, shape in MODEL_SHAPES.items()]),
    FunctionTask(gqa_savings, [Case(name.partition(" with ")[0], shape[:4]) for name, shape in MODEL_SHAPES.items()]),
]
