# %% [markdown]
# # 10 · A debugging checklist
#
# Six models, A to F, have the same weights and one bug each. Nothing crashes: they all give logits, and most of them
# would train. Write four checks, each a comparison of two things that **must be equal**, then name the bug that each
# model has.
#
# | check | must be equal |
# |---|---|
# | `leaks_future` | logits of positions 0 … i, whatever stands behind position i |
# | `cache_differs` | logits of a text in one pass, and token by token through the cache |
# | `padding_changes_logits` | logits of a text alone, and of the same text with padding on its **left** |
# | `mixes_batch_rows` | logits of a text alone, and beside another text in a batch |
#
# Two ways to compute a number seldom agree in its last digits: `torch.allclose(a, b, atol=1e-4)`, not `==`. And
# a text of a few tokens finds few bugs: take ten or more.
#
# A model can be asked four things:
#
# ```
#   model(tokens, mask=None)          tokens (B, T) of 0 … 31 → logits (B, T, 32); mask (B, T), False for padding
#   model.step(tokens, cache=None)    → logits of these tokens, the cache behind them (None before the first)
#   model.loss(tokens)                → the mean loss, as it is trained with
#   model.attention(q, k, v)          its own causal attention on (B, H, T, D)
# ```
#
# The four checks find four of the six. For the other two, compare `model.loss` and `model.attention` with your own, or
# with `build_buggy_model("correct")`. The theory is in notebook 11, finding bugs; `cutaway check` does all of this and
# more, for any model.

# %%
import torch
from torch import nn

from cutaway.learn.exercises.buggy_models import build_buggy_model


# %%
def leaks_future(model: nn.Module) -> bool:
    """Whether a position's logits depend on a later token."""
    # begin solution
    one = torch.arange(12)[None] % 32
    other = one.clone()
    other[0, 8:] = 31
    with torch.no_grad():
        return not torch.allclose(model(one)[:, :8], model(other)[:, :8], atol=1e-4)
    # end solution


# %%
def cache_differs(model: nn.Module) -> bool:
    """Whether token by token through the cache gives other logits than one pass."""
    # begin solution
    tokens = torch.arange(12)[None] % 32
    cache, steps = None, []
    with torch.no_grad():
        for n in range(tokens.shape[1]):
            logits, cache = model.step(tokens[:, n : n + 1], cache)  # type: ignore[operator]
            steps.append(logits)
        return not torch.allclose(torch.cat(steps, 1), model(tokens), atol=1e-4)
    # end solution


# %%
def padding_changes_logits(model: nn.Module) -> bool:
    """Whether padding on the left changes the logits of the text behind it."""
    # begin solution
    tokens = torch.arange(1, 11)[None]
    padded = torch.cat((torch.zeros(1, 4, dtype=torch.long), tokens), 1)
    mask = torch.arange(14)[None] >= 4
    with torch.no_grad():
        return not torch.allclose(model(padded, mask)[:, 4:], model(tokens), atol=1e-4)
    # end solution


# %%
def mixes_batch_rows(model: nn.Module) -> bool:
    """Whether a text's logits depend on the other texts of its batch."""
    # begin solution
    batch = torch.stack((torch.arange(10), torch.arange(20, 30)))
    with torch.no_grad():
        return not torch.allclose(model(batch)[:1], model(batch[:1]), atol=1e-4)
    # end solution


# %% [markdown]
# Now the diagnosis. The names are `future seen`, `cache off by one`, `padding shifts positions`, `no √d`, `loss not
# shifted` and `texts mixed`; each model has another one.

# %%
# begin solution
DIAGNOSIS = {
    "A": "future seen",
    "B": "texts mixed",
    "C": "loss not shifted",
    "D": "cache off by one",
    "E": "no √d",
    "F": "padding shifts positions",
}
# stub: DIAGNOSIS = {"A": "?", "B": "?", "C": "?", "D": "?", "E": "?", "F": "?"}
# end solution

