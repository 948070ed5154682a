"""Each seeded bug is caught by its check, and by no unrelated one."""

import pytest
from support.seeded_bugs.all_bugs import BUG_MODULES  # noqa: F401  enters every bug
from support.seeded_bugs.reference_gpt import ReferenceGPT, check_kwargs
from support.seeded_bugs.registry import SEEDED_BUGS, SeededBug, check_bug

import cutaway as ct
from cutaway.check import get_checks

pytestmark = pytest.mark.unchecked


@pytest.mark.parametrize("one", SEEDED_BUGS.values(), ids=SEEDED_BUGS)
def test_a_bug_is_caught_by_its_check(one: SeededBug) -> None:
    found = check_bug(one, only=[one.caught_by])[one.caught_by]
    assert found.verdict in ("fail", "warn"), found
    assert found.cause
    assert found.fix


@pytest.mark.nightly
@pytest.mark.parametrize("one", SEEDED_BUGS.values(), ids=SEEDED_BUGS)
def test_a_bug_is_caught_by_no_unrelated_check(one: SeededBug) -> None:
    report = check_bug(one, budget=300)
    assert report[one.caught_by].verdict in ("fail", "warn"), report[one.caught_by]
    alarms = {finding.check for finding in (*report.failures, *report.warnings)}
    assert alarms <= {one.caught_by, *one.also_caught_by}, report


@pytest.mark.parametrize("how", [{}, {"window": 5}, {"kv_heads": 4, "tied": False}, {"dropout": 0.3}], ids=str)
def test_the_model_without_bugs_gives_no_alarm(how: dict[str, object]) -> None:
    model = ReferenceGPT(**how)  # type: ignore[arg-type]
    report = ct.check(model, **check_kwargs(model), budget=300)
    assert not report.failures, report
    assert not report.warnings, report


def test_every_check_has_a_bug() -> None:
    assert get_checks().keys() == {bug.caught_by for bug in SEEDED_BUGS.values()}
