"""Each seeded bug is caught by its check, and by no unrelated check."""

import itertools

import pytest
from support.nightly import nightly_except
from support.seeded_bugs.all_bugs import BUG_MODULES  # noqa: F401  registers every bug
from support.seeded_bugs.reference_gpt import ReferenceGPT, check_kwargs
from support.seeded_bugs.registry import SEEDED_BUGS, SeededBug, check_bug

import cutaway as ct
from cutaway.check import get_checks
from cutaway.check.context import CheckContext

pytestmark = [pytest.mark.unchecked, pytest.mark.usefixtures("frozen_check_clock")]


FIRST_BUGS = {bug.caught_by: bug for bug in reversed(SEEDED_BUGS.values())}


@pytest.mark.parametrize("bug", nightly_except(FIRST_BUGS.values(), SEEDED_BUGS.values()), ids=SEEDED_BUGS)
def test_bug_is_caught_by_its_check(bug: SeededBug) -> None:
    finding = check_bug(bug, only=[bug.caught_by])[bug.caught_by]
    assert finding.verdict in ("fail", "warn"), finding
    assert finding.cause
    assert finding.fix


OTHER_FIRST_CAUSES = {
    "right-padding/mask ignored": "padding-leak",
    "left-padding/first row mask for all": "padding-leak",
    "overfit/negated gradient": "gradient-flow",
    "attention-entropy/zero scale": "attention-scale",
    "low-precision/rope angles in bf16": "rope-precision",
    "low-precision/fp16 overflow": "fp16-overflow",
    "meta-buffers/wrong inv freq": "rope-scaling",
    "rope-shift-invariance/keys interleaved": "rope-layout",
    "parity/different activation in one layer": "save-load",
}
"""Bug → check that the report ranks first, where it is not that of the bug. Most of these name the cause too."""


def test_first_cause_is_right_for_nine_of_ten_bugs() -> None:
    assert OTHER_FIRST_CAUSES.keys() <= SEEDED_BUGS.keys()
    assert len(OTHER_FIRST_CAUSES) <= len(SEEDED_BUGS) / 10


@pytest.mark.nightly
@pytest.mark.parametrize("bug", SEEDED_BUGS.values(), ids=SEEDED_BUGS)
def test_bug_is_caught_by_no_unrelated_check(bug: SeededBug) -> None:
    report = check_bug(bug, budget=300)
    assert report.problems[0].check == OTHER_FIRST_CAUSES.get(bug.name, bug.caught_by), report
    assert report[bug.caught_by].verdict in ("fail", "warn"), report[bug.caught_by]
    failed = {finding.check for finding in (*report.failures, *report.warnings)}
    assert failed <= {bug.caught_by, *bug.also_caught_by}, report


@pytest.mark.sample(2)
@pytest.mark.parametrize("model_kwargs", [{}, {"window": 5}, {"kv_heads": 4, "tied": False}, {"dropout": 0.3}], ids=str)
def test_reference_gpt_passes(model_kwargs: dict[str, object]) -> None:
    model = ReferenceGPT(**model_kwargs)  # type: ignore[arg-type]
    report = ct.check(model, **check_kwargs(model), budget=300)
    assert not report.failures, report
    assert not report.warnings, report


def test_checks_run_after_those_they_depend_on() -> None:
    names = list(get_checks())
    for index, check in enumerate(get_checks().values()):
        assert set(check.depends_on) <= set(names[:index]), check.name


def test_budget_skips_checks_that_have_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that advances by a second at each reading, calibration and a few checks use up the budget."""
    seconds = itertools.count()
    monkeypatch.setattr(CheckContext, "clock", staticmethod(lambda: float(next(seconds))))
    report = ct.check(ReferenceGPT(), only=["eval", "causality"], budget=4.5)
    verdicts = {finding.check: finding.verdict for finding in report.findings}
    assert verdicts == {"eval-determinism": "pass", "eval-dropout": "pass", "causality": "skip"}
    assert report["causality"].message == "skipped: the budget of 4.5 s is used up; pass a larger budget"


def test_every_check_has_a_seeded_bug() -> None:
    assert get_checks().keys() == {bug.caught_by for bug in SEEDED_BUGS.values()}
