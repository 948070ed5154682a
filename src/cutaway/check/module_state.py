"""Context managers that change a module temporarily (dtype, weights, training mode), and size limits for copies."""

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from cutaway.check.checked_model import CheckedModel, require
from cutaway.check.numerics import LOW_PRECISION_DTYPES, Args, Kwargs, LowPrecisionRecorder, TorchFunction
from cutaway.check.report.finding import SkipCheckError
from cutaway.device import free_memory
from cutaway.errors import InputError

MAX_COPIED_BYTES = 2 << 30
"""Maximum size of a model's weights, in bytes, for saving or copying the model."""


MAX_PERTURBED_PARAMS = 5_000_000
"""Maximum number of parameters of a model whose weights are perturbed, replaced by random ones, or trained."""
_PERTURBATION_SCALE = 0.02
"""Size of the perturbation relative to a tensor's RMS. Without a perturbation, a tensor that is not saved (such as a
bias of zeros) could be equal after loading by chance."""


_MAX_RESTORED_BUFFER_NUMEL = 1 << 20
"""Maximum number of elements of a buffer that is copied and restored."""


def require_weights(module: nn.Module) -> None:
    """Raise InputError if a parameter or buffer of the module is on the meta device, which stores no values."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    names = [name for name, tensor in tensors if tensor.is_meta]
    if names:
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise InputError(
            f"{names[0]}{others} of {type(module).__name__} on the meta device cannot be checked, because tensors on "
            "this device have no values; load the weights, or call module.to_empty(device='cpu') and initialize them"
        )


def can_upcast(model: CheckedModel) -> bool:
    """Whether the model can run with its bf16 and fp16 weights in fp32.

    It needs a module, enough free memory, and a forward pass that then computes in fp32. Some models cast activations
    to a configured dtype: with fp32 weights they raise an error, or still compute in bf16 or fp16.
    """
    if model.module is None:
        return False
    num_upcast = sum(param.numel() for param in model.module.parameters() if param.dtype in LOW_PRECISION_DTYPES)
    free = free_memory(model.device)
    if not num_upcast or (free is not None and 4 * num_upcast >= free / 2):
        return not num_upcast
    tokens = torch.full((1, model.supported_length(2)), min((model.vocab_size or 1) - 1, 1), device=model.device)
    try:
        with upcast_to_fp32(model.module), torch.no_grad(), LowPrecisionRecorder() as recorder:
            require(model.logits)(tokens)
    except Exception:  # any exception means that the model does not run with fp32 weights
        return False
    return not recorder.uses_low_precision


@contextmanager
def swap_tensors(tensors: Iterable[Tensor], replace: Callable[[Tensor], Tensor | None]) -> Iterator[None]:
    """Replace the data of each tensor by `replace(data)`, unless that is None; restore the data on exit."""
    originals: list[tuple[Tensor, Tensor]] = []
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
    """Convert the bf16 and fp16 parameters and buffers of a module to fp32 while the context is active."""
    tensors = [] if module is None else [*module.parameters(), *module.buffers()]
    return swap_tensors(tensors, lambda data: data.float() if data.dtype in LOW_PRECISION_DTYPES else None)


class _Fp64Functions(TorchFunctionMode):
    """Function mode in which conversions to fp32 and new fp32 tensors are in fp64."""

    def __torch_function__(
        self, func: TorchFunction, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        if func is Tensor.float:
            func = Tensor.double
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        kwargs = {name: torch.float64 if arg is torch.float32 else arg for name, arg in (kwargs or {}).items()}
        return func(*args, **kwargs)


@contextmanager
def run_in_fp64(module: nn.Module) -> Iterator[None]:
    """Compute in fp64 while the context is active: weights, new tensors, and conversions to fp32 in the forward pass.

    The rounding error of a result is then smaller by a factor of about 10⁹; everything else is the same. Attributes
    that the forward pass sets, such as a mask or RoPE tables of the largest length so far, are restored on exit.
    """
    tensors = [*module.parameters(), *module.buffers()]
    default_dtype = torch.get_default_dtype()
    attributes = [(submodule.__dict__, _copy_attributes(submodule.__dict__)) for submodule in module.modules()]
    with swap_tensors(tensors, lambda data: data.double() if data.is_floating_point() else None):
        torch.set_default_dtype(torch.float64)
        try:
            with _Fp64Functions():
                yield
        finally:
            torch.set_default_dtype(default_dtype)
            for current, original in attributes:
                _restore_attributes(current, original)


def _copy_attributes(attributes: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Attribute name → its value, and a shallow copy of the value if it is a dict or a list."""
    return {
        name: (value, copy.copy(value) if isinstance(value, dict | list) else None)
        for name, value in attributes.items()
    }


def _restore_attributes(current: dict[str, Any], original: dict[str, tuple[Any, Any]]) -> None:
    """Restore the attributes of a module, and the contents of dicts and lists, from `_copy_attributes`."""
    for name in current.keys() - original.keys():
        del current[name]
    for name, (value, contents) in original.items():
        current[name] = value
        if isinstance(value, dict):
            value.clear()
            value.update(contents)
        elif isinstance(value, list):
            value[:] = contents


@contextmanager
def substitute_module(module: nn.Module, replacement: nn.Module) -> Iterator[None]:
    """Make calls of `module` run `replacement` while the context is active.

    The attributes of the two modules are swapped, because functions that a user passed hold a reference to `module`.
    """
    module.__dict__, replacement.__dict__ = replacement.__dict__, module.__dict__
    try:
        yield
    finally:
        module.__dict__, replacement.__dict__ = replacement.__dict__, module.__dict__


