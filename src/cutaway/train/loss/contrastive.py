"""Losses of sentence embeddings: multiple negatives ranking, CoSENT, squared error of cosine similarities."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def multiple_negatives_ranking_loss(embeddings: Float[Tensor, "B S d"], scale: float = 20.0) -> Float[Tensor, " B"]:
    """−log softmax of the scaled cosine similarity of each anchor and its positive, over all positives and negatives.

    The first text of a record is the anchor, the second the positive, further ones are negatives. The positives and
    negatives of the other records are negatives of a record, too (in-batch negatives). https://arxiv.org/abs/1705.00652
    """
    normalized = F.normalize(embeddings, dim=-1)
    anchors, others = normalized[:, 0], normalized[:, 1:].transpose(0, 1).flatten(0, 1)  # (B, d), ((S − 1)·B, d)
    scores = scale * anchors @ others.T
    targets = torch.arange(len(anchors), device=scores.device)
    return F.cross_entropy(scores, targets, reduction="none")


def cosent_loss(
    embeddings: Float[Tensor, "B 2 d"], scores: Float[Tensor, " B"], scale: float = 20.0
) -> Float[Tensor, ""]:
    """log(1 + Σ exp(scale·(cos_i − cos_j))) over all i, j with score_i < score_j. https://kexue.fm/archives/8847"""
    similarity = scale * F.cosine_similarity(embeddings[:, 0], embeddings[:, 1], dim=-1)
    difference = similarity[:, None] - similarity[None, :]
    is_lower = scores[:, None] < scores[None, :]
    terms = torch.cat([difference.new_zeros(1), difference[is_lower]])
    return torch.logsumexp(terms, 0)


def cosine_similarity_loss(embeddings: Float[Tensor, "B 2 d"], scores: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Squared difference of cosine similarity and score."""
    return (F.cosine_similarity(embeddings[:, 0], embeddings[:, 1], dim=-1) - scores).square()
