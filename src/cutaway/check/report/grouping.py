"""Group problems that probably have one cause: one bug can fail several checks, of which one names it best."""

import re

from cutaway.check.report.finding import Finding

SYMPTOMS: dict[str, tuple[str, ...]] = {
    "causality": ("softmax-dim", "eval-determinism"),
    "forward-hooks": ("eval-determinism",),
    "mask-diagonal": ("token-ids",),
    "batch-isolation": ("loss-shift",),
    "batch-invariance": ("eval-determinism",),
    "padding-leak": ("cache-unused-slots",),
    "position-encoding": ("left-padding",),
    "unused-parameters": ("position-encoding",),
    "meta-buffers": ("rope-scaling", "rope-layout"),
    "eval-determinism": ("eval-dropout", "mode-restored", "batch-isolation"),
    "cache-reuse": ("batch-isolation",),
    "causality-paths": ("batch-isolation", "cache-chunked-prefill", "cache-decode"),
    "left-padding": ("causality-paths", "padding-leak"),
    "right-padding": ("causality-paths", "padding-leak"),
    "cache-unused-slots": ("mask-polarity", "attention-kernels", "forward-hooks"),
    "cache-sliding-window": ("sliding-window",),
    "cache-padding": ("left-padding", "padding-leak", "mask-polarity"),
    "generation": (
        "mask-polarity", "batch-isolation", "padding-leak", "left-padding", "cache-padding", "cache-unused-slots",
        "cache-reuse",
    ),
    "speculative-decoding": ("batch-isolation",),
    "beam-search": ("batch-invariance",),
    "rope-shift-invariance": ("rope-precision", "rope-layout", "mask-diagonal"),
    "rope-layout": ("rope-precision", "position-range"),
    "rope-scaling": ("position-range",),
    "packing": ("position-encoding", "causality-paths"),
    "attention-kernels": ("attention-scale",),
    "attention-entropy": ("attention-logits", "attention-scale", "cross-attention-source"),
    "dead-heads": ("cross-attention-source",),
    "save-load": ("rope-scaling", "rope-layout", "meta-buffers", "tied-weights", "unused-parameters"),
    "parity": (
        "rope-scaling", "rope-layout", "meta-buffers", "tied-weights", "unused-parameters", "attention-kernels",
        "attention-scale", "save-load",
    ),
    "gradient-accumulation": ("loss-ignore-index", "loss-reduction", "batch-isolation", "batch-invariance"),
    "causality-gradient": ("gradient-flow",),
    "activation-checkpointing": ("gradient-flow",),
    "overfit": ("gradient-flow", "causality-paths"),
    "update-ratio": ("fp16-overflow", "attention-logits"),
    "low-precision": ("fp16-overflow", "rope-precision", "norm-precision"),
}  # fmt: skip
"""Check → checks whose bugs make it fail too. These name the cause more precisely."""


_EXCEPTION_PATTERN = re.compile(r"raised \w+(Error|Exception): .*")
_RANDOM_MODEL_CHECKS = ("eval-dropout", "mode-restored", "eval-determinism")
"""If one of these fails, the noise contains random changes of the model, which makes other checks inconclusive."""


def group_by_cause(findings: list[Finding]) -> None:
    """Set `symptom_of` of each problem whose probable cause another problem names."""
    problems = {finding.check: finding for finding in findings if finding.is_problem}
    for finding in problems.values():
        root = finding
        visited = {finding.check}
        while causes := [name for name in _possible_causes(root) if _is_cause(problems.get(name), root, visited)]:
            root = problems[causes[0]]
            visited.add(root.check)
        finding.symptom_of = None if root is finding else root.check
    _group_equal_exceptions(list(problems.values()))


def _group_equal_exceptions(problems: list[Finding]) -> None:
    """Set `symptom_of` of a problem that is the same exception, up to numbers, as that of an earlier problem."""
    first: dict[str, Finding] = {}
    for finding in problems:
        if match := _EXCEPTION_PATTERN.search(finding.message):
            earlier = first.setdefault(re.sub(r"\d+", "#", match[0]), finding)
            if finding is not earlier and finding.symptom_of is None and finding.check != earlier.symptom_of:
                finding.symptom_of = earlier.symptom_of or earlier.check


def _is_cause(cause: Finding | None, finding: Finding, visited: set[str]) -> bool:
    """Whether a problem can be the cause of another one. An inconclusive check is no cause of a failure."""
    if cause is None or cause.check in visited:
        return False
    return cause.verdict != "inconclusive" or finding.verdict == "inconclusive"


def _possible_causes(finding: Finding) -> tuple[str, ...]:
    """Checks that may name the cause of a problem more precisely, the most probable first."""
    is_inconclusive = finding.verdict == "inconclusive"
    return (*(_RANDOM_MODEL_CHECKS if is_inconclusive else ()), *SYMPTOMS.get(finding.check, ()))
