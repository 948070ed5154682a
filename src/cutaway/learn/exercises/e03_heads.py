# %% [markdown]
# # 3 · Splitting heads
#
# A query of width 768 is twelve queries of width 64 that lie side by side: head 0 owns columns 0–63, head 1 columns
# 64–127, and so on. To let all heads attend at once their axis must come before time:
#
# $$(\text{batch}, \text{time}, \text{heads} \cdot \text{width}) \to (\text{batch}, \text{time}, \text{heads},
# \text{width}) \to (\text{batch}, \text{heads}, \text{time}, \text{width})$$
#
# `view` (or `reshape`, `unflatten`) gives the numbers in memory another shape **in their order**; `transpose`
# exchanges two axes. `view` straight to the last shape has the right shape and the wrong numbers: head 0 would get the
# first tokens whole.
#
# ```
#   one text, two tokens, two heads of width 2
#   token 0:  a0 a1 | b0 b1            head a:  a0 a1      head b:  b0 b1
#   token 1:  a2 a3 | b2 b3                     a2 a3               b2 b3
# ```
#
# Grouped-query attention has fewer key heads than query heads: with 4 query heads and 2 key heads, query heads 0 and 1
# share key head 0, and 2 and 3 share key head 1. Before the product the keys are repeated: 0, 0, 1, 1. The theory is
# in notebook 2, attention.

# %%
import torch
from torch import Tensor


