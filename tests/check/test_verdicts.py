"""Verdicts of a check: inconclusive if the noise is too large, failed if a function that worked before raises."""

from typing import Any
from xml.etree import ElementTree as Tree

import pytest
import torch
from support.seeded_bugs.all_bugs import BUG_MODULES  # noqa: F401  registers every bug
from support.seeded_bugs.reference_gpt import ReferenceGPT, check_kwargs
from support.seeded_bugs.registry import SEEDED_BUGS, check_bug
from torch import Tensor, nn

import cutaway as ct
from cutaway.check import get_checks
from cutaway.check.report.grouping import SYMPTOMS
from cutaway.check.report.junit import format_junit

pytestmark = [pytest.mark.unchecked, pytest.mark.usefixtures("frozen_check_clock")]


def make_noisy_function(*, causal: bool) -> Any:
    """Function in fp16 whose logits are a small difference of large products, so that rounding dominates them."""
    generator = torch.Generator().manual_seed(0)
    embed = torch.randn(31, 64, generator=generator).half()
    wide = (torch.randn(64, 256, generator=generator) * 8).half()
    head = torch.randn(256, 31, generator=generator).half() * 0.05

    def logits(tokens: Tensor) -> Tensor:
        x = embed[tokens]
        length = tokens.shape[1]
        weights = torch.ones(length, length).tril() if causal else torch.ones(length, length)
        mean = (weights / weights.sum(-1, keepdim=True)).half() @ x
        first, second = (mean + 30) @ wide, (mean + 30 + 0.1 * mean) @ wide
        return (second - first) @ head

    return logits


def test_noise_makes_a_check_inconclusive() -> None:
    """In fp16 the noise is larger than the output, so the missing causal mask is not visible, and nothing passes."""
    report = ct.check(make_noisy_function(causal=False), only=["causality"])
    assert {finding.verdict for finding in report.findings} == {"inconclusive"}, report
    assert report.status == "inconclusive"
    assert not report.ok


def test_results_that_are_equal_bit_for_bit_are_conclusive() -> None:
    """With a causal mask the earlier logits do not change at all, which the noise cannot hide."""
    generator = torch.Generator().manual_seed(0)
    embed, head = (torch.randn(31, 8, generator=generator).half() for _ in range(2))

    def logits(tokens: Tensor) -> Tensor:
        return (embed[tokens] * 1e3).sin() @ head.T

    assert ct.check(logits, only=["causality"], has_positions=False)["causality"].verdict == "pass"


def test_status_distinguishes_passed_failed_and_inconclusive() -> None:
    model = ReferenceGPT()
    passed = ct.check(model, only=["causality"], **check_kwargs(model))
    assert (passed.status, passed.ok) == ("passed", True)
    noisy = ct.check(make_noisy_function(causal=False), only=["causality-paths"])
    assert noisy.to_dict()["status"] == noisy.status == "inconclusive"
    assert not noisy.ok
    assert "rounding noise" in noisy["causality-paths"].message
    assert "1 inconclusive" in noisy.summary()
    suite = Tree.fromstring(format_junit(noisy))
    assert suite.get("errors") == "1"
    assert suite.find(".//testcase/error") is not None


class CrashesAfterPrefill(ReferenceGPT):
    def forward(self, tokens: Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("cache") is not None:
            raise RuntimeError("StaticCache\nin layer 3:\nexpected 5 slots, got 4")
        return super().forward(tokens, *args, **kwargs)


class CrashesInLargeBatch(ReferenceGPT):
    def forward(self, tokens: Tensor, mask: Tensor | None = None, **kwargs: Any) -> Any:
        if mask is not None and len(tokens) > 2:
            raise IndexError("index 2 is out of bounds")
        return super().forward(tokens, mask, **kwargs)


def test_exception_after_a_success_is_a_failure() -> None:
    model = CrashesAfterPrefill()
    report = ct.check(model, only=["cache-decode", "causality-paths"], **check_kwargs(model))
    finding = report["cache-decode"]
    assert finding.verdict == "fail"
    assert "expected 5 slots, got 4" in finding.message
    assert not report.ok
    assert finding.location is not None
    assert "test_verdicts.py" in finding.location
    paths = report["causality-paths"]
    assert paths.verdict == "fail"
    assert any(case.verdict == "pass" and "with a mask" in case.message for case in paths.cases), paths.cases


def test_exception_of_a_padded_batch_is_a_failure() -> None:
    model = CrashesInLargeBatch()
    finding = ct.check(model, only=["right-padding"], **check_kwargs(model))["right-padding"]
    assert finding.verdict == "fail"
    assert "a forward pass with a mask raised IndexError: index 2 is out of bounds" in finding.message


def test_function_that_never_works_is_inconclusive() -> None:
    def broken(tokens: Tensor, cache: Any) -> tuple[Tensor, Any]:
        raise RuntimeError("no cache here")

    model = ReferenceGPT()
    kwargs = check_kwargs(model) | {"logits_with_cache": broken}
    report = ct.check(model, only=["cache-decode"], **kwargs)
    assert report["cache-decode"].verdict == "inconclusive"
    assert not report.ok
    assert "no cache here" in report["cache-decode"].message


def test_rejected_input_is_not_a_crash() -> None:
    class OneByOne(ReferenceGPT):
        def forward(self, tokens: Tensor, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("cache") is not None and tokens.shape[1] > 1:
                raise NotImplementedError("chunked prefill")
            return super().forward(tokens, *args, **kwargs)

    model = OneByOne()
    report = ct.check(model, only=["cache"], **check_kwargs(model))
    assert report.ok, report
    assert isinstance(model, nn.Module)


def test_symptoms_follow_the_problem_that_names_their_cause() -> None:
    """A window that is one token too long also changes a rolling cache; both problems are one group."""
    bug = SEEDED_BUGS["sliding-window/window one too wide"]
    report = check_bug(bug, only=["sliding-window", "cache-sliding-window"])
    names = [finding.check for finding in report.problems]
    assert names[0] == "sliding-window"
    for finding in report.problems[1:]:
        assert finding.symptom_of == "sliding-window"
        assert "probably the same cause as: sliding-window" in str(finding)
        assert "fix" not in dict(line.strip().split(": ", 1) for line in str(finding).splitlines()[1:])


def test_every_symptom_names_checks() -> None:
    assert SYMPTOMS.keys() <= get_checks().keys()
    assert {cause for causes in SYMPTOMS.values() for cause in causes} <= get_checks().keys()


class GrowingTable(ReferenceGPT):
    """Adds sinusoidal positions from a table that grows with the text; the number of rows is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.num_positions = 16
        self.register_buffer("table", self.encode(16), persistent=False)

    def encode(self, length: int) -> Tensor:
        return torch.outer(torch.arange(length), 0.7 ** torch.arange(32)).sin()

    def forward(self, tokens: Tensor, *args: Any, **kwargs: Any) -> Any:
        if tokens.shape[1] > self.num_positions:
            self.num_positions = tokens.shape[1]
            self.table = self.encode(self.num_positions)
        assert len(self.table) >= self.num_positions
        return super().forward(tokens, *args, **kwargs)


def test_the_size_of_a_restored_table_is_restored_too() -> None:
    model = GrowingTable()
    report = ct.check(model, only=["position-range", "cache-decode", "causality"], **check_kwargs(model))
    assert report.ok, report
    assert (model.num_positions, len(model.table)) == (16, 16)
    model(torch.zeros(1, 30, dtype=torch.long))
