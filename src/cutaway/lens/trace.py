"""`ct.trace`: read any value inside a model while it runs, and leave nothing behind.

with ct.trace(model, "resid_post", "attn.pattern", layers=[0, -1]) as t:
    model(tokens)
t["blocks.0.attn.pattern"]

A model of transformers has the same names, as far as its modules show such values; any other module has its paths.
"""

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cutaway.errors import InputError
from cutaway.lens import attention_pattern
from cutaway.lens.adapters import sites, unwrap_model
from cutaway.lens.display import format_bytes, format_site_table, plot_heatmap, render_html_table
from cutaway.lens.hook_conversions import HookConversion
from cutaway.lens.hooks import HookContext, SiteHooks, index_tensor, is_in_backward
from cutaway.lens.sites import (
    Indices,
    Site,
    check_sites_in_model,
    materialize_indices,
    resolve_heads,
    resolve_indices,
    select_sites,
)
from cutaway.model import inputs


class TracedTensor(Tensor):
    """What passed a site."""

    site: str
    axes: str

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        sizes = " × ".join(f"{axis} {size}" for axis, size in zip(self.axes, self.shape, strict=True))
        plain = self.as_subclass(Tensor)
        return f"{self.site}  {sizes or 'a number'}  {str(self.dtype).removeprefix('torch.')}\n{plain}"

    def __deepcopy__(self, memo: dict[int, Any]) -> "TracedTensor":
        return as_traced_tensor(self.as_subclass(Tensor).clone(), self.site, self.axes)

    def _repr_html_(self) -> str:
        return render_html_table(
            [(self.site, self.axes, tuple(self.shape), float(self.as_subclass(Tensor).float().norm()))]
        )

    def plot(self, **plot_kwargs: Any) -> Any:
        """A heat map of the last two axes, for the first of the others."""
        plain = self.as_subclass(Tensor).detach()
        while plain.ndim > 2:
            plain = plain[0]
        return plot_heatmap(plain, self.site, self.axes[-2:], **plot_kwargs)


def as_traced_tensor(tensor: Tensor, site: str, axes: str) -> TracedTensor:
    value = tensor.as_subclass(TracedTensor)
    value.site, value.axes = site, axes
    return value


class SiteMemory(NamedTuple):
    """A site, and what one call holds of it."""

    site: str
    axes: str
    shape: tuple[int, ...]
    nbytes: int


class TraceMemoryEstimate(list[SiteMemory]):
    """What a trace will hold."""

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for row in self)

    def __repr__(self) -> str:
        return f"{format_site_table(list(self))}\n{format_bytes(self.nbytes)} a call"


_UNNAMED_AXIS = "·"
"""An axis that no vocabulary names."""


