"""Each seeded bug is caught by its check, and by no unrelated one."""

import pytest
from zoo.bug import ZOO, Bug, examined
from zoo.home import Home, offers
from zoo.rooms import ROOMS  # noqa: F401  enters every bug

import cutaway as ct
from cutaway.check import checks

pytestmark = pytest.mark.unchecked


@pytest.mark.parametrize("one", ZOO.values(), ids=ZOO)
def test_a_bug_is_caught_by_its_check(one: Bug) -> None:
    found = examined(one, only=[one.caught])[one.caught]
    assert found.verdict in ("fail", "warn"), found
    assert found.cause
    assert found.fix


@pytest.mark.nightly
@pytest.mark.parametrize("one", ZOO.values(), ids=ZOO)
def test_a_bug_is_caught_by_no_unrelated_check(one: Bug) -> None:
    report = examined(one, budget=300)
    assert report[one.caught].verdict in ("fail", "warn"), report[one.caught]
    alarms = {finding.check for finding in (*report.failures, *report.warnings)}
    assert alarms <= {one.caught, *one.also}, report


@pytest.mark.parametrize("how", [{}, {"window": 5}, {"groups": 4, "tied": False}, {"dropout": 0.3}], ids=str)
def test_the_model_without_bugs_gives_no_alarm(how: dict[str, object]) -> None:
    model = Home(**how)  # type: ignore[arg-type]
    report = ct.check(model, **offers(model), budget=300)
    assert not report.failures, report
    assert not report.warnings, report


def test_every_check_has_a_bug() -> None:
    assert checks().keys() == {bug.caught for bug in ZOO.values()}
