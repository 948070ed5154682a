"""The checks by name."""

import difflib
import fnmatch
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from cutaway.check.report.finding import CaseResult
from cutaway.errors import InputError

if TYPE_CHECKING:
    from cutaway.check.context import CheckContext

CHECK_MODULES = (
    "eval_mode",
    "causality",
    "batching",
    "attention_mask",
    "padding",
    "cross_attention",
    "kv_cache",
    "generation",
    "attention",
    "positions",
    "config_and_weights",
    "loss",
    "training",
    "activations",
    "parity",
)
CAUSAL_KINDS = ("decoder", "encoder-decoder")
ALL_KINDS = ("decoder", "encoder", "encoder-decoder")
CheckFunction = Callable[["CheckContext"], CaseResult | Iterable[CaseResult]]


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
    """Functions of CheckedModel that must be there; `a|b` is either."""
    kinds: tuple[str, ...]
    preflight: bool
    """Whether training asks it before the first step."""
    native_dtype: bool
    """Asked in the model's own precision; all others in fp32 where weights are narrower."""
    depends_on: tuple[str, ...]
    """Checks that see the same bug nearer to its cause: where one of them fails, this one has nothing to add."""
    run: CheckFunction
    description: str = ""
    """How it is asked: the check's docstring."""

    @property
    def docs_path(self) -> str:
        return f"docs/checks/{self.name}.md"


CHECKS: dict[str, Check] = {}


def register_check(
    name: str,
    *,
    catches: str,
    cause: str,
    fix: str,
    needs: tuple[str, ...] = ("logits",),
    kinds: tuple[str, ...] = ALL_KINDS,
    preflight: bool = False,
    native_dtype: bool = False,
    depends_on: tuple[str, ...] = (),
) -> Callable[[CheckFunction], CheckFunction]:
    """Enter a function as a check."""

    def enter(run: CheckFunction) -> CheckFunction:
        assert name not in CHECKS, name
        asks = " ".join((run.__doc__ or "").split())
        CHECKS[name] = Check(name, catches, cause, fix, needs, kinds, preflight, native_dtype, depends_on, run, asks)
        return run

    return enter


def get_checks() -> dict[str, Check]:
    """All of them, in the order in which they are asked."""
    for module in CHECK_MODULES:
        import_module(f"cutaway.check.checks.{module}")
    return CHECKS


def select_checks(only: Iterable[str] | None, skip: Iterable[str] | None) -> list[Check]:
    """Those that are asked for: by name, by the beginning of names (`cache` means all of `cache-…`), or by a pattern
    (`causality*`)."""
    known = get_checks()

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
