"""The buggy models of exercise 10: each fails its check, and the correct one passes all."""

from typing import Any

import pytest
import torch

import cutaway as ct
from cutaway.learn.exercises.buggy_models import (
    CORRECT,
    LETTERS,
    BuggyModel,
    bug_of_letter,
    build_buggy_model,
)

pytestmark = [pytest.mark.unchecked, pytest.mark.usefixtures("frozen_check_clock")]
CHECK_OF_BUG = {
    "future seen": "causality",
    "cache off by one": "cache-decode",
    "padding shifts positions": "left-padding",
    "no √d": "attention-scale",
    "loss not shifted": "loss-shift",
    "texts mixed": "batch-isolation",
}


def check_arguments(model: BuggyModel) -> dict[str, Any]:
    """Keyword arguments of `ct.check` for a model."""
    return {
        "logits": model.forward,
        "logits_with_mask": model.forward,
        "logits_with_cache": model.step,
        "loss": model.loss,
        "attention": model.attention,
        "vocab_size": model.vocab_size,
        "max_seq_len": model.max_len,
    }


def test_models_have_six_different_bugs_and_the_same_weights() -> None:
    assert {bug_of_letter(letter) for letter in LETTERS} == CHECK_OF_BUG.keys()
    correct = build_buggy_model(CORRECT).state_dict()
    for letter in LETTERS:
        assert all(
            torch.equal(correct[name], weight) for name, weight in build_buggy_model(letter).state_dict().items()
        )


@pytest.mark.parametrize("letter", LETTERS)
def test_bug_fails_its_check(letter: str) -> None:
    model = build_buggy_model(letter)
    check = CHECK_OF_BUG[bug_of_letter(letter)]
    assert ct.check(model, only=[check], **check_arguments(model))[check].verdict == "fail"


def test_correct_model_passes_all_checks() -> None:
    model = build_buggy_model(CORRECT)
    report = ct.check(model, only=list(CHECK_OF_BUG.values()), budget=120, **check_arguments(model))
    assert report.ok, report
    assert {finding.verdict for finding in report.findings} == {"pass"}
