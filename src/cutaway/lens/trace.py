"""`ct.trace`: read any value inside a model while it runs, and leave nothing behind.

with ct.trace(model, "resid_post", "attn.pattern", layers=[0, -1]) as t:
    model(tokens)
t["blocks.0.attn.pattern"]

A model of transformers has the same names, as far as its modules show such values; any other module has its paths.
"""

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from cutaway.errors import InputError
from cutaway.lens import pattern
from cutaway.lens.choice import Numbers, chosen, numbers, settled, some_heads
from cutaway.lens.drawing import listing
from cutaway.lens.models import unwrapped
from cutaway.lens.parts import Part
from cutaway.lens.plan import Plan, Planned
from cutaway.lens.sites import Site, refuse_if_gone, sites
from cutaway.lens.taps import Passing, Taps, in_backward, index
from cutaway.lens.value import Value, valued
from cutaway.model import inputs

UNNAMED = "·"
"""An axis that no vocabulary names."""


class Trace:
    """What passed the chosen sites: `t[site]`, or `t[site, call]` where the model was called several times."""

    def __init__(
        self,
        model: Any,
        *patterns: str,
        layers: Numbers | None = None,
        positions: Numbers | None = None,
        heads: Numbers | None = None,
        gradients: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.model = unwrapped(model)
        self.sites = chosen(sites(self.model), patterns, layers)
        self.positions, self.heads = settled(positions, "positions"), settled(heads, "heads")
        inputs.check_dtype(dtype)
        if device is not None:
            inputs.check_device(device)
        self.gradients, self.device, self.dtype = gradients, device, dtype
        self.seen: dict[str, list[Tensor]] = {site.name: [] for site in self.sites}
        self.slopes: dict[str, dict[int, Tensor]] = {site.name: {} for site in self.sites}
        self.taps = Taps()
        for site in self.sites:
            self.heads_of(site)  # refused before anything runs
            if not site.axes and not (positions is None and heads is None):
                raise InputError(
                    f"{site.name} is a module's path, and which of its axes are tokens or heads is not known; "
                    "leave positions and heads away, and cut what you get"
                )

    def __enter__(self) -> "Trace":
        refuse_if_gone(self.model, self.sites)
        inside = [(site, self.heads_of(site) if site.side in ("scores", "pattern") else None) for site in self.sites]
        self.taps.open((site, self.read, heads) for site, heads in inside)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.taps.close()
        if kind is None:
            refuse_if_gone(self.model, self.sites)
        if kind is None and not any(self.seen.values()):
            raise InputError(
                f"nothing passed {self.sites[0].name}; call the model inside the with-block: the model itself, "
                "not a compiled copy of it"
            )

    def heads_of(self, site: Site) -> list[int] | None:
        if self.heads is None or site.heads is None:
            return None
        return some_heads(site, self.heads)

    def read(self, passing: Passing) -> Tensor | None:
        if in_backward():  # a block that is computed again
            return None
        site, value = passing.site, passing.value
        call = len(self.seen[site.name])
        if self.gradients:
            if site.side in ("scores", "pattern"):
                self.follow_inside(passing, call)
            elif value.requires_grad:
                if site.name.endswith(".in"):  # others may read the same tensor, and their slope is not this site's
                    value = value.view_as(value)
                if site.part is None or value is not passing.value:
                    followed: Any = value  # PyTorch's own method has no types
                    followed.register_hook(lambda slope: self.keep_slope(site, call, slope))
                else:
                    self.follow_whole(passing, site.part, call)
        self.seen[site.name].append(self.kept(site, passing.value))
        return None if value is passing.value else value

    def follow_inside(self, passing: Passing, call: int) -> None:
        """A pattern that is computed aside has no gradient of its own; z's gives it: z = pattern·v."""
        site = passing.site
        if not passing.result.requires_grad:
            return
        kernel: Any = site.module
        if kernel.training and kernel.dropout > 0:
            raise InputError(
                f"{site.name} has no gradient of its own where attention is dropped out; call model.eval()"
            )
        heads = self.heads_of(site)
        mixed, weights = pattern.values(passing.args, heads).detach(), passing.value.detach()
        if site.side == "scores":
            # No product is made anew: a block that is computed again must make the same ones.
            weights = self.taps.inside(kernel, passing.args, heads).pattern(weights).detach()

        def keep(slope: Tensor) -> None:
            slope = slope if heads is None else slope[:, :, heads]
            inner = torch.einsum("bthe,bshe->bhts", slope, mixed)
            if site.side == "scores":
                inner = weights * (inner - (inner * weights).sum(-1, keepdim=True))
            self.keep_slope(site, call, inner)

        passing.result.register_hook(keep)

    def follow_whole(self, passing: Passing, part: Part, call: int) -> None:
        """A value that was taken out of a tensor is on no way to the loss; the tensor is."""
        site, shape = passing.site, passing.value.shape
        passing.result.register_hook(lambda slope: self.keep_slope(site, call, part.slope(slope, shape)))

    def keep_slope(self, site: Site, call: int, slope: Tensor) -> None:
        kept, held = self.kept(site, slope), self.slopes[site.name]
        held[call] = held[call] + kept if call in held else kept

    def kept(self, site: Site, value: Tensor) -> Tensor:
        """The part that was asked for, as a tensor that holds no more than itself."""
        value = value.detach()
        if self.positions is not None and site.token_axis is not None:
            size = value.shape[site.token_axis]
            where = numbers(self.positions, size, "positions", "the tokens of this call")
            value = value.index_select(site.token_axis, index(where, value))
        heads = self.heads_of(site)
        if heads is not None and site.head_axis is not None and site.side in ("in", "out"):
            value = value.index_select(site.head_axis, index(heads, value))
        moved = value.to(device=self.device or value.device, dtype=self.dtype or value.dtype)
        # Other libraries write into values that they have used, a cache into its keys and values, a user into logits.
        follows = moved is value and (site.part is not None or site.axes[:2] == "BS" or site.layer is None)
        if moved.untyped_storage().nbytes() > moved.numel() * moved.element_size():
            return moved.clone()  # a view would hold, and follow, what it is a part of
        return copied_when_written(moved) if follows else moved

    def __getitem__(self, asked: str | tuple[str, int]) -> Value:
        name, call = asked if isinstance(asked, tuple) and len(asked) == 2 else (asked, None)
        if not isinstance(name, str) or not (call is None or isinstance(call, int)):
            raise InputError(f"{asked!r} names no value; give a site, or a site and the number of a call")
        return self.pick(name, call, dict(enumerate(self.of(name))))

    def gradient(self, name: str, call: int | None = None) -> Value:
        """∂loss/∂value, after backward() in or after the with-block."""
        name = self.name_of(name)
        if not self.gradients:
            raise InputError("gradients were not asked for; write trace(…, gradients=True)")
        if self.seen[name] and not self.slopes[name]:
            raise InputError(
                f"no gradient came to {name}; call backward(), and the model with gradients on and without a cache"
            )
        return self.pick(name, call, self.slopes[name])

    def of(self, name: str) -> list[Tensor]:
        """What passed, one value a call."""
        return self.seen[self.name_of(name)]

    def name_of(self, name: str) -> str:
        """A full name, or an end that only one site has."""
        found = [name] if name in self.seen else [each for each in self.seen if each.endswith(f".{name}")]
        if len(found) != 1:
            why = "is not one of the sites traced" if not found else f"is the end of {len(found)} sites"
            raise InputError(f"'{name}' {why}; there is {', '.join(found or list(self.seen)[:6])} …")
        return found[0]

    def pick(self, name: str, call: int | None, found: dict[int, Tensor]) -> Value:
        name = self.name_of(name)
        site = next(site for site in self.sites if site.name == name)
        calls = len(self.seen[name])
        if call is None and calls > 1:
            raise InputError(
                f"{name} was passed {calls} times; say which, as in t['{name}', -1], or take t.of('{name}')"
            )
        number = (0 if call is None else call) % max(calls, 1)
        if number not in found or not -calls <= (call or 0) < calls:
            raise InputError(f"nothing passed {name} in that call; it was passed {calls} times")
        return valued(found[number], name, site.axes or UNNAMED * found[number].ndim)

    def stacked(self, end: str) -> Tensor:
        """(layers, …): the values of the sites whose names end so, one call's, one above the other."""
        found = [site for site in self.sites if site.name == end or site.name.endswith(f".{end}")]
        if not found:
            self.name_of(end)
        return torch.stack([self[site.name] for site in found])

    def __iter__(self) -> Iterator[str]:
        return iter(self.seen)

    def __len__(self) -> int:
        return len(self.seen)

    def __contains__(self, name: object) -> bool:
        return name in self.seen

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        values = [each for found in self.seen.values() for each in found]
        return sum(each.nbytes for each in values)

    def plan(self, batch: int, length: int, source: int | None = None) -> Plan:
        """What one call with so many rows and tokens will hold, before it runs."""
        for what, count in (("batch", batch), ("length", length), ("source", 1 if source is None else source)):
            inputs.check_size(what, count)
        rows = []
        for site in self.sites:
            if not site.axes:
                raise InputError(f"what passes {site.name} is known when it has passed; see t.nbytes after a call")
            shape = list(site.shape(batch, length, source))
            axis, heads = site.token_axis, self.heads_of(site)
            if self.positions is not None and axis is not None:
                shape[axis] = len(numbers(self.positions, shape[axis], "positions", "the tokens of this call"))
            if heads is not None and site.head_axis is not None:
                shape[site.head_axis] = len(heads)
            size = (self.dtype or next(self.model.parameters()).dtype).itemsize
            rows.append(Planned(site.name, site.axes, tuple(shape), size * torch.Size(shape).numel()))
        return Plan(rows)

    def save(self, path: str | Path) -> None:
        """All of it as safetensors; the calls of one site are numbered."""
        from safetensors.torch import save_file

        flat: dict[str, Tensor] = {}
        held: set[int] = set()
        for name, found in self.seen.items():
            for call, each in enumerate(found):
                whole = each.contiguous()
                if whole.data_ptr() in held:  # one block's resid_post is the next one's resid_pre: a file wants two
                    whole = whole.clone()
                held.add(whole.data_ptr())
                flat[name if len(found) == 1 else f"{name}@{call}"] = whole
        save_file(flat, path, {site.name: site.axes for site in self.sites})

    def __repr__(self) -> str:
        rows = [(name, each) for name, found in self.seen.items() for each in found[-1:]]
        axes = {site.name: site.axes for site in self.sites}
        return listing(
            [(name, axes[name] or UNNAMED * each.ndim, tuple(each.shape), each.nbytes) for name, each in rows]
        )


def copied_when_written(value: Tensor) -> Tensor:
    """A copy that is made when someone writes into either, so mostly never: logits are large."""
    try:
        return torch._lazy_clone(value)
    except RuntimeError:  # memory that is not PyTorch's own
        return value.clone()


trace = Trace
