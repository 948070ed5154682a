"""`ct.trace`: record activations and their gradients with forward hooks, which are removed at the end of a with-block.

with ct.trace(model, "resid_post", "attn.pattern", layers=[0, -1]) as t:
    model(tokens)
t["blocks.0.attn.pattern"]

The sites of a transformers model have the same names. A site is available if its value is the input or output of one
of the model's modules. In any other `nn.Module`, sites are named by submodule paths.
"""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from cutaway.argument_checks import check_dtype, check_positive_int, resolve_device
from cutaway.errors import InputError
from cutaway.lens import attention_pattern
from cutaway.lens.adapters import ModelLike, sites, unwrap_model
from cutaway.lens.context_hooks import is_in_backward
from cutaway.lens.display import format_axes, format_site_table, render_html_table
from cutaway.lens.hooks import HookContext, SiteHooks, index_tensor
from cutaway.lens.sites import (
    Indices,
    Site,
    check_sites_in_model,
    materialize_indices,
    resolve_heads,
    resolve_positions,
    select_sites,
)
from cutaway.model.kernels import Kernel
from cutaway.size.units import format_si

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class TracedTensor(Tensor):
    """A recorded activation with the names of its site and axes. Operations on it return plain tensors."""

    site: str
    axes: str
    """One letter per axis, as in `Site.axes`."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        sizes = format_axes(self.axes, tuple(self.shape)) or "scalar"
        return f"{self.site}  {sizes}  {str(self.dtype).removeprefix('torch.')}\n{self.as_subclass(Tensor)}"

    def __deepcopy__(self, memo: dict[int, object]) -> "TracedTensor":
        return _as_traced_tensor(self.as_subclass(Tensor).clone(), self.site, self.axes)

    def _repr_html_(self) -> str:
        norm = float(self.as_subclass(Tensor).float().norm())
        return render_html_table([(self.site, self.axes, tuple(self.shape), norm)])

    def plot(self, **plot_kwargs: Any) -> "Figure":
        """Plot a heat map of the last two axes, at index 0 of the other axes."""
        from cutaway.lens.labeled_tensor import LabeledTensor

        plain = self.as_subclass(Tensor).detach()
        while plain.ndim > 2:
            plain = plain[0]
        axes = tuple(self.axes[-2:]) if self.axes[0] != _UNNAMED_AXIS else ("row", "column")[-plain.ndim :]
        labels = tuple(tuple(map(str, range(size))) for size in plain.shape)
        return LabeledTensor(self.site, plain, axes, labels).plot(**plot_kwargs)


def _as_traced_tensor(tensor: Tensor, site: str, axes: str) -> TracedTensor:
    value = tensor.as_subclass(TracedTensor)
    value.site, value.axes = site, axes
    return value


class SiteMemory(NamedTuple):
    """A site and the number of bytes that one call of the model records there."""

    site: str
    axes: str
    shape: tuple[int, ...]
    nbytes: int


class TraceMemoryEstimate(list[SiteMemory]):
    """Estimated memory of a trace for one call of the model: one `SiteMemory` per site."""

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for row in self)

    def __repr__(self) -> str:
        return f"{format_site_table(list(self))}\n{format_si(self.nbytes, 'B', 3)} per call"


_UNNAMED_AXIS = "·"
"""Letter of an axis without a name, in modules that are neither cutaway's nor of a supported transformers family."""


