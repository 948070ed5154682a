# %% [markdown]
# # 3 · Splitting heads
#
# A query of dimension 768 is the concatenation of twelve queries of dimension 64: head 0 has columns 0–63, head 1
# columns 64–127, and so on. To compute all heads at once, the head axis must come before the time axis:
#
# $$(\text{batch}, \text{time}, \text{heads} \cdot \text{width}) \to (\text{batch}, \text{time}, \text{heads},
# \text{width}) \to (\text{batch}, \text{heads}, \text{time}, \text{width})$$
#
# `view` (or `reshape`, `unflatten`) changes the shape and keeps the numbers **in their memory order**; `transpose`
# swaps two axes. A `view` directly to the last shape has the right shape but the wrong numbers: head 0 would get all
# columns of the first tokens.
#
# ```
#   one sequence, two tokens, two heads of width 2
#   token 0:  a0 a1 | b0 b1            head a:  a0 a1      head b:  b0 b1
#   token 1:  a2 a3 | b2 b3                     a2 a3               b2 b3
# ```
#
# Grouped-query attention has fewer key heads than query heads: with 4 query heads and 2 key heads, query heads 0 and 1
# share key head 0, and 2 and 3 share key head 1. Before the product the key heads are repeated: 0, 0, 1, 1. The theory
# is in notebook 2, attention.

# %%
import torch
from torch import Tensor


# %%
def split_heads(x: Tensor, n_heads: int) -> Tensor:
    """Reorder (batch, time, n_heads · width) to (batch, head, time, width)."""
    # begin solution
    batch, time, d_model = x.shape
    return x.reshape(batch, time, n_heads, d_model // n_heads).transpose(1, 2)
    # end solution


# %%
def merge_heads(z: Tensor) -> Tensor:
    """Inverse of split_heads: (batch, head, time, width) → (batch, time, n_heads · width)."""
    # begin solution
    batch, n_heads, time, width = z.shape
    return z.transpose(1, 2).reshape(batch, time, n_heads * width)
    # end solution


# %%
def repeat_kv(k: Tensor, n_heads: int) -> Tensor:
    """Repeat keys or values (batch, group, time, width) for each query head: (batch, head, time, width)."""
    # begin solution
    return k.repeat_interleave(n_heads // k.shape[1], 1)
    # end solution


# %% [markdown]
# Number the columns and follow them, then run `cutaway learn check 3`.

# %%
split_heads(torch.arange(8).reshape(1, 2, 4), 2)

# %% checker
from cutaway.learn.exercises.task import Case, FunctionTask, MistakeSet  # noqa: E402

MINUTES = 15
NOTEBOOK = "02_attention"
SITE = "attn.q"
HINTS = (
    "Two steps: first split the last axis into (heads, width), then swap two axes. Never one step.",
    "x.reshape(batch, time, n_heads, width) keeps the numbers of each token together. Which two "
    "axes must be swapped now? To merge, swap them first.",
    "split: x.reshape(batch, time, n_heads, -1).transpose(1, 2); merge: z.transpose(1, "
    "2).reshape(batch, time, -1); and repeat_interleave over axis 1 for the groups.",
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
    if "the wrong axes swapped" in mistakes:
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
    if "heads summed" in mistakes:
        return z.sum(1)
    return z.transpose(1, 2).reshape(batch, time, n_heads * width)


def wrong_repeat_kv(mistakes: MistakeSet, k: Tensor, n_heads: int) -> Tensor:
    repeats = n_heads // k.shape[1]
    if "repeat in place of repeat_interleave" in mistakes:
        return k.repeat(1, repeats, 1, 1)
    if "repeated along time" in mistakes:
        return k.repeat_interleave(repeats, 2)
    if "GQA forgotten" in mistakes:
        return k
    return k.repeat_interleave(repeats, 1)


def arange_tensor(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


VIEW_HINT = (
    "the shape is right and the numbers are not: `view` keeps the memory order, so a head gets "
    "all columns of a few tokens; split the last axis first, then transpose(1, 2)"
)
TRANSPOSE_HINT = (
    "the head axis was not moved after the time axis before the last two axes were merged: "
    "transpose(1, 2), then reshape"
)
TASKS = [
    FunctionTask(
        split_heads,
        [
            Case("for two tokens and two heads", (arange_tensor(1, 2, 4), 2)),
            Case("for a batch of 2, 5 tokens and 3 heads of width 4", (arange_tensor(2, 5, 12), 3)),
            Case("for one token", (arange_tensor(1, 1, 6), 3)),
            Case("for one head", (arange_tensor(2, 3, 5), 1)),
            Case("for a non-contiguous tensor", (arange_tensor(2, 6, 4).transpose(1, 2), 2)),
        ],
        wrong_split_heads,
        {
            "view without transpose": VIEW_HINT,
            "heads and width swapped": "each head has every n-th column; the columns of a head are contiguous: the "
            "axes are (n_heads, width), in this order",
            "no transpose at all": "time is still before the heads: swap axes 1 and 2",
            "the wrong axes swapped": "heads and width were swapped instead of time and heads: transpose(1, 2)",
        },
        ("batch", "head", "time", "width"),
    ),
    FunctionTask(
        merge_heads,
        [
            Case("for two heads", (arange_tensor(1, 2, 2, 2),)),
            Case("for a batch of 2, 3 heads, 5 tokens of width 4", (arange_tensor(2, 3, 5, 4),)),
            Case("for one token", (arange_tensor(1, 3, 1, 2),)),
            Case("for the output of split_heads", (split_heads(arange_tensor(2, 5, 12), 3),)),
        ],
        wrong_merge_heads,
        {
            "view without transpose": TRANSPOSE_HINT,
            "heads and width swapped": "the columns of the heads are interleaved: after the transpose the axes are "
            "(time, heads, width), and the last two are merged in this order",
            "one head only": "the other heads are lost: they are concatenated along the last axis",
            "heads summed": "heads are concatenated, not summed",
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
            "repeat in place of repeat_interleave": "the groups are ordered 0, 1, 0, 1 instead of 0, 0, 1, 1: heads "
            "that share a group are adjacent; use repeat_interleave",
            "repeated along time": "axis 2 is time; the groups are axis 1",
            "GQA forgotten": "there are still as many heads as groups: each group is shared by n_heads // n_groups "
            "query heads",
        },
        ("batch", "head", "time", "width"),
    ),
]
