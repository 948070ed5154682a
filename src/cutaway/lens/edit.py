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
from cutaway.lens import structure
from cutaway.lens.changes import DOES, Change
from cutaway.lens.choice import chosen
from cutaway.lens.models import unwrapped
from cutaway.lens.sites import Site, refuse_if_gone, sites
from cutaway.lens.taps import Passing, Taps
from cutaway.model.stack import Stack

Function = Callable[[Tensor], Tensor]
What = str | Mapping[str, Any] | Change | Tensor | Function


class Edit:
    """Changes by site: a name ('zero', 'skip', …), a table {"do": …}, a `Change`, a tensor to put there, a function.

    Later changes see what earlier ones made. One whose site nothing passes is an error at the end.
    """

    def __init__(self, model: Any, changes: Mapping[str, What] | str | Path) -> None:
        self.model = unwrapped(model)
        if isinstance(changes, str | Path):
            changes = read(changes)
        if not isinstance(changes, Mapping) or not changes:
            raise InputError("edits are a table of changes by site, with one at least; see help(ct.edit)")
        self.changes = dict(changes)
        self.values: list[tuple[str, Site, Change | Function]] = []
        self.builds: list[tuple[str, tuple[str, Stack, int | None], str, Any]] = []
        known, parts = sites(self.model), structure.places(self.model)
        for name, what in self.changes.items():
            if not isinstance(name, str):
                raise InputError(f"a site's name is text, and {name!r} is a {type(name).__name__}; see sites(model)")
            how = build_of(what)
            matching = [place for place in parts if fnmatchcase(place, name)]
            if how is not None and matching:
                self.builds += [(place, parts[place], how, value_of(name, what)) for place in matching]
                continue
            change = change_of(name, what)
            self.values += [(name, site, change) for site in chosen(known, [name])]
        self.fired: dict[str, int] = {}
        self.taps = Taps(change=True)
        self.undo: list[structure.Undo] = []

    def __enter__(self) -> "Edit":
        self.taps.refuse_if_open()
        refuse_if_gone(self.model, [site for _, site, _ in self.values])
        self.fired = {name: 0 for name, *_ in self.values} | {place: 0 for place, *_ in self.builds}
        try:
            for place, part, how, value in self.builds:
                self.undo.append(structure.change(*part, place, how, value, partial(self.count, place)))
            self.taps.open((site, self.act(name, change), heads_of(site, change)) for name, site, change in self.values)
        except BaseException:
            self.restore()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.restore()
        if kind is None:
            refuse_if_gone(self.model, [site for _, site, _ in self.values])
        idle = [name for name, count in self.fired.items() if not count]
        if kind is None and idle:
            raise InputError(
                f"nothing passed {', '.join(idle)}, so that edit did nothing; call the model inside the with-block: "
                "the model itself, not a compiled copy of it"
            )

    def restore(self) -> None:
        self.taps.close()
        while self.undo:
            self.undo.pop()()

    def act(self, name: str, change: Change | Function) -> Callable[[Passing], Tensor]:
        def changed(passing: Passing) -> Tensor:
            self.count(name)
            site, value = passing.site, passing.value
            new = change(site, value) if isinstance(change, Change) else change(value.clone())  # it may write into it
            if not isinstance(new, Tensor) or new.shape != value.shape:
                found = tuple(new.shape) if isinstance(new, Tensor) else type(new).__name__
                raise InputError(f"the function for {site.name} gave {found}; it must give {tuple(value.shape)}")
            return new.to(value.dtype)

        return changed

    def count(self, name: str) -> None:
        self.fired[name] += 1

    def to_dict(self) -> dict[str, Any]:
        """The changes in JSON's words."""
        return {name: told(name, what) for name, what in self.changes.items()}

    def save(self, path: str | Path) -> None:
        """As JSON, which `ct.edit(model, path)` takes."""
        text = json.dumps(self.to_dict(), indent=2) + "\n"
        Path(path).write_text(text, encoding="utf-8")


def read(path: str | Path) -> dict[str, Any]:
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"edits cannot be read from '{path}': {error.strerror}; give a JSON file or a table") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"'{path}' is no JSON ({error}); write edits there with edit.save(path)") from None
    if not isinstance(found, dict):
        raise InputError(f"'{path}' holds a {type(found).__name__}; edits are a table of changes by site")
    return found


def build_of(what: What) -> str | None:
    """The name of a change of the build, if it is one."""
    how = what.get("do") if isinstance(what, Mapping) else what
    return how if isinstance(how, str) and any(how in ways for ways in structure.WAYS.values()) else None


def value_of(name: str, what: What) -> Any:
    """What a change of the build is given beside its name."""
    if not isinstance(what, Mapping):
        return None
    if extra := what.keys() - {"do", "value"}:
        wrong = min(map(str, extra))
        raise InputError(
            f"the edit of {name} has '{wrong}', and '{what['do']}' is done to all of it; leave {wrong} out"
        )
    return what.get("value")


def change_of(name: str, what: What) -> Change | Function:
    if isinstance(what, Change):
        return what
    if isinstance(what, Tensor):
        return Change("replace", what)
    if isinstance(what, str):
        if (how := build_of(what)) is not None:
            raise InputError(f"'{how}' is for a part of the model, such as blocks.0, and '{name}' is none of this one")
        return Change(what)
    if isinstance(what, Mapping):
        extra = what.keys() - {"do", "value", "positions", "heads", "units"}
        if extra or "do" not in what:
            wrong = f"has '{min(extra)}'" if extra else "has no 'do'"
            raise InputError(f"the edit of {name} {wrong}; it takes do, value, positions, heads and units")
        return Change(**what)
    if callable(what):
        return what
    raise InputError(
        f"the edit of {name} is a {type(what).__name__}; give one of {', '.join(DOES)}, a table or a function"
    )


def heads_of(site: Site, change: Change | Function) -> list[int] | None:
    heads = change.heads_of(site) if isinstance(change, Change) else None
    return heads if site.side in ("scores", "pattern") else None


def told(name: str, what: What) -> Any:
    if isinstance(what, str | Mapping) and build_of(what) is not None:
        return what if isinstance(what, str) else dict(what)
    change = change_of(name, what)
    if not isinstance(change, Change):
        raise InputError(
            f"the edit of {name} is a function, which JSON cannot hold; use zero, mean, add, replace, scale"
        )
    return change.to_dict()


edit = Edit
