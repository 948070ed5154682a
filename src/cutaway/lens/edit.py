"""`ct.edit`: change any value inside a model, or its build, while it runs; afterwards it is as it was.

with ct.edit(model, {"blocks.3.attn.z": {"do": "zero", "heads": [4]}, "blocks.5": "skip", "mask": "drop"}):
    model(tokens)
"""

import json
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from cutaway.errors import InputError
from cutaway.lens import structural_edits
from cutaway.lens.adapters import sites, unwrap_model
from cutaway.lens.hooks import HookContext, SiteHooks
from cutaway.lens.interventions import OPERATIONS, Intervention
from cutaway.lens.sites import Site, check_sites_in_model, select_sites
from cutaway.model.stack import Stack

TensorFn = Callable[[Tensor], Tensor]
EditSpec = str | Mapping[str, Any] | Intervention | Tensor | TensorFn


class Edit:
    """Changes by site: a name ('zero', 'skip', …), a table {"do": …}, an `Intervention`, a tensor, a function.

    Later changes see what earlier ones made. One whose site nothing passes is an error at the end.
    """

    def __init__(self, model: Any, edits: Mapping[str, EditSpec] | str | Path) -> None:
        self.model = unwrap_model(model)
        if isinstance(edits, str | Path):
            edits = read_edits(edits)
        if not isinstance(edits, Mapping) or not edits:
            raise InputError("edits are a table of changes by site, with one at least; see help(ct.edit)")
        self.edits = dict(edits)
        self.value_edits: list[tuple[str, Site, Intervention | TensorFn]] = []
        self.structural_edits: list[tuple[str, tuple[str, Stack, int | None], str, Any]] = []
        known, parts = sites(self.model), structural_edits.structural_targets(self.model)
        for name, what in self.edits.items():
            if not isinstance(name, str):
                raise InputError(f"a site's name is text, and {name!r} is a {type(name).__name__}; see sites(model)")
            how = _structural_op(what)
            matching = [place for place in parts if fnmatchcase(place, name)]
            if how is not None and matching:
                self.structural_edits += [
                    (place, parts[place], how, _structural_value(name, what)) for place in matching
                ]
                continue
            change = _parse_intervention(name, what)
            self.value_edits += [(name, site, change) for site in select_sites(known, [name])]
        self.call_counts: dict[str, int] = {}
        self._hooks = SiteHooks(modifies=True)
        self._undo_stack: list[structural_edits.UndoFn] = []

    def __enter__(self) -> "Edit":
        self._hooks.check_not_registered()
        check_sites_in_model(self.model, [site for _, site, _ in self.value_edits])
        self.call_counts = {name: 0 for name, *_ in self.value_edits} | {
            place: 0 for place, *_ in self.structural_edits
        }
        try:
            for place, part, how, value in self.structural_edits:
                self._undo_stack.append(
                    structural_edits.apply_structural_edit(*part, place, how, value, partial(self._count_call, place))
                )
            self._hooks.register(
                (site, self._hook_fn(name, change), _attention_heads(site, change))
                for name, site, change in self.value_edits
            )
        except BaseException:
            self._restore()
            raise
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._restore()
        if exc_type is None:
            check_sites_in_model(self.model, [site for _, site, _ in self.value_edits])
        idle = [name for name, count in self.call_counts.items() if not count]
        if exc_type is None and idle:
            raise InputError(
                f"nothing passed {', '.join(idle)}, so that edit did nothing; call the model inside the with-block: "
                "the model itself, not a compiled copy of it"
            )

    def _restore(self) -> None:
        self._hooks.remove()
        while self._undo_stack:
            self._undo_stack.pop()()

    def _hook_fn(self, name: str, intervention: Intervention | TensorFn) -> Callable[[HookContext], Tensor]:
        def changed(passing: HookContext) -> Tensor:
            self._count_call(name)
            site, value = passing.site, passing.value
            new = (
                intervention(site, value) if isinstance(intervention, Intervention) else intervention(value.clone())
            )  # it may write into it
            if not isinstance(new, Tensor) or new.shape != value.shape:
                found = tuple(new.shape) if isinstance(new, Tensor) else type(new).__name__
                raise InputError(f"the function for {site.name} gave {found}; it must give {tuple(value.shape)}")
            return new.to(value.dtype)

        return changed

    def _count_call(self, name: str) -> None:
        self.call_counts[name] += 1

    def to_dict(self) -> dict[str, Any]:
        """The changes in JSON's words."""
        return {name: _spec_to_json(name, what) for name, what in self.edits.items()}

    def save(self, path: str | Path) -> None:
        """As JSON, which `ct.edit(model, path)` takes."""
        text = json.dumps(self.to_dict(), indent=2) + "\n"
        Path(path).write_text(text, encoding="utf-8")


def read_edits(path: str | Path) -> dict[str, Any]:
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"edits cannot be read from '{path}': {error.strerror}; give a JSON file or a table") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"'{path}' is no JSON ({error}); write edits there with edit.save(path)") from None
    if not isinstance(found, dict):
        raise InputError(f"'{path}' holds a {type(found).__name__}; edits are a table of changes by site")
    return found


def _structural_op(spec: EditSpec) -> str | None:
    """The name of a change of the build, if it is one."""
    how = spec.get("do") if isinstance(spec, Mapping) else spec
    return (
        how if isinstance(how, str) and any(how in ways for ways in structural_edits.STRUCTURAL_OPS.values()) else None
    )


def _structural_value(name: str, spec: EditSpec) -> Any:
    """What a change of the build is given beside its name."""
    if not isinstance(spec, Mapping):
        return None
    if extra := spec.keys() - {"do", "value"}:
        wrong = min(map(str, extra))
        raise InputError(
            f"the edit of {name} has '{wrong}', and '{spec['do']}' is done to all of it; leave {wrong} out"
        )
    return spec.get("value")


def _parse_intervention(name: str, spec: EditSpec) -> Intervention | TensorFn:
    if isinstance(spec, Intervention):
        return spec
    if isinstance(spec, Tensor):
        return Intervention("replace", spec)
    if isinstance(spec, str):
        if (how := _structural_op(spec)) is not None:
            raise InputError(f"'{how}' is for a part of the model, such as blocks.0, and '{name}' is none of this one")
        return Intervention(spec)
    if isinstance(spec, Mapping):
        extra = spec.keys() - {"do", "value", "positions", "heads", "units"}
        if extra or "do" not in spec:
            wrong = f"has '{min(extra)}'" if extra else "has no 'do'"
            raise InputError(f"the edit of {name} {wrong}; it takes do, value, positions, heads and units")
        return Intervention(**spec)
    if callable(spec):
        return spec
    raise InputError(
        f"the edit of {name} is a {type(spec).__name__}; give one of {', '.join(OPERATIONS)}, a table or a function"
    )


def _attention_heads(site: Site, intervention: Intervention | TensorFn) -> list[int] | None:
    heads = intervention.selected_heads(site) if isinstance(intervention, Intervention) else None
    return heads if site.kind in ("scores", "pattern") else None


def _spec_to_json(name: str, spec: EditSpec) -> Any:
    if isinstance(spec, str | Mapping) and _structural_op(spec) is not None:
        return spec if isinstance(spec, str) else dict(spec)
    change = _parse_intervention(name, spec)
    if not isinstance(change, Intervention):
        raise InputError(
            f"the edit of {name} is a function, which JSON cannot hold; use zero, mean, add, replace, scale"
        )
    return change.to_dict()


edit = Edit
