"""Measures of information equal textbook values and torch.distributions; calibration equals the definition."""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributions import Categorical, kl_divergence

import cutaway as ct
from cutaway.errors import InputError
from cutaway.evaluate import functional
from cutaway.evaluate import information as info
from cutaway.evaluate.calibration import Calibration, evaluate_calibration

P, Q = (0.7, 0.2, 0.1), (0.5, 0.3, 0.2)
NEG_INF = -math.inf


def test_textbook_values() -> None:
    assert info.entropy((0.5, 0.5)) == 1.0
    assert info.entropy((0.9, 0.1)) == pytest.approx(0.4690, abs=5e-5)
    for q, bits in ((0.9, 0.1520), (0.4, 1.3219), (0.01, 6.6439)):
        assert info.cross_entropy(target=0, q=(q, 1 - q)) == pytest.approx(bits, abs=5e-5)
        assert info.cross_entropy((1, 0), (q, 1 - q)) == pytest.approx(bits, abs=5e-5)
    assert info.perplexity(target=0, q=(0.9, 0.1)) == pytest.approx(1.11, abs=5e-3)
    assert info.perplexity((1, 0), (0.4, 0.6)) == pytest.approx(2.50)
    assert info.perplexity([0.25] * 4) == pytest.approx(4.0)
    measures = info.entropy(P), info.kl_divergence(P, Q), info.cross_entropy(P, Q)
    assert measures == pytest.approx((1.1568, 0.1228, 1.2796), abs=5e-5)
    assert info.mutual_information([[0.5, 0], [0, 0.5]]) == pytest.approx(1.0)
    assert info.mutual_information([[0.25, 0.25], [0.25, 0.25]]) == 0.0
    assert info.bits_per_byte(16 * math.log(2), 8) == pytest.approx(2.0)
    assert info.bits_per_byte(1.0, 0) == math.inf


WEIGHTS = st.lists(st.floats(0, 1), min_size=1, max_size=12).filter(lambda weights: sum(weights) > 1e-3)


def normalize(weights: Sequence[float]) -> list[float]:
    return [weight / math.fsum(weights) for weight in weights]


@given(weights=WEIGHTS, others=st.lists(st.floats(1e-6, 1), min_size=12, max_size=12))
def test_cross_entropy_is_entropy_plus_kl_divergence(weights: list[float], others: list[float]) -> None:
    p, q = normalize(weights), normalize(others[: len(weights)])
    for unit in ("bits", "nats"):
        expected = info.entropy(p, unit=unit) + info.kl_divergence(p, q, unit=unit)
        assert info.cross_entropy(p, q, unit=unit) == pytest.approx(expected, abs=1e-9)
    assert info.kl_divergence(p, q) >= 0
    assert info.kl_divergence(p, p) == 0
    assert 0 <= info.entropy(p) <= math.log2(len(p)) + 1e-9
    independent = [[a * b for b in q] for a in p]
    assert info.mutual_information(independent) == pytest.approx(0, abs=1e-9)


@given(x=st.lists(st.floats(-1e4, 1e4) | st.just(NEG_INF), min_size=2, max_size=8).filter(lambda x: max(x) > NEG_INF))
def test_logits_equal_their_softmax(x: list[float]) -> None:
    """Lists, tensors and softmax give equal results; excluded outcomes contribute nothing."""
    tensor = torch.tensor(x, dtype=torch.float64)
    bits = info.entropy(logits=x)
    assert bits == pytest.approx(info.entropy(tensor.softmax(-1)), abs=1e-9)
    assert bits == pytest.approx(info.entropy(logits=tensor), abs=1e-9)
    assert bits == pytest.approx(info.entropy(logits=[logit for logit in x if logit > NEG_INF]), abs=1e-9)
    assert info.perplexity(p_logits=x) == pytest.approx(2**bits)
    flat = [0.0] * len(x)
    assert info.kl_divergence(p_logits=x, q_logits=flat) == pytest.approx(math.log2(len(x)) - bits, abs=1e-9)
    best = max(range(len(x)), key=x.__getitem__)
    assert info.cross_entropy(target=best, q_logits=x, unit="nats") == pytest.approx(
        -float(tensor.log_softmax(-1)[best]), abs=1e-9
    )


