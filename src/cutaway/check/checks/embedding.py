"""Embedding checks: token-ids."""

from collections.abc import Iterator
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from cutaway.check.checked_model import require
from cutaway.check.context import CheckContext
from cutaway.check.probes.embedding_gradients import forward_with_offset
from cutaway.check.registry import register_check
from cutaway.check.report.finding import CaseResult, SkipCheckError, failure, success, warning

_MAX_TOKEN_IDS = 512
"""Maximum number of token ids that are compared."""
_BATCH_SIZE = 64
_NUM_CONTEXTS = 3
"""Number of pairs of tokens before and after a token that is tested for being padding."""
_MAX_PADDING_TOKENS = 0.05
"""Largest part of the tokens that may be padding tokens; other models, such as hashed embeddings, treat more alike."""


@register_check("token-ids", depends_on=("eval-determinism", "batch-isolation"))
def token_ids(ctx: CheckContext) -> Iterator[CaseResult]:
    """Catches token ids that are clamped, taken modulo a number or replaced: different tokens give the same logits.

    Run sequences of one token, for the lowest, the highest and random other ids: the logits of each must differ from
    those of all others, unless the rows of the embedding are equal. In sequences of three tokens, no token may be
    invisible to the next one, or change its position, unless it is declared as pad_token_id=.

    Cause: ids are clamped to a wrong vocabulary size, wrapped, or replaced by the pad or unknown token.
    Fix: look up the embedding with the unchanged token id, and raise an error for ids outside the vocabulary.
    """
    vocab_size = require(ctx.model.vocab_size)
    if vocab_size < 2:
        raise SkipCheckError("needs a vocabulary of two tokens")
    ids = _choose_token_ids(ctx, vocab_size)
    ids = ids[~torch.isin(ids, torch.tensor(ctx.model.special_token_ids))]  # padding may be masked
    logits = _logits_of_single_tokens(ctx, ids[:, None].to(ctx.model.device))
    groups = _equal_rows(logits)
    if len(groups) == 1:
        raise SkipCheckError("the logits of one token do not depend on the token")
    embedding = _find_embedding(ctx)
    equal = [[int(ids[index]) for index in group] for group in groups if len(group) > 1]
    if embedding is not None:  # unused tokens may have equal rows
        equal = [group for group in equal if len(_equal_rows(embedding[group])) > 1]
    if not equal:
        yield success(f"{len(ids)} token ids give different logits")
        if ctx.seq_len >= 3 and ctx.model.multiple is None and not ctx.is_slow:
            pad = -1 if ctx.model.pad_token_id is None else ctx.model.pad_token_id
            yield from _check_padding_tokens(ctx, ids[ids != pad])
        return
    first, second = equal[0][:2]
    num_equal = sum(map(len, equal))
    message = f"tokens {first} and {second} give the same logits ({num_equal} of {len(ids)} tokens have an equal one)"
    if embedding is None:
        yield warning(f"{message}, which is correct only if their embeddings are equal", num_equal, 0)
        return
    yield failure(message, num_equal, 0)


def _check_padding_tokens(ctx: CheckContext, ids: Tensor) -> Iterator[CaseResult]:
    """Check in the context of three pairs of other tokens that no token is treated as padding by the next token."""
    invisible, moving = set(ids.tolist()), set(ids.tolist())
    for _ in range(_NUM_CONTEXTS):
        others = ctx.random_tokens(1, 2).cpu()
        tokens = torch.stack((others[0, 0].expand(len(ids)), ids, others[0, 1].expand(len(ids))), 1)
        try:
            found = [
                _find_padding_tokens(ctx, batch) for batch in torch.split(tokens.to(ctx.model.device), _BATCH_SIZE)
            ]
        except (SkipCheckError, RuntimeError):  # no embedding, no gradients, or a limited batch size
            return
        invisible &= set().union(*(first for first, _ in found))
        moving &= set().union(*(second for _, second in found))
    for found_ids, effect in ((invisible, "is invisible to the next token"), (moving, "changes later positions")):
        if 0 < len(found_ids) <= max(1, _MAX_PADDING_TOKENS * len(ids)):
            yield warning(
                f"token {min(found_ids)} {effect}, which is correct only for padding; pass pad_token_id= to declare it",
                len(found_ids),
                0,
                f"token {min(found_ids)}",
                cause="an ordinary token has the id that the model treats as padding",
                fix="derive masks and positions from an attention mask, or use an id for padding that no text contains",
            )
            return
    yield success("no token is treated as padding")


def _find_padding_tokens(ctx: CheckContext, tokens: Tensor) -> tuple[set[int], set[int]]:
    """Tokens in the middle of the sequences (N, 3) that are invisible to the last position, and those that change an
    index with which the last position is looked up in another table than the token embedding."""
    if len(tokens) == tokens.shape[1]:  # an index (T, T) of relative positions must not have the shape of the tokens
        tokens = tokens.repeat(2, 1)
    indices: list[Tensor] = []

    def record(_module: nn.Module, inputs: tuple[object, ...]) -> None:
        index = inputs[0] if inputs else None
        if isinstance(index, Tensor) and index.shape == tokens.shape and not bool((index == tokens).all()):
            indices.append(index[:, 2].detach())

    with ExitStack() as hooks:
        for submodule in require(ctx.model.module).modules() if ctx.model.module is not None else ():
            if isinstance(submodule, nn.Embedding):
                hooks.enter_context(submodule.register_forward_pre_hook(record))
        out, offset = forward_with_offset(ctx.model.module, ctx.logits, tokens)
        generator = torch.Generator().manual_seed(ctx.seed)
        weights = torch.randn(out.shape[-1], generator=generator).to(out)
        with torch.enable_grad():
            value = (out[:, 2].nan_to_num() * weights).sum()
        (gradient,) = torch.autograd.grad(value, offset, allow_unused=True)
    middle = tokens[:, 1]
    size = torch.zeros(len(tokens)) if gradient is None else gradient.abs().amax(-1)[:, 1].cpu()
    moving = [index != index.mode().values for index in indices]
    return set(middle[(size == 0).to(middle.device)].tolist()), {
        token for rows in moving for token in middle[rows.to(middle.device)].tolist()
    }


def _logits_of_single_tokens(ctx: CheckContext, tokens: Tensor) -> Tensor:
    """Logits (N, V) of N sequences of one token. If a model rejects large batches, such as one with a cache for a
    limited number of rows, each sequence is run alone."""
    try:
        return torch.cat([ctx.logits(batch)[:, 0] for batch in torch.split(tokens, _BATCH_SIZE)])
    except Exception:  # raised again below if it is not the batch size that the model rejects
        return torch.cat([ctx.logits(row)[:, 0] for row in torch.split(tokens, 1)])


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
