"""Which checks find which bugs, and how many known bugs concern masks or axes."""

from collections.abc import Sequence

import torch

from cutaway.check import check, get_checks
from cutaway.learn.exercises.buggy_models import BUGS, BuggyModel
from cutaway.learn.studies.study import Estimate, exact

MASK_CHECKS = (
    "causality", "causality-tile-edges", "causality-gradient", "causality-paths", "packing", "bidirectional-attention",
    "mask-polarity", "mask-diagonal", "fully-masked-row", "left-padding", "right-padding", "padding-leak",
    "moe-padding", "cross-attention-padding", "cache-chunked-prefill", "cache-unused-slots", "cache-sliding-window",
    "sliding-window",
)  # fmt: skip
"""Checks of the visibility of tokens."""
AXIS_CHECKS = ("batch-isolation", "softmax-dim", "grouped-query-attention", "rope-layout")
"""Checks of the order of axes, rows, heads and dimensions."""


def measure_bug_checks(device: str) -> dict[str, Estimate]:
    """Share of checks, each of one published bug, on masks and on axes; number of failing checks by bug.

    The bugs are those of exercise 10. They run on the CPU.
    """
    names = set(get_checks())
    assert names >= {*MASK_CHECKS, *AXIS_CHECKS}
    estimates = {
        "bugs/checks": exact(len(names)),
        "bugs/mask-share": exact(len(MASK_CHECKS) / len(names)),
        "bugs/axis-share": exact(len(AXIS_CHECKS) / len(names)),
    }
    for bug in ("", *BUGS):
        failed = failing_checks(bug)
        estimates[f"bugs/failing-checks/{bug or 'correct'}"] = exact(len(failed))
    shapes = {BuggyModel(bug)(torch.zeros(2, 5, dtype=torch.long)).shape for bug in ("", *BUGS)}
    return estimates | {"bugs/output-shapes": exact(len(shapes))}


def failing_checks(bug: str, only: Sequence[str] | None = None) -> set[str]:
    """Names of the checks that fail on a model with this bug; with `only`, of these checks."""
    model = BuggyModel(bug)
    report = check(
        model,
        only=only,
        budget=300,
        logits=model.forward,
        logits_with_mask=model.forward,
        logits_with_cache=model.step,
        loss=model.loss,
        attention=model.attention,
        vocab_size=model.vocab_size,
        max_seq_len=model.max_len,
    )
    return {finding.check for finding in report.failures}