def test_extreme_logits_and_zeros_are_exact() -> None:
    far = (1e4, -1e4)
    assert info.entropy(logits=far) == info.entropy((1, 0)) == 0
    assert math.copysign(1, info.entropy((1, 0))) == 1
    assert (
        info.cross_entropy((0, 1), q_logits=far, unit="nats") == 2e4
    )  # infinite if computed from softmax, which underflows to 0
    assert info.kl_divergence((0, 1), q_logits=far, unit="nats") == 2e4
    assert info.perplexity((0, 1), q_logits=far) == math.inf
    for excluded in ({"q": (1, 0)}, {"q_logits": (0, NEG_INF)}, {"q_samples": [0, 0, 0]}):
        assert info.kl_divergence((0.5, 0.5), **excluded) == info.cross_entropy((0.5, 0.5), **excluded) == math.inf
        assert info.perplexity((0.5, 0.5), **excluded) == math.inf
        assert info.kl_divergence((1, 0), **excluded) == 0
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.tensor([[3e4, 3e4, -3e4], [1.0, 1.0, NEG_INF]], dtype=dtype)
        bits = info.entropy(logits=x)
        assert bits.dtype == torch.float32
        assert bits.tolist() == pytest.approx([1.0, 1.0])
    assert info.entropy(torch.randn(50_000).softmax(-1).bfloat16()) < math.log2(50_000)


def test_batches_equal_single_distributions_and_torch_distributions() -> None:
    rng = torch.Generator().manual_seed(0)
    x, y = (torch.randn(2, 3, 7, generator=rng, dtype=torch.float64) for _ in range(2))
    p, q = x.softmax(-1), y.softmax(-1)
    p_dist, q_dist = Categorical(logits=x), Categorical(logits=y)
    expected = {
        "entropy": p_dist.entropy(),
        "kl": kl_divergence(p_dist, q_dist),
        "cross": p_dist.entropy() + kl_divergence(p_dist, q_dist),
    }
    for convert in (lambda array: array, lambda array: array.numpy(), lambda array: array.tolist()):
        measures = {
            "entropy": info.entropy(convert(p), unit="nats"),
            "kl": info.kl_divergence(convert(p), q_logits=convert(y), unit="nats"),
            "cross": info.cross_entropy(p_logits=convert(x), q=convert(q), unit="nats"),
        }
        for name, value in measures.items():
            torch.testing.assert_close(torch.as_tensor(value), expected[name])
        assert info.entropy(convert(p)[1][2]) == pytest.approx(float(measures["entropy"][1][2]) / math.log(2))
    targets = torch.randint(7, (2, 3), generator=rng)
    nll = -q_dist.log_prob(targets)
    torch.testing.assert_close(info.cross_entropy(target=targets, q_logits=y, unit="nats"), nll)
    np.testing.assert_allclose(info.cross_entropy(target=targets.numpy(), q=q.numpy(), unit="nats"), nll.numpy())
    torch.testing.assert_close(info.perplexity(target=targets, q_logits=y), nll.exp())
    torch.testing.assert_close(
        info.kl_divergence(p[0, 0], q), kl_divergence(Categorical(probs=p[0, 0]), q_dist) / math.log(2)
    )
    torch.testing.assert_close(info.kl_divergence(p[0, 0].tolist(), q), info.kl_divergence(p[0, 0], q))
    joint = x.flatten(1).softmax(-1).reshape(2, 3, 7)
    batched = info.mutual_information(joint)
    assert batched.tolist() == pytest.approx([info.mutual_information(table.tolist()) for table in joint])


def test_gradients_flow_through_batches() -> None:
    x = torch.tensor([[0.5, -1.0, 2.0]], requires_grad=True)
    info.entropy(logits=x, unit="nats").sum().backward()
    p = x.detach().softmax(-1)
    expected = -p * (p.log() - (p * p.log()).sum())  # ∂H/∂xᵢ = −pᵢ·(log pᵢ + H)
    torch.testing.assert_close(x.grad, expected)


def test_input_types_of_distributions() -> None:
    inputs = (torch.tensor(P), torch.tensor(P, requires_grad=True), np.array(P, np.float32), (p for p in P))
    for p in (*inputs, [Fraction(7, 10), Fraction(1, 5), Fraction(1, 10)]):
        assert info.entropy(p) == pytest.approx(info.entropy(P), abs=1e-6)


def test_samples_are_counted() -> None:
    assert info.entropy(samples="aabb") == 1.0
    assert info.entropy(samples=torch.tensor([3, 3, 3, 9])) == pytest.approx(info.entropy((0.75, 0.25)))
    assert info.entropy(samples=np.array([[0, 1], [0, 1], [1, 1], [1, 1]])) == 1.0
    assert info.perplexity(p_samples=["a", "b", "c", "d"]) == pytest.approx(4.0)
    counts = [0] * 7 + [1] * 2 + [2]
    assert info.cross_entropy(p_samples=counts, q=Q) == pytest.approx(info.cross_entropy(P, Q))
    assert info.kl_divergence(p_samples=counts, q_samples=[0] * 5 + [1] * 3 + [2] * 2) == pytest.approx(
        info.kl_divergence(P, Q)
    )
    assert info.kl_divergence(p_samples="ab", q_samples="b") == math.inf
    independent = [(x, y) for x in "abc" for y in range(2)]
    assert info.mutual_information(samples=independent) == pytest.approx(0, abs=1e-12)
    assert info.mutual_information(samples=zip("abab", "cdcd", strict=True)) == pytest.approx(1.0)


