"""Information ≡ the textbook's numbers ≡ torch.distributions; logits ≡ their softmax; sure is right as often."""

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
NONE = -math.inf


def test_the_textbooks_numbers() -> None:
    assert info.entropy((0.5, 0.5)) == 1.0
    assert info.entropy((0.9, 0.1)) == pytest.approx(0.4690, abs=5e-5)
    for share, bits in ((0.9, 0.1520), (0.4, 1.3219), (0.01, 6.6439)):
        assert info.cross_entropy(target=0, q=(share, 1 - share)) == pytest.approx(bits, abs=5e-5)
        assert info.cross_entropy((1, 0), (share, 1 - share)) == pytest.approx(bits, abs=5e-5)
    assert info.perplexity(target=0, q=(0.9, 0.1)) == pytest.approx(1.11, abs=5e-3)
    assert info.perplexity((1, 0), (0.4, 0.6)) == pytest.approx(2.50)
    assert info.perplexity([0.25] * 4) == pytest.approx(4.0)
    found = info.entropy(P), info.kl_divergence(P, Q), info.cross_entropy(P, Q)
    assert found == pytest.approx((1.1568, 0.1228, 1.2796), abs=5e-5)
    assert info.mutual_information([[0.5, 0], [0, 0.5]]) == pytest.approx(1.0)
    assert info.mutual_information([[0.25, 0.25], [0.25, 0.25]]) == 0.0
    assert info.bits_per_byte(16 * math.log(2), 8) == pytest.approx(2.0)
    assert info.bits_per_byte(1.0, 0) == math.inf


WEIGHTS = st.lists(st.floats(0, 1), min_size=1, max_size=12).filter(lambda each: sum(each) > 1e-3)


def normal(weights: Sequence[float]) -> list[float]:
    return [weight / math.fsum(weights) for weight in weights]


@given(weights=WEIGHTS, others=st.lists(st.floats(1e-6, 1), min_size=12, max_size=12))
def test_cross_entropy_is_entropy_and_divergence(weights: list[float], others: list[float]) -> None:
    p, q = normal(weights), normal(others[: len(weights)])
    for unit in ("bits", "nats"):
        parts = info.entropy(p, unit=unit) + info.kl_divergence(p, q, unit=unit)
        assert info.cross_entropy(p, q, unit=unit) == pytest.approx(parts, abs=1e-9)
    assert info.kl_divergence(p, q) >= 0
    assert info.kl_divergence(p, p) == 0
    assert 0 <= info.entropy(p) <= math.log2(len(p)) + 1e-9
    independent = [[a * b for b in q] for a in p]
    assert info.mutual_information(independent) == pytest.approx(0, abs=1e-9)


@given(x=st.lists(st.floats(-1e4, 1e4) | st.just(NONE), min_size=2, max_size=8).filter(lambda x: max(x) > NONE))
def test_logits_are_their_softmax(x: list[float]) -> None:
    """Numpy's logits by hand, PyTorch's, and torch.distributions; what is ruled out adds nothing."""
    wide = torch.tensor(x, dtype=torch.float64)
    bits = info.entropy(logits=x)
    assert bits == pytest.approx(info.entropy(wide.softmax(-1)), abs=1e-9)
    assert bits == pytest.approx(info.entropy(logits=wide), abs=1e-9)
    assert bits == pytest.approx(info.entropy(logits=[each for each in x if each > NONE]), abs=1e-9)
    assert info.perplexity(p_logits=x) == pytest.approx(2**bits)
    flat = [0.0] * len(x)
    assert info.kl_divergence(p_logits=x, q_logits=flat) == pytest.approx(math.log2(len(x)) - bits, abs=1e-9)
    best = max(range(len(x)), key=x.__getitem__)
    assert info.cross_entropy(target=best, q_logits=x, unit="nats") == pytest.approx(
        -float(wide.log_softmax(-1)[best]), abs=1e-9
    )


