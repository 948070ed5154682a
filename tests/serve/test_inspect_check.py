"""Check screen: the queries give the findings of `ct.check`, one by one, and can be canceled."""

import json
from dataclasses import asdict
from typing import Any

import pytest
import torch

import cutaway as ct
from cutaway.check import Finding, get_checks
from cutaway.lens import edit
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.model_input import TokenizerAdapter
from cutaway.serve.inspect.protocol import QueryCancelled, QueryJob, QueryResult
from cutaway.serve.inspect.queries.model_check import ListChecks, RunCheck, find_bound

pytestmark = [pytest.mark.unchecked, pytest.mark.usefixtures("frozen_check_clock")]


class RecordingJob(QueryJob):
    """A job that keeps partial results, and is canceled after `max_partials` of them."""

    def __init__(self, max_partials: int = 1000) -> None:
        super().__init__()
        self.partials: list[dict[str, Any]] = []
        self.max_partials = max_partials

    def send_partial(self, result: QueryResult) -> None:
        self.partials.append(dict(result.data))
        if len(self.partials) >= self.max_partials:
            self.cancelled.set()
        self.check_cancelled()


def build(preset: str) -> Inspector:
    model = ct.build(preset, seed=0)
    return Inspector(model, TokenizerAdapter(model.config.vocab_size), name=preset)


def comparable(finding: Finding | dict[str, Any]) -> dict[str, Any]:
    """A finding as JSON values, without the time and the fields that only the page has."""
    data = asdict(finding) if isinstance(finding, Finding) else dict(finding)
    data = {name: value for name, value in data.items() if name not in ("seconds", "bound")}
    data["cases"] = [{name: value for name, value in case.items() if name != "bound"} for case in data["cases"]]
    return json.loads(json.dumps(data))


@pytest.mark.parametrize("preset", ["tiny-gpt", "tiny-bert", "tiny-t5"])
def test_findings_are_those_of_the_library(preset: str) -> None:
    inspector, job = build(preset), RecordingJob()
    before = {name: value.clone() for name, value in inspector.model.state_dict().items()}
    result = RunCheck(preflight=True).run(inspector, job)
    report = ct.check(inspector.model, preflight=True, budget=60)
    assert [comparable(data) for data in job.partials] == [comparable(finding) for finding in report.findings]
    assert result.data["counts"] == report.counts()
    assert report.findings
    assert all(torch.equal(value, before[name]) for name, value in inspector.model.state_dict().items())
    assert not inspector.model.training


def test_a_canceled_run_ends_and_restores_the_model() -> None:
    inspector, job = build("tiny-gpt"), RecordingJob(max_partials=3)
    before = {name: value.clone() for name, value in inspector.model.state_dict().items()}
    with pytest.raises(QueryCancelled):
        RunCheck(preflight=True).run(inspector, job)
    assert len(job.partials) == 3
    assert all(torch.equal(value, before[name]) for name, value in inspector.model.state_dict().items())
    assert inspector.lock.acquire(blocking=False)


def test_a_model_without_a_mask_fails_with_location_and_array() -> None:
    inspector, job = build("tiny-gpt"), RecordingJob()
    with edit(inspector.model, {"mask": "drop"}):
        RunCheck(preflight=True).run(inspector, job)
    finding = next(data for data in job.partials if data["check"] == "causality")
    assert finding["verdict"] == "fail"
    assert finding["location"].startswith("position ")
    assert finding["fix"]
    assert finding["bound"] == "at most"
    rows = {int(name): row for name, row in zip(finding["array"]["names"], finding["array"]["values"], strict=True)}
    assert max(max(row[:cut]) for cut, row in rows.items()) >= finding["measured"]
    skipped = next(data for data in job.partials if data["check"] == "causality-paths")
    assert skipped["not_run"]
    assert "causality failed" in skipped["message"]


def test_arrays_show_the_measured_values() -> None:
    model = ct.build("tiny-llama", seed=0)
    report = ct.check(model, only=["causality", "causality-gradient", "cache-decode", "left-padding", "softmax-dim"])
    arrays = {finding.check: finding.array for finding in report.findings}
    causality = arrays["causality"]
    assert causality is not None
    for name, row in zip(causality.names, causality.values, strict=True):
        assert max(row[: int(name)]) <= (report["causality"].threshold or 0.0)
        assert min(row[int(name) :]) > 0
    gradient = arrays["causality-gradient"]
    assert gradient is not None
    assert torch.tensor(gradient.values).triu(1).abs().max() == 0
    cache = arrays["cache-decode"]
    assert cache is not None
    assert max(cache.values[0]) == pytest.approx(report["cache-decode"].measured)
    padding = arrays["left-padding"]
    assert padding is not None
    assert max(max(row) for row in padding.values) == pytest.approx(report["left-padding"].measured)
    sums = arrays["softmax-dim"]
    assert sums is not None
    assert torch.allclose(torch.tensor(sums.values), torch.ones(()), atol=1e-5)


def test_every_check_has_a_title_a_subject_and_texts() -> None:
    rows = ListChecks().run(build("tiny-gpt"), QueryJob()).data["checks"]
    assert isinstance(rows, list)
    assert [row["name"] for row in rows] == list(get_checks())
    titles = {row["name"]: row["title"] for row in rows}
    assert titles["rope-shift-invariance"] == "RoPE shift invariance"
    assert titles["cache-decode"] == "KV cache decode"
    assert len(set(titles.values())) == len(titles)
    assert {row["subject"] for row in rows} >= {"Causality", "KV cache", "Padding", "Evaluation mode", "Loss"}
    assert any(row["preflight"] for row in rows)
    assert all(row["catches"] and row["description"] for row in rows)


@pytest.mark.parametrize(
    ("verdict", "measured", "threshold", "expected"),
    [
        ("pass", 1e-6, 1e-4, "at most"),
        ("fail", 1.0, 1e-4, "at most"),
        ("pass", 18.0, 1e-4, "at least"),
        ("fail", 0.0, 1e-4, "at least"),
        ("pass", 1.0, None, None),
    ],
)
def test_bound(verdict: str, measured: float, threshold: float | None, expected: str | None) -> None:
    assert find_bound(verdict, measured, threshold) == expected
