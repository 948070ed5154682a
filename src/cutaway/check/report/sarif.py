"""SARIF 2.1.0 output of a report, for code scanning: one rule per check, one result per problem."""

import hashlib
import json
from importlib.metadata import PackageNotFoundError, metadata
from typing import Any
from urllib.parse import quote

from cutaway.check.registry import get_check
from cutaway.check.report.baseline import get_accepted, mask_numbers
from cutaway.check.report.explain import explain_check
from cutaway.check.report.finding import Finding, Report, Verdict
from cutaway.check.report.source_location import SourceLocator

_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_LEVELS: dict[Verdict, str] = {"fail": "error", "inconclusive": "warning", "warn": "warning"}
_FINGERPRINT = "cutawayFinding/v1"


def format_sarif(report: Report, locator: SourceLocator) -> str:
    """Format a report as SARIF. Accepted findings are suppressed results; checks that did not run are notifications."""
    checks = [finding.check for finding in report.findings]
    not_run = [finding for finding in report.findings if finding.not_run]
    run = {
        "tool": {"driver": _describe_tool(checks)},
        # GitHub separates the alerts of several models by the part of the id before the last slash.
        "automationDetails": {"id": f"cutaway-check/{locator.source}/"},
        "originalUriBaseIds": {"%SRCROOT%": {"description": {"text": "Directory in which cutaway check was run."}}},
        "columnKind": "unicodeCodePoints",
        "invocations": [
            {"executionSuccessful": True, "toolExecutionNotifications": [_format_not_run(item) for item in not_run]}
        ],
        "results": [
            _format_result(report, finding, checks.index(finding.check), locator)
            for finding in report.findings
            if finding.is_problem
        ],
    }
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2, ensure_ascii=False) + "\n"


def _describe_tool(checks: list[str]) -> dict[str, Any]:
    version, repository = _read_package_metadata()
    driver: dict[str, Any] = {"name": "cutaway check", "rules": [_format_rule(name, repository) for name in checks]}
    driver |= {"version": version} if version else {}
    return driver | ({"informationUri": repository} if repository else {})


def _read_package_metadata() -> tuple[str | None, str | None]:
    """The version and the repository URL of the installed package; None if it is not installed."""
    try:
        package = metadata("cutaway")
    except PackageNotFoundError:
        return None, None
    urls = dict(url.split(", ", 1) for url in package.get_all("Project-URL") or [])
    return package["Version"], urls.get("Repository")


def _format_rule(name: str, repository: str | None) -> dict[str, Any]:
    check = get_check(name)
    rule: dict[str, Any] = {
        "id": name,
        "name": "".join(word.capitalize() for word in name.split("-")),
        "shortDescription": {"text": f"{check.title}: {check.catches}."},
        "fullDescription": {"text": check.description},
        "help": {"text": f"Cause: {check.cause}.\nFix: {check.fix}.", "markdown": explain_check(name)},
        "defaultConfiguration": {"level": "error"},
        "properties": {"tags": ["correctness", check.subject]},
    }
    return rule | ({"helpUri": f"{repository}/blob/main/{check.docs_path}"} if repository else {})


def _format_result(report: Report, finding: Finding, rule_index: int, locator: SourceLocator) -> dict[str, Any]:
    result: dict[str, Any] = {
        "ruleId": finding.check,
        "ruleIndex": rule_index,
        "level": _LEVELS[finding.verdict],
        "message": {"text": _format_message(report, finding)},
        "locations": [_format_location(finding, locator)],
        "partialFingerprints": {_FINGERPRINT: compute_fingerprint(finding, locator.source)},
    }
    accepted = get_accepted(report)
    if finding.check in accepted:
        suppression = {"kind": "external", "status": "accepted"}
        reason = accepted[finding.check]
        result["suppressions"] = [suppression | ({"justification": reason} if reason else {})]
    return result


def _format_message(report: Report, finding: Finding) -> str:
    lines = [f"{report.model_name}: {finding.message}"]
    lines += [f"{label}: {text}" for label, text in finding.details() if text and label != "docs"]
    return "\n".join(lines)


def _format_location(finding: Finding, locator: SourceLocator) -> dict[str, Any]:
    """The source location, if it is known, and the name of the module or the location in words."""
    location: dict[str, Any] = {}
    source = locator.locate(finding)
    if source is not None:
        artifact = {"uri": quote(source.path), "uriBaseId": "%SRCROOT%"}
        location["physicalLocation"] = {"artifactLocation": artifact, "region": {"startLine": source.line}}
    module_name = locator.find_module_name(finding)
    name = locator.source if module_name is None else f"{locator.source}.{module_name}"
    location["logicalLocations"] = [{"fullyQualifiedName": name, "kind": "object"}]
    return location


def compute_fingerprint(finding: Finding, source: str) -> str:
    """Hash of the model's source, the check and the message without numbers: the same in each run."""
    identity = "\n".join([source, finding.check, mask_numbers(finding.message)])
    return hashlib.sha256(identity.encode()).hexdigest()[:32]


def _format_not_run(finding: Finding) -> dict[str, Any]:
    return {"level": "note", "message": {"text": finding.message}, "associatedRule": {"id": finding.check}}