def test_extreme_logits_and_zeros_are_exact() -> None:
    far = (1e4, -1e4)
    assert info.entropy(logits=far) == info.entropy((1, 0)) == 0
    assert math.copysign(1, info.entropy((1, 0))) == 1
    assert info.cross_entropy((0, 1), q_logits=far, unit="nats") == 2e4  # of its softmax, which is 0, it is infinite
    assert info.kl_divergence((0, 1), q_logits=far, unit="nats") == 2e4
    assert info.perplexity((0, 1), q_logits=far) == math.inf
    for ruled_out in ({"q": (1, 0)}, {"q_logits": (0, NONE)}, {"q_samples": [0, 0, 0]}):
        assert info.kl_divergence((0.5, 0.5), **ruled_out) == info.cross_entropy((0.5, 0.5), **ruled_out) == math.inf
        assert info.perplexity((0.5, 0.5), **ruled_out) == math.inf
        assert info.kl_divergence((1, 0), **ruled_out) == 0
    for narrow in (torch.float16, torch.bfloat16):
        x = torch.tensor([[3e4, 3e4, -3e4], [1.0, 1.0, NONE]], dtype=narrow)
        found = info.entropy(logits=x)
        assert found.dtype == torch.float32
        assert found.tolist() == pytest.approx([1.0, 1.0])
    assert info.entropy(torch.randn(50_000).softmax(-1).bfloat16()) < math.log2(50_000)


def test_batches_are_each_alone_and_what_torch_distributions_say() -> None:
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randn(2, 3, 7, generator=draw, dtype=torch.float64) for _ in range(2))
    p, q = x.softmax(-1), y.softmax(-1)
    mine, theirs = Categorical(logits=x), Categorical(logits=y)
    expected = {
        "entropy": mine.entropy(),
        "kl": kl_divergence(mine, theirs),
        "cross": mine.entropy() + kl_divergence(mine, theirs),
    }
    for kind in (lambda each: each, lambda each: each.numpy(), lambda each: each.tolist()):
        found = {
            "entropy": info.entropy(kind(p), unit="nats"),
            "kl": info.kl_divergence(kind(p), q_logits=kind(y), unit="nats"),
            "cross": info.cross_entropy(p_logits=kind(x), q=kind(q), unit="nats"),
        }
        for name, value in found.items():
            torch.testing.assert_close(torch.as_tensor(value), expected[name])
        assert info.entropy(kind(p)[1][2]) == pytest.approx(float(found["entropy"][1][2]) / math.log(2))
    true = torch.randint(7, (2, 3), generator=draw)
    told = -theirs.log_prob(true)
    torch.testing.assert_close(info.cross_entropy(target=true, q_logits=y, unit="nats"), told)
    np.testing.assert_allclose(info.cross_entropy(target=true.numpy(), q=q.numpy(), unit="nats"), told.numpy())
    torch.testing.assert_close(info.perplexity(target=true, q_logits=y), told.exp())
    torch.testing.assert_close(
        info.kl_divergence(p[0, 0], q), kl_divergence(Categorical(probs=p[0, 0]), theirs) / math.log(2)
    )
    torch.testing.assert_close(info.kl_divergence(p[0, 0].tolist(), q), info.kl_divergence(p[0, 0], q))
    joint = x.flatten(1).softmax(-1).reshape(2, 3, 7)
    each = info.mutual_information(joint)
    assert each.tolist() == pytest.approx([info.mutual_information(table.tolist()) for table in joint])


def test_gradients_flow_through_batches() -> None:
    x = torch.tensor([[0.5, -1.0, 2.0]], requires_grad=True)
    info.entropy(logits=x, unit="nats").sum().backward()
    p = x.detach().softmax(-1)
    expected = -p * (p.log() - (p * p.log()).sum())  # ∂H/∂xᵢ = −pᵢ·(log pᵢ + H)
    torch.testing.assert_close(x.grad, expected)


def test_whatever_holds_numbers_is_a_distribution() -> None:
    kinds = (torch.tensor(P), torch.tensor(P, requires_grad=True), np.array(P, np.float32), (each for each in P))
    for kind in (*kinds, [Fraction(7, 10), Fraction(1, 5), Fraction(1, 10)]):
        assert info.entropy(kind) == pytest.approx(info.entropy(P), abs=1e-6)


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
    together = [(x, y) for x in "abc" for y in range(2)]
    assert info.mutual_information(samples=together) == pytest.approx(0, abs=1e-12)
    assert info.mutual_information(samples=zip("abab", "cdcd", strict=True)) == pytest.approx(1.0)