class Trace:
    """Context manager that records the activations at the selected sites.

    `t[site]` is the recorded activation, or `t[site, call]` if the model was called several times. Forward passes of
    other threads are not recorded, unless they run in a copied context (`asyncio.to_thread`,
    `contextvars.copy_context().run`); their calls are recorded in the order in which they reach each site.

    Args:
        model: a cutaway model or checkpoint, a transformers model, or another nn.Module.
        patterns: site names, suffixes of site names, or globs of either (`"resid_post"`, `"blocks.0.*"`).
        layers, positions, heads: record only these layers, token positions and heads; the default is all.
        gradients: also record ∂loss/∂activation, which the method `gradient` returns.
        device, dtype: convert the recorded tensors to these. The default keeps the model's device and dtype.
    """

    def __init__(
        self,
        model: ModelLike,
        *patterns: str,
        layers: Indices | None = None,
        positions: Indices | None = None,
        heads: Indices | None = None,
        gradients: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.model = unwrap_model(model)
        self.sites = select_sites(sites(model), patterns, layers)
        self.positions, self.heads = materialize_indices(positions, "positions"), materialize_indices(heads, "heads")
        check_dtype(dtype)
        if device is not None:
            resolve_device(device)
        self.records_gradients, self.device, self.dtype = gradients, device, dtype
        self._values: dict[str, list[Tensor]] = {site.name: [] for site in self.sites}
        self._gradients: dict[str, dict[int, Tensor]] = {site.name: {} for site in self.sites}
        self._hooks, self._lock = SiteHooks(), threading.Lock()
        for site in self.sites:
            self._selected_heads(site)  # raises on invalid heads before the model runs
            if not site.axes and not (positions is None and heads is None):
                problem = f"{site.name} is a module path, whose token and head axes are not known"
                raise InputError(f"{problem}; leave positions and heads out, and index the recorded tensor")

    def __enter__(self) -> "Trace":
        check_sites_in_model(self.model, self.sites)
        # Scores and patterns are recomputed for the selected heads only.
        self._hooks.register(
            (site, self._record, self._selected_heads(site) if site.is_recomputed else None) for site in self.sites
        )
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        self._hooks.remove()
        if exc_type is not None:
            return
        check_sites_in_model(self.model, self.sites)
        if not any(self._values.values()):
            problem = f"{self.sites[0].name} was not reached, so nothing was recorded"
            raise InputError(f"{problem}; call the model itself, not a compiled copy of it, inside the with-block")

    def _selected_heads(self, site: Site) -> list[int] | None:
        if self.heads is None or site.num_heads is None:
            return None
        return resolve_heads(site, self.heads)

    def _record(self, context: HookContext) -> Tensor | None:
        if is_in_backward():  # activation checkpointing recomputes a block
            return None
        site, value = context.site, context.value
        recorded = self._select_part(site, value)
        with self._lock:  # threads with a copied context record to the same trace
            call = len(self._values[site.name])
            self._values[site.name].append(recorded)
        if self.records_gradients:
            if site.is_recomputed:
                self._record_attention_gradient(context, call)
            elif value.requires_grad:
                # A sublayer's input may be used elsewhere too (by the residual connection, by the other branch of a
                # parallel block). The gradient of a view contains only the sublayer's contribution.
                if site.name.endswith(".in"):
                    value = value.view_as(value)
                if site.conversion is None or value is not context.value:
                    _register_grad_hook(value, lambda grad: self._store_gradient(site, call, grad))
                else:
                    self._record_converted_gradient(context, call)
        return None if value is context.value else value

    def _record_attention_gradient(self, context: HookContext, call: int) -> None:
        """Derive the gradient of the pattern or the scores from the gradient of z.

        The recorded pattern is recomputed outside the kernel, so it is not in the autograd graph. With z = pattern·v,
        ∂L/∂pattern = ∂L/∂z·vᵀ, and the softmax backward pass gives ∂L/∂scores.
        """
        site, kernel, z = context.site, context.site.module, context.module_output
        assert isinstance(kernel, Kernel)
        assert isinstance(z, Tensor)
        if not z.requires_grad:
            return
        if kernel.training and kernel.dropout > 0:
            raise InputError(f"the gradient of {site.name} is not known with attention dropout; call model.eval()")
        heads = self._selected_heads(site)
        v = attention_pattern.values_per_head(context.module_args, heads).detach()  # (B, S, H, E)
        pattern = context.value.detach()  # (B, H, T, S)
        if site.kind == "scores":
            # This uses the cached scores: with selective activation checkpointing, a recomputed block must run the same
            # matrix products as the first pass.
            pattern = self._hooks.attention_scores(kernel, context.module_args, heads).pattern(pattern).detach()

        def store(grad_z: Tensor) -> None:
            grad_z = grad_z if heads is None else grad_z[:, :, heads]  # (B, T, H, E)
            grad = torch.einsum("bthe,bshe->bhts", grad_z, v)
            if site.kind == "scores":  # backward pass of softmax
                grad = pattern * (grad - (grad * pattern).sum(-1, keepdim=True))
            self._store_gradient(site, call, grad)

        _register_grad_hook(z, store)

    def _record_converted_gradient(self, context: HookContext, call: int) -> None:
        """Record the gradient of a value that a `HookConversion` extracted from a module's input or output.

        The value itself is not in the autograd graph, so the gradient of the module's tensor is converted.
        """
        site, shape = context.site, context.value.shape

        def store(grad: Tensor) -> None:
            assert site.conversion is not None
            self._store_gradient(site, call, site.conversion.convert_gradient(grad, shape))

        assert isinstance(context.module_output, Tensor)
        _register_grad_hook(context.module_output, store)

    def _store_gradient(self, site: Site, call: int, gradient: Tensor) -> None:
        selected, stored = self._select_part(site, gradient), self._gradients[site.name]
        stored[call] = stored[call] + selected if call in stored else selected

    def _select_part(self, site: Site, value: Tensor) -> Tensor:
        """Select the traced positions and heads of `value`. The result shares no storage with a larger tensor."""
        value = value.detach()
        if self.positions is not None and site.token_axis is not None:
            indices = resolve_positions(self.positions, value.shape[site.token_axis])
            value = value.index_select(site.token_axis, index_tensor(indices, value))
        heads = self._selected_heads(site)
        if heads is not None and site.head_axis is not None and not site.is_recomputed:
            value = value.index_select(site.head_axis, index_tensor(heads, value))
        moved = value.to(device=self.device or value.device, dtype=self.dtype or value.dtype)
        # Activations of other libraries, keys and values in a cache, and logits may later be written in place.
        may_be_written = moved is value and (site.conversion is not None or site.axes[:2] == "BS" or site.layer is None)
        if moved.untyped_storage().nbytes() > moved.numel() * moved.element_size():
            return moved.clone()  # a view would keep the whole storage in memory, and would change with it
        return _lazy_clone(moved) if may_be_written else moved

    def __getitem__(self, key: str | tuple[str, int]) -> TracedTensor:
        name, call = key if isinstance(key, tuple) and len(key) == 2 else (key, None)
        if not isinstance(name, str) or not (call is None or isinstance(call, int)):
            raise InputError(f"{key!r} is not a key of a trace; use t[site], or t[site, call] with the call's index")
        return self._select_call(name, call, dict(enumerate(self.calls(name))))

    def gradient(self, name: str, call: int | None = None) -> TracedTensor:
        """Return ∂loss/∂activation at a site. Call backward() before this, inside the with-block or after it."""
        name = self.resolve_name(name)
        if not self.records_gradients:
            raise InputError("gradients were not recorded; pass gradients=True to trace")
        if self._values[name] and not self._gradients[name]:
            raise InputError(f"{name} has no gradient; call the model with gradients, without a cache, then backward()")
        return self._select_call(name, call, self._gradients[name])

    def calls(self, name: str) -> list[Tensor]:
        """Return the activations recorded at a site, one per call of the model."""
        return self._values[self.resolve_name(name)]

    def clear(self) -> None:
        """Discard the recorded activations and gradients, so that the memory of a loop of calls is constant."""
        for name in self._values:
            self._values[name], self._gradients[name] = [], {}

    def resolve_name(self, name: str) -> str:
        """Return the full name of a traced site, from its name or from a suffix that only one site has."""
        matches = [name] if name in self._values else [key for key in self._values if key.endswith(f".{name}")]
        if len(matches) != 1:
            reason = "is not a traced site" if not matches else f"is a suffix of {len(matches)} traced sites"
            raise InputError(f"'{name}' {reason}; use one of {', '.join(matches or list(self._values)[:6])} …")
        return matches[0]

    def _select_call(self, name: str, call: int | None, values: dict[int, Tensor]) -> TracedTensor:
        name = self.resolve_name(name)
        site = next(site for site in self.sites if site.name == name)
        calls = len(self._values[name])
        if call is None and calls > 1:
            raise InputError(f"{name} was recorded in {calls} calls; use t['{name}', -1] or t.calls('{name}')")
        number = (0 if call is None else call) % max(calls, 1)
        if number not in values or not -calls <= (call or 0) < calls:
            raise InputError(f"{name} has no call {call or 0}; {calls} calls were recorded, counted from 0")
        return _as_traced_tensor(values[number], name, site.axes or _UNNAMED_AXIS * values[number].ndim)

    def stack_activation(self, suffix: str) -> Tensor:
        """Stack the activations of all traced sites with this suffix, after one call of the model: (layers, …)."""
        matches = [site for site in self.sites if site.name == suffix or site.name.endswith(f".{suffix}")]
        if not matches:
            self.resolve_name(suffix)  # raises
        return torch.stack([self[site.name] for site in matches])

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, name: object) -> bool:
        return name in self._values

    @property
    def nbytes(self) -> int:
        """Size of the recorded activations in bytes, without gradients."""
        return sum(value.nbytes for calls in self._values.values() for value in calls)

    def estimate_memory(self, batch_size: int, seq_len: int, source_len: int | None = None) -> TraceMemoryEstimate:
        """Estimate the size of the activations that one call with this batch shape records. The model is not run."""
        check_positive_int("batch_size", batch_size)
        check_positive_int("seq_len", seq_len)
        check_positive_int("source_len", 1 if source_len is None else source_len)
        itemsize = (self.dtype or next(self.model.parameters()).dtype).itemsize
        rows = []
        for site in self.sites:
            if not site.axes:
                raise InputError(f"the shape at the module path {site.name} is not known; use t.nbytes after a call")
            shape = list(site.shape(batch_size, seq_len, source_len))
            axis, heads = site.token_axis, self._selected_heads(site)
            if self.positions is not None and axis is not None:
                shape[axis] = len(resolve_positions(self.positions, shape[axis]))
            if heads is not None and site.head_axis is not None:
                shape[site.head_axis] = len(heads)
            rows.append(SiteMemory(site.name, site.axes, tuple(shape), itemsize * torch.Size(shape).numel()))
        return TraceMemoryEstimate(rows)

    def save(self, path: str | Path) -> None:
        """Write all activations to a safetensors file. After several calls of the model, the keys are `site@call`."""
        from safetensors.torch import save_file

        flat: dict[str, Tensor] = {}
        pointers: set[int] = set()
        for name, calls in self._values.items():
            for call, value in enumerate(calls):
                tensor = value.contiguous()
                # A block's resid_post is the same tensor as the next block's resid_pre, and safetensors rejects tensors
                # that share memory.
                if tensor.data_ptr() in pointers:
                    tensor = tensor.clone()
                pointers.add(tensor.data_ptr())
                flat[name if len(calls) == 1 else f"{name}@{call}"] = tensor
        save_file(flat, path, {site.name: site.axes for site in self.sites})

    def __repr__(self) -> str:
        rows = []
        for site in self.sites:
            for value in self._values[site.name][-1:]:
                axes = site.axes or _UNNAMED_AXIS * value.ndim
                rows.append((site.name, axes, tuple(value.shape), value.nbytes))
        return format_site_table(rows)


def _register_grad_hook(tensor: Tensor, hook: Callable[[Tensor], None]) -> None:
    tensor.register_hook(hook)  # type: ignore[no-untyped-call]


def _lazy_clone(value: Tensor) -> Tensor:
    """Return a copy-on-write clone: its data is copied only when one of the two tensors is written to."""
    try:
        return torch._lazy_clone(value)
    except RuntimeError:  # storage that PyTorch did not allocate
        return value.clone()


trace = Trace
