"""Losses of sentence embeddings, against direct computations of their definitions in fp64."""

import math

import pytest
import torch
from torch import Tensor

from cutaway.train.loss.contrastive import cosent_loss, cosine_similarity_loss, multiple_negatives_ranking_loss


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b / (a.norm() * b.norm()))


@pytest.mark.parametrize("num_texts", [2, 3, 4])
def test_multiple_negatives_ranking(num_texts: int) -> None:
    torch.manual_seed(0)
    embeddings = torch.randn(5, num_texts, 7, dtype=torch.float64)
    losses = multiple_negatives_ranking_loss(embeddings, scale=20.0)
    for i in range(5):
        candidates = [embeddings[j, side] for side in range(1, num_texts) for j in range(5)]
        scores = [20 * cosine(embeddings[i, 0], each) for each in candidates]
        expected = math.log(sum(math.exp(score) for score in scores)) - scores[i]
        assert float(losses[i]) == pytest.approx(expected, abs=1e-9)


def test_cosent() -> None:
    torch.manual_seed(0)
    embeddings = torch.randn(6, 2, 7, dtype=torch.float64)
    scores = torch.tensor([0.1, 0.5, 0.5, 0.9, 0.0, 1.0], dtype=torch.float64)
    similarity = [cosine(*pair) for pair in embeddings]
    total = 1 + sum(
        math.exp(20 * (similarity[i] - similarity[j])) for i in range(6) for j in range(6) if scores[i] < scores[j]
    )
    assert float(cosent_loss(embeddings, scores, 20.0)) == pytest.approx(math.log(total), abs=1e-9)
    assert float(cosent_loss(embeddings[:1], scores[:1])) == 0


def test_cosine_similarity() -> None:
    torch.manual_seed(0)
    embeddings = torch.randn(4, 2, 7, dtype=torch.float64)
    scores = torch.rand(4, dtype=torch.float64)
    expected = [(cosine(*pair) - float(score)) ** 2 for pair, score in zip(embeddings, scores, strict=True)]
    assert cosine_similarity_loss(embeddings, scores).tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("loss", [multiple_negatives_ranking_loss, cosine_similarity_loss, cosent_loss])
def test_gradients(loss: object) -> None:
    torch.manual_seed(0)
    embeddings = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    scores = torch.tensor([0.2, 0.9, 0.4], dtype=torch.float64)
    arguments = (embeddings,) if loss is multiple_negatives_ranking_loss else (embeddings, scores)
    assert torch.autograd.gradcheck(loss, arguments)  # type: ignore[arg-type]
