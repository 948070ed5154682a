"""The buggy models of exercise 10: each is found by its check, and the correct one by none."""

import pytest
import torch

import cutaway as ct
from cutaway.learn.exercises.buggy_models import CORRECT, LETTERS, bug_of_letter, build_buggy_model, check_arguments

pytestmark = pytest.mark.unchecked
CAUGHT = {
    "future seen": "causality",
    "cache off by one": "cache-decode",
    "padding shifts positions": "left-padding",
    "no √d": "attention-scale",
    "loss not shifted": "loss-shift",
    "texts mixed": "batch-isolation",
}


def test_six_models_have_six_bugs_and_the_same_weights() -> None:
    assert {bug_of_letter(letter) for letter in LETTERS} == CAUGHT.keys()
    correct = build_buggy_model(CORRECT).state_dict()
    for letter in LETTERS:
        assert all(
            torch.equal(correct[name], weight) for name, weight in build_buggy_model(letter).state_dict().items()
        )


@pytest.mark.parametrize("letter", LETTERS)
def test_a_bug_is_found_by_its_check(letter: str) -> None:
    model = build_buggy_model(letter)
    caught = CAUGHT[bug_of_letter(letter)]
    assert ct.check(model, only=[caught], **check_arguments(model))[caught].verdict == "fail"


def test_the_correct_one_gives_no_alarm() -> None:
    model = build_buggy_model(CORRECT)
    report = ct.check(model, only=list(CAUGHT.values()), budget=120, **check_arguments(model))
    assert report.ok, report
    assert {finding.verdict for finding in report.findings} == {"pass"}
