"""The same model a second time: saved and loaded, or made anew and filled. Its logits are asked by standing in."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cutaway.check.exam import NARROW, CannotError, Exam, Gap
from cutaway.errors import first_line

if TYPE_CHECKING:
    from cutaway.check.target import Logits, Target

LARGEST = 2 << 30
"""Bytes of weights up to which a model is written to disk, or copied, to be looked at."""
SMALL = 5_000_000
"""Parameters up to which weights are nudged before they are saved."""
NUDGE = 0.02
"""Of a tensor's usual size: so that what is not saved is not found again by chance, as a bias of zeros would be."""


@dataclass
class Again:
    """A model that was saved and loaded again, or made anew and given the same weights."""

    module: nn.Module
    missing: list[str] = field(default_factory=list)
    """Tensors of the model that were not in what was saved."""
    unexpected: list[str] = field(default_factory=list)
    """Tensors that were saved and found no place."""
    second: "Logits | None" = None
    """The logits of what was saved by another implementation."""
    why: str = ""
    """Why there is no other."""
    gap: Gap = field(default_factory=lambda: Gap(0.0, 0.0, ()))
    """How far its logits are from the model's."""
    rounded: list[str] = field(default_factory=list)
    """Constants that are the fresh ones, rounded."""
    apart: list[str] = field(default_factory=list)
    """Constants that are not what a fresh model has."""
    broke: str = ""
    """What was raised in saving or loading, where that was impossible."""
    parity: Gap | None = None
    """How far the other implementation's logits are from the model's."""
    parts: "Callable[[nn.Module, Tensor, float], str | None] | None" = None
    """Module, tokens, noise → where the other implementation parts from it first."""
    parted: str | None = None


@contextmanager
def standing_in(module: nn.Module, other: nn.Module) -> Iterator[None]:
    """While it lasts, whoever calls `module` runs `other`: functions that a user gave know only the one."""
    module.__dict__, other.__dict__ = other.__dict__, module.__dict__
    try:
        yield
    finally:
        module.__dict__, other.__dict__ = other.__dict__, module.__dict__


@contextmanager
def nudged(module: nn.Module, generator: torch.Generator) -> Iterator[None]:
    """While it lasts, the weights of a small model are moved a little from where they began."""
    kept: list[tuple[nn.Parameter, Tensor]] = []
    trained = [each for each in module.parameters() if each.requires_grad and each.is_floating_point()]
    try:
        if sum(each.numel() for each in trained) <= SMALL:
            for each in trained:
                kept.append((each, each.data))
                size = float(each.data.float().square().mean().sqrt()) or 1.0
                noise = torch.randn(each.shape, generator=generator).to(each.device)
                each.data = (each.data.float() + NUDGE * size * noise).to(each.dtype)
        yield
    finally:
        for each, data in kept:
            each.data = data


def size_of(module: nn.Module) -> int:
    """Bytes of its weights."""
    return sum(each.numel() * each.element_size() for each in module.parameters())


def again(exam: Exam, *, broken: bool = False) -> Again:
    """The model saved and loaded, or made anew, and compared: once for all checks that ask about it. One that could not
    be is given only to who asks for that."""
    found = exam.once("again", lambda: made_again(exam))
    if isinstance(found, CannotError):
        raise found
    assert isinstance(found, Again)
    if found.broke and not broken:
        raise CannotError("needs a model that can be saved and loaded again")
    return found


@torch.no_grad()
def made_again(exam: Exam) -> Again | CannotError:
    target, module, logits = exam.target, exam.target.module, exam.target.logits
    if module is None:
        return CannotError("needs the module")
    if size_of(module) > LARGEST:
        return CannotError(f"needs a model of at most {LARGEST >> 30} GB, for it is saved")
    assert logits is not None
    tokens = exam.text()
    with nudged(module, exam.generator):
        try:
            found = target.reloaded() if target.reloaded is not None else refilled(target)
        except (CannotError, OSError) as error:
            return error if isinstance(error, CannotError) else CannotError(f"needs room to save it ({error})")
        except Exception as error:  # whatever it is, it is the target's own code: the check of export says so
            return Again(module, broke=f"{type(error).__name__}: {first_line(error)}")
        found.module.eval()
        compare_buffers(module, found)

        def second() -> Tensor:
            with standing_in(module, found.module):
                return logits(tokens)

        def first() -> Tensor:
            return logits(tokens)

        if found.second is not None:
            other = found.second
            # Frequencies that `model.to(bfloat16)` rounded are no matter of the other implementation.
            mine = second if found.rounded else first
            found.parity = exam.same(mine, lambda: other(tokens))
            if not found.parity.ok and found.parts is not None:
                found.parted = found.parts(found.module if found.rounded else module, tokens, exam.ratio)
        settle_rounded(module, found)
        found.gap = exam.same(first, second)
    return found


