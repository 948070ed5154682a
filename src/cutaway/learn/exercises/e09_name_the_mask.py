# %% [markdown]
# # 9 · Name the mask
#
# Three forms of Transformer differ in their attention masks:
#
# | form | attention | mask |
# |---|---|---|
# | encoder-only (BERT) | `self` | ? |
# | decoder-only (GPT, Llama) | `self` | ? |
# | encoder-decoder (T5, the 2017 Transformer) | `encoder`, `decoder`, `cross` | ? ? ? |
#
# The masks are `bidirectional` (every query attends to every key) and `causal` (a query attends to itself and earlier
# positions). Padding is masked in each of them: **keys** that are padding are visible to no query. The row of a padded
# query does not matter, since its output is never used: compute it as for a real query. In cross-attention the queries
# are computed from the target and the keys from the source. The whole source is known.
#
# Some decoders use other masks: in a sliding `window` of $w$ a token attends to itself and the $w - 1$ tokens before
# it; with a `prefix` the first tokens all attend to each other, and the rest is causal; packed `documents` are
# concatenated in one row, each causal and masked from the others. A mask in which each token attends only to itself is
# a window (of 1).
#
# ```
#   causal        window 2      prefix 2      documents 2 + 1
#   1 . .         1 . .         1 1 .         1 . .
#   1 1 .         1 1 .         1 1 .         1 1 .
#   1 1 1         . 1 1         1 1 1         . . 1
# ```
#
# The theory is in notebooks 2, attention, and 6, the three forms.

# %%
import torch
from torch import Tensor


# %%
def attention_masks(form: str) -> dict[str, str]:
    """Name of the mask of each attention sublayer, for `form` "encoder-only", "decoder-only" or "encoder-decoder"."""
    # begin solution
    if form == "encoder-only":
        return {"self": "bidirectional"}
    if form == "decoder-only":
        return {"self": "causal"}
    return {"encoder": "bidirectional", "decoder": "causal", "cross": "bidirectional"}
    # end solution


# %%
def build_attention_mask(mask: str, num_queries: int, not_padding: Tensor) -> Tensor:
    """Build a "bidirectional" or "causal" mask (batch, query, key). `not_padding` (batch, key) is False for padding."""
    # begin solution
    visible = torch.ones(num_queries, not_padding.shape[1], dtype=torch.bool)
    if mask == "causal":
        visible = visible.tril()
    return visible & not_padding[:, None, :]
    # end solution


# %%
def name_the_mask(mask: Tensor) -> str:
    """Name of a mask (query, key) of at least three tokens: bidirectional, causal, window, prefix or documents."""
    # begin solution
    i, j = torch.arange(len(mask))[:, None], torch.arange(len(mask))
    past = j <= i
    if mask.all():
        return "bidirectional"
    if (mask & ~past).any():
        return "prefix"
    if torch.equal(mask, past):
        return "causal"
    return "window" if torch.equal(mask, past & (i - j < mask.sum(-1).max())) else "documents"
    # end solution


# %% [markdown]
# Try one, then run `cutaway learn check 9`.

# %%
name_the_mask(torch.ones(4, 4, dtype=torch.bool).tril().triu(-1))

# %% checker
from cutaway.learn.exercises.task import Case, FunctionTask  # noqa: E402


def document_mask(*lengths: int) -> Tensor:
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return (document[:, None] == document).tril()


def prefix_mask(n: int, prefix_len: int) -> Tensor:
    visible = torch.ones(n, n, dtype=torch.bool).tril()
    visible[:prefix_len, :prefix_len] = True
    return visible


LEFT_PADDED = torch.tensor([[False, False, True, True], [True, True, True, True]])
RIGHT_PADDED = torch.tensor([[True, True, True, False]])
FULL_MASK = torch.ones(6, 6, dtype=torch.bool)
TASKS = [
    FunctionTask(
        attention_masks, [Case(f"for {form}", (form,)) for form in ("encoder-only", "decoder-only", "encoder-decoder")]
    ),
    FunctionTask(
        build_attention_mask,
        [
            Case("for a causal mask with padding on the left", ("causal", 4, LEFT_PADDED)),
            Case("for a causal mask with padding on the right", ("causal", 4, RIGHT_PADDED)),
            Case("for an encoder with padding", ("bidirectional", 4, LEFT_PADDED)),
            Case("for one token", ("causal", 1, torch.tensor([[True]]))),
            Case("for cross-attention, 2 queries and a padded source", ("bidirectional", 2, RIGHT_PADDED)),
        ],
        ("batch", "query", "key"),
    ),
    FunctionTask(
        name_the_mask,
        [
            Case("for a mask without any False", (FULL_MASK,)),
            Case("for the lower triangle", (FULL_MASK.tril(),)),
            Case("for a window of 3", (FULL_MASK.tril().triu(-2),)),
            Case("for a window of 1", (FULL_MASK.tril().triu(),)),
            Case("for a prefix of 2", (prefix_mask(6, 2),)),
            Case("for a prefix of all but one", (prefix_mask(5, 4),)),
            Case("for documents of 2, 3 and 1", (document_mask(2, 3, 1),)),
            Case("for documents of 3 and 3", (document_mask(3, 3),)),
        ],
    ),
]