def fork_rng() -> AbstractContextManager[None]:
    """Restore the random state of the CPU and of all GPUs on exit."""
    return torch.random.fork_rng(devices=range(torch.cuda.device_count()))


def perturb_weights(module: nn.Module, generator: torch.Generator) -> AbstractContextManager[None]:
    """Add small random noise to the trainable weights while the context is active.

    Models with more than `MAX_PERTURBED_PARAMS` trainable parameters stay unchanged.
    """
    trainable = [param for param in module.parameters() if param.requires_grad and param.is_floating_point()]
    if sum(param.numel() for param in trainable) > MAX_PERTURBED_PARAMS:
        trainable = []
    return add_noise(trainable, _PERTURBATION_SCALE, generator)


@contextmanager
def randomize_zeros(module: nn.Module | None, generator: torch.Generator) -> Iterator[int]:
    """Give parameters that are all zero small random values while the context is active; yield their number."""
    params = [] if module is None else [param for param in module.parameters() if param.is_floating_point()]
    zeros = [param for param in params if not bool(param.detach().any())]
    with add_noise(zeros, _PERTURBATION_SCALE, generator):
        yield len(zeros)


def add_noise(params: Sequence[nn.Parameter], scale: float, generator: torch.Generator) -> AbstractContextManager[None]:
    """Add normal noise to `params` while the context is active; its std is `scale` times the RMS of each parameter."""

    def perturb(data: Tensor) -> Tensor:
        rms = float(data.float().square().mean().sqrt()) or 1.0
        noise = torch.randn(data.shape, generator=generator).to(data.device)
        return (data.float() + scale * rms * noise).to(data.dtype)

    return swap_tensors(params, perturb)


class BufferSnapshot:
    """Copies of a module's small buffers, such as running means or RoPE frequencies that depend on the length.

    The numbers among the attributes of modules with buffers are copied too, because a module may store there for how
    many positions it has computed a buffer.
    """

    def __init__(self, module: nn.Module | None) -> None:
        self._entries = [
            (submodule, name, buffer, buffer.detach().clone())
            for submodule in (() if module is None else module.modules())
            for name, buffer in submodule._buffers.items()
            if buffer is not None and buffer.numel() <= _MAX_RESTORED_BUFFER_NUMEL and not buffer.is_meta
        ]
        self._numbers = {
            submodule: {name: value for name, value in vars(submodule).items() if type(value) in (int, float)}
            for submodule, *_ in self._entries
        }

    @torch.no_grad()
    def restore(self) -> None:
        """Put the original buffers back into the module, with the values that they had when copied."""
        for submodule, numbers in self._numbers.items():
            vars(submodule).update(numbers)
        for submodule, name, buffer, value in self._entries:
            submodule._buffers[name] = buffer
            if not torch.equal(buffer, value.to(buffer.dtype)):
                buffer.copy_(value)


@contextmanager
def preserve_state(module: nn.Module, *, training: bool = False) -> Iterator[None]:
    """Set the module to training or eval mode; restore its training flags, buffers and gradients on exit."""
    flags = {submodule: submodule.training for submodule in module.modules()}
    gradients = {param: param.grad for param in module.parameters()}
    buffers = BufferSnapshot(module)
    module.train(training)
    try:
        yield
    finally:
        for submodule, flag in flags.items():
            submodule.training = flag
        buffers.restore()
        for param, grad in gradients.items():
            param.grad = grad


def copy_parameters(module: nn.Module) -> None:
    """Copy the parameters into memory where the checkpoint files that they are mapped from can otherwise not be
    deleted, which is on Windows."""
    if os.name == "nt":
        for param in module.parameters():
            param.data = param.data.clone()


def weight_bytes(module: nn.Module) -> int:
    """Size of a module's parameters in bytes."""
    return sum(param.numel() * param.element_size() for param in module.parameters())


def deepcopy_module(module: nn.Module) -> nn.Module:
    """Deep-copy a module; raise SkipCheckError if the module is too large or cannot be copied."""
    if weight_bytes(module) > MAX_COPIED_BYTES:
        raise SkipCheckError(f"needs a model of at most {MAX_COPIED_BYTES >> 30} GB, because it is copied")
    try:
        return copy.deepcopy(module)
    except (RuntimeError, TypeError, NotImplementedError, AttributeError) as error:
        raise SkipCheckError(f"needs a module that can be copied ({str(error)[:80]})") from None


def require_uncompiled(module: nn.Module) -> None:
    """Raise SkipCheckError if the module is compiled or scripted: hooks and modes record no ops of compiled code."""
    if is_compiled(module):
        raise SkipCheckError("needs a module that is not compiled")


def require_unscripted(module: nn.Module | None) -> None:
    """Raise SkipCheckError if the module has scripted submodules, which support neither hooks nor function modes."""
    submodules = () if module is None else module.modules()
    if any(isinstance(submodule, torch.jit.ScriptModule) for submodule in submodules):
        raise SkipCheckError("needs a module that is not scripted")


def is_compiled(module: nn.Module) -> bool:
    """Whether the module or one of its submodules is compiled or scripted."""
    return any(
        getattr(submodule, "_compiled_call_impl", None) is not None
        or hasattr(submodule, "_orig_mod")
        or isinstance(submodule, torch.jit.ScriptModule)
        for submodule in module.modules()
    )
