"""Means of the metrics of an objective over the micro-batches and ranks of a step or an evaluation."""

from collections.abc import Iterable

import torch
from torch import Tensor

from cutaway.train.distributed.process_group import DistributedContext
from cutaway.train.loss.chunked_cross_entropy import LossSums


def metric_means(losses: Iterable[LossSums], dist_context: DistributedContext) -> dict[str, Tensor]:
    """Mean of each metric in `LossSums.metrics`, without a sync. NaN for a metric whose weights are all 0."""
    rows = [loss.metrics for loss in losses if loss.metrics]
    if not rows:
        return {}
    names = list(rows[0])
    sums = [torch.stack([torch.stack(list(row[name])).detach().double() for name in names]) for row in rows]
    totals, weights = dist_context.sum_over_dp(torch.stack(sums).sum(0)).unbind(-1)
    return dict(zip(names, (totals / weights).unbind(), strict=True))
