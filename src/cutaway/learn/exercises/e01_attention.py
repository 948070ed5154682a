# %% [markdown]
# # 1 · Attention by hand
#
# Each token asks a question (its query $q$), each token has a label (its key $k$) and something to hand over (its value
# $v$). How well a label fits a question is their product; the fits of one question are turned into shares that add up
# to one; and what is read is the values, mixed by these shares:
#
# $$\text{weights} = \text{softmax}\left(\frac{q k^\top}{\sqrt{d}}\right) \qquad \text{out} = \text{weights} \cdot v$$
#
# The softmax goes over the **keys**: one question, all labels. $d$ is the width of $q$ and $k$. A product of $d$ random
# pairs has standard deviation $\sqrt d$, so without the root the softmax of a wide head sees one key only.
#
# **A number to begin with.** One question $q = (2, 0, 0, 0)$ and two labels $k_1 = (2, 0, 0, 0)$, $k_2 = (0, 2, 0,
# 0)$. The products are 4 and 0, over $\sqrt 4$ they are 2 and 0, and $e^2/(e^2 + e^0) = 0.8808$. With values 10 and 20
# one reads $0.8808 \cdot 10 + 0.1192 \cdot 20 = 11.19$.
#
# Write it with products, `exp`, sums and `max`; that is what "by hand" means (`torch.softmax` passes too). Mind that
# `exp(1000)` is infinite: the softmax does not change when each row's largest score is taken away first. There is no
# mask here; that is exercise 2. The theory is in notebook 2, attention.

# %%
import math

import torch
from torch import Tensor


# %%
def attention_weights(q: Tensor, k: Tensor) -> Tensor:
    """Queries (batch, query, width) and keys (batch, key, width) → shares (batch, query, key); rows add up to 1."""
    # begin solution
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    shares = (scores - scores.max(-1, keepdim=True).values).exp()
    return shares / shares.sum(-1, keepdim=True)
    # end solution


# %%
def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The values (batch, key, width of v) mixed by the weights → (batch, query, width of v)."""
    # begin solution
    return attention_weights(q, k) @ v
    # end solution


# %% [markdown]
# Try the number from above, then ask: `cutaway learn check 1`.

# %%
Q = torch.tensor([[[2.0, 0, 0, 0]]])
K = torch.tensor([[[2.0, 0, 0, 0], [0, 2, 0, 0]]])
V = torch.tensor([[[10.0], [20.0]]])
attention(Q, K, V)

# %% checker
from cutaway.learn.exercises.task import Case, FunctionTask, MistakeSet  # noqa: E402

MINUTES = 15
NOTEBOOK = "02_attention"
SITE = "attn.pattern"
HINTS = (
    "Write the shapes beside each line: (batch, query, width) times (batch, width, key) is (batch, query, key).",
    "Each question gets its own shares: the sum goes over the last axis, the keys, and is kept as an axis of size 1 so "
    "that the division fits (`keepdim=True`).",
    "scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]); then exp of the scores less their row's largest, over "
    "the row's sum.",
)


def random_case(
    seed: int, queries: int, keys: int, d_head: int, d_value: int, *, batch: int = 2, scale: float = 1.0
) -> Case:
    dice = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(batch, n, d, generator=dice) for n, d in ((queries, d_head), (keys, d_head), (keys, d_value))
    )
    return Case(f"for {queries} queries and {keys} keys of width {d_head}", (q * scale, k * scale, v))


CASES = [
    Case("for the number of the task", (Q, K, V)),
    random_case(1, 3, 3, 4, 4),
    random_case(2, 2, 5, 3, 6),
    random_case(3, 1, 1, 8, 2, batch=1),
    Case("for scores in the hundreds", random_case(11, 2, 3, 16, 2, scale=8.0).args),
]
SHARED_MISTAKES = {
    "no √d": "the scores are not divided: with wide heads the softmax then sees one key only; divide q·k by "
    "math.sqrt(q.shape[-1]) before the softmax",
    "d in place of √d": "the scores are divided by the width, and its root was asked: that makes all keys nearly alike",
    "√ of the wrong size": "the scores are divided by the root of the number of keys; it is the width of q and k that "
    "makes products large",
    "softmax on the wrong axis": "the shares of a column add up to one, and those of a row should: the softmax goes "
    "over the keys, dim=-1",
    "softmax over everything": "all queries share one sum; each query has its own: sum over the last axis only",
    "softmax over the batch": "dim=0 is the batch: the shares of one text depend on its neighbours; the softmax goes "
    "over the keys, dim=-1",
    "exp without the maximum": "exp of a score in the hundreds is infinite, and ∞/∞ is NaN: take each row's maximum "
    "away first",
    "one maximum for all": "the largest score of all is taken away from every row, and rows far below it become 0/0: "
    "each row needs its own maximum, amax(-1, keepdim=True)",
    "no softmax": "the scores are used as they are; softmax makes shares of them that add up to one",
}


def wrong_attention_weights(mistakes: MistakeSet, q: Tensor, k: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1)
    if "d in place of √d" in mistakes:
        scores = scores / q.shape[-1]
    elif "√ of the wrong size" in mistakes:
        scores = scores / math.sqrt(k.shape[-2])
    elif "no √d" not in mistakes:
        scores = scores / math.sqrt(q.shape[-1])
    if "no softmax" in mistakes:
        return scores
    axes: tuple[int, ...] = (-2,) if "softmax on the wrong axis" in mistakes else (-1,)
    axes = (-2, -1) if "softmax over everything" in mistakes else (0,) if "softmax over the batch" in mistakes else axes
    largest = scores.max() if "one maximum for all" in mistakes else scores.amax(axes, keepdim=True)
    largest = torch.zeros(()) if "exp without the maximum" in mistakes else largest
    shares = (scores - largest).exp()
    return shares / shares.sum(axes, keepdim=True)


def wrong_attention(mistakes: MistakeSet, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    shares = wrong_attention_weights(mistakes, q, k)
    if "weights on the wrong side" in mistakes:
        return shares.transpose(-2, -1) @ v
    return shares @ (k if "keys in place of values" in mistakes else v)


TASKS = [
    FunctionTask(
        attention_weights,
        [Case(case.description, case.args[:2]) for case in CASES],
        wrong_attention_weights,
        SHARED_MISTAKES,
        ("batch", "query", "key"),
    ),
    FunctionTask(
        attention,
        CASES,
        wrong_attention,
        {
            "keys in place of values": "what is read are the values; the keys only decide how much of each",
            "weights on the wrong side": "the weights are turned around: row i holds the shares of query i, so it is "
            "weights @ v",
            **SHARED_MISTAKES,
        },
        ("batch", "query", "width"),
    ),
]