# %% [markdown]
# Check them, then ask: `cutaway learn check 10`.

# %%
{letter: leaks_future(build_buggy_model(letter)) for letter in "ABCDEF"}

# %% checker
from collections.abc import Callable  # noqa: E402

from torch import Tensor  # noqa: E402

from cutaway.learn.exercises.buggy_models import LETTERS, BuggyModel, TokenLookupModel, bug_of_letter  # noqa: E402
from cutaway.learn.exercises.task import Case, FunctionTask, MistakeSet, TableTask  # noqa: E402

MINUTES = 40
NOTEBOOK = "11_finding_bugs"
SITE = "logits"
HINTS = (
    "Each check makes two inputs, asks the model for both, and compares the part that must be equal.",
    "leaks_future: change the last tokens only, compare the positions before them. cache_differs: one token a step, "
    "the cache handed on, all logits side by side. padding_changes_logits: give the mask, and compare behind the "
    "padding. mixes_batch_rows: one text alone and the same beside another.",
    "Of the two that are left: a loss that is not shifted asks for the token that is read; compare "
    "model.loss(tokens) with cross_entropy(model(tokens)[:, :-1], tokens[:, 1:]). And compare model.attention with "
    "torch.nn.functional.scaled_dot_product_attention(…, is_causal=True).",
)
ROUNDING_ERROR = 2e-6


def model_cases(bugs: dict[str, str], *, with_positions: bool = False) -> list[Case]:
    """Correct models of several kinds, and ones with bugs."""
    models = {
        "for a correct model": BuggyModel(rounding=ROUNDING_ERROR),
        "for a correct model without attention": TokenLookupModel(with_positions=with_positions),
        "for a correct model without attention whose last digits differ": TokenLookupModel(
            with_positions=with_positions, rounding=ROUNDING_ERROR
        ),
        **{what: BuggyModel(bug) for what, bug in bugs.items()},
    }
    return [Case(what, (model,)) for what, model in models.items()]


ALLCLOSE_HINT = "== finds the last digits of correct models; compare with torch.allclose(…, atol=1e-4)"
TensorPair = tuple[Tensor, Tensor]


def tensors_differ(mistakes: MistakeSet, pair: TensorPair) -> bool:
    one, other = pair
    if "exact equality" in mistakes:
        return not torch.equal(one, other)
    return not torch.allclose(one, other, atol=1e-4)


def as_check(compare: Callable[[MistakeSet, BuggyModel], TensorPair]) -> Callable[[MistakeSet, BuggyModel], bool]:
    """A comparison as a check, with the mistakes that all comparisons share."""

    def ask(mistakes: MistakeSet, model: BuggyModel) -> bool:
        with torch.no_grad():
            found = tensors_differ(mistakes, compare(mistakes, model))
        return not found if "the answer turned round" in mistakes else found

    return ask


def compare_future(mistakes: MistakeSet, model: BuggyModel) -> TensorPair:
    length = 4 if "too short a text" in mistakes else 12
    one = torch.arange(length)[None]
    other = one.clone()
    if "the past changed" in mistakes:
        other[0, 0] = 31
        return model(one)[:, 1:], model(other)[:, 1:]
    other[0, -3:] = 31
    upto = length if "the changed position compared too" in mistakes else length - 3
    return model(one)[:, :upto], model(other)[:, :upto]


def compare_cached(mistakes: MistakeSet, model: BuggyModel) -> TensorPair:
    tokens = torch.arange(12)[None]
    if "no cache between the steps" in mistakes:
        alone = [model.step(tokens[:, n : n + 1])[0] for n in range(tokens.shape[1])]
        return torch.cat(alone, 1), model(tokens)
    if "nothing read from the cache" in mistakes:
        return model.step(tokens)[0], model(tokens)
    cache, steps = None, []
    for n in range(tokens.shape[1]):
        logits, cache = model.step(tokens[:, n : n + 1], cache)
        steps.append(logits)
    return torch.cat(steps, 1), model(tokens)


