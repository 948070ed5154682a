"""What a user gives as a keyword is taken as it is meant, and what it cannot be is said by its name: a wrong adapter is
no bug of the model."""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, get_args

import torch
from torch import Tensor

from cutaway.check.finding import Part
from cutaway.check.plain import logits_of, loss_of
from cutaway.check.target import OFFERS, Kind
from cutaway.errors import InputError

SHAPED = {"logits": 0, "against": 0, "padded": 0, "placed": 0, "packed": 0, "labelled": 0, "poisoned": 0, "rolled": 0}
SHAPED |= {"crossed": 2}
"""Functions that give logits, and which of their arguments is the tokens."""
WRITERS = ("generate", "generate_padded", "speculate")
COUNTS = ("vocab", "longest", "window", "layers", "source_vocab", "pad", "eos")


class OfferError(Exception):
    """A function that was given as a keyword does not do what that keyword is for."""


def guarded(name: str, value: Any) -> Any:
    """One keyword's value, which says by itself where it is not what it should be."""
    if name == "kind" and value not in get_args(Kind):
        raise InputError(f"kind is {value!r}; it is one of {', '.join(get_args(Kind))}")
    if value is None:
        return None
    if name in COUNTS and (not isinstance(value, int) or isinstance(value, bool)):
        raise InputError(f"{name} is {value!r}; it is a whole number")
    if name == "kernels":
        if not isinstance(value, Mapping):
            raise InputError(f"kernels is a {type(value).__name__}; give a dict of names and functions tokens → logits")
        return {kernel: shaped(f"kernels[{kernel!r}]", each, 0) for kernel, each in value.items()}
    if name in OFFERS and name != "module" and not callable(value):
        raise InputError(f"{name} is a {type(value).__name__}; give a function")
    if name in SHAPED:
        return shaped(name, value, SHAPED[name])
    if name == "cached":
        return stepping(value)
    if name == "loss":
        return one_number(value)
    return written(name, value) if name in WRITERS else value


def described(x: Any) -> str:
    return f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"


def called(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The function's result; a call that its arguments do not allow is told as such."""
    try:
        return function(*args, **kwargs)
    except TypeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is None:  # it did not even begin
            raise OfferError(f"{name}= cannot be called with {len(args)} arguments: {error}") from error
        raise


def logits_for(name: str, out: Any, tokens: Tensor) -> Tensor:
    out = logits_of(out)
    if not isinstance(out, Tensor) or out.ndim != 3 or out.shape[:2] != tokens.shape:
        shape = ", ".join(map(str, tokens.shape))
        raise OfferError(
            f"{name}= gave {described(out)} for tokens of shape ({shape}); it must give logits of shape ({shape}, V)"
        )
    if not out.is_floating_point():
        raise OfferError(f"{name}= gave numbers of type {out.dtype}; logits are floating-point")
    return out


def shaped(name: str, function: Any, at: int) -> Any:
    @wraps(function, updated=())
    def ask(*args: Any, **kwargs: Any) -> Tensor:
        return logits_for(name, called(name, function, *args, **kwargs), args[at])

    return ask


def stepping(function: Any) -> Any:
    @wraps(function, updated=())
    def step(tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        out = called("cached", function, tokens, state)
        if not isinstance(out, tuple | list) or len(out) != 2:
            raise OfferError(f"cached= gave {described(out)}; it must give logits and the state after them")
        if out[1] is None:
            raise OfferError("cached= gave None as its state, which stands for a text that begins; give what it keeps")
        return logits_for("cached", out[0], tokens), out[1]

    return step


def one_number(function: Any) -> Any:
    @wraps(function, updated=())
    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        out = loss_of(called("loss", function, tokens, labels))
        out = torch.tensor(float(out)) if isinstance(out, float | int) else out
        if not isinstance(out, Tensor) or out.numel() != 1:
            raise OfferError(f"loss= gave {described(out)}; it must give one number, the mean loss")
        return out.reshape(())

    return loss


def written(name: str, function: Any) -> Any:
    @wraps(function, updated=())
    def write(*args: Any) -> Tensor:
        out = called(name, function, *args)
        if not isinstance(out, Tensor) or out.ndim != 2 or len(out) != len(args[0]) or out.is_floating_point():
            rows = len(args[0])
            raise OfferError(
                f"{name}= gave {described(out)} for {rows} prompts; it must give tokens of shape ({rows}, n)"
            )
        return out

    return write


def no_logits(x: Tensor, kind: str) -> Part | None:
    """Whether numbers are no logits: probabilities, or what an activation has left of them."""
    if x.shape[-1] < 3 or not bool((x >= 0).all()):
        return None
    if bool(((x.float().sum(-1) - 1).abs() < 1e-2).all()):
        return Part(
            "fail",
            "what it gives as logits are probabilities: none is negative, and they sum to one",
            cause="softmax is taken in the model, and the loss takes it again",
            fix="give the logits, and take softmax where probabilities are wanted",
        )
    zeros = float((x == 0).float().mean())
    if kind != "encoder" and 0.05 < zeros < 1:
        return Part(
            "fail",
            f"no logit is negative, and {zeros:.0%} are exactly zero",
            zeros,
            0.05,
            cause="an activation stands behind the head",
            fix="give what the head gives: unlikely tokens have negative logits",
        )
    return None
