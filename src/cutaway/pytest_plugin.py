"""`pytest --cutaway module:factory`: each check of a model is a test, so that a project's CI keeps them.

It stands outside of `cutaway.check` because pytest imports it at every start, and that package imports torch.
"""

import warnings
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cutaway.errors import CutawayError

if TYPE_CHECKING:
    from cutaway.check import Finding, Report


class CutawayWarning(UserWarning):
    """A check found something to look at."""


class CheckFailedError(Exception):
    """A check failed; its text is the finding."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("cutaway", "checks of Transformers")
    told = "check the model that this function makes (called without arguments); repeatable"
    group.addoption("--cutaway", action="append", default=[], metavar="module.path:factory", help=told)
    for name, told in (("only", "only these checks, as in causality,cache"), ("skip", "all but these checks")):
        group.addoption(f"--cutaway-{name}", action="append", default=None, metavar="A,B", help=told)
    group.addoption("--cutaway-seed", type=int, default=0, metavar="N", help="of the texts; 0 unless given")
    group.addoption(
        "--cutaway-budget", type=float, default=30.0, metavar="SECONDS", help="for each model; 30 unless given"
    )


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """The models are collected after the project's own tests."""
    report = yield
    if isinstance(collector, pytest.Session) and report.passed:
        report.result += _collect_models(collector)
    return report


def _collect_models(session: pytest.Session) -> list["ModelCollector"]:
    """Each model that was asked for; a name that is wrong ends the run before it begins."""
    option = session.config.getoption
    sources = list(dict.fromkeys(option("--cutaway")))
    if not sources:
        return []
    from cutaway.check.model_sources import import_factory
    from cutaway.check.registry import select_checks

    made = []
    try:
        names = [
            each.name
            for each in select_checks(_split_names(option("--cutaway-only")), _split_names(option("--cutaway-skip")))
        ]
        for source in sources:
            factory = import_factory(source, session.config.invocation_params.dir)
            name = "cutaway" if len(sources) == 1 else f"cutaway[{source}]"
            collector = ModelCollector.from_parent(
                session, name=name, nodeid=name, source=source, factory=factory, checks=names
            )
            made.append(collector)
    except CutawayError as error:
        raise pytest.UsageError(f"--cutaway: {error}") from None
    return made


def _split_names(names: list[str] | None) -> list[str] | None:
    return None if names is None else [name.strip() for each in names for name in each.split(",") if name.strip()]


class ModelCollector(pytest.Collector):
    """One model. It is made and asked when its first test runs: all checks that were chosen, at once."""

    def __init__(self, *, source: str, factory: Any, checks: list[str], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.source, self.factory, self.checks = source, factory, checks
        self.report: Report | None = None
        self.error: CutawayError | None = None

    def collect(self) -> list[pytest.Item]:
        return [CheckItem.from_parent(self, name=name) for name in self.checks]

    def get_finding(self, check: str) -> "Finding":
        if self.report is None and self.error is None:
            self.run_checks()
        if self.error is not None:
            raise self.error
        assert self.report is not None
        return self.report[check]

    def run_checks(self) -> None:
        from cutaway.check import check
        from cutaway.check.model_sources import build_from_factory

        seed, budget = self.config.getoption("--cutaway-seed"), self.config.getoption("--cutaway-budget")
        names = [item.name for item in self.session.items if item.parent is self]
        try:
            model, overrides = build_from_factory(self.source, self.factory, seed=seed)
            self.report = check(model, only=names, seed=seed, budget=budget, **overrides)
        except CutawayError as error:
            self.error = error


class CheckItem(pytest.Item):
    """One check of one model."""

    def runtest(self) -> None:
        assert isinstance(self.parent, ModelCollector)
        finding = self.parent.get_finding(self.name)
        for name in ("measured", "threshold", "location"):
            if getattr(finding, name) is not None:
                self.user_properties.append((name, getattr(finding, name)))
        if finding.verdict == "skip":
            pytest.skip(finding.message.removeprefix("skipped: "))
        if finding.verdict == "fail":
            raise CheckFailedError(str(finding).partition(": ")[2])  # pytest says the check and that it failed
        if finding.verdict == "warn":
            warnings.warn(CutawayWarning(str(finding)), stacklevel=1)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The finding, or what is wrong with the factory, without a traceback of ours."""
        if isinstance(excinfo.value, CheckFailedError | CutawayError):
            return str(excinfo.value)
        return super().repr_failure(excinfo)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        assert isinstance(self.parent, ModelCollector)
        return self.path, None, f"{self.parent.source} {self.name}"
