"""JUnit XML output of a report, for continuous integration."""

import tempfile
from pathlib import Path
from xml.etree import ElementTree as Tree

from cutaway.check.report.finding import Finding, Report
from cutaway.errors import InputError


def _format_junit(report: Report) -> str:
    """Format a report as JUnit XML: one test case per check.

    Warnings pass, with their text in system-out. Inconclusive checks are errors.
    """
    counts = report.counts()
    figures = {
        "tests": str(len(report.findings)),
        "failures": str(counts["fail"]),
        "errors": str(counts["inconclusive"]),
        "skipped": str(counts["skip"]),
        "time": f"{report.seconds:.3f}",
    }
    root = Tree.Element("testsuites", {"name": "cutaway check", **figures})
    suite = Tree.SubElement(root, "testsuite", {"name": _escape_unprintable(report.model_name), **figures})
    properties = {"seed": report.seed, **{f"noise.{dtype}": f"{ratio:.3g}" for dtype, ratio in report.noise.items()}}
    _add_properties(suite, {**report.properties, **properties})
    for finding in report.findings:
        _add_test_case(suite, report.model_name, finding)
    Tree.indent(root)
    return Tree.tostring(root, encoding="unicode", xml_declaration=False) + "\n"


def _add_test_case(suite: Tree.Element, model_name: str, finding: Finding) -> None:
    message, text = _escape_unprintable(finding.message), _escape_unprintable(str(finding))
    class_name = f"cutaway.{_escape_unprintable(model_name)}"
    attributes = {"name": finding.check, "classname": class_name, "time": f"{finding.seconds:.3f}"}
    case = Tree.SubElement(suite, "testcase", attributes)
    _add_properties(case, {name: getattr(finding, name) for name in ("verdict", "measured", "threshold", "location")})
    if finding.verdict == "fail":
        Tree.SubElement(case, "failure", {"message": message, "type": finding.check}).text = text
    elif finding.verdict == "inconclusive":
        Tree.SubElement(case, "error", {"message": message, "type": "inconclusive"}).text = text
    elif finding.verdict == "skip":
        Tree.SubElement(case, "skipped", {"message": message})
    elif finding.verdict == "warn":
        Tree.SubElement(case, "system-out").text = text


def _add_properties(parent: Tree.Element, values: dict[str, object]) -> None:
    known = {name: value for name, value in values.items() if value is not None}
    element = Tree.SubElement(parent, "properties") if known else parent
    for name, value in known.items():
        Tree.SubElement(element, "property", {"name": name, "value": _escape_unprintable(str(value))})


def _escape_unprintable(text: str) -> str:
    """Escape all unprintable characters except newline and tab, because XML does not allow some of them."""
    return "".join(char if char in "\n\t" or char.isprintable() else repr(char)[1:-1] for char in text)


def write_junit(report: Report, path: Path) -> None:
    """Write a report as JUnit XML, atomically: to a temporary file, which then replaces `path`."""
    try:
        with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as temp_dir:
            temp_path = Path(temp_dir) / path.name
            temp_path.write_text(f"<?xml version='1.0' encoding='utf-8'?>\n{_format_junit(report)}", encoding="utf-8")
            temp_path.replace(path)
    except OSError as error:
        raise InputError(
            f"the report cannot be written to '{path}' ({error.strerror}); pass another path with --junit"
        ) from error
