"""Stored results of studies: estimates, files, and the sentences that quote them."""

import math
import re
from itertools import combinations
from pathlib import Path

import pytest
import torch

from cutaway.errors import InputError
from cutaway.learn.studies import STUDIES, Estimate, StudyResults, estimate, get_study, load_results, read_results
from cutaway.learn.studies.norm_placement import (
    DEPTHS,
    VARIANTS,
    Setting,
    all_settings,
    describe_gradient,
    measure_gradient,
)
from cutaway.learn.studies.study import RESULTS_DIR, estimate_share, format_figure, load_measures, write_results


def test_estimate_has_students_interval() -> None:
    result = estimate([1.0, 2.0, 3.0])
    assert (result.mean, result.count) == (2.0, 3)
    assert result.high - result.mean == pytest.approx(4.303 / math.sqrt(3), rel=1e-3)
    ratio = estimate([0.5, 2.0], ratio=True)
    assert ratio.mean == pytest.approx(1.0)
    assert ratio.low * ratio.high == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1.249, "1.2"),
        (0.0456, "0.046"),
        (23.44, "23.4"),
        (1234.5, "1,230"),
        (1.6e16, "1.6e+16"),
        (9.96, "10"),
    ],
)
def test_figures_have_two_or_three_digits(value: float, text: str) -> None:
    assert format_figure(value) == text


def test_results_survive_writing_and_reading(tmp_path: Path) -> None:
    results = StudyResults("x", "command", {"seeds": 3}, "torch", 12.0, {"a/b": Estimate(1.0, 0.5, 2.0, 3)})
    write_results(results, tmp_path / "x.json")
    assert read_results(tmp_path / "x.json") == results


def test_stored_results_belong_to_studies() -> None:
    stored = [path.stem for path in RESULTS_DIR.glob("*.json")]
    assert {"norm-placement", "layer-speed"} <= set(stored) <= set(STUDIES)
    for name in stored:
        results = load_results(name)
        assert results.estimates
        assert results.command == f"cutaway learn study {name} --run"
        assert all(e.low <= e.mean <= e.high for e in results.estimates.values())


def test_study_without_results_says_how_to_measure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("cutaway.learn.studies.study.RESULTS_DIR", tmp_path)
    with pytest.raises(InputError, match="cutaway learn study layer-speed --run"):
        load_results.__wrapped__("layer-speed")


def test_unknown_names_are_errors() -> None:
    with pytest.raises(InputError, match="norm-placement"):
        get_study("norms")
    with pytest.raises(InputError, match="no result 'x'"):
        load_results("norm-placement").get("x")


def test_norm_placement_results_are_complete() -> None:
    """Every setting of the page has a sentence, with the figure of the study."""
    results = load_results("norm-placement")
    for setting in all_settings():
        for depth in DEPTHS:
            assert str(results.get(setting.key(depth))) in describe_gradient(setting, depth)


@pytest.mark.unchecked
def test_norm_placement_measurement_equals_the_stored_result() -> None:
    setting = Setting("post", "decoder", "relu", "xavier")
    stored = load_results("norm-placement").get(setting.key(6))
    assert measure_gradient(setting, 6).mean == pytest.approx(stored.mean, rel=1e-3)


def test_interval_of_a_share_is_within_0_and_1() -> None:
    none, some = estimate_share([0.0] * 10), estimate_share([1.0, 0.0, 0.0, 0.0])
    assert (none.mean, none.low) == (0, 0)
    assert none.high == pytest.approx(0.2775, abs=1e-4)  # z² / (n + z²)
    assert 0 < some.low < some.mean == 0.25 < some.high < 1


def test_deepnorm_scales_residuals_and_weights() -> None:
    post, deepnorm = (VARIANTS[name].build(8, 16, 0) for name in ("post", "post, DeepNorm"))
    assert deepnorm.config.stacks["decoder"].placement.skip_scale == pytest.approx(2)  # 16^¼
    for name, parameter in deepnorm.named_parameters():
        is_scaled = name.endswith("weight") and any(part in name for part in (".v.", ".o.", ".up.", ".down."))
        expected = post.get_parameter(name) * (64**-0.25 if is_scaled else 1)
        torch.testing.assert_close(parameter, expected)


@pytest.mark.parametrize("name", STUDIES)
def test_every_result_has_a_described_measure(name: str) -> None:
    measures = load_measures(name)
    results = load_results(name).estimates
    assert all(sum(measure.includes(key) for measure in measures) == 1 for key in results)
    for measure in measures:
        keys = [key.removeprefix(measure.name) for key in results if measure.includes(key)]
        assert {key.count("/") for key in keys} == _numbers_of_parts(measure.key), measure.name


def _numbers_of_parts(pattern: str) -> set[int]:
    """Possible numbers of parts of a key: [/PART] may be absent, and | separates alternatives."""
    numbers = set()
    for alternative in pattern.split(" | "):
        required, optional = re.sub(r"\[.*?\]", "", alternative), re.findall(r"\[.*?\]", alternative)
        added = {
            sum(part.count("/") for part in chosen)
            for n in range(len(optional) + 1)
            for chosen in combinations(optional, n)
        }
        numbers |= {required.count("/") + 1 + number for number in added}
    return numbers
