"""Attention modules of other libraries that call `scaled_dot_product_attention` (SDPA), with cutaway's attention sites.

While such a module runs, a TorchFunctionMode replaces its call of SDPA by a call of an `InterceptedSdpa` kernel with
the same tensors. So hooks on this kernel record and edit q, k, v, scores and patterns as in cutaway models. The mode is
active only in the thread that runs the module and only during its forward pass; without edits, the kernel calls SDPA
with the original arguments, so that the output does not change by a single bit.
"""

import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from cutaway.errors import InputError
from cutaway.lens.context_hooks import ForwardWrapper
from cutaway.model.kernels import HeadOutputs, Kernel, Keys, Queries, SdpaMask, Sink, Values

INTERCEPTED = ("q", "k", "v", "scores", "pattern")
"""Last components of the names of the sites that the arguments of an SDPA call give."""
_MASKED_BIAS = 0.5
"""A float mask below this fraction of the dtype's minimum is masked: transformers uses the minimum instead of −∞."""


class _SdpaCall(SdpaMask):
    """The mask of an SDPA call as the recomputation of scores takes it, with the original arguments of the call."""

    query: Tensor
    key: Tensor
    value: Tensor
    kwargs: dict[str, Any]
    views: tuple[Tensor, Tensor, Tensor]
    """query, key and value in the layout of cutaway's kernels: (B, T, H, D), (B, S, G, D), (B, S, G, E)."""


class _CallState(threading.local):
    is_running = False
    """Whether the kernel is running, so that its own SDPA call is not intercepted."""
    num_calls = 0


class InterceptedSdpa(Kernel):
    """Kernel that is called instead of SDPA, with the layout of cutaway's kernels."""

    name = "intercepted sdpa"
    supports = frozenset()

    def __init__(self, kv_heads: int) -> None:
        super().__init__(scale=1.0)
        self.kv_heads, self.state = kv_heads, _CallState()

    def replace_sdpa(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Call the kernel with the arguments of an SDPA call, and return what SDPA returns."""
        if query.ndim != 4:
            problem = f"scaled_dot_product_attention was called with a query of shape {tuple(query.shape)}"
            raise InputError(f"{problem}; sites of attention need (batch, heads, tokens, head width)")
        self.scale = query.shape[-1] ** -0.5 if scale is None else scale
        self.dropout, self.training = dropout_p, dropout_p > 0
        mask, fully_masked = _convert_mask(attn_mask)
        call = _SdpaCall(is_causal, mask, fully_masked)
        call.query, call.key, call.value = query, key, value
        call.kwargs = kwargs | {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
        call.views = query.transpose(1, 2), self._drop_repeated_heads(key), self._drop_repeated_heads(value)
        self.state.is_running = True
        try:
            z: Tensor = self(*call.views, call)
            return z.transpose(1, 2)
        finally:
            self.state.is_running = False
            self.state.num_calls += 1

    def _drop_repeated_heads(self, kv: Tensor) -> Tensor:
        """(B, H or G, S, D) → (B, S, G, D): some models repeat the key-value heads before they call SDPA."""
        if kv.shape[1] != self.kv_heads:
            kv = kv[:, :: kv.shape[1] // self.kv_heads]
        return kv.transpose(1, 2)

    def forward(self, q: Queries, k: Keys, v: Values, prepared_mask: Any, sink: Sink = None) -> HeadOutputs:
        call: _SdpaCall = prepared_mask
        originals = (call.query, call.key, call.value)
        query, key, value = map(_restore_layout, (q, k, v), originals, call.views)
        return F.scaled_dot_product_attention(query, key, value, **call.kwargs).transpose(1, 2)


def _restore_layout(new: Tensor, original: Tensor, view: Tensor) -> Tensor:
    """(B, S, G, D) → (B, H or G, S, D), as in the original call. Unchanged values are the original tensor.

    If gradients are recorded, the new tensor is used, so that it is in the autograd graph.
    """
    if new is view and not new.requires_grad:
        return original
    new = new.transpose(1, 2)
    group = original.shape[1] // new.shape[1]
    return new if group == 1 else new.repeat_interleave(group, 1)


def _convert_mask(mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the mask with −∞ where a float mask is masked, and the queries of a boolean mask without a visible key."""
    if mask is None:
        return None, None
    mask = mask[(None,) * (4 - mask.ndim)]
    if mask.dtype == torch.bool:
        fully_masked = ~mask.any(-1, keepdim=True)
        return mask | fully_masked, fully_masked
    masked = mask < _MASKED_BIAS * torch.finfo(mask.dtype).min
    masked &= ~masked.all(-1, keepdim=True)  # a query whose keys are all masked attends to them equally
    return mask.masked_fill(masked, float("-inf")), None


class _SdpaMode(TorchFunctionMode):
    """Replaces calls of SDPA by calls of the kernel."""

    def __init__(self, kernel: InterceptedSdpa) -> None:
        super().__init__()
        self.kernel = kernel

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention and not self.kernel.state.is_running:
            return self.kernel.replace_sdpa(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def intercept_sdpa(module: nn.Module, kernel: InterceptedSdpa) -> ForwardWrapper:
    """Return a wrapper of the module's forward method in which the kernel is called instead of SDPA."""
    name = type(module).__name__

    def wrapper(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        num_calls = kernel.state.num_calls
        with _SdpaMode(kernel):
            result = forward(*args, **kwargs)
        if kernel.state.num_calls == num_calls:
            problem = f"{name} did not call scaled_dot_product_attention, so its q, k, v, scores and pattern"
            raise InputError(f"{problem} are not known; load the model with attn_implementation='sdpa'")
        return result

    return wrapper


_KERNELS: WeakKeyDictionary[nn.Module, InterceptedSdpa] = WeakKeyDictionary()
_LOCK = threading.Lock()


def intercepted_kernel(module: nn.Module, kv_heads: int) -> InterceptedSdpa:
    """Return the kernel of an attention module. All traces and edits of the module use the same one."""
    with _LOCK:
        kernel = _KERNELS.get(module)
        if kernel is None or kernel.kv_heads != kv_heads:
            kernel = _KERNELS[module] = InterceptedSdpa(kv_heads)
        return kernel
