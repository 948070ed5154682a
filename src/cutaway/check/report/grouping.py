"""Group problems that probably have one cause: one bug can fail several checks, of which one names it best."""

from cutaway.check.report.finding import Finding

SYMPTOMS: dict[str, tuple[str, ...]] = {
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
    "rope-shift-invariance": ("rope-layout", "mask-diagonal", "rope-precision"),
    "rope-layout": ("position-range",),
    "rope-scaling": ("position-range", "meta-buffers"),
    "packing": ("position-encoding",),
    "attention-kernels": ("attention-scale",),
    "attention-entropy": ("attention-logits", "attention-scale", "cross-attention-source"),
    "dead-heads": ("cross-attention-source",),
    "save-load": ("meta-buffers", "tied-weights", "unused-parameters", "rope-scaling", "rope-layout"),
    "parity": (
        "meta-buffers", "tied-weights", "unused-parameters", "attention-kernels", "attention-scale", "rope-scaling",
        "rope-layout", "save-load",
    ),
    "gradient-accumulation": ("loss-ignore-index", "loss-reduction", "batch-isolation", "batch-invariance"),
    "causality-gradient": ("gradient-flow",),
    "activation-checkpointing": ("gradient-flow",),
    "overfit": ("gradient-flow", "causality-paths"),
    "update-ratio": ("fp16-overflow", "attention-logits"),
    "low-precision": ("fp16-overflow", "rope-precision", "norm-precision"),
}  # fmt: skip
"""Check → checks whose bugs make it fail too. These name the cause more precisely."""


def group_by_cause(findings: list[Finding]) -> None:
    """Set `symptom_of` of each problem whose probable cause another problem names."""
    problems = {finding.check: finding for finding in findings if finding.is_problem}
    for finding in problems.values():
        root = finding
        visited = {finding.check}
        while causes := [name for name in SYMPTOMS.get(root.check, ()) if name in problems and name not in visited]:
            root = problems[causes[0]]
            visited.add(root.check)
        finding.symptom_of = None if root is finding else root.check
