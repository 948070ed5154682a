"""Embedding checks: token-ids."""

import torch
from torch import Tensor, nn

from cutaway.check.checked_model import require
from cutaway.check.context import CheckContext
from cutaway.check.registry import register_check
from cutaway.check.report.finding import CaseResult, SkipCheckError, failure, success, warning

_MAX_TOKEN_IDS = 512
"""Maximum number of token ids that are compared."""
_BATCH_SIZE = 64


@register_check("token-ids", depends_on=("eval-determinism", "batch-isolation"))
def token_ids(ctx: CheckContext) -> CaseResult:
    """Catches token ids that are clamped, taken modulo a number or replaced: different tokens give the same logits.

    Run sequences of one token, for the lowest, the highest and random other ids: the logits of each must differ from
    those of all others, unless the rows of the embedding are equal.

    Cause: ids are clamped to a wrong vocabulary size, wrapped, or replaced by the pad or unknown token.
    Fix: look up the embedding with the unchanged token id, and raise an error for ids outside the vocabulary.
    """
    vocab_size = require(ctx.model.vocab_size)
    if vocab_size < 2:
        raise SkipCheckError("needs a vocabulary of two tokens")
    ids = _choose_token_ids(ctx, vocab_size)
    ids = ids[~torch.isin(ids, torch.tensor(ctx.model.special_token_ids))]  # padding may be masked
    batches = torch.split(ids[:, None].to(ctx.model.device), _BATCH_SIZE)
    logits = torch.cat([ctx.logits(batch)[:, 0] for batch in batches])
    groups = _equal_rows(logits)
    if len(groups) == 1:
        raise SkipCheckError("the logits of one token do not depend on the token")
    embedding = _find_embedding(ctx)
    equal = [[int(ids[index]) for index in group] for group in groups if len(group) > 1]
    if embedding is not None:  # unused tokens may have equal rows
        equal = [group for group in equal if len(_equal_rows(embedding[group])) > 1]
    if not equal:
        return success(f"{len(ids)} token ids give different logits")
    first, second = equal[0][:2]
    num_equal = sum(map(len, equal))
    message = f"tokens {first} and {second} give the same logits ({num_equal} of {len(ids)} tokens have an equal one)"
    if embedding is None:
        return warning(f"{message}, which is correct only if their embeddings are equal", num_equal, 0)
    return failure(message, num_equal, 0)


def _choose_token_ids(ctx: CheckContext, vocab_size: int) -> Tensor:
    """All token ids of a small vocabulary; of a large one, the lowest, the highest and random others."""
    limit = _MAX_TOKEN_IDS // (8 if ctx.is_slow else 1)
    if vocab_size <= limit:
        return torch.arange(vocab_size)
    ends = limit // 4
    middle = ends + torch.randperm(vocab_size - 2 * ends, generator=ctx.generator)[: limit - 2 * ends]
    return torch.cat((torch.arange(ends), middle.sort().values, torch.arange(vocab_size - ends, vocab_size)))


def _equal_rows(matrix: Tensor) -> list[list[int]]:
    """Indices of the rows of a matrix (N, V), grouped by equality."""
    _, inverse = torch.unique(matrix.detach().float().cpu(), dim=0, return_inverse=True)
    groups: dict[int, list[int]] = {}
    for index, group in enumerate(inverse.tolist()):
        groups.setdefault(group, []).append(index)
    return list(groups.values())


def _find_embedding(ctx: CheckContext) -> Tensor | None:
    """The weight of the embedding with one row per token; None if the model has none or several different ones."""
    module, vocab_size = ctx.model.module, ctx.model.vocab_size
    submodules = () if module is None else module.modules()
    tables = {
        id(submodule.weight): submodule.weight
        for submodule in submodules
        if isinstance(submodule, nn.Embedding) and submodule.num_embeddings >= require(vocab_size)
    }
    return next(iter(tables.values())).detach() if len(tables) == 1 else None
