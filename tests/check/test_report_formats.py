"""Output formats of a report: SARIF, Markdown and badge."""

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as Tree

import jsonschema
import pytest
from torch import nn

from cutaway.check import Finding, Report, get_checks
from cutaway.check.report.badge import format_badge
from cutaway.check.report.baseline import Baseline
from cutaway.check.report.formats import FORMATS, write_outputs
from cutaway.check.report.junit import format_junit
from cutaway.check.report.markdown import format_markdown
from cutaway.check.report.sarif import format_sarif
from cutaway.check.report.source_location import SourceLocation, SourceLocator

TEXT = {"type": "object", "required": ["text"], "properties": {"text": {"type": "string", "minLength": 1}}}
LEVEL = {"enum": ["none", "note", "warning", "error"]}
SARIF_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["version", "runs"],
    "additionalProperties": False,
    "properties": {
        "$schema": {"type": "string", "format": "uri"},
        "version": {"const": "2.1.0"},
        "runs": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/run"}},
    },
    "$defs": {
        "run": {
            "type": "object",
            "required": ["tool", "results"],
            "additionalProperties": False,
            "properties": {
                "tool": {"properties": {"driver": {"$ref": "#/$defs/driver"}}, "required": ["driver"]},
                "automationDetails": {"properties": {"id": {"type": "string"}}, "additionalProperties": False},
                "originalUriBaseIds": {"type": "object", "additionalProperties": {"properties": {"description": TEXT}}},
                "columnKind": {"enum": ["utf16CodeUnits", "unicodeCodePoints"]},
                "invocations": {"type": "array", "items": {"$ref": "#/$defs/invocation"}},
                "results": {"type": "array", "items": {"$ref": "#/$defs/result"}},
            },
        },
        "driver": {
            "required": ["name"],
            "additionalProperties": False,
            "properties": {
                "name": {"type": "string"},
                "version": {"type": "string"},
                "informationUri": {"type": "string", "format": "uri"},
                "rules": {"type": "array", "uniqueItems": True, "items": {"$ref": "#/$defs/rule"}},
            },
        },
        "rule": {
            "required": ["id"],
            "additionalProperties": False,
            "properties": {
                "id": {"type": "string"},
                "name": {"type": "string"},
                "shortDescription": TEXT,
                "fullDescription": TEXT,
                "help": {**TEXT, "properties": {**TEXT["properties"], "markdown": {"type": "string"}}},  # type: ignore[dict-item]
                "helpUri": {"type": "string", "pattern": "^https://"},
                "defaultConfiguration": {"properties": {"level": LEVEL}},
                "properties": {"properties": {"tags": {"type": "array", "items": {"type": "string"}}}},
            },
        },
        "invocation": {
            "required": ["executionSuccessful"],
            "properties": {
                "executionSuccessful": {"type": "boolean"},
                "toolExecutionNotifications": {
                    "type": "array",
                    "items": {"required": ["message"], "properties": {"level": LEVEL, "message": TEXT}},
                },
            },
        },
        "result": {
            "required": ["message"],
            "additionalProperties": False,
            "properties": {
                "ruleId": {"type": "string"},
                "ruleIndex": {"type": "integer", "minimum": 0},
                "level": LEVEL,
                "message": TEXT,
                "locations": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/location"}},
                "partialFingerprints": {"type": "object", "additionalProperties": {"type": "string"}},
                "suppressions": {
                    "type": "array",
                    "items": {
                        "required": ["kind"],
                        "additionalProperties": False,
                        "properties": {
                            "kind": {"enum": ["inSource", "external"]},
                            "status": {"enum": ["accepted", "underReview", "rejected"]},
                            "justification": {"type": "string"},
                        },
                    },
                },
            },
        },
        "location": {
            "additionalProperties": False,
            "properties": {
                "physicalLocation": {
                    "required": ["artifactLocation"],
                    "properties": {
                        "artifactLocation": {
                            "required": ["uri"],
                            "properties": {"uri": {"type": "string", "pattern": "^[^/\\\\ ]"}},
                        },
                        "region": {"properties": {"startLine": {"type": "integer", "minimum": 1}}},
                    },
                },
                "logicalLocations": {"type": "array", "items": {"type": "object"}},
            },
        },
    },
}
"""The part of the SARIF 2.1.0 schema that the output uses; further properties are errors."""

