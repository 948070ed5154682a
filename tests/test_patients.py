"""The ill models of exercise 10: each is found by its check, and the healthy one by none."""

import pytest
import torch

import cutaway as ct
from cutaway.learn.patients import HEALTHY, LETTERS, illness_of, offers, patient

pytestmark = pytest.mark.unchecked
CAUGHT = {
    "future seen": "causality",
    "cache off by one": "cache-steps",
    "padding shifts positions": "left-padding",
    "no √d": "attention-scale",
    "loss not shifted": "loss-shift",
    "texts mixed": "rows-apart",
}


def test_six_patients_have_six_illnesses_and_the_same_weights() -> None:
    assert {illness_of(letter) for letter in LETTERS} == CAUGHT.keys()
    healthy = patient(HEALTHY).state_dict()
    for letter in LETTERS:
        assert all(torch.equal(healthy[name], weight) for name, weight in patient(letter).state_dict().items())


@pytest.mark.parametrize("letter", LETTERS)
def test_a_patients_illness_is_found_by_its_check(letter: str) -> None:
    model = patient(letter)
    caught = CAUGHT[illness_of(letter)]
    assert ct.check(model, only=[caught], **offers(model))[caught].verdict == "fail"


def test_the_healthy_one_gives_no_alarm() -> None:
    model = patient(HEALTHY)
    report = ct.check(model, only=list(CAUGHT.values()), budget=120, **offers(model))
    assert report.ok, report
    assert {finding.verdict for finding in report.findings} == {"pass"}
