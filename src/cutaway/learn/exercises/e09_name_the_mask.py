# %% [markdown]
# # 9 · Name the mask
#
# Three forms of Transformer differ in who may look at whom:
#
# | form | attention | mask |
# |---|---|---|
# | encoder-only (BERT) | `self` | ? |
# | decoder-only (GPT, Llama) | `self` | ? |
# | encoder-decoder (T5, the 2017 Transformer) | `encoder`, `decoder`, `cross` | ? ? ? |
#
# The masks' names are `bidirectional` (every query sees every key) and `causal` (a query sees itself and what is
# before it). Padding is hidden in each of them: **keys** that are no real tokens are seen by nobody. What a padded
# query sees does not matter, for nobody reads it: leave its row as if it were real. In cross-attention the queries
# come from the target and the keys from the source, which is known whole.
#
# Some decoders use others yet: in a `window` of $w$ a token sees itself and the $w - 1$ before it; with a `prefix` the
# first tokens all see each other, and the rest is causal; packed `documents` lie behind each other in one row, each
# causal and blind to the others. Where each token sees itself alone, call it a window (of 1).
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
    """For "encoder-only", "decoder-only" and "encoder-decoder": each of its attentions, and its mask's name."""
    # begin solution
    if form == "encoder-only":
        return {"self": "bidirectional"}
    if form == "decoder-only":
        return {"self": "causal"}
    return {"encoder": "bidirectional", "decoder": "causal", "cross": "bidirectional"}
    # end solution


# %%
def build_attention_mask(mask: str, num_queries: int, not_padding: Tensor) -> Tensor:
    """A "bidirectional" or "causal" mask (batch, query, key); `not_padding` (batch, key) is False for padding."""
    # begin solution
    seen = torch.ones(num_queries, not_padding.shape[1], dtype=torch.bool)
    if mask == "causal":
        seen = seen.tril()
    return seen & not_padding[:, None, :]
    # end solution


# %%
def name_the_mask(mask: Tensor) -> str:
    """bidirectional, causal, window, prefix or documents: the name of a mask (query, key) of three tokens or more."""
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
# Try one, then ask: `cutaway learn check 9`.

# %%
name_the_mask(torch.ones(4, 4, dtype=torch.bool).tril().triu(-1))

# %% checker
from cutaway.learn.exercises.task import Case, FunctionTask, MistakeSet  # noqa: E402

MINUTES = 15
NOTEBOOK = "06_forms"
SITE = "cross.pattern"
HINTS = (
    "Ask of each attention: which of its keys are known when its query is computed? What is known may be seen.",
    "The encoder reads a finished text, and so does cross-attention. A decoder writes. Padding: "
    "not_padding[:, None, :] is one row of keys for every query.",
    "To tell masks apart: is everything True? Is anything above the diagonal True? Is it the whole lower triangle? "
    "Are all rows cut to the same width?",
)


def wrong_attention_masks(mistakes: MistakeSet, form: str) -> dict[str, str]:
    right = attention_masks(form)
    if "encoder" in form and "the encoder made causal" in mistakes:
        right["self" if form == "encoder-only" else "encoder"] = "causal"
    if "decoder" in form and "the decoder sees the future" in mistakes:
        right["self" if form == "decoder-only" else "decoder"] = "bidirectional"
    if "cross" in right and "cross-attention made causal" in mistakes:
        right["cross"] = "causal"
    if "cross-attention forgotten" in mistakes:
        right.pop("cross", None)
    return right


def wrong_build_attention_mask(mistakes: MistakeSet, mask: str, num_queries: int, not_padding: Tensor) -> Tensor:
    seen = torch.ones(num_queries, not_padding.shape[1], dtype=torch.bool)
    if mask == "causal" or "always causal" in mistakes:
        moved = -1 if "off by one: a token does not see itself" in mistakes else 0
        seen = seen if "never causal" in mistakes else seen.tril(moved)
    if "padding not hidden" in mistakes:
        return seen.expand(len(not_padding), -1, -1)
    if "padded queries hidden in place of keys" in mistakes:
        return seen & not_padding[:, :, None]
    if "padded queries hidden too" in mistakes:
        return seen & not_padding[:, None, :] & not_padding[:, :, None]
    if "padding seen, tokens hidden" in mistakes:
        return seen & ~not_padding[:, None, :]
    return seen & not_padding[:, None, :]


def wrong_name_the_mask(mistakes: MistakeSet, mask: Tensor) -> str:
    right = name_the_mask(mask)
    if right in ("window", "documents") and "everything without a future called causal" in mistakes:
        return "causal"
    if right == "prefix" and "a prefix called bidirectional" in mistakes:
        return "bidirectional"
    if right == "documents" and "documents called a window" in mistakes:
        return "window"
    if right == "window" and "a window called documents" in mistakes:
        return "documents"
    return right


def document_mask(*lengths: int) -> Tensor:
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return (document[:, None] == document).tril()


def prefix_mask(n: int, prefix_len: int) -> Tensor:
    seen = torch.ones(n, n, dtype=torch.bool).tril()
    seen[:prefix_len, :prefix_len] = True
    return seen


LEFT_PADDED = torch.tensor([[False, False, True, True], [True, True, True, True]])
RIGHT_PADDED = torch.tensor([[True, True, True, False]])
FULL_MASK = torch.ones(6, 6, dtype=torch.bool)
TASKS = [
    FunctionTask(
        attention_masks,
        [Case(f"for {form}", (form,)) for form in ("encoder-only", "decoder-only", "encoder-decoder")],
        wrong_attention_masks,
        {
            "the encoder made causal": "an encoder reads a text that is there whole: every token may see every other",
            "the decoder sees the future": "a decoder must guess the next token, so it may not see it: causal",
            "cross-attention made causal": "cross-attention looks at the source, which is known whole before the "
            "first word is written",
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
            "padding not hidden": "keys that are padding are seen: `not_padding` says which are real",
            "padded queries hidden in place of keys": "the rows of padded queries are empty and padded keys are "
            "seen: it is the keys, the columns, that padding hides: not_padding[:, None, :]",
            "padded queries hidden too": "the rows of padded queries are empty, and a softmax over an empty row is "
            "NaN; hide keys only",
            "padding seen, tokens hidden": "`not_padding` is True for real tokens, which are to be seen",
            "never causal": "causal: query i sees keys 0 to i",
            "always causal": "bidirectional: every query sees every real key",
            "off by one: a token does not see itself": "the diagonal is seen too",
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
            "everything without a future called causal": "that nothing later is seen is not enough: causal sees all "
            "of the past",
            "a prefix called bidirectional": "some of the future is seen, but not all of it",
            "documents called a window": "in a window the rows are cut to one width; documents begin anew",
            "a window called documents": "in a window the edge moves with each row; a document's edge stays while it "
            "lasts",
        },
    ),
]
