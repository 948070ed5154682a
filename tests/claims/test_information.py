"""Claims about entropy, cross-entropy, KL divergence, perplexity and mutual information."""

import heapq
import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from cutaway.evaluate import bits_per_byte, cross_entropy, entropy, kl_divergence, mutual_information, perplexity

P, Q = (0.7, 0.2, 0.1), (0.5, 0.3, 0.2)


def huffman_length(probabilities: list[float]) -> float:
    """Expected number of yes/no questions of an optimal sequence of questions that identifies the outcome."""
    heap, expected = sorted(probabilities), 0.0
    while len(heap) > 1:
        merged = heapq.heappop(heap) + heapq.heappop(heap)
        expected += merged
        heapq.heappush(heap, merged)
    return expected


def test_c240_entropy_of_coins_and_its_range() -> None:
    assert entropy((0.5, 0.5)) == 1
    assert entropy((0.9, 0.1)) == pytest.approx(0.4690, abs=5e-5)
    for n in (2, 3, 10, 1000):
        assert entropy([1 / n] * n) == pytest.approx(math.log2(n))
        assert entropy([1.0] + [0.0] * (n - 1)) == 0
        assert entropy(torch.randn(n, dtype=torch.float64).softmax(-1)) < math.log2(n)


def test_c241_one_bit_is_one_question_only_on_average_over_blocks() -> None:
    """One flip of a 0.9/0.1 coin takes one question; a block of 12 flips takes 0.470 per flip, near its entropy."""
    num_flips = (1, 2, 5, 12)
    outcomes = [[math.prod(flips) for flips in itertools.product((0.9, 0.1), repeat=n)] for n in num_flips]
    per_flip = [huffman_length(p) / n for p, n in zip(outcomes, num_flips, strict=True)]
    assert per_flip == pytest.approx([1.0, 0.645, 0.4802, 0.4700], abs=5e-5)
    assert min(per_flip) > entropy((0.9, 0.1))


def test_c244_cross_entropy_is_smallest_at_the_true_distribution() -> None:
    assert cross_entropy(P, P) == pytest.approx(entropy(P))
    for _ in range(100):
        q = torch.randn(3, dtype=torch.float64).softmax(-1).tolist()
        assert cross_entropy(P, q) > entropy(P)
    assert cross_entropy((0, 1, 0), Q) == cross_entropy(target=1, q=Q) == pytest.approx(-math.log2(Q[1]))


def test_c246_kl_divergence_is_asymmetric_and_has_the_gradient_of_cross_entropy() -> None:
    assert kl_divergence(P, P) == 0
    assert kl_divergence(P, Q) > 0
    assert abs(kl_divergence(P, Q) - kl_divergence(Q, P)) > 0.009
    assert cross_entropy(P, Q) == pytest.approx(entropy(P) + kl_divergence(P, Q))
    logits, p = torch.randn(3, dtype=torch.float64, requires_grad=True), torch.tensor(P, dtype=torch.float64)
    of_cross_entropy, of_kl = (
        torch.autograd.grad(measure.sum(), logits)[0]
        for measure in (F.cross_entropy(logits, p), F.kl_div(logits.log_softmax(-1), p, reduction="none"))
    )
    torch.testing.assert_close(of_cross_entropy, of_kl)  # H(P) does not depend on Q


def test_c248_perplexity_is_the_same_in_bits_and_nats() -> None:
    bits, nats = entropy(P), entropy(P, unit="nats")
    assert perplexity(P) == pytest.approx(2**bits)
    assert perplexity(P) == pytest.approx(math.exp(nats))
    assert bits == pytest.approx(nats / math.log(2))
    assert 2**nats < 0.8 * perplexity(P)  # the error of mixing the bases
    assert math.exp(bits) > 1.2 * perplexity(P)


@pytest.mark.parametrize("k", [1, 2, 7, 50])
def test_c249_perplexity_of_a_uniform_choice_among_k_is_k(k: int) -> None:
    assert perplexity([1 / k] * k) == pytest.approx(k)
    assert perplexity([1 / k] * k + [0.0] * 5) == pytest.approx(k)


def test_c250_mutual_information_is_0_if_independent_and_h_y_if_determined() -> None:
    joint = torch.rand(3, 4, dtype=torch.float64)
    joint /= joint.sum()
    sum_of_entropies = entropy(joint.sum(1)) + entropy(joint.sum(0)) - entropy(joint.flatten())
    assert mutual_information(joint) == pytest.approx(sum_of_entropies)
    assert mutual_information(joint) > 0.01
    assert mutual_information(torch.outer(joint.sum(1), joint.sum(0))) == pytest.approx(0, abs=1e-12)
    p_y = torch.tensor([0.7, 0.3])
    x_determines_y = torch.tensor([[0.5, 0.0], [0.2, 0.0], [0.0, 0.3]])
    assert mutual_information(x_determines_y) == pytest.approx(entropy(p_y))


def test_c253_perplexity_depends_on_the_tokenizer_and_bits_per_byte_do_not() -> None:
    """Random bytes as tokens of one byte or of two: perplexity 256 or 65,536, in both cases 8 bits per byte."""
    num_bytes, one_byte, two_bytes = 100, [2.0**-8] * 2**8, [2.0**-16] * 2**16
    assert [perplexity(one_byte), perplexity(two_bytes)] == pytest.approx([256, 65_536])
    nats = [num_bytes * entropy(one_byte, unit="nats"), num_bytes / 2 * entropy(two_bytes, unit="nats")]
    assert [bits_per_byte(total, num_bytes) for total in nats] == pytest.approx([8, 8])
