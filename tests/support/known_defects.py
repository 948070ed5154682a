"""Known defects of transformers, which the checks rightly report for its models."""

from pathlib import Path

from cutaway.check import Report

DEFECTS_DIR = Path(__file__).parents[2] / "docs" / "defects"
KNOWN_DEFECTS: dict[tuple[str, str], str] = {
    ("biogpt", "left-padding"): "biogpt_left_padding",
    ("falcon", "attention-kernels"): "falcon_alibi_kernels",
    ("falcon", "parity"): "falcon_alibi_kernels",
    ("falcon", "cache-unused-slots"): "falcon_alibi_static_cache",
    ("mpt", "config-fields"): "mpt_alibi_bias_max",
    ("phi3", "cache-decode"): "sliding_window_of_one",
    ("phi3", "causality-paths"): "sliding_window_of_one",
}
"""(family, check) → script that reproduces a real defect of transformers; see docs/ecosystem.md."""


RIGHT_FINDINGS = {
    "gradient-flow": "selects experts, but gets no gradient",  # random configurations with one normalized expert
    "config-fields": "the config field rope_parameters does not change the logits",  # EXAONE 4 without RoPE
}
"""Check → message of findings on random configurations that are right, although the model is correct."""


def unexpected_findings(report: Report, family: str = "") -> list[str]:
    """Failures, inconclusive checks and warnings that are neither known defects nor right."""
    return [
        str(finding)
        for finding in report.problems
        if (family, finding.check) not in KNOWN_DEFECTS
        and RIGHT_FINDINGS.get(finding.check, "\n") not in finding.message
    ]
