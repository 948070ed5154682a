"""From what a user has to a `Target`: functions and facts are found where they can be, and taken where given."""

from contextlib import nullcontext
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from cutaway.check import theirs
from cutaway.check.exam import can_widen, widened
from cutaway.check.offered import OfferError, guarded
from cutaway.check.target import Target
from cutaway.errors import InputError, raised
from cutaway.model import Transformer

MOST = 72
"""No check asks with more tokens, unless it knows that they can be read."""
KNOWN = {each.name for each in fields(Target)}


def discover(thing: Any, given: dict[str, Any], *, seed: int) -> Target:
    """The target, with what was given in place of what was found."""
    unknown = given.keys() - KNOWN
    if unknown:
        raise InputError(
            f"'{sorted(unknown)[0]}' is nothing a target can offer; it may have {', '.join(sorted(KNOWN))}"
        )
    found = replace(thing) if isinstance(thing, Target) else found_in(thing, given, seed)
    for name, value in given.items():
        setattr(found, name, guarded(name, value))
    finish(found)
    return found


def found_in(thing: Any, given: dict[str, Any], seed: int) -> Target:
    from cutaway.check import ours, plain

    model = thing
    if not isinstance(model, nn.Module) and isinstance(getattr(model, "model", None), Transformer):
        model = model.model  # a checkpoint
    if isinstance(getattr(model, "_orig_mod", model), Transformer):
        return ours.target(model, thing, seed)
    if isinstance(model, nn.Module) and theirs.is_one(model):
        return theirs.target(model, seed)
    if isinstance(model, nn.Module):
        return plain.of_module(model, given)
    if thing is None and ("logits" in given or "attention" in given):
        return Target()
    if callable(thing):
        return plain.of_function(thing, given)
    raise InputError(
        f"a {type(thing).__name__} cannot be checked; give a model of ct.build(…) or ct.load(…), one of transformers, "
        "another nn.Module, or a function from tokens to logits"
    )


@torch.no_grad()
def finish(found: Target) -> None:
    """Find out what follows from what is there, and that the target answers at all."""
    if found.logits is None and found.attention is not None:
        from cutaway.check.plain import by_attention

        by_attention(found)
    if found.logits is None:
        raise InputError("there is nothing to ask: give a function tokens (B, T) → logits (B, T, V) as logits=")
    if found.module is not None:
        found.module.eval()
        parameter = next(found.module.parameters(), None)
        if parameter is not None:
            found.device = parameter.device
            found.dtype = found.dtype or parameter.dtype
    low = 0 if found.vocab is None else min(found.vocab - 1, 1)
    probe = torch.full((1, 2), low, dtype=torch.long, device=found.device)
    try:
        out = found.logits(probe)
    except OfferError as error:
        raise InputError(str(error)) from error
    except Exception as error:
        raise InputError(
            f"{found.name} was called with two tokens and {raised(error)}; give a function "
            "tokens (B, T) → logits (B, T, V) as logits="
        ) from error
    if not isinstance(out, Tensor) or out.ndim != 3 or out.shape[:2] != probe.shape:
        what = f"a tensor of shape {tuple(out.shape)}" if isinstance(out, Tensor) else f"a {type(out).__name__}"
        raise InputError(
            f"{found.name} gave {what} for tokens of shape (1, 2); it must give logits of shape (1, 2, V): "
            "give a function that does as logits="
        )
    found.vocab = found.vocab or out.shape[-1]
    for name in ("pad", "eos"):  # some configurations name tokens that a small table does not have
        if not 0 <= (getattr(found, name) or 0) < found.vocab:
            setattr(found, name, None)
    if found.longest is None and not describes_itself(found.module):
        with widened(found.module) if can_widen(found) else nullcontext():  # a CPU may be slow in less
            found.longest = longest(found, low)
    found.dtype = found.dtype or out.dtype


def describes_itself(module: nn.Module | None) -> bool:
    """Whether a model's configuration says how much it reads: nothing is then nothing to ask for."""
    return module is not None and theirs.is_one(module)


def longest(found: Target, token: int) -> int | None:
    """How many tokens it reads, where that is fewer than the longest text of a check; None where all can be read."""
    if found.device.type != "cpu":  # an index beyond a table ends every later use of a GPU: ask the tables instead
        tables = (
            [part.num_embeddings for part in found.module.modules() if isinstance(part, nn.Embedding)]
            if found.module
            else []
        )
        return min((size for size in tables if size > 1), default=None)
    assert found.logits is not None

    def reads(length: int) -> bool:
        try:
            found.logits(torch.full((1, length), token))  # type: ignore[misc]
        except Exception:  # whatever it raises, such a text cannot be asked about
            return False
        return True

    if reads(MOST):
        return None
    low, high = 2, MOST  # it reads two, and not the most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if reads(middle) else (low, middle)
    return low