def test_few_samples_are_too_low_and_the_correction_helps() -> None:
    """Of 200 throws of a die; and of two dice, which tell nothing of each other, the plug-in says they do."""
    draw = np.random.default_rng(0)
    throws = draw.integers(6, size=(100, 200, 2))
    missing, told = [], []
    for corrected in (False, True):
        alone = [info.entropy(samples=each[:, 0], bias_correction=corrected) for each in throws]
        both = [info.mutual_information(samples=each, bias_correction=corrected) for each in throws]
        missing.append(math.log2(6) - float(np.mean(alone)))
        told.append(float(np.mean(both)))
    assert missing[0] == pytest.approx(5 / 400 / math.log(2), rel=0.2)  # (outcomes − 1) / 2·samples
    assert abs(missing[1]) < missing[0] / 4
    assert told[0] == pytest.approx((35 - 5 - 5) / 400 / math.log(2), rel=0.2)
    assert abs(told[1]) < told[0] / 4


def test_shares_of_a_softmax_need_no_asking() -> None:
    """What lens, training and page call: a sink's share is one more outcome."""
    shares = torch.full((1, 4, 2), 0.25)
    assert functional.entropy(functional.append_missing_mass(shares)).tolist()[0] == pytest.approx(
        [1.5 * math.log(2)] * 4
    )
    x, y = torch.randn(3, 9), torch.randn(3, 9)
    torch.testing.assert_close(
        functional.kl_divergence_from_logits(x, y), info.kl_divergence(p_logits=x, q_logits=y, unit="nats")
    )


@pytest.mark.unchecked
def test_what_is_no_distribution_is_said() -> None:
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
        ("no number", [None, 1]),
        ("no number", ["0.5", "0.5"]),
    ]
    for sentence, p in cases:
        with pytest.raises(InputError, match=sentence):
            info.entropy(p)


@pytest.mark.unchecked
def test_what_cannot_be_asked_is_said() -> None:
    cases: list[tuple[str, Any, dict[str, Any]]] = [
        ("nothing was given", info.entropy, {}),
        ("p and logits were given together", info.entropy, {"p": P, "logits": P}),
        ("unit is 'bit'", info.entropy, {"p": P, "unit": "bit"}),
        (r"logits\[1\] is inf", info.entropy, {"logits": [0, math.inf]}),
        (r"logits\[0\] is nan", info.entropy, {"logits": torch.tensor([math.nan, 1])}),
        ("−inf for every outcome", info.entropy, {"logits": [[0.0, 1.0], [NONE, NONE]]}),
        ("samples is empty", info.entropy, {"samples": []}),
        ("cannot be counted", info.entropy, {"samples": [{}]}),
        ("only an estimate", info.entropy, {"p": P, "bias_correction": True}),
        ("2 outcomes and q 3", info.kl_divergence, {"p": (0.5, 0.5), "q": P}),
        ("leading axes", info.kl_divergence, {"p_logits": torch.zeros(2, 3), "q_logits": torch.zeros(4, 3)}),
        ("their numbers, 0 to 2", info.kl_divergence, {"p_samples": [3], "q": P}),
        ("target has classes from 3", info.cross_entropy, {"target": 3, "q": P}),
        ("target has the shape", info.cross_entropy, {"target": [0, 1], "q": P}),
        ("target is 0.5", info.cross_entropy, {"target": 0.5, "q": P}),
        ("target and p were given together", info.cross_entropy, {"target": 0, "p": P, "q": P}),
        ("one row", info.mutual_information, {"joint": P}),
        ("different lengths", info.mutual_information, {"joint": [[0.5, 0.25], [0.25]]}),
        ("which is no pair", info.mutual_information, {"samples": [1, 2]}),
        ("num_bytes is -1", info.bits_per_byte, {"nats": 1.0, "num_bytes": -1}),
    ]
    for sentence, measure, asked in cases:
        with pytest.raises(InputError, match=sentence):
            measure(**asked)


# ---------------------------------------------------------------------------------------- calibration


