"""A seeded bug: how it is made, and which checks must say so."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cutaway.check import Report, check
from zoo.home import Home, offers

ZOO: dict[str, "Bug"] = {}


@dataclass
class Bug:
    """`caught` must fail (or warn, for checks of health); beside it only what is in `also` may."""

    name: str
    caught: str
    make: Callable[[], tuple[Any, dict[str, Any]]]
    """The target, and what it offers."""
    also: tuple[str, ...] = field(default=())
    """Checks that rightly see the same bug from another side."""


def bug(caught: str, *, also: tuple[str, ...] = ()) -> Callable[[Any], Any]:
    """Enter a function that makes a target with a bug: it gives a Home, or (target, offers)."""

    def enter(make: Any) -> Any:
        def made() -> tuple[Any, dict[str, Any]]:
            target = make()
            return (target, offers(target)) if isinstance(target, Home) else target

        name = f"{caught}/{make.__name__.replace('_', ' ')}"
        assert name not in ZOO, name
        ZOO[name] = Bug(name, caught, made, also)
        return make

    return enter


def examined(one: Bug, **how: Any) -> Report:
    """What the checks say of a bug."""
    target, given = one.make()
    return check(target, **given, **how)