def refilled(target: "Target") -> Again:
    """What `make` gives, with the state of the model."""
    module, make = target.module, target.make
    if make is None or module is None:
        raise CannotError("needs make or reloaded")
    fresh = make()
    if type(fresh) is not type(module):
        raise CannotError(f"make() gave a {type(fresh).__name__} for a {type(module).__name__}")
    fresh.to(target.device)
    tensors: list[Tensor] = [*fresh.parameters(), *fresh.buffers()]
    for tensor in tensors:
        tensor.data = tensor.data.float() if tensor.dtype in NARROW else tensor.data
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    shapes = {name: tensor.shape for name, tensor in fresh.state_dict().items()}
    for name in state.keys() & shapes.keys():
        if state[name].shape != shapes[name]:
            raise CannotError(f"make() gave a model of other sizes: {name} is {tuple(shapes[name])}")
    said = fresh.load_state_dict(state, strict=False)
    return Again(fresh, list(said.missing_keys), list(said.unexpected_keys))


def constants(module: nn.Module) -> dict[str, Tensor]:
    """What follows from the configuration, most likely: buffers that are not saved, and parameters that are frozen."""
    saved = module.state_dict().keys()
    found: dict[str, Tensor] = {name: each for name, each in module.named_buffers() if name not in saved}
    return found | {name: each for name, each in module.named_parameters() if not each.requires_grad}


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


def compare_buffers(module: nn.Module, found: Again) -> None:
    """Which constants are not those of the other: rounded to a narrower dtype, or others."""
    other = tensors_of(found.module)
    for name, mine in constants(module).items():
        fresh = other.get(name)
        if fresh is None or fresh.shape != mine.shape or fresh.is_meta or alike(fresh, mine):
            continue
        rounded = any(torch.equal(fresh.to(dtype).to(mine.dtype), mine) for dtype in NARROW)
        (found.rounded if rounded else found.apart).append(name)


def settle_rounded(module: nn.Module, found: Again) -> None:
    """Give the other the rounded buffers too (`model.to(bfloat16)` makes them): another check asks about these."""
    mine, other = constants(module), tensors_of(found.module)
    for name in found.rounded:
        other[name].data = mine[name].data.clone().to(other[name].dtype)


def alike(a: Tensor, b: Tensor) -> bool:
    """Equal, but for a last place."""
    if not a.is_floating_point() or not b.is_floating_point():
        return a.dtype == b.dtype and torch.equal(a, b)
    return bool(torch.isclose(a.float(), b.float(), rtol=1e-5, atol=1e-7, equal_nan=True).all())


def copied(module: nn.Module) -> nn.Module:
    """A deep copy, where that can be made."""
    if size_of(module) > LARGEST:
        raise CannotError(f"needs a model of at most {LARGEST >> 30} GB to be copied")
    try:
        return copy.deepcopy(module)
    except (RuntimeError, TypeError, NotImplementedError, AttributeError) as error:
        raise CannotError(f"needs a module that can be copied ({str(error)[:80]})") from None


def shared(module: nn.Module) -> dict[str, frozenset[str]]:
    """Names of parameters → all names of the same tensor, where there are several."""
    names: dict[tuple[Any, ...], set[str]] = {}
    for name, each in module.named_parameters(remove_duplicate=False):
        key = (each.untyped_storage().data_ptr(), each.storage_offset(), each.shape)
        names.setdefault(key, set()).add(name)
    return {name: frozenset(group) for group in names.values() if len(group) > 1 for name in group}
