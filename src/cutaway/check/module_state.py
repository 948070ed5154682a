"""Context managers that change a module for a while, and guards of what may be done to one."""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from cutaway.check.checked_model import CheckedModel
from cutaway.check.numerics import LOW_PRECISION_DTYPES
from cutaway.check.report.finding import SkipCheckError
from cutaway.model.device import free_memory

MAX_COPIED_BYTES = 2 << 30
"""Bytes of weights up to which a model is written to disk, or copied, to be looked at."""


MAX_PERTURBED_PARAMS = 5_000_000
"""Parameters up to which weights are nudged before they are saved."""


PERTURBATION_SCALE = 0.02
"""Of a tensor's usual size: so that what is not saved is not found again by chance, as a bias of zeros would be."""


MAX_RESTORED_BUFFER_NUMEL = 1 << 20
"""Numbers of a buffer that is put back after training mode."""


def can_upcast(model: CheckedModel) -> bool:
    """Whether there is a module, and room for its weights in fp32."""
    if model.module is None:
        return False
    more = 4 * sum(each.numel() for each in model.module.parameters() if each.dtype in LOW_PRECISION_DTYPES)
    free = free_memory(model.device)
    return free is None or more < free / 2


@contextmanager
def swap_tensors(module: nn.Module | None, replace: Callable[[Tensor], Tensor | None]) -> Iterator[None]:
    """For as long as it lasts, weights and buffers are others (None: as they are); then the same tensors as before."""
    kept: list[tuple[Tensor, Tensor]] = []
    tensors = [] if module is None else [*module.parameters(), *module.buffers()]
    try:
        for tensor in {id(each): each for each in tensors}.values():
            changed = replace(tensor.data)
            if changed is not None:
                kept.append((tensor, tensor.data))
                tensor.data = changed
        yield
    finally:
        for tensor, data in kept:
            tensor.data = data


def upcast_to_fp32(module: nn.Module | None) -> AbstractContextManager[None]:
    """For as long as it lasts, weights narrower than fp32 are fp32."""
    return swap_tensors(module, lambda data: data.float() if data.dtype in LOW_PRECISION_DTYPES else None)


@contextmanager
def substitute_module(module: nn.Module, replacement: nn.Module) -> Iterator[None]:
    """While it lasts, whoever calls `module` runs `replacement`: functions that a user gave know only the one."""
    module.__dict__, replacement.__dict__ = replacement.__dict__, module.__dict__
    try:
        yield
    finally:
        module.__dict__, replacement.__dict__ = replacement.__dict__, module.__dict__


@contextmanager
def perturb_weights(module: nn.Module, generator: torch.Generator) -> Iterator[None]:
    """While it lasts, the weights of a small model are moved a little from where they began."""
    kept: list[tuple[nn.Parameter, Tensor]] = []
    trained = [each for each in module.parameters() if each.requires_grad and each.is_floating_point()]
    try:
        if sum(each.numel() for each in trained) <= MAX_PERTURBED_PARAMS:
            for each in trained:
                kept.append((each, each.data))
                size = float(each.data.float().square().mean().sqrt()) or 1.0
                noise = torch.randn(each.shape, generator=generator).to(each.device)
                each.data = (each.data.float() + PERTURBATION_SCALE * size * noise).to(each.dtype)
        yield
    finally:
        for each, data in kept:
            each.data = data


@contextmanager
def training_mode(module: nn.Module) -> Iterator[None]:
    """Training mode for as long as it lasts; what it counts in buffers is put back."""
    modes = {part: part.training for part in module.modules()}
    before = [(each, each.detach().clone()) for each in module.buffers() if each.numel() <= MAX_RESTORED_BUFFER_NUMEL]
    module.train()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode
        with torch.no_grad():
            for each, kept in before:
                if not torch.equal(each, kept):
                    each.copy_(kept)


def weight_bytes(module: nn.Module) -> int:
    """Bytes of its weights."""
    return sum(each.numel() * each.element_size() for each in module.parameters())


def deepcopy_module(module: nn.Module) -> nn.Module:
    """A deep copy, where that can be made."""
    if weight_bytes(module) > MAX_COPIED_BYTES:
        raise SkipCheckError(f"needs a model of at most {MAX_COPIED_BYTES >> 30} GB to be copied")
    try:
        return copy.deepcopy(module)
    except (RuntimeError, TypeError, NotImplementedError, AttributeError) as error:
        raise SkipCheckError(f"needs a module that can be copied ({str(error)[:80]})") from None


def require_uncompiled(module: nn.Module) -> None:
    """Compiled code runs without a word: nothing that is seen there tells what it does."""
    for part in module.modules():
        compiled = getattr(part, "_compiled_call_impl", None) is not None or hasattr(part, "_orig_mod")
        if compiled or isinstance(part, torch.jit.ScriptModule):
            raise SkipCheckError("needs code that is not compiled")
