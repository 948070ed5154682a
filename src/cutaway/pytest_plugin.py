"""pytest plugin: `pytest --cutaway module:factory` runs each check of a model as a test.

The plugin is outside of `cutaway.check`, because that package imports torch and pytest imports plugins at every start.
"""

import warnings
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from _pytest._code.code import TerminalRepr

from cutaway.errors import CutawayError

if TYPE_CHECKING:
    from cutaway.check import Finding, Report
    from cutaway.check.report.baseline import Baseline


class CutawayWarning(UserWarning):
    """A check returned a warning, or a finding of the baseline no longer occurs."""


class CheckFailedError(Exception):
    """A check failed. The message describes the finding."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("cutaway", "correctness checks of Transformers")
    help_text = "function without arguments that returns the model to check; can be given several times"
    group.addoption("--cutaway", action="append", default=[], metavar="module.path:factory", help=help_text)
    for name, help_text in (("only", "run only these checks, such as causality,cache"), ("skip", "skip these checks")):
        group.addoption(f"--cutaway-{name}", action="append", default=None, metavar="A,B", help=help_text)
    group.addoption("--cutaway-seed", type=int, default=0, metavar="N", help="seed of the random tokens; default 0")
    group.addoption(
        "--cutaway-budget", type=float, default=30.0, metavar="SECONDS", help="time limit per model; default 30"
    )
    help_text = "accepted findings, written by cutaway check --write-baseline; they are reported as xfailed"
    group.addoption("--cutaway-baseline", type=Path, default=None, metavar="FILE", help=help_text)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Add one collector per --cutaway option after the tests that pytest has collected."""
    report = yield
    if isinstance(collector, pytest.Session) and report.passed:
        report.result += _collect_models(collector)
    return report


def _collect_models(session: pytest.Session) -> list["ModelCollector"]:
    """Build one collector per --cutaway option.

    An invalid factory or check name is a usage error, reported before any test runs.
    """
    option = session.config.getoption
    sources = list(dict.fromkeys(option("--cutaway")))
    if not sources:
        return []
    from cutaway.check.model_sources import import_factory
    from cutaway.check.registry import select_checks
    from cutaway.check.report.baseline import load_baseline

    collectors = []
    path: Path | None = option("--cutaway-baseline")
    try:
        baseline = None if path is None else load_baseline(session.config.invocation_params.dir / path)
        only, skip = _split_names(option("--cutaway-only")), _split_names(option("--cutaway-skip"))
        names = [check.name for check in select_checks(only, skip)]
        for source in sources:
            factory = import_factory(source, session.config.invocation_params.dir)
            name = "cutaway" if len(sources) == 1 else f"cutaway[{source}]"
            kwargs = {"source": source, "factory": factory, "checks": names, "baseline": baseline}
            collectors.append(ModelCollector.from_parent(session, name=name, nodeid=name, **kwargs))
    except CutawayError as error:
        raise pytest.UsageError(f"--cutaway: {error}") from None
    return collectors


def _split_names(names: list[str] | None) -> list[str] | None:
    return None if names is None else [name.strip() for option in names for name in option.split(",") if name.strip()]


class ModelCollector(pytest.Collector):
    """Collector of one model's checks. The first test builds the model and runs all selected checks at once."""

    def __init__(
        self, *, source: str, factory: object, checks: list[str], baseline: "Baseline | None", **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.source, self.factory, self.checks, self.baseline = source, factory, checks, baseline
        self.accepted: dict[str, str] = {}
        """Name of each check whose problems are all in the baseline → the reasons."""
        self.fixed: dict[str, list[str]] = {}
        """Check → messages in the baseline that no longer occur."""
        self.report: Report | None = None
        self.error: CutawayError | None = None

    def collect(self) -> list[pytest.Item]:
        return [CheckItem.from_parent(self, name=name) for name in self.checks]

    def get_finding(self, check: str) -> "Finding":
        """Return the finding of one check. Run all selected checks first if they have not run; raise if that failed."""
        if self.report is None and self.error is None:
            self.run_checks()
        if self.error is not None:
            raise self.error
        assert self.report is not None
        return self.report[check]

    def run_checks(self) -> None:
        """Build the model and run the checks that are still selected (-k may have deselected some)."""
        from cutaway.check import check
        from cutaway.check.model_sources import build_from_factory

        seed, budget = self.config.getoption("--cutaway-seed"), self.config.getoption("--cutaway-budget")
        names = [item.name for item in self.session.items if item.parent is self]
        try:
            model, overrides = build_from_factory(self.source, self.factory, seed=seed)
            self.report = check(model, only=names, seed=seed, budget=budget, **overrides)
            if self.baseline is not None:
                self.report = compared = self.baseline.apply(self.report, self.source)
                self.accepted = compared.accepted
                for entry in compared.fixed:
                    self.fixed.setdefault(entry.check, []).append(entry.message)
        except CutawayError as error:
            self.error = error


class CheckItem(pytest.Item):
    """pytest item that runs one check of one model."""

    def runtest(self) -> None:
        assert isinstance(self.parent, ModelCollector)
        finding = self.parent.get_finding(self.name)
        for name in ("measured", "threshold", "location"):
            if getattr(finding, name) is not None:
                self.user_properties.append((name, getattr(finding, name)))
        for message in self.parent.fixed.get(self.name, ()):
            text = f"fixed  {self.name}: {message}; remove it from the baseline"
            warnings.warn(CutawayWarning(text), stacklevel=1)
        if self.name in self.parent.accepted:
            reason = self.parent.accepted[self.name]
            pytest.xfail(f"accepted{f' ({reason})' if reason else ''}: {finding.message}")
        if finding.verdict == "skip":
            pytest.skip(finding.message.removeprefix("skipped: "))
        if finding.verdict == "fail":
            raise CheckFailedError(str(finding).partition(": ")[2])  # pytest prints the name and the verdict
        if finding.verdict == "inconclusive":  # neither passed nor failed
            warnings.warn(CutawayWarning(str(finding)), stacklevel=1)
            pytest.skip(finding.message)
        if finding.verdict == "warn":
            warnings.warn(CutawayWarning(str(finding)), stacklevel=1)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: object = None) -> str | TerminalRepr:
        """Return the finding, or the CutawayError of the factory, as text; other errors keep their traceback."""
        if isinstance(excinfo.value, CheckFailedError | CutawayError):
            return str(excinfo.value)
        return super().repr_failure(excinfo)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        assert isinstance(self.parent, ModelCollector)
        return self.path, None, f"{self.parent.source} {self.name}"
