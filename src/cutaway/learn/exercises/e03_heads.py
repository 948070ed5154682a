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
    """Repeat keys or values (batch, group, time, width) for each query head of a group: (batch, head, time, width)."""
    # begin solution
    return k.repeat_interleave(n_heads // k.shape[1], 1)
    # end solution


# %% [markdown]
# Split a tensor of consecutive numbers and find the columns of each head, then run `cutaway learn check 3`.

# %%
split_heads(torch.arange(8).reshape(1, 2, 4), 2)

# %% checker
from cutaway.learn.exercises.task import Case, FunctionTask  # noqa: E402


def arange_tensor(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


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
        ("batch", "head", "time", "width"),
    ),
]