# %%
def split_heads(x: Tensor, n_heads: int) -> Tensor:
    """(batch, time, n_heads · width) → (batch, head, time, width)."""
    # begin solution
    batch, time, d_model = x.shape
    return x.reshape(batch, time, n_heads, d_model // n_heads).transpose(1, 2)
    # end solution


# %%
def merge_heads(z: Tensor) -> Tensor:
    """The way back: (batch, head, time, width) → (batch, time, n_heads · width)."""
    # begin solution
    batch, n_heads, time, width = z.shape
    return z.transpose(1, 2).reshape(batch, time, n_heads * width)
    # end solution


# %%
def repeat_kv(k: Tensor, n_heads: int) -> Tensor:
    """Keys or values (batch, group, time, width) for each of the query heads: (batch, head, time, width)."""
    # begin solution
    return k.repeat_interleave(n_heads // k.shape[1], 1)
    # end solution


# %% [markdown]
# Number the columns and see where they go, then ask: `cutaway learn check 3`.

# %%
split_heads(torch.arange(8).reshape(1, 2, 4), 2)

# %% checker
from cutaway.learn.exercises.task import Case, FunctionTask, MistakeSet  # noqa: E402

MINUTES = 15
NOTEBOOK = "02_attention"
SITE = "attn.q"
HINTS = (
    "Two steps: first give the last axis two names (heads, width), then exchange two axes. Never one step.",
    "x.reshape(batch, time, n_heads, width) keeps each token's numbers together. Which two axes must now change "
    "places? For the way back, exchange them first.",
    "x.reshape(batch, time, n_heads, -1).transpose(1, 2), back: z.transpose(1, 2).reshape(batch, time, -1), and "
    "repeat_interleave over axis 1 for the groups.",
)


def wrong_split_heads(mistakes: MistakeSet, x: Tensor, n_heads: int) -> Tensor:
    batch, time, d_model = x.shape
    width = d_model // n_heads
    if "view without transpose" in mistakes:
        return x.reshape(batch, n_heads, time, width)
    if "heads and width swapped" in mistakes:
        return x.reshape(batch, time, width, n_heads).permute(0, 3, 1, 2)
    if "no transpose at all" in mistakes:
        return x.reshape(batch, time, n_heads, width)
    if "the wrong axes exchanged" in mistakes:
        return x.reshape(batch, time, n_heads, width).transpose(2, 3)
    return x.reshape(batch, time, n_heads, width).transpose(1, 2)


def wrong_merge_heads(mistakes: MistakeSet, z: Tensor) -> Tensor:
    batch, n_heads, time, width = z.shape
    if "view without transpose" in mistakes:
        return z.reshape(batch, time, n_heads * width)
    if "heads and width swapped" in mistakes:
        return z.permute(0, 2, 3, 1).reshape(batch, time, n_heads * width)
    if "one head only" in mistakes:
        return z[:, 0]
    if "heads added up" in mistakes:
        return z.sum(1)
    return z.transpose(1, 2).reshape(batch, time, n_heads * width)


def wrong_repeat_kv(mistakes: MistakeSet, k: Tensor, n_heads: int) -> Tensor:
    times = n_heads // k.shape[1]
    if "repeat in place of repeat_interleave" in mistakes:
        return k.repeat(1, times, 1, 1)
    if "repeated along time" in mistakes:
        return k.repeat_interleave(times, 2)
    if "GQA forgotten" in mistakes:
        return k
    return k.repeat_interleave(times, 1)


def arange_tensor(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


VIEW_HINT = (
    "the shape is right and the numbers are not: `view` lays them out in their order, so heads would get whole tokens; "
    "split the last axis first, then transpose(1, 2)"
)
TRANSPOSE_HINT = (
    "the heads were not brought back behind time before the last two axes were joined: transpose(1, 2), then reshape"
)
TASKS = [
    FunctionTask(
        split_heads,
        [
            Case("for two tokens and two heads", (arange_tensor(1, 2, 4), 2)),
            Case("for a batch of 2, 5 tokens and 3 heads of width 4", (arange_tensor(2, 5, 12), 3)),
            Case("for one token", (arange_tensor(1, 1, 6), 3)),
            Case("for one head", (arange_tensor(2, 3, 5), 1)),
            Case("for numbers that are not in order in memory", (arange_tensor(2, 6, 4).transpose(1, 2), 2)),
        ],
        wrong_split_heads,
        {
            "view without transpose": VIEW_HINT,
            "heads and width swapped": "each head got every n-th column; a head's columns lie side by side: the axes "
            "are (n_heads, width), in this order",
            "no transpose at all": "time still stands before the heads: exchange axes 1 and 2",
            "the wrong axes exchanged": "heads and width changed places, and time and heads should: transpose(1, 2)",
        },
        ("batch", "head", "time", "width"),
    ),
    FunctionTask(
        merge_heads,
        [
            Case("for two heads", (arange_tensor(1, 2, 2, 2),)),
            Case("for a batch of 2, 3 heads, 5 tokens of width 4", (arange_tensor(2, 3, 5, 4),)),
            Case("for one token", (arange_tensor(1, 3, 1, 2),)),
            Case("for what split_heads gave", (split_heads(arange_tensor(2, 5, 12), 3),)),
        ],
        wrong_merge_heads,
        {
            "view without transpose": TRANSPOSE_HINT,
            "heads and width swapped": "the columns of the heads are mixed: after the transpose the axes are (time, "
            "heads, width), and the last two are joined as they are",
            "one head only": "the other heads are lost: they stand side by side in the last axis",
            "heads added up": "heads stand side by side; they are not added up",
        },
        ("batch", "time", "column"),
    ),
    FunctionTask(
        repeat_kv,
        [
            Case("for 2 groups and 4 heads", (arange_tensor(1, 2, 3, 2), 4)),
            Case("for 3 groups and 6 heads, a batch of 2", (arange_tensor(2, 3, 2, 2), 6)),
            Case("for one group (multi-query)", (arange_tensor(1, 1, 2, 3), 4)),
            Case("for as many groups as heads", (arange_tensor(1, 3, 2, 2), 3)),
        ],
        wrong_repeat_kv,
        {
            "repeat in place of repeat_interleave": "the groups come as 0, 1, 0, 1, and 0, 0, 1, 1 was asked: heads "
            "that share a group are neighbours; repeat_interleave",
            "repeated along time": "axis 2 is time; the groups are axis 1",
            "GQA forgotten": "there are still as many heads as groups: each group serves n_heads // n_groups query "
            "heads",
        },
        ("batch", "head", "time", "width"),
    ),
]