def test_bias_correction_reduces_the_bias_of_few_samples() -> None:
    """200 throws of a die: the plug-in entropy is biased low, the mutual information of two independent dice high."""
    throws = np.random.default_rng(0).integers(6, size=(100, 200, 2))
    entropy_bias, information_bias = [], []
    for bias_correction in (False, True):
        entropies = [info.entropy(samples=sample[:, 0], bias_correction=bias_correction) for sample in throws]
        informations = [info.mutual_information(samples=sample, bias_correction=bias_correction) for sample in throws]
        entropy_bias.append(math.log2(6) - float(np.mean(entropies)))
        information_bias.append(float(np.mean(informations)))
    assert entropy_bias[0] == pytest.approx(5 / 400 / math.log(2), rel=0.2)  # (outcomes − 1) / 2·samples
    assert abs(entropy_bias[1]) < entropy_bias[0] / 4
    assert information_bias[0] == pytest.approx((35 - 5 - 5) / 400 / math.log(2), rel=0.2)
    assert abs(information_bias[1]) < information_bias[0] / 4


def test_functional_equals_validated_functions() -> None:
    """The unvalidated functions, with the mass of an attention sink as one more outcome."""
    pattern = torch.full((1, 4, 2), 0.25)
    assert functional.entropy(functional.append_missing_mass(pattern)).tolist()[0] == pytest.approx(
        [1.5 * math.log(2)] * 4
    )
    x, y = torch.randn(3, 9), torch.randn(3, 9)
    torch.testing.assert_close(
        functional.kl_divergence_from_logits(x, y), info.kl_divergence(p_logits=x, q_logits=y, unit="nats")
    )


@pytest.mark.unchecked
def test_invalid_distributions_are_errors() -> None:
    cases: list[tuple[str, Any]] = [
        ("p is empty", []),
        ("p is empty", torch.zeros(0, 3)),
        ("sums to 1.1", (0.5, 0.6)),
        ("sums to 1.2", torch.tensor([[0.5, 0.5], [0.6, 0.6]])),
        (r"p\[1\] is -0.5", (1.5, -0.5)),
        (r"p\[0\] is nan", (math.nan, 1.0)),
        (r"p\[1, 0\] is -1.0", torch.tensor([[0.5, 0.5], [-1, 2]])),
        ("is a str", "0.5"),
        ("is a float", 0.5),
        ("is a Tensor", torch.tensor(1.0)),
        ("different lengths", [[0.5, 0.5], [1.0]]),
        ("not a number", [None, 1]),
        ("not a number", ["0.5", "0.5"]),
    ]
    for message, p in cases:
        with pytest.raises(InputError, match=message):
            info.entropy(p)


@pytest.mark.unchecked
def test_invalid_arguments_are_errors() -> None:
    cases: list[tuple[str, Any, dict[str, Any]]] = [
        ("none is set", info.entropy, {}),
        ("p and logits are set together", info.entropy, {"p": P, "logits": P}),
        ("unit is 'bit'", info.entropy, {"p": P, "unit": "bit"}),
        (r"logits\[1\] is inf", info.entropy, {"logits": [0, math.inf]}),
        (r"logits\[0\] is nan", info.entropy, {"logits": torch.tensor([math.nan, 1])}),
        ("−inf for every outcome", info.entropy, {"logits": [[0.0, 1.0], [NEG_INF, NEG_INF]]}),
        ("samples is empty", info.entropy, {"samples": []}),
        ("cannot be counted", info.entropy, {"samples": [{}]}),
        ("only to estimates from samples", info.entropy, {"p": P, "bias_correction": True}),
        ("2 outcomes and q 3", info.kl_divergence, {"p": (0.5, 0.5), "q": P}),
        ("leading axes", info.kl_divergence, {"p_logits": torch.zeros(2, 3), "q_logits": torch.zeros(4, 3)}),
        ("outcome indices, 0 to 2", info.kl_divergence, {"p_samples": [3], "q": P}),
        ("target has classes from 3", info.cross_entropy, {"target": 3, "q": P}),
        ("target has shape", info.cross_entropy, {"target": [0, 1], "q": P}),
        ("target is 0.5", info.cross_entropy, {"target": 0.5, "q": P}),
        ("target and p are set together", info.cross_entropy, {"target": 0, "p": P, "q": P}),
        ("joint has 1 axis", info.mutual_information, {"joint": P}),
        ("different lengths", info.mutual_information, {"joint": [[0.5, 0.25], [0.25]]}),
        ("which is not a pair", info.mutual_information, {"samples": [1, 2]}),
        ("num_bytes is -1", info.bits_per_byte, {"nats": 1.0, "num_bytes": -1}),
    ]
    for message, measure, kwargs in cases:
        with pytest.raises(InputError, match=message):
            measure(**kwargs)


