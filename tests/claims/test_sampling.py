"""Claims about temperature and top-k, on the distribution that the sampler samples from."""

import pytest
import torch
from torch import Tensor

import cutaway as ct
from cutaway.generate.sampling.logits_processing import logits_to_probs
from cutaway.generate.sampling.sampler import Sampler
from cutaway.generate.sampling.sampling_params import SamplingParams

LOGITS = torch.tensor([2.0, 1.0, 0.5, -1.0, -3.0])


def sampling_distribution(logits: Tensor, temperature: float, top_k: int | None = None) -> Tensor:
    sampler = Sampler(1, len(logits))
    sampler.set_row(0, SamplingParams(temperature=temperature, top_k=top_k), [], 0)
    return logits_to_probs(logits[None], sampler.first_rows(1), sampler.features(1))[0]


def test_c209_temperature_keeps_order_and_support_and_raises_the_entropy() -> None:
    previous = 0.0
    for temperature in (0.1, 0.5, 1.0, 2.0, 10.0):
        p = sampling_distribution(LOGITS, temperature)
        torch.testing.assert_close(p, (LOGITS / temperature).softmax(-1))
        assert p.tolist() == sorted(p.tolist(), reverse=True)
        assert (p > 0).all()
        assert ct.evaluate.entropy(p) > previous
        previous = ct.evaluate.entropy(p)
    assert sampling_distribution(LOGITS, 0).tolist() == [1, 0, 0, 0, 0]
    assert sampling_distribution(LOGITS, 1e-3).tolist() == [1, 0, 0, 0, 0]  # the others are below 1e-38
    assert sampling_distribution(LOGITS, 1e6).tolist() == pytest.approx([0.2] * 5, abs=1e-6)


def test_c210_top_k_cuts_the_support_and_keeps_ratios() -> None:
    full = sampling_distribution(LOGITS, 1.0)
    for k in range(1, 6):
        p = sampling_distribution(LOGITS, 1.0, top_k=k)
        assert (p > 0).tolist() == [rank < k for rank in range(5)]
        assert float(p.sum()) == pytest.approx(1)
        torch.testing.assert_close(p[:k] / p[0], full[:k] / full[0])


def test_c211_temperature_keeps_the_tail_and_top_k_ignores_the_confidence() -> None:
    confident, unsure = 10 * LOGITS, torch.zeros(5)
    assert (sampling_distribution(LOGITS, 0.5) > 0).all()
    top_k = [sampling_distribution(logits, 1.0, top_k=2) for logits in (confident, unsure + 1e-3 * LOGITS)]
    assert [int((p > 0).sum()) for p in top_k] == [2, 2]  # the same number of tokens, whatever the confidence
    removed = [1 - float(sampling_distribution(x, 1.0)[:2].sum()) for x in (confident, unsure + 1e-3 * LOGITS)]
    assert removed == pytest.approx([0.0, 0.6], abs=1e-3)
