"""Context managers that change a module temporarily (dtype, weights, training mode), and limits on copies."""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from cutaway.check.checked_model import CheckedModel
from cutaway.check.numerics import LOW_PRECISION_DTYPES
from cutaway.check.report.finding import SkipCheckError
from cutaway.device import free_memory

MAX_COPIED_BYTES = 2 << 30
"""Largest model, in bytes of weights, that is saved or copied."""


MAX_PERTURBED_PARAMS = 5_000_000
"""Largest model, in parameters, whose weights are perturbed before saving."""


PERTURBATION_SCALE = 0.02
"""Perturbation relative to a tensor's RMS: without it, an unsaved tensor could match by chance (a zero bias)."""


MAX_RESTORED_BUFFER_NUMEL = 1 << 20
"""Largest buffer, in elements, that is restored after training mode."""


def can_upcast(model: CheckedModel) -> bool:
    """Whether there is a module, and enough memory for its weights in fp32."""
    if model.module is None:
        return False
    fp32_bytes = 4 * sum(param.numel() for param in model.module.parameters() if param.dtype in LOW_PRECISION_DTYPES)
    free = free_memory(model.device)
    return free is None or fp32_bytes < free / 2


@contextmanager
def swap_tensors(module: nn.Module | None, replace: Callable[[Tensor], Tensor | None]) -> Iterator[None]:
    """Replace the data of weights and buffers by `replace(data)` (None keeps it); restore the original data on exit."""
    originals: list[tuple[Tensor, Tensor]] = []
    tensors = [] if module is None else [*module.parameters(), *module.buffers()]
    try:
        for tensor in {id(tensor): tensor for tensor in tensors}.values():
            changed = replace(tensor.data)
            if changed is not None:
                originals.append((tensor, tensor.data))
                tensor.data = changed
        yield
    finally:
        for tensor, data in originals:
            tensor.data = data


def upcast_to_fp32(module: nn.Module | None) -> AbstractContextManager[None]:
    """Convert bf16 and fp16 weights to fp32 while the context is active."""
    return swap_tensors(module, lambda data: data.float() if data.dtype in LOW_PRECISION_DTYPES else None)


@contextmanager
def substitute_module(module: nn.Module, replacement: nn.Module) -> Iterator[None]:
    """Make calls of `module` run `replacement`: functions that a user passed hold a reference to `module`."""
    module.__dict__, replacement.__dict__ = replacement.__dict__, module.__dict__
    try:
        yield
    finally:
        module.__dict__, replacement.__dict__ = replacement.__dict__, module.__dict__


@contextmanager
def perturb_weights(module: nn.Module, generator: torch.Generator) -> Iterator[None]:
    """Add small random noise to the weights of a small model while the context is active."""
    originals: list[tuple[nn.Parameter, Tensor]] = []
    trainable = [param for param in module.parameters() if param.requires_grad and param.is_floating_point()]
    try:
        if sum(param.numel() for param in trainable) <= MAX_PERTURBED_PARAMS:
            for param in trainable:
                originals.append((param, param.data))
                rms = float(param.data.float().square().mean().sqrt()) or 1.0
                noise = torch.randn(param.shape, generator=generator).to(param.device)
                param.data = (param.data.float() + PERTURBATION_SCALE * rms * noise).to(param.dtype)
        yield
    finally:
        for param, data in originals:
            param.data = data


@contextmanager
def training_mode(module: nn.Module) -> Iterator[None]:
    """Set training mode while the context is active; restore the training flags and the buffers on exit."""
    training_flags = {submodule: submodule.training for submodule in module.modules()}
    buffers = [
        (buffer, buffer.detach().clone()) for buffer in module.buffers() if buffer.numel() <= MAX_RESTORED_BUFFER_NUMEL
    ]
    module.train()
    try:
        yield
    finally:
        for submodule, training in training_flags.items():
            submodule.training = training
        with torch.no_grad():
            for buffer, value in buffers:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


def weight_bytes(module: nn.Module) -> int:
    """Size of a module's parameters in bytes."""
    return sum(param.numel() * param.element_size() for param in module.parameters())


def deepcopy_module(module: nn.Module) -> nn.Module:
    """Deep-copy a module; skip the check if it is too large or cannot be copied."""
    if weight_bytes(module) > MAX_COPIED_BYTES:
        raise SkipCheckError(f"needs a model of at most {MAX_COPIED_BYTES >> 30} GB to be copied")
    try:
        return copy.deepcopy(module)
    except (RuntimeError, TypeError, NotImplementedError, AttributeError) as error:
        raise SkipCheckError(f"needs a module that can be copied ({str(error)[:80]})") from None


def require_uncompiled(module: nn.Module) -> None:
    """Skip the check if the module is compiled or scripted: hooks and modes do not record ops in compiled code."""
    for submodule in module.modules():
        compiled = getattr(submodule, "_compiled_call_impl", None) is not None or hasattr(submodule, "_orig_mod")
        if compiled or isinstance(submodule, torch.jit.ScriptModule):
            raise SkipCheckError("needs a module that is not compiled")