class Trace:
    """What passed the chosen sites: `t[site]`, or `t[site, call]` where the model was called several times."""

    def __init__(
        self,
        model: Any,
        *patterns: str,
        layers: Indices | None = None,
        positions: Indices | None = None,
        heads: Indices | None = None,
        gradients: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.model = unwrap_model(model)
        self.sites = select_sites(sites(self.model), patterns, layers)
        self.positions, self.heads = materialize_indices(positions, "positions"), materialize_indices(heads, "heads")
        inputs.check_dtype(dtype)
        if device is not None:
            inputs.resolve_device(device)
        self.records_gradients, self.device, self.dtype = gradients, device, dtype
        self._values: dict[str, list[Tensor]] = {site.name: [] for site in self.sites}
        self._gradients: dict[str, dict[int, Tensor]] = {site.name: {} for site in self.sites}
        self._hooks = SiteHooks()
        for site in self.sites:
            self._selected_heads(site)  # refused before anything runs
            if not site.axes and not (positions is None and heads is None):
                raise InputError(
                    f"{site.name} is a module's path, and which of its axes are tokens or heads is not known; "
                    "leave positions and heads away, and cut what you get"
                )

    def __enter__(self) -> "Trace":
        check_sites_in_model(self.model, self.sites)
        inside = [
            (site, self._selected_heads(site) if site.kind in ("scores", "pattern") else None) for site in self.sites
        ]
        self._hooks.register((site, self._record, heads) for site, heads in inside)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._hooks.remove()
        if exc_type is None:
            check_sites_in_model(self.model, self.sites)
        if exc_type is None and not any(self._values.values()):
            raise InputError(
                f"nothing passed {self.sites[0].name}; call the model inside the with-block: the model itself, "
                "not a compiled copy of it"
            )

    def _selected_heads(self, site: Site) -> list[int] | None:
        if self.heads is None or site.num_heads is None:
            return None
        return resolve_heads(site, self.heads)

    def _record(self, context: HookContext) -> Tensor | None:
        if is_in_backward():  # a block that is computed again
            return None
        site, value = context.site, context.value
        call = len(self._values[site.name])
        if self.records_gradients:
            if site.kind in ("scores", "pattern"):
                self._record_attention_gradient(context, call)
            elif value.requires_grad:
                if site.name.endswith(".in"):  # others may read the same tensor, and their slope is not this site's
                    value = value.view_as(value)
                if site.conversion is None or value is not context.value:
                    followed: Any = value  # PyTorch's own method has no types
                    followed.register_hook(lambda slope: self._store_gradient(site, call, slope))
                else:
                    self._record_converted_gradient(context, site.conversion, call)
        self._values[site.name].append(self._select_part(site, context.value))
        return None if value is context.value else value

    def _record_attention_gradient(self, context: HookContext, call: int) -> None:
        """A pattern that is computed aside has no gradient of its own; z's gives it: z = pattern·v."""
        site = context.site
        if not context.module_output.requires_grad:
            return
        kernel: Any = site.module
        if kernel.training and kernel.dropout > 0:
            raise InputError(
                f"{site.name} has no gradient of its own where attention is dropped out; call model.eval()"
            )
        heads = self._selected_heads(site)
        mixed, weights = attention_pattern.values_per_head(context.module_args, heads).detach(), context.value.detach()
        if site.kind == "scores":
            # No product is made anew: a block that is computed again must make the same ones.
            weights = self._hooks.attention_scores(kernel, context.module_args, heads).pattern(weights).detach()

        def keep(slope: Tensor) -> None:
            slope = slope if heads is None else slope[:, :, heads]
            inner = torch.einsum("bthe,bshe->bhts", slope, mixed)
            if site.kind == "scores":
                inner = weights * (inner - (inner * weights).sum(-1, keepdim=True))
            self._store_gradient(site, call, inner)

        context.module_output.register_hook(keep)

    def _record_converted_gradient(self, context: HookContext, conversion: HookConversion, call: int) -> None:
        """A value that was taken out of a tensor is on no way to the loss; the tensor is."""
        site, shape = context.site, context.value.shape
        context.module_output.register_hook(
            lambda slope: self._store_gradient(site, call, conversion.convert_gradient(slope, shape))
        )

    def _store_gradient(self, site: Site, call: int, gradient: Tensor) -> None:
        kept, held = self._select_part(site, gradient), self._gradients[site.name]
        held[call] = held[call] + kept if call in held else kept

    def _select_part(self, site: Site, value: Tensor) -> Tensor:
        """The part that was asked for, as a tensor that holds no more than itself."""
        value = value.detach()
        if self.positions is not None and site.token_axis is not None:
            size = value.shape[site.token_axis]
            where = resolve_indices(self.positions, size, "positions", "the tokens of this call")
            value = value.index_select(site.token_axis, index_tensor(where, value))
        heads = self._selected_heads(site)
        if heads is not None and site.head_axis is not None and site.kind in ("in", "out"):
            value = value.index_select(site.head_axis, index_tensor(heads, value))
        moved = value.to(device=self.device or value.device, dtype=self.dtype or value.dtype)
        # Other libraries write into values that they have used, a cache into its keys and values, a user into logits.
        follows = moved is value and (site.conversion is not None or site.axes[:2] == "BS" or site.layer is None)
        if moved.untyped_storage().nbytes() > moved.numel() * moved.element_size():
            return moved.clone()  # a view would hold, and follow, what it is a part of
        return _lazy_clone(moved) if follows else moved

    def __getitem__(self, key: str | tuple[str, int]) -> TracedTensor:
        name, call = key if isinstance(key, tuple) and len(key) == 2 else (key, None)
        if not isinstance(name, str) or not (call is None or isinstance(call, int)):
            raise InputError(f"{key!r} names no value; give a site, or a site and the number of a call")
        return self._select_call(name, call, dict(enumerate(self.calls(name))))

    def gradient(self, name: str, call: int | None = None) -> TracedTensor:
        """∂loss/∂value, after backward() in or after the with-block."""
        name = self.resolve_name(name)
        if not self.records_gradients:
            raise InputError("gradients were not asked for; write trace(…, gradients=True)")
        if self._values[name] and not self._gradients[name]:
            raise InputError(
                f"no gradient came to {name}; call backward(), and the model with gradients on and without a cache"
            )
        return self._select_call(name, call, self._gradients[name])

    def calls(self, name: str) -> list[Tensor]:
        """What passed, one value a call."""
        return self._values[self.resolve_name(name)]

    def resolve_name(self, name: str) -> str:
        """A full name, or an end that only one site has."""
        found = [name] if name in self._values else [each for each in self._values if each.endswith(f".{name}")]
        if len(found) != 1:
            why = "is not one of the sites traced" if not found else f"is the end of {len(found)} sites"
            raise InputError(f"'{name}' {why}; there is {', '.join(found or list(self._values)[:6])} …")
        return found[0]

    def _select_call(self, name: str, call: int | None, values: dict[int, Tensor]) -> TracedTensor:
        name = self.resolve_name(name)
        site = next(site for site in self.sites if site.name == name)
        calls = len(self._values[name])
        if call is None and calls > 1:
            raise InputError(
                f"{name} was passed {calls} times; say which, as in t['{name}', -1], or take t.calls('{name}')"
            )
        number = (0 if call is None else call) % max(calls, 1)
        if number not in values or not -calls <= (call or 0) < calls:
            raise InputError(f"nothing passed {name} in that call; it was passed {calls} times")
        return as_traced_tensor(values[number], name, site.axes or _UNNAMED_AXIS * values[number].ndim)

    def stack_activation(self, suffix: str) -> Tensor:
        """(layers, …): the values of the sites whose names end so, one call's, one above the other."""
        found = [site for site in self.sites if site.name == suffix or site.name.endswith(f".{suffix}")]
        if not found:
            self.resolve_name(suffix)
        return torch.stack([self[site.name] for site in found])

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, name: object) -> bool:
        return name in self._values

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        values = [each for found in self._values.values() for each in found]
        return sum(each.nbytes for each in values)

    def estimate_memory(self, batch_size: int, seq_len: int, source_len: int | None = None) -> TraceMemoryEstimate:
        """What one call with so many rows and tokens will hold, before it runs."""
        for what, count in (
            ("batch_size", batch_size),
            ("seq_len", seq_len),
            ("source_len", 1 if source_len is None else source_len),
        ):
            inputs.check_positive_int(what, count)
        rows = []
        for site in self.sites:
            if not site.axes:
                raise InputError(f"what passes {site.name} is known when it has passed; see t.nbytes after a call")
            shape = list(site.shape(batch_size, seq_len, source_len))
            axis, heads = site.token_axis, self._selected_heads(site)
            if self.positions is not None and axis is not None:
                shape[axis] = len(resolve_indices(self.positions, shape[axis], "positions", "the tokens of this call"))
            if heads is not None and site.head_axis is not None:
                shape[site.head_axis] = len(heads)
            size = (self.dtype or next(self.model.parameters()).dtype).itemsize
            rows.append(SiteMemory(site.name, site.axes, tuple(shape), size * torch.Size(shape).numel()))
        return TraceMemoryEstimate(rows)

    def save(self, path: str | Path) -> None:
        """All of it as safetensors; the calls of one site are numbered."""
        from safetensors.torch import save_file

        flat: dict[str, Tensor] = {}
        held: set[int] = set()
        for name, found in self._values.items():
            for call, each in enumerate(found):
                whole = each.contiguous()
                if whole.data_ptr() in held:  # one block's resid_post is the next one's resid_pre: a file wants two
                    whole = whole.clone()
                held.add(whole.data_ptr())
                flat[name if len(found) == 1 else f"{name}@{call}"] = whole
        save_file(flat, path, {site.name: site.axes for site in self.sites})

    def __repr__(self) -> str:
        rows = [(name, each) for name, found in self._values.items() for each in found[-1:]]
        axes = {site.name: site.axes for site in self.sites}
        return format_site_table(
            [(name, axes[name] or _UNNAMED_AXIS * each.ndim, tuple(each.shape), each.nbytes) for name, each in rows]
        )


def _lazy_clone(value: Tensor) -> Tensor:
    """A copy that is made when someone writes into either, so mostly never: logits are large."""
    try:
        return torch._lazy_clone(value)
    except RuntimeError:  # memory that is not PyTorch's own
        return value.clone()


trace = Trace
