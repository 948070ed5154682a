"""Known defects of transformers, which the checks rightly report for its models."""

from pathlib import Path

from cutaway.check import Report

DEFECTS_DIR = Path(__file__).parents[2] / "docs" / "defects"
KNOWN_DEFECTS: dict[tuple[str, str], str] = {
    ("falcon", "attention-kernels"): "falcon_alibi_kernels",
    ("falcon", "parity"): "falcon_alibi_kernels",
    ("falcon", "cache-unused-slots"): "falcon_alibi_static_cache",
    ("mpt", "config-fields"): "mpt_alibi_bias_max",
    ("phi3", "cache-decode"): "sliding_window_of_one",
    ("phi3", "causality-paths"): "sliding_window_of_one",
}
"""(family, check) → script that reproduces a real defect of transformers; see docs/ecosystem.md."""


def unexpected_findings(report: Report, family: str = "") -> list[str]:
    """Failures, inconclusive checks and warnings that are not known defects."""
    findings = [*report.failures, *report.inconclusive, *report.warnings]
    return [str(finding) for finding in findings if (family, finding.check) not in KNOWN_DEFECTS]
