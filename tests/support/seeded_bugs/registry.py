"""Registry of seeded bugs: models with one bug each, and the checks that must catch it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from support.seeded_bugs.reference_gpt import ReferenceGPT, check_kwargs

from cutaway.check import Report, check

SEEDED_BUGS: dict[str, "SeededBug"] = {}


@dataclass
class SeededBug:
    """A model with a known bug. The check `caught_by` must fail (or warn, for activation checks); apart from it, only
    `also_caught_by` may fail."""

    name: str
    caught_by: str
    build: Callable[[], tuple[Any, dict[str, Any]]]
    """Returns the model and keyword arguments of `ct.check`."""
    also_caught_by: tuple[str, ...] = field(default=())
    """Other checks that correctly fail for the same bug."""


def seeded_bug(caught_by: str, *, also_caught_by: tuple[str, ...] = ()) -> Callable[[Any], Any]:
    """Register a function that builds a model with a bug: it returns a ReferenceGPT, or (model, keywords of check)."""

    def register(function: Any) -> Any:
        def build() -> tuple[Any, dict[str, Any]]:
            model = function()
            return (model, check_kwargs(model)) if isinstance(model, ReferenceGPT) else model

        name = f"{caught_by}/{function.__name__.replace('_', ' ')}"
        assert name not in SEEDED_BUGS, name
        SEEDED_BUGS[name] = SeededBug(name, caught_by, build, also_caught_by)
        return function

    return register


def check_bug(bug: SeededBug, **check_kwargs: Any) -> Report:
    """Run the checks on a seeded bug."""
    model, overrides = bug.build()
    return check(model, **overrides, **check_kwargs)