def test_calibration_by_hand() -> None:
    """Two bins: in one 0.2 and 0.4 with one right (off by 0.2), in the other 0.8 twice with one right (off by 0.3)."""
    found = evaluate_calibration([0.2, 0.4, 0.8, 0.8], [False, True, True, False], num_bins=2)
    assert (found.bin_counts, found.bin_correct) == ((2, 2), (1, 1))
    assert found.ece == pytest.approx(0.5 * 0.2 + 0.5 * 0.3)
    assert found.brier_score == pytest.approx((0.2**2 + 0.6**2 + 0.2**2 + 0.8**2) / 4)
    assert (found.confidence, found.accuracy) == (pytest.approx(0.55), 0.5)
    assert found.bins[1] == pytest.approx({"low": 0.5, "high": 1.0, "count": 2, "confidence": 0.8, "accuracy": 0.5})
    assert evaluate_calibration([0.0, 1.0], [0, 1]).ece == 0
    assert "ece=0.2500" in repr(found)
    assert str(found).splitlines()[-1].split() == ["0.500–1.000", "0.800", "0.500", "2"]
    assert found.to_dict()["ece"] == found.ece


def test_calibration_of_logits_is_of_the_likeliest_class() -> None:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(500, 4, 5, generator=draw, dtype=torch.float64) * 2
    targets = Categorical(logits=logits).sample()
    found = evaluate_calibration(logits=logits, targets=targets)
    best = logits.softmax(-1).max(-1)
    other = evaluate_calibration(best.values, best.indices == targets)
    assert (found.bin_counts, found.bin_correct) == (other.bin_counts, other.bin_correct)
    assert found.bin_confidence_sums == pytest.approx(other.bin_confidence_sums)
    assert found.squared_error_sum == pytest.approx(other.squared_error_sum)
    of_p = evaluate_calibration(p=logits.softmax(-1).numpy(), targets=targets.numpy())
    assert found.ece == pytest.approx(of_p.ece, rel=1e-12)  # softmax of both libraries may differ in the last digit
    assert found.ece < 0.05  # the targets are drawn from what it says
    assert evaluate_calibration(logits=3 * logits, targets=targets).ece > 0.1
    assert evaluate_calibration(logits=3 * logits, targets=targets).confidence > found.accuracy + 0.1
    halves = [
        evaluate_calibration(logits=logits[part], targets=targets[part]) for part in (slice(250), slice(250, None))
    ]
    assert (halves[0] + halves[1]).ece == pytest.approx(found.ece)
    assert (halves[0] + halves[1]).bin_counts == found.bin_counts


def test_a_diagram_has_a_bar_for_each_bin_in_use() -> None:
    figure = evaluate_calibration([0.2, 0.4, 0.8, 0.8], [0, 1, 1, 0], num_bins=10).plot()
    above, below = figure.axes
    assert [bar.get_height() for bar in above.patches] == pytest.approx([0, 1, 0.5])
    assert [bar.get_height() for bar in below.patches] == [1, 1, 2]


@pytest.mark.unchecked
def test_what_is_no_prediction_is_said() -> None:
    cases: list[tuple[str, dict[str, Any]]] = [
        ("nothing was given", {}),
        ("`correct`", {"confidence": [0.5]}),
        ("`targets`", {"logits": [[0.0, 1.0]]}),
        ("as many of both", {"confidence": [0.5], "correct": [1, 0]}),
        ("from 0 to 1", {"confidence": [1.5], "correct": [1]}),
        ("from 0 to 1", {"confidence": [0.5], "correct": [2]}),
        ("give one for each", {"logits": [[0.0, 1.0]], "targets": [1, 0]}),
        ("0 to 1; something", {"logits": [[0.0, 1.0]], "targets": [2]}),
        ("num_bins is 0", {"confidence": [0.5], "correct": [1], "num_bins": 0}),
    ]
    for sentence, asked in cases:
        with pytest.raises(InputError, match=sentence):
            evaluate_calibration(**asked)
    with pytest.raises(InputError, match="2 bins and the other 3"):
        evaluate_calibration([0.5], [1], num_bins=2) + evaluate_calibration([0.5], [1], num_bins=3)


def test_the_package_is_public_and_can_be_called() -> None:
    evaluate: Any = ct.evaluate
    assert evaluate.entropy is info.entropy
    assert evaluate.evaluate_calibration is evaluate_calibration
    assert evaluate.Calibration is Calibration
    assert callable(evaluate)
    assert "evaluate" in ct.__all__
