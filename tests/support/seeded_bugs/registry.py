"""A seeded bug: how it is made, and which checks must say so."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from support.seeded_bugs.reference_gpt import ReferenceGPT, check_kwargs

from cutaway.check import Report, check

SEEDED_BUGS: dict[str, "SeededBug"] = {}


@dataclass
class SeededBug:
    """`caught_by` must fail (or warn, for checks of activations); beside it only `also_caught_by` may."""

    name: str
    caught_by: str
    build: Callable[[], tuple[Any, dict[str, Any]]]
    """The model, and keyword arguments of `ct.check`."""
    also_caught_by: tuple[str, ...] = field(default=())
    """Checks that rightly see the same bug from another side."""


def seeded_bug(caught_by: str, *, also_caught_by: tuple[str, ...] = ()) -> Callable[[Any], Any]:
    """Register a function that builds a model with a bug: it returns a ReferenceGPT, or (model, keywords of check)."""

    def enter(make: Any) -> Any:
        def made() -> tuple[Any, dict[str, Any]]:
            target = make()
            return (target, check_kwargs(target)) if isinstance(target, ReferenceGPT) else target

        name = f"{caught_by}/{make.__name__.replace('_', ' ')}"
        assert name not in SEEDED_BUGS, name
        SEEDED_BUGS[name] = SeededBug(name, caught_by, made, also_caught_by)
        return make

    return enter


def check_bug(bug: SeededBug, **check_kwargs: Any) -> Report:
    """What the checks say of a bug."""
    target, given = bug.build()
    return check(target, **given, **check_kwargs)