def compare_padded(mistakes: MistakeSet, model: BuggyModel) -> TensorPair:
    tokens = torch.arange(1, 11)[None]
    pads = torch.zeros(1, 4, dtype=torch.long)
    right = "padding on the right" in mistakes
    padded = torch.cat((tokens, pads) if right else (pads, tokens), 1)
    mask = None if "no mask given" in mistakes else padded > 0
    out = model(padded, mask)
    begin = 0 if right or "compared from position 0" in mistakes else 4
    return out[:, begin : begin + 10], model(tokens)


def compare_batched(mistakes: MistakeSet, model: BuggyModel) -> TensorPair:
    first = torch.arange(10)
    batch = torch.stack((first, first if "the same text twice" in mistakes else torch.arange(20, 30)))
    row = 1 if "another row compared" in mistakes else 0
    return model(batch)[row], model(first[None])[0]


INVERTED_HINT = "True and False are turned round: True means that the model has the bug"
COMMON_MISTAKES = {"exact equality": ALLCLOSE_HINT, "the answer turned round": INVERTED_HINT}
TASKS = [
    FunctionTask(
        leaks_future,
        model_cases(
            {
                "for a model that sees one token ahead": "future seen",
                "for a model that sees ahead from position 6 on": "future seen late",
            }
        ),
        as_check(compare_future),
        {
            "the changed position compared too": "where the token itself is changed its logits change too, in every "
            "model; compare the positions before it only",
            "the past changed": "an earlier token was changed, which later positions may see; change the last ones",
            "too short a text": "the leak begins behind the end of your text; take ten tokens or more",
            **COMMON_MISTAKES,
        },
        max_mistakes=1,
    ),
    FunctionTask(
        cache_differs,
        model_cases({"for a model whose cache is off by one": "cache off by one"}, with_positions=True),
        as_check(compare_cached),
        {
            "nothing read from the cache": "with one step alone, or all tokens in one step, nothing is read from the "
            "cache; give one token at a time, and go on for several steps",
            "no cache between the steps": "each step begins anew: hand the cache on that the step before gave",
            **COMMON_MISTAKES,
        },
        max_mistakes=1,
    ),
    FunctionTask(
        padding_changes_logits,
        model_cases({"for a model that counts padding as positions": "padding shifts positions"}),
        as_check(compare_padded),
        {
            "padding on the right": "behind the text padding shifts nothing; put it on the left",
            "no mask given": "without a mask padding is a text like any other; tell the model with mask=",
            "compared from position 0": "there the padding stands; the text's own logits begin behind it",
            **COMMON_MISTAKES,
        },
        max_mistakes=1,
    ),
    FunctionTask(
        mixes_batch_rows,
        model_cases({"for a model that mixes the texts of a batch": "texts mixed"}),
        as_check(compare_batched),
        {
            "the same text twice": "a text that is mixed with itself stays what it is; put another one beside it",
            "another row compared": "the two rows are of different texts; compare the same text alone and in the batch",
            **COMMON_MISTAKES,
        },
        max_mistakes=1,
    ),
    TableTask(
        "DIAGNOSIS",
        {letter: bug_of_letter(letter) for letter in LETTERS},
        {
            "future seen": "`leaks_future` would say True",
            "cache off by one": "`cache_differs` would say True, and `leaks_future` False: where the future is seen, "
            "one pass and steps differ too, for in steps it is not there yet",
            "padding shifts positions": "`padding_changes_logits` would say True",
            "no √d": "model.attention would differ from scaled_dot_product_attention(q, k, v, is_causal=True)",
            "loss not shifted": "model.loss(tokens) would be the cross-entropy of logits[:, t] with tokens[:, t], "
            "not with tokens[:, t + 1]",
            "texts mixed": "`mixes_batch_rows` would say True",
        },
        wrong_phrase="does not have",
    ),
]