MODULE = """
from torch import nn


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(2, 2)


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.position = nn.Embedding(2, 2)
        self.blocks = nn.ModuleList([Attention()])


def make():
    return GPT()


instance = {"module": GPT()}
"""
ATTENTION, GPT, MAKE = (SourceLocation("my models/gpt_model.py", line) for line in (5, 11, 18))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of a project, imported from the working directory."""
    (tmp_path / "my models").mkdir()
    (tmp_path / "my models" / "gpt_model.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "my models")
    yield import_module("gpt_model")
    del sys.modules["gpt_model"]


def build_report() -> Report:
    return Report(
        "a <model>",
        [
            Finding(
                "causality", "fail", "token 1 | leaks <b>", 2.5, 1e-5, "position 0, first in blocks.0.out", "c", "f"
            ),
            Finding("dead-heads", "warn", "2 heads are dead", float("inf"), location="blocks.0"),
            Finding("cache-decode", "inconclusive", "the rounding noise is 12 %"),
            Finding("packing", "pass", "held"),
            Finding("loss-eos", "skip", "skipped: the budget is used up", not_run=True),
        ],
        seed=7,
    )


def format_run(report: Report, locator: SourceLocator) -> dict[str, Any]:
    """Format as SARIF, validate it, and return its only run."""
    data = json.loads(format_sarif(report, locator), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    jsonschema.validate(data, SARIF_SCHEMA)
    [run] = data["runs"]
    return dict(run)


def test_sarif_has_a_rule_per_check_and_a_result_per_problem(project: Any) -> None:
    run = format_run(build_report(), SourceLocator("gpt_model:make", project.make(), {}, project.make))
    rules = {rule["id"]: rule for rule in run["tool"]["driver"]["rules"]}
    assert list(rules) == ["causality", "dead-heads", "cache-decode", "packing", "loss-eos"]
    assert get_checks()["causality"].fix in rules["causality"]["help"]["text"]
    assert rules["causality"]["helpUri"].endswith("/docs/checks/causality.md")
    results = run["results"]
    assert [(item["ruleId"], item["level"]) for item in results] == [
        ("causality", "error"),
        ("dead-heads", "warning"),
        ("cache-decode", "warning"),
    ]
    for item in results:
        assert run["tool"]["driver"]["rules"][item["ruleIndex"]]["id"] == item["ruleId"]
    physical = results[0]["locations"][0]["physicalLocation"]
    assert physical["artifactLocation"]["uri"] == "my%20models/gpt_model.py"
    assert physical["region"] == {"startLine": ATTENTION.line}
    assert results[0]["locations"][0]["logicalLocations"][0]["fullyQualifiedName"] == "gpt_model:make.blocks.0.out"
    [notification] = run["invocations"][0]["toolExecutionNotifications"]
    assert notification["level"] == "note"
    assert run["automationDetails"]["id"] == "cutaway-check/gpt_model:make/"


def test_fingerprints_are_stable_across_runs() -> None:
    def fingerprints(source: str, message: str, check: str = "causality") -> str:
        report = Report("m", [Finding(check, "fail", message, 1.0)], seed=0)
        [result] = format_run(report, SourceLocator(source))["results"]
        return "".join(result["partialFingerprints"].values())

    reference = fingerprints("a:make", "position 3 differs by 0.5")
    assert fingerprints("a:make", "position 4 differs by 1e-3") == reference
    different = [
        ("b:make", "position 3 differs"),
        ("a:make", "other"),
        ("a:make", "position 3 differs by 0.5", "packing"),
    ]
    assert reference not in [fingerprints(*arguments) for arguments in different]


def test_accepted_findings_are_suppressed(project: Any) -> None:
    report = build_report()
    compared = Baseline().update(report, "gpt_model:make").apply(report, "gpt_model:make")
    compared.accepted["causality"] = "a prefix LM"
    results = format_run(compared, SourceLocator("gpt_model:make"))["results"]
    assert results[0]["suppressions"] == [{"kind": "external", "status": "accepted", "justification": "a prefix LM"}]
    assert results[1]["suppressions"] == [{"kind": "external", "status": "accepted"}]
    suite = Tree.fromstring(format_junit(compared))[0]
    assert (suite.get("failures"), suite.get("errors"), suite.get("skipped")) == ("0", "0", "4")
    skipped = suite.find("testcase/skipped")
    assert skipped is not None
    assert (skipped.get("message") or "").startswith("accepted (a prefix LM): token 1")
    assert "accepted (fail): a prefix LM" in format_markdown(compared, "gpt_model:make")


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        ("position 0, first in blocks.0.out", ATTENTION),  # a module of torch: the class that contains it
        ("blocks.0", ATTENTION),
        ("blocks.0.out.weight", ATTENTION),
        ("position.weight", GPT),
        ("position 0", MAKE),  # not the module `position`
        ("gpt_model.py, line 8, in __init__", SourceLocation("my models/gpt_model.py", 8)),
        ("elsewhere.py, line 8, in __init__", MAKE),
        (None, MAKE),
    ],
)
def test_location_is_the_class_of_the_named_module(
    project: Any, location: str | None, expected: SourceLocation
) -> None:
    locator = SourceLocator("gpt_model:make", project.make(), {}, project.make)
    assert locator.locate(Finding("causality", "fail", "a", location=location)) == expected


def test_location_without_a_factory_function(project: Any, tmp_path: Path) -> None:
    finding = Finding("causality", "fail", "a")
    variable = SourceLocator("gpt_model:instance", None, project.instance, project.instance)
    assert variable.locate(finding) == SourceLocation("my models/gpt_model.py", 1)
    assert SourceLocator("a", project.make()).locate(finding) == GPT
    assert SourceLocator("tiny-gpt", nn.Linear(1, 1)).locate(finding) is None
    (tmp_path / "a.gguf").touch()
    assert SourceLocator("a.gguf").locate(finding) == SourceLocation("a.gguf", 1)
    assert SourceLocator("a", project.make(), directory=tmp_path / "my models" / "x").locate(finding) is None


def test_markdown_escapes_markup() -> None:
    text = format_markdown(build_report(), "models.gpt:make")
    [row] = [line for line in text.splitlines() if line.startswith("| causality")]
    assert "token 1 \\| leaks &lt;b&gt;" in row
    assert row.replace("\\|", "").count("|") == 6
    assert text.startswith("### cutaway check `models.gpt:make`: ❌ failed\n")
    assert "<summary>1 passed</summary>" in text


def luminance(color: str) -> float:
    digits = color[1:] if len(color) == 7 else "".join(2 * digit for digit in color[1:])
    values = [int(digits[index : index + 2], 16) / 255 for index in (0, 2, 4)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize(
    ("verdicts", "text"),
    [
        (["pass", "pass", "skip"], "2 passed"),
        (["pass", "warn"], "1 passed, 1 warning"),
        (["pass", "fail", "inconclusive"], "1 failed"),
        (["pass", "inconclusive"], "1 inconclusive"),
        (["skip"], "no check ran"),
    ],
)
def test_badge(verdicts: list[Any], text: str) -> None:
    report = Report("m", [Finding(f"check-{index}", verdict, "a") for index, verdict in enumerate(verdicts)], seed=0)
    svg = format_badge(report)
    root = Tree.fromstring(svg)
    name = "{http://www.w3.org/2000/svg}"
    assert root.findtext(f"{name}title") == f"cutaway check: {text}"
    assert root.get("role") == "img"
    assert [element.text for element in root.iter(f"{name}text")] == ["cutaway check", text]
    colors = [element.get("fill", "") for element in root.iter(f"{name}rect") if element.get("fill")]
    for color in colors:  # WCAG 2, level AA
        assert 1.05 / (luminance(color) + 0.05) >= 4.5
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")


def test_all_formats_are_written_together(tmp_path: Path) -> None:
    paths = {name: tmp_path / name for name in FORMATS}
    write_outputs(build_report(), paths, SourceLocator("a:make"))
    assert {path.name for path in tmp_path.iterdir()} == FORMATS.keys()
    for name, path in paths.items():
        assert path.read_text() == FORMATS[name](build_report(), SourceLocator("a:make"))
