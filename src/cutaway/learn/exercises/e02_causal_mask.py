# %% [markdown]
# # 2 · The causal mask
#
# A decoder is trained at all positions at once: position $i$ predicts token $i+1$, which is itself part of the input.
# So position $i$ may attend to positions $0 … i$ and to no later one. A **mask** states which keys are visible to which
# query: rows are queries, columns are keys.
#
# ```
#              key 0   key 1   key 2
#   query 0    True    False   False
#   query 1    True    True    False
#   query 2    True    True    True
# ```
#
# The score of a masked key is set to $-\infty$ **before** the softmax. Its weight is then $e^{-\infty} = 0$, and the
# row still sums to 1.
#
# **A worked example.** The row of query 1 has scores $(1, 1, 1)$, and keys 0 and 1 are visible: the weights are $(0.5,
# 0.5, 0)$. If the mask were applied after the softmax, they would be $(0.333, 0.333, 0)$, and a third of the attention
# would be lost.
#
# With a KV cache there are fewer queries than keys. For example, 2 new tokens after 3 cached tokens are 2 queries with
# 5 keys, and the first new token is at position 3. The theory is in notebook 2, attention.

# %%
import torch
from torch import Tensor


# %%
def causal_mask(length: int) -> Tensor:
    """Boolean causal mask (query, key) of `length` tokens: True where query i may attend to key j."""
    # begin solution
    return torch.ones(length, length, dtype=torch.bool).tril()
    # end solution


# %%
def cached_mask(num_new: int, num_cached: int) -> Tensor:
    """Boolean causal mask of `num_new` new tokens after `num_cached` cached tokens: (num_new, num_cached + num_new)."""
    # begin solution
    return torch.ones(num_new, num_cached + num_new, dtype=torch.bool).tril(num_cached)
    # end solution


# %%
def masked_weights(scores: Tensor, mask: Tensor) -> Tensor:
    """Map scores (batch, query, key) to weights, which are 0 where the mask (query, key) is False. Rows sum to 1."""
    # begin solution
    return scores.masked_fill(~mask, -torch.inf).softmax(-1)
    # end solution


# %% [markdown]
# Try the worked example, then run `cutaway learn check 2`.

# %%
masked_weights(torch.ones(1, 3, 3), causal_mask(3))

# %% checker
from cutaway.learn.exercises.task import Case, FunctionTask  # noqa: E402


def random_scores(seed: int, batch: int, queries: int, keys: int, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    scores = torch.randn(batch, queries, keys, generator=torch.Generator().manual_seed(seed)) * 2 + offset
    return scores, causal_mask(keys)[keys - queries :]


TASKS = [
    FunctionTask(causal_mask, [Case(f"for length {n}", (n,)) for n in (3, 1, 2, 7)], ("query", "key")),
    FunctionTask(
        cached_mask,
        [Case(f"for {n} new tokens after {p} cached ones", (n, p)) for n, p in ((2, 3), (1, 4), (3, 0), (4, 2))],
        ("query", "key"),
    ),
    FunctionTask(
        masked_weights,
        [
            Case("for equal scores", (torch.ones(1, 3, 3), causal_mask(3))),
            Case("for a batch of two", random_scores(1, 2, 4, 4)),
            Case("for one token", random_scores(2, 1, 1, 1)),
            Case("with a cache", random_scores(3, 1, 2, 5)),
            Case("for scores near −20000", random_scores(4, 1, 3, 3, -20_000.0)),
        ],
        ("batch", "query", "key"),
    ),
]
