"""The checks by name."""

import difflib
import fnmatch
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

import cutaway.check.checks  # noqa: F401  the package first: imported later, it would take the place of `checks()`
from cutaway.check.finding import Part
from cutaway.errors import InputError

if TYPE_CHECKING:
    from cutaway.check.exam import Exam

ROOMS = (
    "modes",
    "causality",
    "rows",
    "masks",
    "padded",
    "source",
    "cache",
    "writing",
    "choosing",
    "attention",
    "positions",
    "scale",
    "rope",
    "state",
    "loss",
    "learning",
    "steps",
    "health",
    "comparison",
)
CAUSAL = ("decoder", "encoder-decoder")
ANY = ("decoder", "encoder", "encoder-decoder")
Run = Callable[["Exam"], Part | Iterable[Part]]


@dataclass(frozen=True)
class Check:
    """One question that a model can be asked, and the bug that it finds."""

    name: str
    catches: str
    """The bug, in a sentence."""
    cause: str
    """What is usually wrong where it fails."""
    fix: str
    needs: tuple[str, ...]
    """What a target must offer; `a|b` is either."""
    kinds: tuple[str, ...]
    quick: bool
    """Whether training asks it before the first step."""
    own: bool
    """Asked in the model's own precision; all others in fp32 where weights are narrower."""
    after: tuple[str, ...]
    """Checks that see the same bug nearer to its cause: where one of them fails, this one has nothing to add."""
    run: Run
    asks: str = ""
    """How it is asked: the check's docstring."""

    @property
    def page(self) -> str:
        return f"docs/checks/{self.name}.md"


CHECKS: dict[str, Check] = {}


def check(
    name: str,
    *,
    catches: str,
    cause: str,
    fix: str,
    needs: tuple[str, ...] = ("logits",),
    kinds: tuple[str, ...] = ANY,
    quick: bool = False,
    own: bool = False,
    after: tuple[str, ...] = (),
) -> Callable[[Run], Run]:
    """Enter a function as a check."""

    def enter(run: Run) -> Run:
        assert name not in CHECKS, name
        asks = " ".join((run.__doc__ or "").split())
        CHECKS[name] = Check(name, catches, cause, fix, needs, kinds, quick, own, after, run, asks)
        return run

    return enter


def checks() -> dict[str, Check]:
    """All of them, in the order in which they are asked."""
    for room in ROOMS:
        import_module(f"cutaway.check.checks.{room}")
    return CHECKS


def chosen(only: Iterable[str] | None, skip: Iterable[str] | None) -> list[Check]:
    """Those that are asked for: by name, by the beginning of names (`cache` means all of `cache-…`), or by a pattern
    (`causality*`)."""
    known = checks()

    def named(names: Iterable[str]) -> set[str]:
        found = set()
        for name in [names] if isinstance(names, str) else names:
            hits = {name} & known.keys() or {each for each in known if each.startswith(f"{name}-")}
            hits = hits or set(fnmatch.filter(known, name))
            if not hits:
                near = difflib.get_close_matches(name, known, 1)
                meant = f"did you mean '{near[0]}'? T" if near else "t"
                raise InputError(f"there is no check '{name}'; {meant}here are {', '.join(known)}")
            found |= hits
        return found

    wanted = set(known) if only is None else named(only)
    wanted -= named(skip or ())
    return [each for name, each in known.items() if name in wanted]
