"""`ct.edit`: modify activations or the structure of a model inside a with-block, and restore the model at the end.

with ct.edit(model, {"blocks.3.attn.z": {"do": "zero", "heads": [4]}, "blocks.5": "skip", "mask": "drop"}):
    model(tokens)
"""

import json
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from cutaway.errors import InputError
from cutaway.lens import structural_edits
from cutaway.lens.adapters import ModelLike, sites, unwrap_model
from cutaway.lens.context_hooks import ContextHooks
from cutaway.lens.hooks import HookContext, SiteHooks
from cutaway.lens.interventions import OPERATIONS, Intervention
from cutaway.lens.sites import Site, check_sites_in_model, select_sites
from cutaway.lens.structural_edits import StructuralTarget

TensorFn = Callable[[Tensor], Tensor]
EditSpec = str | Mapping[str, Any] | Intervention | Tensor | TensorFn


class Edit:
    """Context manager that applies edits at sites of a model.

    `edits` is a mapping from site names or patterns to edits, or the path of a JSON file with such a mapping. An edit
    is an operation ('zero', 'skip', …), a dict {"do": …}, an `Intervention`, a tensor or a function. Edits of the same
    activation are applied in the order of the mapping. If the model does not reach the site of an edit, the end of the
    with-block raises.

    Other threads use the unedited model, unless they run in a copied context (`asyncio.to_thread`,
    `contextvars.copy_context().run`). Threads with different edits of one model do not affect each other.
    """

    def __init__(self, model: ModelLike, edits: Mapping[str, EditSpec] | str | Path) -> None:
        self.model = unwrap_model(model)
        if isinstance(edits, str | Path):
            edits = _read_edits(edits)
        if not isinstance(edits, Mapping) or not edits:
            raise InputError("edits must be a non-empty mapping from site names to edits; see help(ct.edit)")
        self.edits = dict(edits)
        self.value_edits: list[tuple[str, Site, Intervention | TensorFn]] = []
        self.structural_edits: list[tuple[StructuralTarget, str, object]] = []
        all_sites, targets = sites(model), structural_edits.structural_targets(self.model)
        for name, spec in self.edits.items():
            if not isinstance(name, str):
                raise InputError(f"a site name must be a string from sites(model), not {name!r}")
            if not targets and _structural_op(spec) is not None:
                problem = (
                    f"'{_structural_op(spec)}' is a structural edit, which {type(self.model).__name__} does not support"
                )
                raise InputError(
                    f"{problem}; load the model with ct.load, or zero attn.out and ffn.out to skip a block"
                )
            matching = [target for key, target in targets.items() if fnmatchcase(key, name)]
            if matching and (op := _structural_op(spec)) is not None:
                fields = _check_keys(name, spec, ("do", "value")) if isinstance(spec, Mapping) else {}
                self.structural_edits += [(target, op, fields.get("value")) for target in matching]
            else:
                intervention = _parse_intervention(name, spec)
                self.value_edits += [(name, site, intervention) for site in select_sites(all_sites, [name])]
        self.call_counts: dict[str, int] = {}
        self._hooks = SiteHooks(modifies=True)
        self._structural_hooks = ContextHooks()

    def __enter__(self) -> "Edit":
        self._hooks.check_not_registered()
        check_sites_in_model(self.model, [site for _, site, _ in self.value_edits])
        names = [name for name, *_ in self.value_edits] + [target.name for target, *_ in self.structural_edits]
        self.call_counts = dict.fromkeys(names, 0)
        self._structural_hooks = ContextHooks()
        for target, op, value in self.structural_edits:
            on_call = partial(self._count_call, target.name)
            structural_edits.apply_structural_edit(target, op, value, on_call, self._structural_hooks)
        try:
            self._structural_hooks.activate()
            self._hooks.register(
                (site, self._hook_fn(name, intervention), _attention_heads(site, intervention))
                for name, site, intervention in self.value_edits
            )
        except BaseException:
            self._restore()
            raise
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        self._restore()
        if exc_type is not None:
            return
        check_sites_in_model(self.model, [site for _, site, _ in self.value_edits])
        if unused := [name for name, count in self.call_counts.items() if not count]:
            problem = f"{', '.join(unused)} was not reached, so the edit had no effect"
            raise InputError(f"{problem}; call the model itself, not a compiled copy of it, inside the with-block")

    def _restore(self) -> None:
        self._hooks.remove()
        self._structural_hooks.deactivate()

    def _hook_fn(self, name: str, intervention: Intervention | TensorFn) -> Callable[[HookContext], Tensor]:
        def hook_fn(context: HookContext) -> Tensor:
            self._count_call(name)
            site, value = context.site, context.value
            # A user's function may write in place, so it receives a copy.
            new = intervention(site, value) if isinstance(intervention, Intervention) else intervention(value.clone())
            if not isinstance(new, Tensor) or new.shape != value.shape:
                result = f"shape {tuple(new.shape)}" if isinstance(new, Tensor) else type(new).__name__
                problem = f"the function for {site.name} returned {result}"
                raise InputError(f"{problem}; return a tensor of shape {tuple(value.shape)}")
            return new.to(value.dtype)

        return hook_fn

    def _count_call(self, name: str) -> None:
        self.call_counts[name] += 1

    def to_dict(self) -> dict[str, object]:
        """Return the edits by site name, as JSON values. Raise if an edit is a function."""
        return {name: _spec_to_json(name, spec) for name, spec in self.edits.items()}

    def save(self, path: str | Path) -> None:
        """Write the edits to a JSON file that `ct.edit(model, path)` reads."""
        text = json.dumps(self.to_dict(), indent=2) + "\n"
        Path(path).write_text(text, encoding="utf-8")


