"""Check registry: `Check`, `register_check`, selection by name."""

import difflib
import fnmatch
import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from cutaway.check.report.finding import CaseResult
from cutaway.errors import InputError

if TYPE_CHECKING:
    from cutaway.check.context import CheckContext

CHECK_MODULES = (
    "eval_mode", "causality", "batching", "embedding", "attention_mask", "padding", "cross_attention", "kv_cache",
    "generation", "attention", "positions", "rope", "config_and_weights", "loss", "training", "activations", "parity",
)  # fmt: skip
_WORDS = {"rope": "RoPE", "cache": "KV cache", "moe": "MoE", "eos": "EOS"}
"""Words of check names that are written differently in titles."""
_SUBJECTS = {
    "eval_mode": "Evaluation mode",
    "kv_cache": "KV cache",
    "rope": "RoPE",
    "parity": "Comparison with a reference",
}
"""Module of checks → subject, where it is not the name of the module."""
CAUSAL_KINDS = ("decoder", "encoder-decoder")
ALL_KINDS = ("decoder", "encoder", "encoder-decoder")
CheckFunction = Callable[["CheckContext"], CaseResult | Iterable[CaseResult]]


@dataclass(frozen=True)
class Check:
    """A registered check: the bug it catches, its requirements, and the function that runs it."""

    name: str
    run: CheckFunction
    needs: tuple[str, ...]
    """Names of the CheckedModel functions that the check requires; `a|b` means that one of the two is enough."""
    kinds: tuple[str, ...]
    """Model kinds that the check applies to."""
    preflight: bool
    """Whether training runs the check before its first step."""
    native_dtype: bool
    """Whether the check runs in the model's own dtype. Other checks run in fp32 if the weights are bf16 or fp16."""
    depends_on: tuple[str, ...]
    """Names of checks that find the same bug closer to its cause. If one of them fails, this check is skipped."""
    catches: str
    """The bug that the check finds."""
    description: str
    """How the check works."""
    cause: str
    """The usual cause of a failure."""
    fix: str
    """How to fix the usual cause."""

    @property
    def title(self) -> str:
        """The name in words: `RoPE shift invariance`."""
        words = " ".join(_WORDS.get(word, word) for word in self.name.split("-"))
        return words[0].upper() + words[1:]

    @property
    def subject(self) -> str:
        """The subject of the check, which is that of its module: `KV cache`."""
        module = self.run.__module__.rpartition(".")[2]
        return _SUBJECTS.get(module, module.replace("_", " ").capitalize())

    @property
    def docs_path(self) -> str:
        return f"docs/checks/{self.name}.md"


CHECKS: dict[str, Check] = {}
_DOCSTRING = re.compile(r"Catches (.*?)\.\n\n(.*)\n\nCause: (.*?)\.\nFix: (.*)\.", re.DOTALL)
"""Docstring of a check function: the fields catches, description, cause and fix of `Check`."""


def register_check(
    name: str,
    *,
    needs: tuple[str, ...] = ("logits",),
    kinds: tuple[str, ...] = ALL_KINDS,
    preflight: bool = False,
    native_dtype: bool = False,
    depends_on: tuple[str, ...] = (),
) -> Callable[[CheckFunction], CheckFunction]:
    """Decorator that registers a function as a check, which runs under torch.no_grad(). See `Check` for the arguments.

    The other fields of `Check` are read from the function's docstring:

        Catches <the bug that the check finds>.

        <How the check works>

        Cause: <the usual cause of a failure>.
        Fix: <how to fix the usual cause>.
    """

    def register(run: CheckFunction) -> CheckFunction:
        parts = _DOCSTRING.fullmatch(inspect.getdoc(run) or "")
        if parts is None:
            raise InputError(f"the docstring of the check {name} does not have the form that register_check describes")
        texts = (" ".join(part.split()) for part in parts.groups())
        CHECKS[name] = Check(name, run, needs, kinds, preflight, native_dtype, depends_on, *texts)
        return run

    return register


def get_checks() -> dict[str, Check]:
    """All checks by name, in the order in which they run."""
    for module in CHECK_MODULES:
        import_module(f"cutaway.check.checks.{module}")
    return CHECKS


def get_check(name: str) -> Check:
    """Return the check with this name, or raise InputError that suggests a similar name."""
    checks = get_checks()
    if name not in checks:
        similar = difflib.get_close_matches(name, checks, 1)
        hint = f"did you mean '{similar[0]}'? T" if similar else "t"
        raise InputError(f"there is no check '{name}'; {hint}he checks are {', '.join(checks)}")
    return checks[name]


def select_checks(only: Iterable[str] | None, skip: Iterable[str] | None) -> list[Check]:
    """Return the checks in `only` (all checks if it is None) that are not in `skip`, in the order in which they run.

    Each item of `only` and `skip` is a name, the first part of a name (`cache` for all `cache-…`), the subject of a
    group (`padding`, `attention-mask`), or a pattern (`causality*`).
    """
    checks = get_checks()

    def match(names: Iterable[str]) -> set[str]:
        matched = set()
        for name in [names] if isinstance(names, str) else names:
            words = name.lower().replace("-", " ").replace("_", " ")
            group = {check.name for check in checks.values() if check.subject.lower() == words}
            prefixed = {candidate for candidate in checks if candidate.startswith(f"{name}-")}
            hits = {name} & checks.keys() or prefixed | group
            matched |= hits or set(fnmatch.filter(checks, name)) or {get_check(name).name}
        return matched

    selected = set(checks) if only is None else match(only)
    selected -= match(skip or ())
    return [check for name, check in checks.items() if name in selected]
