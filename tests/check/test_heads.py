"""Checks of models with heads of tasks: they run, without logits of tokens and without generation."""

from typing import Any

import pytest

import cutaway as ct
from cutaway.families.replace_head import replace_head


@pytest.mark.parametrize(
    ("preset", "kind"),
    [
        ("tiny-llama", "sequence-classification"),
        ("tiny-gpt", "token-classification"),
        ("tiny-bert", "embedding"),
        ("tiny-bert", "multiple-choice"),
        ("tiny-t5", "sequence-classification"),
    ],
)
def test_models_with_heads_of_tasks_pass(preset: str, kind: str) -> None:
    model: Any = replace_head(ct.build(preset, seed=0), kind, seed=1).model
    report = ct.check(model, only=["unused-parameters", "config-fields", "left-padding", "save-load", "generation"])
    assert report.ok, str(report)
    assert [finding.check for finding in report.skipped] == ["generation"]