def _read_edits(path: str | Path) -> dict[str, EditSpec]:
    """Read a mapping from site names to edits from a JSON file. Raise InputError if this fails."""
    try:
        edits = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read edits from '{path}': {error.strerror}; pass a JSON file or a mapping") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"'{path}' is not valid JSON ({error}); write edits with edit.save(path)") from None
    if not isinstance(edits, dict):
        raise InputError(f"'{path}' contains a {type(edits).__name__}; write an object from site names to edits")
    return edits


def _structural_op(spec: EditSpec) -> str | None:
    """Return the structural operation ('skip', 'drop', …) that a spec names, or None if it names none."""
    op = spec.get("do") if isinstance(spec, Mapping) else spec
    return op if isinstance(op, str) and any(op in ops for ops in structural_edits.STRUCTURAL_OPS.values()) else None


def _check_keys(name: str, spec: Mapping[str, Any], keys: tuple[str, ...]) -> Mapping[str, Any]:
    extra = min(map(str, spec.keys() - set(keys)), default=None)
    if extra is not None:
        raise InputError(f"the edit of {name} has '{extra}', but allowed keys are {', '.join(keys)}; leave {extra} out")
    if "do" not in spec:
        raise InputError(f"the edit of {name} has no 'do'; add it (allowed keys: {', '.join(keys)})")
    return spec


def _parse_intervention(name: str, spec: EditSpec) -> Intervention | TensorFn:
    if isinstance(spec, Intervention):
        return spec
    if isinstance(spec, Tensor):
        return Intervention("replace", spec)
    if isinstance(spec, str):
        if (op := _structural_op(spec)) is not None:
            raise InputError(
                f"'{op}' is a structural edit, which does not apply to '{name}';"
                " use it on a block (blocks.0), final_norm, mask or positions"
            )
        return Intervention(spec)
    if isinstance(spec, Mapping):
        return Intervention(**_check_keys(name, spec, ("do", "value", "positions", "heads", "units")))
    if callable(spec):
        return spec
    operations = ", ".join(OPERATIONS)
    raise InputError(f"the edit of {name} is a {type(spec).__name__}; pass {operations}, a dict, tensor or function")


def _attention_heads(site: Site, intervention: Intervention | TensorFn) -> list[int] | None:
    heads = intervention.selected_heads(site) if isinstance(intervention, Intervention) else None
    return heads if site.is_recomputed else None


def _spec_to_json(name: str, spec: EditSpec) -> object:
    if isinstance(spec, str | Mapping) and _structural_op(spec) is not None:
        return spec if isinstance(spec, str) else dict(spec)
    intervention = _parse_intervention(name, spec)
    if not isinstance(intervention, Intervention):
        raise InputError(f"the edit of {name} is a function, which cannot be written as JSON; use an operation")
    return intervention.to_dict()


edit = Edit
