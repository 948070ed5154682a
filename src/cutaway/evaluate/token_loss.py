"""Cross-entropy per token, computed in chunks of logits, and helpers for batching, padding and validation."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import add
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from cutaway.argument_checks import check_positive_int
from cutaway.errors import InputError, WeightError
from cutaway.eval_mode import eval_mode
from cutaway.evaluate.calibration import bin_predictions
from cutaway.evaluate.results import EvalResult
from cutaway.model import Transformer
from cutaway.tokenizer import Tokenizer

MAX_LOGITS_PER_CHUNK = 1 << 25
"""Maximum number of logits in memory at a time: 128 MiB in float32."""
_TOKENS_PER_BATCH = {"cpu": 2048}
_DEFAULT_TOKENS_PER_BATCH = 16384
"""Number of tokens per forward pass if the caller sets no batch size, by device type. On a CPU, larger batches are not
faster, and the progress bar would update too rarely."""
_DEFAULT_CONTEXT = 4096
"""Upper limit of the default context, because the full context of some models does not fit into memory."""
ProgressFn = Callable[[int, int], None]
"""Called with (items done, items in total)."""
_TokenRow = Sequence[int] | NDArray[np.uint32]
Item = TypeVar("Item")


class TokenLosses(NamedTuple):
    nll: Float[Tensor, " N"]
    """−log p of each target."""
    correct: Bool[Tensor, " N"]
    """Whether the target was the most likely token."""
    confidence: Float[Tensor, " N"]
    """Probability of the most likely token."""


def sum_token_losses(
    head: nn.Module, x: Float[Tensor, "N d"], targets: Int[Tensor, " N"], vocab_size: int
) -> EvalResult:
    """Return −Σ log p(target) (summed in float64) and calibration. `x` is the head's input."""
    losses = compute_token_losses(head, x, targets, vocab_size)
    confidence, correct = losses.confidence.cpu().double().numpy(), losses.correct.cpu().double().numpy()
    return EvalResult(float(losses.nll.double().sum()), len(targets), bin_predictions(confidence, correct))


def score_batches(
    model: Transformer,
    items: Sequence[Item],
    length: Callable[[Item], int],
    score: Callable[[list[Item]], EvalResult],
    batch_size: int | None,
    progress: ProgressFn | None,
) -> EvalResult:
    """Batch the items (at least one), call `score` on each batch in evaluation mode, and add up the results."""
    sums, done = [], 0
    with evaluation_mode(model):
        for batch in batch_by_length(items, length, batch_size, model.device):
            sums.append(score(batch))
            done += len(batch)
            if progress is not None:
                progress(done, len(items))
    total_nll = math.fsum(part.total_nll for part in sums)
    calibration = reduce(add, (part.calibration for part in sums))
    return EvalResult(total_nll, sum(part.num_tokens for part in sums), calibration)


def compute_token_losses(
    head: nn.Module, x: Float[Tensor, "N d"], targets: Int[Tensor, " N"], vocab_size: int
) -> TokenLosses:
    """Return, per target, its loss, whether it is the most likely token, and the probability of the most likely token.

    `x` is the head's input. The logits are computed in chunks, to save memory. Raise if a loss is NaN."""
    chunk = max(1, MAX_LOGITS_PER_CHUNK // vocab_size)
    nll, correct, confidence = [], [], []
    for start in range(0, len(x), chunk):
        logits, target = head(x[start : start + chunk]), targets[start : start + chunk]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        log_p, prediction = logits.log_softmax(-1), logits.argmax(-1)  # (N, V), (N,)
        nll.append(F.nll_loss(log_p, target, reduction="none"))
        correct.append(prediction == target)
        confidence.append(log_p.gather(-1, prediction[:, None])[:, 0].exp())
    if not nll:
        return TokenLosses(x.new_zeros(0), x.new_zeros(0).bool(), x.new_zeros(0))
    losses = TokenLosses(torch.cat(nll), torch.cat(correct), torch.cat(confidence))
    if bool(losses.nll.isnan().any()):
        raise WeightError("the logits are NaN, from damaged weights or an overflow; load the weights again, or in fp32")
    return losses


@contextmanager
def evaluation_mode(model: Transformer) -> Iterator[None]:
    """Context manager: evaluation mode without gradients. An out-of-memory error is raised as an InputError."""
    try:
        with torch.no_grad(), eval_mode(model):
            yield
    except torch.OutOfMemoryError:
        raise InputError("the device is out of memory; lower batch_size or context") from None


def batch_by_length(
    items: Sequence[Item], length: Callable[[Item], int], batch_size: int | None, device: torch.device
) -> list[list[Item]]:
    """Batch items of similar length, longest first, so that an out-of-memory error occurs at the start."""
    if batch_size is not None:
        check_positive_int("batch_size", batch_size)
    ordered = sorted(items, key=length, reverse=True)
    batches, start, max_tokens = [], 0, _TOKENS_PER_BATCH.get(device.type, _DEFAULT_TOKENS_PER_BATCH)
    while start < len(ordered):
        rows = batch_size or max(1, max_tokens // max(1, length(ordered[start])))
        batches.append(ordered[start : start + rows])
        start += rows
    return batches


def pad_rows(rows: Sequence[_TokenRow], device: torch.device) -> tuple[Int[Tensor, "B T"], Tensor | None]:
    """Right-pad rows of token ids to one tensor. Return it and its mask: True for tokens; None without padding."""
    width = max(map(len, rows))
    tokens, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.bool)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = torch.from_numpy(np.asarray(row, np.int64))
        mask[index, : len(row)] = True
    return tokens.to(device), None if bool(mask.all()) else mask.to(device)


def resolve_length(name: str, value: int | None, default: int, maximum: int | None, reason: str) -> int:
    """Return `value`, or `default` if it is None. Raise InputError unless `value` is an integer from 1 to `maximum`."""
    if value is None:
        return default
    check_positive_int(name, value)
    if maximum is not None and value > maximum:
        raise InputError(f"{name} is {value}, {reason}; pass at most {maximum}")
    return value


def resolve_context(model: Transformer, context: int | None) -> int:
    """Return the maximum number of input tokens. The default is the model's context, but at most _DEFAULT_CONTEXT."""
    [stack] = model.stacks.values()
    limit: int | None = getattr(stack.embed.position, "max_positions", None)
    default = min(length for length in (model.config.context, limit, _DEFAULT_CONTEXT) if length is not None)
    return resolve_length("context", context, default, limit, f"but the model has positions for {limit} tokens")


def check_texts(texts: Iterable[str]) -> Iterable[str]:
    """Return the texts. Raise on a single string, because each of its characters would be used as a text."""
    if isinstance(texts, str):
        raise InputError("texts is a string; pass a list of texts")
    return texts


def require_tokenizer(tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise InputError("this model has no tokenizer; put the tokenizer files into the checkpoint directory")
    return tokenizer


def special_prefix_and_suffix(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the special tokens that the tokenizer adds before and after a text."""
    encoded, plain = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=False)
    for start in range(len(encoded) - len(plain) + 1):
        if encoded[start : start + len(plain)] == plain:
            return encoded[:start], encoded[start + len(plain) :]
    return [], []


def check_token_ids(max_id: int, vocab_size: int) -> None:
    if max_id >= vocab_size:
        raise InputError(
            f"token id {max_id} is not one of the model's ids, 0 to {vocab_size - 1}; use the model's own tokenizer"
        )
