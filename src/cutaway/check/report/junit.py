"""JUnit XML output of a report, for continuous integration."""

from xml.etree import ElementTree as Tree

from cutaway.check.report.baseline import get_accepted
from cutaway.check.report.finding import Finding, Report
from cutaway.check.report.text_file import escape_unprintable


def format_junit(report: Report) -> str:
    """Format a report as JUnit XML: one test case per check.

    Warnings pass, with their text in system-out. Inconclusive checks are errors. Accepted findings are skipped, as
    pytest writes xfail.
    """
    counts, accepted = report.counts(), get_accepted(report)
    figures = {
        "tests": str(len(report.findings)),
        "failures": str(counts["fail"]),
        "errors": str(counts["inconclusive"]),
        "skipped": str(counts["skip"] + len(accepted)),
        "time": f"{report.seconds:.3f}",
    }
    root = Tree.Element("testsuites", {"name": "cutaway check", **figures})
    suite = Tree.SubElement(root, "testsuite", {"name": escape_unprintable(report.model_name), **figures})
    properties = {"seed": report.seed, **{f"noise.{dtype}": f"{ratio:.3g}" for dtype, ratio in report.noise.items()}}
    _add_properties(suite, {**report.properties, **properties})
    for finding in report.findings:
        _add_test_case(suite, report.model_name, finding, accepted.get(finding.check))
    Tree.indent(root)
    xml = Tree.tostring(root, encoding="unicode", xml_declaration=False)
    return f"<?xml version='1.0' encoding='utf-8'?>\n{xml}\n"


def _add_test_case(suite: Tree.Element, model_name: str, finding: Finding, accepted: str | None) -> None:
    """Add one check; `accepted` is the reason why its problems are accepted, or None."""
    message, text = escape_unprintable(finding.message), escape_unprintable(str(finding))
    class_name = f"cutaway.{escape_unprintable(model_name)}"
    attributes = {"name": finding.check, "classname": class_name, "time": f"{finding.seconds:.3f}"}
    case = Tree.SubElement(suite, "testcase", attributes)
    _add_properties(case, {name: getattr(finding, name) for name in ("verdict", "measured", "threshold", "location")})
    if accepted is not None:
        reason = escape_unprintable(f" ({accepted})") if accepted else ""
        Tree.SubElement(case, "skipped", {"message": f"accepted{reason}: {message}"}).text = text
    elif finding.verdict == "fail":
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
        Tree.SubElement(element, "property", {"name": name, "value": escape_unprintable(str(value))})
