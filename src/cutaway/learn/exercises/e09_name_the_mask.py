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
# query does not matter, since its output is never used: leave it as if the query were real. In cross-attention the
# queries come from the target and the keys from the source, all of which is known.
#
# Some decoders use other masks: in a sliding `window` of $w$ a token attends to itself and the $w - 1$ tokens before
# it; with a `prefix` the first tokens all attend to each other, and the rest is causal; packed `documents` are
# concatenated in one row, each causal and masked from the others. Where each token attends to itself alone, call it a
# window (of 1).
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
    """Name of the mask of each attention in the form "encoder-only", "decoder-only" or "encoder-decoder"."""
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
from cutaway.learn.exercises.task import Case, FunctionTask, MistakeSet  # noqa: E402

MINUTES = 15
NOTEBOOK = "06_forms"
SITE = "cross.pattern"
HINTS = (
    "For each attention: which of its keys are known when the query is computed? Known keys may be visible.",
    "The encoder processes a complete text, and cross-attention attends to one. A decoder "
    "generates. Padding: not_padding[:, None, :] is one row of keys for every query.",
    "To distinguish masks: is everything True? Is anything above the diagonal True? Is it the "
    "complete lower triangle? Do all rows have the same maximum width?",
)


def wrong_attention_masks(mistakes: MistakeSet, form: str) -> dict[str, str]:
    masks = attention_masks(form)
    if "encoder" in form and "the encoder made causal" in mistakes:
        masks["self" if form == "encoder-only" else "encoder"] = "causal"
    if "decoder" in form and "the decoder made bidirectional" in mistakes:
        masks["self" if form == "decoder-only" else "decoder"] = "bidirectional"
    if "cross" in masks and "cross-attention made causal" in mistakes:
        masks["cross"] = "causal"
    if "cross-attention forgotten" in mistakes:
        masks.pop("cross", None)
    return masks


def wrong_build_attention_mask(mistakes: MistakeSet, mask: str, num_queries: int, not_padding: Tensor) -> Tensor:
    visible = torch.ones(num_queries, not_padding.shape[1], dtype=torch.bool)
    if mask == "causal" or "always causal" in mistakes:
        diagonal = -1 if "off by one: diagonal masked" in mistakes else 0
        visible = visible if "never causal" in mistakes else visible.tril(diagonal)
    if "padding not masked" in mistakes:
        return visible.expand(len(not_padding), -1, -1)
    if "padded queries masked in place of keys" in mistakes:
        return visible & not_padding[:, :, None]
    if "padded queries masked too" in mistakes:
        return visible & not_padding[:, None, :] & not_padding[:, :, None]
    if "padding visible, tokens masked" in mistakes:
        return visible & ~not_padding[:, None, :]
    return visible & not_padding[:, None, :]


def wrong_name_the_mask(mistakes: MistakeSet, mask: Tensor) -> str:
    name = name_the_mask(mask)
    if name in ("window", "documents") and "any lower-triangular mask called causal" in mistakes:
        return "causal"
    if name == "prefix" and "a prefix called bidirectional" in mistakes:
        return "bidirectional"
    if name == "documents" and "documents called a window" in mistakes:
        return "window"
    if name == "window" and "a window called documents" in mistakes:
        return "documents"
    return name


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
        attention_masks,
        [Case(f"for {form}", (form,)) for form in ("encoder-only", "decoder-only", "encoder-decoder")],
        wrong_attention_masks,
        {
            "the encoder made causal": "the input of an encoder is complete: every token may attend to every other",
            "the decoder made bidirectional": "a decoder must predict the next token, so it may not attend to it: "
            "causal",
            "cross-attention made causal": "cross-attention attends to the source, all of which is known before the "
            "first target token is generated",
            "cross-attention forgotten": "an encoder-decoder has three attentions: encoder, decoder and cross",
        },
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
        wrong_build_attention_mask,
        {
            "padding not masked": "keys that are padding are visible: `not_padding` marks the real ones",
            "padded queries masked in place of keys": "the rows of padded queries are empty and padded keys are "
            "visible: mask the keys, the columns: not_padding[:, None, :]",
            "padded queries masked too": "the rows of padded queries are empty, and a softmax over an empty row is "
            "NaN; mask keys only",
            "padding visible, tokens masked": "`not_padding` is True for real tokens, which must be visible",
            "never causal": "causal: query i attends to keys 0 to i",
            "always causal": "bidirectional: every query attends to every real key",
            "off by one: diagonal masked": "the diagonal is visible too",
        },
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
        wrong_name_the_mask,
        {
            "any lower-triangular mask called causal": "masking all later keys is not enough: in a causal mask all "
            "earlier keys are visible",
            "a prefix called bidirectional": "some later keys are visible, but not all",
            "documents called a window": "in a window all rows have the same width; documents start anew",
            "a window called documents": "in a window the left edge moves with each row; the edge of a document is "
            "fixed within it",
        },
    ),
]
