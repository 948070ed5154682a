# %% [markdown]
# # 10 · A debugging checklist
#
# Six models, A to F, have the same weights and one bug each. None crashes: they all return logits, and most of them
# would train. Write four checks, each of which compares two results that **must be equal**, then name the bug of each
# model.
#
# | check | must be equal |
# |---|---|
# | `leaks_future` | logits of positions 0 … i, whatever the tokens after position i |
# | `cache_differs` | logits of a sequence in one forward pass, and token by token with the KV cache |
# | `padding_changes_logits` | logits of a sequence, and of the same sequence with padding on its **left** |
# | `mixes_batch_rows` | logits of a sequence alone, and in a batch with another sequence |
#
# Two computations of the same number rarely agree in the last digits: use `torch.allclose(a, b, atol=1e-4)`, not `==`.
# And a short sequence reveals few bugs: use ten tokens or more.
#
# The interface of a model:
#
# ```
#   model(tokens, mask=None)          tokens (B, T) of 0 … 31 → logits (B, T, 32); mask (B, T), False for padding
#   model.step(tokens, cache=None)    → logits of these tokens, the updated cache (None before the first step)
#   model.loss(tokens)                → the mean training loss
#   model.attention(q, k, v)          its causal attention on (B, H, T, D)
# ```
#
# The four checks find four of the six bugs. For the other two, compare `model.loss` and `model.attention` with your own
# implementation, or with `build_buggy_model("correct")`. The theory is in notebook 11, finding bugs; `cutaway check`
# does all of this and more, for any model.

# %%
import torch
from torch import nn

from cutaway.learn.exercises.buggy_models import build_buggy_model


# %%
def leaks_future(model: nn.Module) -> bool:
    """Whether the logits of a position depend on a later token."""
    # begin solution
    tokens = torch.arange(12)[None] % 32
    changed = tokens.clone()
    changed[0, 8:] = 31
    with torch.no_grad():
        return not torch.allclose(model(tokens)[:, :8], model(changed)[:, :8], atol=1e-4)
    # end solution


# %%
def cache_differs(model: nn.Module) -> bool:
    """Whether decoding token by token with the cache gives different logits than one forward pass."""
    # begin solution
    tokens = torch.arange(12)[None] % 32
    cache, step_logits = None, []
    with torch.no_grad():
        for t in range(tokens.shape[1]):
            logits, cache = model.step(tokens[:, t : t + 1], cache)  # type: ignore[operator]
            step_logits.append(logits)
        return not torch.allclose(torch.cat(step_logits, 1), model(tokens), atol=1e-4)
    # end solution


# %%
def padding_changes_logits(model: nn.Module) -> bool:
    """Whether padding on the left of a sequence changes the logits of its tokens."""
    # begin solution
    tokens = torch.arange(1, 11)[None]
    padded = torch.cat((torch.zeros(1, 4, dtype=torch.long), tokens), 1)
    mask = torch.arange(14)[None] >= 4
    with torch.no_grad():
        return not torch.allclose(model(padded, mask)[:, 4:], model(tokens), atol=1e-4)
    # end solution


# %%
def mixes_batch_rows(model: nn.Module) -> bool:
    """Whether the logits of a sequence depend on the other sequences of its batch."""
    # begin solution
    batch = torch.stack((torch.arange(10), torch.arange(20, 30)))
    with torch.no_grad():
        return not torch.allclose(model(batch)[:1], model(batch[:1]), atol=1e-4)
    # end solution


# %% [markdown]
# Now the diagnosis. The bug names are `future seen`, `cache off by one`, `padding shifts positions`, `no √d`, `loss not
# shifted` and `texts mixed`; each model has a different one.

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
# Run the checks on the models, then run `cutaway learn check 10`.

# %%
{letter: leaks_future(build_buggy_model(letter)) for letter in "ABCDEF"}

# %% checker
from cutaway.learn.exercises.buggy_models import LETTERS, BuggyModel, TokenLookupModel, bug_of_letter  # noqa: E402
from cutaway.learn.exercises.task import Case, FunctionTask, TableTask  # noqa: E402

ROUNDING_ERROR = 2e-6


def model_cases(bugs: dict[str, str], *, with_positions: bool = False) -> list[Case]:
    """Return test cases: correct models, and models with the given bugs ({description of the case: bug})."""
    models = {
        "for a correct model": BuggyModel(rounding=ROUNDING_ERROR),
        "for a correct model without attention": TokenLookupModel(with_positions=with_positions),
        "for a correct model without attention, with rounding noise": TokenLookupModel(
            with_positions=with_positions, rounding=ROUNDING_ERROR
        ),
        **{description: BuggyModel(bug) for description, bug in bugs.items()},
    }
    return [Case(description, (model,)) for description, model in models.items()]


TASKS = [
    FunctionTask(
        leaks_future,
        model_cases(
            {
                "for a model that attends one token ahead": "future seen",
                "for a model that attends one token ahead from position 6 on": "future seen late",
            }
        ),
        max_mistakes=1,
    ),
    FunctionTask(
        cache_differs,
        model_cases({"for a model whose cache is off by one": "cache off by one"}, with_positions=True),
        max_mistakes=1,
    ),
    FunctionTask(
        padding_changes_logits,
        model_cases({"for a model that counts padding as positions": "padding shifts positions"}),
        max_mistakes=1,
    ),
    FunctionTask(
        mixes_batch_rows,
        model_cases({"for a model that mixes the sequences of a batch": "texts mixed"}),
        max_mistakes=1,
    ),
    TableTask(
        "DIAGNOSIS",
        {letter: bug_of_letter(letter) for letter in LETTERS},
        {
            "future seen": "`leaks_future` would return True",
            "cache off by one": "`cache_differs` would return True, and `leaks_future` False: a model that attends to "
            "future tokens also differs between one pass and cached steps, where future tokens do not "
            "exist yet",
            "padding shifts positions": "`padding_changes_logits` would return True",
            "no √d": "model.attention would differ from scaled_dot_product_attention(q, k, v, is_causal=True)",
            "loss not shifted": "model.loss(tokens) would be the cross-entropy of logits[:, t] with tokens[:, t], "
            "not with tokens[:, t + 1]",
            "texts mixed": "`mixes_batch_rows` would return True",
        },
        wrong_phrase="does not have",
    ),
]
