# %% [markdown]
# # 2 · The causal mask
#
# A decoder is trained at all positions at once: position $i$ must guess token $i+1$ while that very token stands in
# the input. So position $i$ may look at positions $0 … i$ and at nothing later. A **mask** says who may look at whom:
# rows ask, columns are looked at.
#
# ```
#              key 0   key 1   key 2
#   query 0    True    False   False
#   query 1    True    True    False
#   query 2    True    True    True
# ```
#
# What may not be seen gets the score $-\infty$ **before** the softmax: $e^{-\infty} = 0$, and the rest of the row
# still adds up to 1.
#
# **A number to begin with.** Scores $(1, 1, 1)$ in query 1's row, which sees keys 0 and 1: the shares are $(0.5, 0.5,
# 0)$. Zeroed after the softmax they would be $(0.333, 0.333, 0)$: a third of the attention is lost.
#
# With a cache the new tokens are fewer than the keys: after 3 tokens in the cache, 2 new ones have 5 keys, and the
# first of them stands at position 3. The theory is in notebook 2, attention.

# %%
import torch
from torch import Tensor


# %%
def causal_mask(length: int) -> Tensor:
    """(query, key) of True and False: True where query i may look at key j."""
    # begin solution
    return torch.ones(length, length, dtype=torch.bool).tril()
    # end solution


# %%
def cached_mask(num_new: int, num_cached: int) -> Tensor:
    """The mask of `num_new` tokens behind `num_cached` cached ones: (num_new, num_cached + num_new)."""
    # begin solution
    return torch.ones(num_new, num_cached + num_new, dtype=torch.bool).tril(num_cached)
    # end solution


# %%
def masked_weights(scores: Tensor, mask: Tensor) -> Tensor:
    """Scores (batch, query, key) → shares: 0 where the mask (query, key) is False, and rows add up to 1."""
    # begin solution
    return scores.masked_fill(~mask, -torch.inf).softmax(-1)
    # end solution


# %% [markdown]
# Try the number from above, then ask: `cutaway learn check 2`.

# %%
masked_weights(torch.ones(1, 3, 3), causal_mask(3))

# %% checker
from cutaway.learn.exercises.task import Case, FunctionTask, MistakeSet  # noqa: E402

MINUTES = 15
NOTEBOOK = "02_attention"
SITE = "attn.scores"
HINTS = (
    "Rows are queries. Which entries of row 0 are True, and which of the last row?",
    "`torch.ones(n, n, dtype=torch.bool).tril()` keeps what is on and below the diagonal; `tril(k)` moves the "
    "diagonal k places to the right. `~mask` is the opposite of a mask.",
    "Behind `num_cached` tokens row i is position num_cached + i: the diagonal moves by `num_cached`. And "
    "`scores.masked_fill(~mask, -torch.inf).softmax(-1)`.",
)
MASK_MISTAKES = {
    "off by one: a token does not see itself": "the diagonal is False: token i may look at itself, and the first one "
    "has nothing else, so that its row would be NaN",
    "off by one: one token ahead": "token i sees token i + 1, which is the one it has to guess: a leak that looks like "
    "learning",
    "upside down": "the past is hidden and the future seen: rows ask, columns are looked at, so the lower triangle "
    "is True",
    "True and False swapped": "True stands where nothing may be seen: here True means that a query may look",
    "nothing hidden": "every token sees every other one: that is an encoder's mask",
}


def wrong_causal_mask(mistakes: MistakeSet, length: int) -> Tensor:
    ones = torch.ones(length, length, dtype=torch.bool)
    moved = 0
    moved -= "off by one: a token does not see itself" in mistakes
    moved += "off by one: one token ahead" in mistakes
    mask = ones if "nothing hidden" in mistakes else ones.tril(moved)
    mask = mask.T if "upside down" in mistakes else mask
    return ~mask if "True and False swapped" in mistakes else mask


def wrong_cached_mask(mistakes: MistakeSet, num_new: int, num_cached: int) -> Tensor:
    ones = torch.ones(num_new, num_cached + num_new, dtype=torch.bool)
    moved = 0 if "the new tokens begin at position 0" in mistakes else num_cached
    moved -= "off by one: a token does not see itself" in mistakes
    moved += "off by one: one token ahead" in mistakes
    if "the cache is not seen" in mistakes:
        return torch.cat((torch.zeros(num_new, num_cached, dtype=torch.bool), ones[:, num_cached:].tril()), 1)
    mask = ones if "nothing hidden" in mistakes else ones.tril(moved)
    return ~mask if "True and False swapped" in mistakes else mask


def wrong_masked_weights(mistakes: MistakeSet, scores: Tensor, mask: Tensor) -> Tensor:
    axis = -2 if "softmax on the wrong axis" in mistakes else -1
    mask = ~mask if "the mask is read the wrong way" in mistakes else mask
    if "mask after softmax" in mistakes:
        return scores.softmax(axis).masked_fill(~mask, 0.0)
    instead = 0.0 if "0 in place of −∞" in mistakes else -1e4 if "a number in place of −∞" in mistakes else -torch.inf
    return scores.masked_fill(~mask, instead).softmax(axis)


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
        [Case(f"for {n} new tokens behind {p}", (n, p)) for n, p in ((2, 3), (1, 4), (3, 0), (4, 2))],
        wrong_cached_mask,
        {
            "the new tokens begin at position 0": "the triangle begins in the corner as if nothing were cached: the "
            "first new token stands at position `num_cached`, so the diagonal moves by `num_cached`",
            "the cache is not seen": "the columns of the cached tokens are False: the new ones may look at all of them",
            **{name: hint for name, hint in MASK_MISTAKES.items() if name != "upside down"},
        },
        ("query", "key"),
    ),
    FunctionTask(
        masked_weights,
        [
            Case("for equal scores", (torch.ones(1, 3, 3), causal_mask(3))),
            Case("for a batch of two", random_scores(1, 2, 4, 4)),
            Case("for one token", random_scores(2, 1, 1, 1)),
            Case("behind a cache", random_scores(3, 1, 2, 5)),
            Case("for scores near −20000", random_scores(4, 1, 3, 3, -20_000.0)),
        ],
        wrong_masked_weights,
        {
            "mask after softmax": "the rows do not add up to 1: what is hidden was zeroed after the softmax had "
            "given it a share; put −∞ in the scores before it",
            "0 in place of −∞": "a score of 0 is a score like others, and e⁰ = 1 is a share; hidden ones need −∞",
            "a number in place of −∞": "−10000 is not small where scores are smaller still; only −∞ is below all",
            "softmax on the wrong axis": "the columns add up to 1, and the rows should: softmax over the keys, dim=-1",
            "the mask is read the wrong way": "hidden is where the mask is False: masked_fill takes ~mask",
        },
        ("batch", "query", "key"),
    ),
]
