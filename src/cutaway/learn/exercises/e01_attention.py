# %% [markdown]
# # 1 · Attention by hand
#
# Each token has a query $q$, a key $k$ and a value $v$. The score of a query and a key is their dot product, divided by
# $\sqrt d$. The softmax turns the scores of one query into weights that sum to one. The output is the sum of the
# values, multiplied by these weights:
#
# $$\text{weights} = \text{softmax}\left(\frac{q k^\top}{\sqrt{d}}\right) \qquad \text{out} = \text{weights} \cdot v$$
#
# The softmax runs over the **keys**: one query, all keys. $d$ is the dimension of $q$ and $k$. The dot product of two
# vectors of $d$ random entries with variance 1 has standard deviation $\sqrt d$, so without the division by $\sqrt d$
# the softmax of a wide head saturates on one key.
#
# **A worked example.** One query $q = (2, 0, 0, 0)$ and two keys $k_1 = (2, 0, 0, 0)$, $k_2 = (0, 2, 0, 0)$. The dot
# products are 4 and 0, divided by $\sqrt 4$ they are 2 and 0, and $e^2/(e^2 + e^0) = 0.8808$. With values 10 and 20 the
# output is $0.8808 \cdot 10 + 0.1192 \cdot 20 = 11.19$.
#
# Implement it with products, `exp`, sums and `max`; that is what "by hand" means (`torch.softmax` passes too). Note
# that `exp(1000)` overflows. To avoid this, subtract the maximum of each row first, which does not change the softmax.
# There is no mask here; exercise 2 adds it. The theory is in notebook 2, attention.

# %%
import math

import torch
from torch import Tensor


# %%
def attention_weights(q: Tensor, k: Tensor) -> Tensor:
    """Map queries (batch, query, width) and keys (batch, key, width) to weights (batch, query, key). Rows sum to 1."""
    # begin solution
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True)
    # end solution


# %%
def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Sum the values v (batch, key, width of v), weighted by attention_weights: (batch, query, width of v)."""
    # begin solution
    return attention_weights(q, k) @ v
    # end solution


# %% [markdown]
# Try the worked example, then run `cutaway learn check 1`.

# %%
Q = torch.tensor([[[2.0, 0, 0, 0]]])
K = torch.tensor([[[2.0, 0, 0, 0], [0, 2, 0, 0]]])
V = torch.tensor([[[10.0], [20.0]]])
attention(Q, K, V)

# %% checker
from cutaway.learn.exercises.task import Case, FunctionTask  # noqa: E402


def random_case(
    seed: int, queries: int, keys: int, d_head: int, d_value: int, *, batch: int = 2, scale: float = 1.0
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(batch, n, d, generator=generator) for n, d in ((queries, d_head), (keys, d_head), (keys, d_value))
    )
    return Case(f"for {queries} queries and {keys} keys of width {d_head}", (q * scale, k * scale, v))


CASES = [
    Case("for the worked example", (Q, K, V)),
    random_case(1, 3, 3, 4, 4),
    random_case(2, 2, 5, 3, 6),
    random_case(3, 1, 1, 8, 2, batch=1),
    Case("for scores in the hundreds", random_case(11, 2, 3, 16, 2, scale=8.0).args),
]


TASKS = [
    FunctionTask(
        attention_weights, [Case(case.description, case.args[:2]) for case in CASES], ("batch", "query", "key")
    ),
    FunctionTask(attention, CASES, ("batch", "query", "width")),
]
