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
    """Boolean mask (query, key): True where query i may attend to key j."""
    # begin solution
    return torch.ones(length, length, dtype=torch.bool).tril()
    # end solution


# %%
def cached_mask(num_new: int, num_cached: int) -> Tensor:
    """Mask of `num_new` new tokens after `num_cached` cached tokens: (num_new, num_cached + num_new)."""
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
from cutaway.learn.exercises.task import Case, FunctionTask, MistakeSet  # noqa: E402

MINUTES = 15
NOTEBOOK = "02_attention"
SITE = "attn.scores"
HINTS = (
    "Rows are queries. Which entries of row 0 are True, and which of the last row?",
    "`torch.ones(n, n, dtype=torch.bool).tril()` keeps the entries on and below the diagonal; "
    "`tril(k)` shifts the diagonal k columns to the right. `~mask` negates a mask.",
    "After `num_cached` tokens row i is position num_cached + i: the diagonal shifts by "
    "`num_cached`. And `scores.masked_fill(~mask, -torch.inf).softmax(-1)`.",
)
MASK_MISTAKES = {
    "off by one: diagonal masked": "the diagonal is False: token i may attend to itself, and the first "
    "token has no other key, so its row would be NaN",
    "off by one: one token ahead": "token i attends to token i + 1, which is its target: a leak that looks like "
    "learning",
    "transposed": "the past is masked and the future visible: rows are queries, columns are keys, so the "
    "lower triangle is True",
    "True and False swapped": "True marks masked entries: here True means that a query may attend to a key",
    "nothing masked": "every token attends to every other one: that is the mask of an encoder",
}


def wrong_causal_mask(mistakes: MistakeSet, length: int) -> Tensor:
    ones = torch.ones(length, length, dtype=torch.bool)
    diagonal = 0
    diagonal -= "off by one: diagonal masked" in mistakes
    diagonal += "off by one: one token ahead" in mistakes
    mask = ones if "nothing masked" in mistakes else ones.tril(diagonal)
    mask = mask.T if "transposed" in mistakes else mask
    return ~mask if "True and False swapped" in mistakes else mask


def wrong_cached_mask(mistakes: MistakeSet, num_new: int, num_cached: int) -> Tensor:
    ones = torch.ones(num_new, num_cached + num_new, dtype=torch.bool)
    diagonal = 0 if "new tokens start at position 0" in mistakes else num_cached
    diagonal -= "off by one: diagonal masked" in mistakes
    diagonal += "off by one: one token ahead" in mistakes
    if "cached tokens masked" in mistakes:
        return torch.cat((torch.zeros(num_new, num_cached, dtype=torch.bool), ones[:, num_cached:].tril()), 1)
    mask = ones if "nothing masked" in mistakes else ones.tril(diagonal)
    return ~mask if "True and False swapped" in mistakes else mask


def wrong_masked_weights(mistakes: MistakeSet, scores: Tensor, mask: Tensor) -> Tensor:
    axis = -2 if "softmax on the wrong axis" in mistakes else -1
    mask = ~mask if "mask inverted" in mistakes else mask
    if "mask after softmax" in mistakes:
        return scores.softmax(axis).masked_fill(~mask, 0.0)
    fill_value = (
        0.0 if "0 in place of −∞" in mistakes else -1e4 if "a number in place of −∞" in mistakes else -torch.inf
    )
    return scores.masked_fill(~mask, fill_value).softmax(axis)


def random_scores(seed: int, batch: int, queries: int, keys: int, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    scores = torch.randn(batch, queries, keys, generator=torch.Generator().manual_seed(seed)) * 2 + offset
    return scores, causal_mask(keys)[keys - queries :]


TASKS = [
    FunctionTask(
        causal_mask,
        [Case(f"for length {n}", (n,)) for n in (3, 1, 2, 7)],
        wrong_causal_mask,
        MASK_MISTAKES,
        ("query", "key"),
    ),
    FunctionTask(
        cached_mask,
        [Case(f"for {n} new tokens after {p} cached ones", (n, p)) for n, p in ((2, 3), (1, 4), (3, 0), (4, 2))],
        wrong_cached_mask,
        {
            "new tokens start at position 0": "the diagonal begins in the corner, as if nothing were cached: the "
            "first new token is at position `num_cached`, so the diagonal shifts by `num_cached`",
            "cached tokens masked": "the columns of the cached tokens are False: new tokens may attend to all of them",
            **{name: hint for name, hint in MASK_MISTAKES.items() if name != "transposed"},
        },
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
        wrong_masked_weights,
        {
            "mask after softmax": "the rows do not sum to 1: masked entries were set to zero after the softmax had "
            "given them weight; set their scores to −∞ before it",
            "0 in place of −∞": "0 is an ordinary score, and e⁰ = 1 gives weight; masked scores must be −∞",
            "a number in place of −∞": "−10000 is not small where scores are smaller still; only −∞ is below all "
            "scores",
            "softmax on the wrong axis": "the columns sum to 1 instead of the rows: softmax over the keys, dim=-1",
            "mask inverted": "entries are masked where the mask is False: masked_fill takes ~mask",
        },
        ("batch", "query", "key"),
    ),
]