# ---------------------------------------------------------------------------------------- calibration


def test_calibration_of_two_bins() -> None:
    """Two bins: 0.2 and 0.4 with one correct (gap 0.2), and 0.8 twice with one correct (gap 0.3)."""
    calibration = evaluate_calibration([0.2, 0.4, 0.8, 0.8], [False, True, True, False], num_bins=2)
    assert (calibration.bin_counts, calibration.bin_correct) == ((2, 2), (1, 1))
    assert calibration.ece == pytest.approx(0.5 * 0.2 + 0.5 * 0.3)
    assert calibration.brier_score == pytest.approx((0.2**2 + 0.6**2 + 0.2**2 + 0.8**2) / 4)
    assert (calibration.confidence, calibration.accuracy) == (pytest.approx(0.55), 0.5)
    assert calibration.bins[1] == pytest.approx(
        {"low": 0.5, "high": 1.0, "count": 2, "confidence": 0.8, "accuracy": 0.5}
    )
    assert evaluate_calibration([0.0, 1.0], [0, 1]).ece == 0
    assert "ece=0.2500" in repr(calibration)
    assert str(calibration).splitlines()[-1].split() == ["0.500–1.000", "0.800", "0.500", "2"]
    assert calibration.to_dict()["ece"] == calibration.ece


def test_calibration_of_logits_uses_the_most_likely_class() -> None:
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(500, 4, 5, generator=rng, dtype=torch.float64) * 2
    targets = Categorical(logits=logits).sample()
    calibration = evaluate_calibration(logits=logits, targets=targets)
    top = logits.softmax(-1).max(-1)
    expected = evaluate_calibration(top.values, top.indices == targets)
    assert (calibration.bin_counts, calibration.bin_correct) == (expected.bin_counts, expected.bin_correct)
    assert calibration.bin_confidence_sums == pytest.approx(expected.bin_confidence_sums)
    assert calibration.squared_error_sum == pytest.approx(expected.squared_error_sum)
    from_p = evaluate_calibration(p=logits.softmax(-1).numpy(), targets=targets.numpy())
    assert calibration.ece == pytest.approx(
        from_p.ece, rel=1e-12
    )  # numpy and torch softmax may differ in the last digit
    assert calibration.ece < 0.05  # the targets are sampled from the predicted distribution
    assert evaluate_calibration(logits=3 * logits, targets=targets).ece > 0.1
    assert evaluate_calibration(logits=3 * logits, targets=targets).confidence > calibration.accuracy + 0.1
    halves = [
        evaluate_calibration(logits=logits[part], targets=targets[part]) for part in (slice(250), slice(250, None))
    ]
    assert (halves[0] + halves[1]).ece == pytest.approx(calibration.ece)
    assert (halves[0] + halves[1]).bin_counts == calibration.bin_counts


def test_reliability_diagram_has_a_bar_per_non_empty_bin() -> None:
    figure = evaluate_calibration([0.2, 0.4, 0.8, 0.8], [0, 1, 1, 0], num_bins=10).plot()
    above, below = figure.axes
    assert [bar.get_height() for bar in above.patches] == pytest.approx([0, 1, 0.5])
    assert [bar.get_height() for bar in below.patches] == [1, 1, 2]


@pytest.mark.unchecked
def test_invalid_predictions_are_errors() -> None:
    cases: list[tuple[str, dict[str, Any]]] = [
        ("none is set", {}),
        ("pass correct", {"confidence": [0.5]}),
        ("pass targets", {"logits": [[0.0, 1.0]]}),
        ("equal, non-empty shapes", {"confidence": [0.5], "correct": [1, 0]}),
        ("outside 0 to 1", {"confidence": [1.5], "correct": [1]}),
        ("outside 0 to 1", {"confidence": [0.5], "correct": [2]}),
        ("one per prediction", {"logits": [[0.0, 1.0]], "targets": [1, 0]}),
        ("integers from 0 to 1", {"logits": [[0.0, 1.0]], "targets": [2]}),
        ("num_bins is 0", {"confidence": [0.5], "correct": [1], "num_bins": 0}),
    ]
    for message, kwargs in cases:
        with pytest.raises(InputError, match=message):
            evaluate_calibration(**kwargs)
    with pytest.raises(InputError, match="2 bins and the other 3"):
        evaluate_calibration([0.5], [1], num_bins=2) + evaluate_calibration([0.5], [1], num_bins=3)


def test_package_is_public_and_callable() -> None:
    evaluate: Any = ct.evaluate
    assert evaluate.entropy is info.entropy
    assert evaluate.evaluate_calibration is evaluate_calibration
    assert evaluate.Calibration is Calibration
    assert callable(evaluate)
    assert "evaluate" in ct.__all__
