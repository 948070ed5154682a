"""Baselines: accepted findings are reported, do not change the status, and are listed as fixed when they are gone."""

import json
from pathlib import Path

import pytest

from cutaway.check import CaseResult, Finding, Report
from cutaway.check.report.baseline import Baseline, BaselineEntry, load_baseline, mask_numbers
from cutaway.errors import InputError

MODEL = "models.gpt:make"


def build_finding(check: str, *cases: tuple[str, str]) -> Finding:
    """A finding with (verdict, message) cases, of which the first is the most severe."""
    results = [
        CaseResult(verdict, message, location=f"blocks.{index}") for index, (verdict, message) in enumerate(cases)
    ]  # type: ignore[arg-type]
    return Finding(check, results[0].verdict, results[0].message, cause="a cause", fix="a fix", cases=results)


def build_report(*findings: Finding) -> Report:
    return Report("a model", list(findings), seed=0)


LEAK = build_finding("causality", ("fail", "the logits at position 0 change with token 1"), ("pass", "ok"))
NOISE = build_finding("cache-decode", ("inconclusive", "the rounding noise is 12 %"))
DEAD = build_finding("dead-heads", ("warn", "2 heads are dead"))
HELD = build_finding("packing", ("pass", "held"))


def test_numbers_do_not_distinguish_messages() -> None:
    messages = ["4 of 7 rows differ by 1.5e-07 at 0x7f3a", "12 of 9 rows differ by inf at 0xbeef"]
    assert {mask_numbers(message) for message in messages} == {"# of # rows differ by # at #"}
    assert mask_numbers("has NaN values") == "has NaN values"


def test_written_baseline_accepts_the_same_report(tmp_path: Path) -> None:
    report = build_report(LEAK, NOISE, DEAD, HELD)
    Baseline().update(report, MODEL).write(tmp_path / "b.json")
    data = json.loads((tmp_path / "b.json").read_text())
    assert [entry["check"] for entry in data["accepted"]] == ["cache-decode", "causality", "dead-heads"]
    assert data["accepted"][1] == {
        "model": MODEL,
        "check": "causality",
        "verdict": "fail",
        "message": "the logits at position # change with token #",
        "reason": "",
    }
    compared = load_baseline(tmp_path / "b.json").apply(report, MODEL)
    assert report.status == "failed"
    assert compared.status == "passed"
    assert compared.accepted.keys() == {"causality", "cache-decode", "dead-heads"}
    assert compared.counts() == {"fail": 0, "inconclusive": 0, "warn": 0, "pass": 1, "skip": 0, "accepted": 3}
    assert not compared.fixed
    assert str(compared).startswith("a model: 0 failed")
    assert compared.to_dict()["accepted"] == compared.accepted


def test_empty_baseline_changes_nothing() -> None:
    report = build_report(LEAK, NOISE, DEAD, HELD)
    compared = Baseline().apply(report, MODEL)
    assert compared.status == report.status
    assert compared.findings == report.findings
    assert {**compared.counts(), "accepted": 0} == {**report.counts(), "accepted": 0}


def test_other_models_and_more_severe_verdicts_are_not_accepted() -> None:
    baseline = Baseline().update(build_report(DEAD), MODEL)
    assert baseline.apply(build_report(DEAD), "models.gpt:other").warnings == [DEAD]
    worse = build_finding("dead-heads", ("fail", "5 heads are dead"))
    assert baseline.apply(build_report(worse), MODEL).status == "failed"
    milder = Baseline().update(build_report(worse), MODEL).apply(build_report(DEAD), MODEL)
    assert milder.accepted.keys() == {"dead-heads"}


def test_new_case_of_an_accepted_check_is_reported() -> None:
    baseline = Baseline().update(build_report(LEAK), MODEL)
    both = build_finding("causality", ("fail", "the logits at position 4 change with token 5"), ("fail", "labels leak"))
    compared = baseline.apply(build_report(both), MODEL)
    [failure] = compared.failures
    assert (failure.message, failure.location) == ("labels leak", "blocks.1")
    assert [case.message for case in failure.cases] == ["labels leak"]
    assert failure.cause
    assert not compared.accepted


def test_fixed_entries_are_listed_only_if_the_check_ran() -> None:
    baseline = Baseline().update(build_report(LEAK, DEAD), MODEL)
    passed, skipped = build_finding("causality", ("pass", "held")), Finding("dead-heads", "skip", "skipped: no time")
    compared = baseline.apply(build_report(passed, skipped), MODEL)
    assert [entry.check for entry in compared.fixed] == ["causality"]
    inconclusive = build_finding("causality", ("inconclusive", "the rounding noise is 12 %"))
    assert not baseline.apply(build_report(inconclusive), MODEL).fixed


def test_update_keeps_reasons_other_models_and_checks_that_did_not_run() -> None:
    old = Baseline(
        (
            BaselineEntry(MODEL, "causality", "fail", mask_numbers(LEAK.message), "prefix LM"),
            BaselineEntry(MODEL, "dead-heads", "warn", "gone"),
            BaselineEntry(MODEL, "packing", "fail", "not selected"),
            BaselineEntry("other:make", "dead-heads", "warn", "gone"),
        )
    )
    entries = {(entry.model, entry.check): entry for entry in old.update(build_report(LEAK, DEAD), MODEL).entries}
    assert len(entries) == 4
    assert entries[MODEL, "causality"].reason == "prefix LM"
    assert entries[MODEL, "dead-heads"].message == "# heads are dead"
    assert entries[MODEL, "packing"].message == "not selected"
    assert entries["other:make", "dead-heads"].message == "gone"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("{}", 'it needs "version": 1'),
        ('{"version": 2, "accepted": []}', 'it needs "version": 1'),
        ('{"version": 1, "accepted": [3]}', r"accepted\[0\] must be an object"),
        ('{"version": 1, "accepted": [{"chekc": "a"}]}', r"accepted\[0\] must be an object"),
        ('{"version": 1, "accepted": [{"model": "a", "check": "b", "verdict": "fail"}]}', "has no text 'message'"),
        (
            '{"version": 1, "accepted": [{"model": "a", "check": "b", "verdict": "pass", "message": "c"}]}',
            "has the verdict 'pass'",
        ),
    ],
)
def test_invalid_baselines_are_errors(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text(text)
    with pytest.raises(InputError, match=message):
        load_baseline(tmp_path / "b.json")


def test_missing_baseline_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist; create it with"):
        load_baseline(tmp_path / "b.json")
