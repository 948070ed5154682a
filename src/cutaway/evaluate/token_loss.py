"""How surprised a model is by tokens: cross-entropy over its head's logits, of which only a chunk is ever there."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import add
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from cutaway.errors import InputError, WeightError
from cutaway.evaluate.calibration import Calibration, bin_predictions
from cutaway.generate.engine.model_runner import eval_mode
from cutaway.model import Transformer
from cutaway.tokenizer import Tokenizer

MAX_LOGITS_PER_CHUNK = 1 << 25
"""Logits that are held at a time: 128 MiB of 32-bit numbers."""
TOKENS_PER_BATCH = {"cpu": 2048}
DEFAULT_TOKENS_PER_BATCH = 16384
"""Tokens that are read in one pass, on a device and on others, unless the caller says how many rows. A CPU gains
nothing by more, and its user would see the progress bar stand still."""
DEFAULT_CONTEXT = 4096
"""Tokens of context, unless the caller says how many: some models could read more than a machine has room for."""
ProgressFn = Callable[[int, int], None]
"""Called with what is done, and how much there is."""
Item = TypeVar("Item")


class TokenLossSum(NamedTuple):
    total_nll: float
    num_correct: int
    """Targets that were the likeliest token."""
    calibration: Calibration
    """How sure of the likeliest it was, and how often that was the target."""


class TokenLosses(NamedTuple):
    nll: Float[Tensor, " N"]
    """−log p of each target."""
    correct: Bool[Tensor, " N"]
    """Whether it was the likeliest token."""
    confidence: Float[Tensor, " N"]
    """p of the likeliest."""


def sum_token_losses(
    head: nn.Module, x: Float[Tensor, "N d"], targets: Int[Tensor, " N"], vocab_size: int
) -> TokenLossSum:
    """−Σ log p(target), from the vectors that the head reads; summed in 64 bits."""
    found = compute_token_losses(head, x, targets, vocab_size)
    right = found.correct.cpu().double().numpy()
    told = bin_predictions(found.confidence.cpu().double().numpy(), right)
    return TokenLossSum(float(found.nll.double().sum()), int(right.sum()), told)


def combine_loss_sums(sums: Sequence[TokenLossSum]) -> TokenLossSum:
    """Of all parts of a text, of which there is at least one."""
    nats = math.fsum(part.total_nll for part in sums)
    calibration = reduce(add, (part.calibration for part in sums))
    return TokenLossSum(nats, sum(part.num_correct for part in sums), calibration)


def compute_token_losses(
    head: nn.Module, x: Float[Tensor, "N d"], targets: Int[Tensor, " N"], vocab_size: int
) -> TokenLosses:
    chunk = max(1, MAX_LOGITS_PER_CHUNK // vocab_size)
    nats, right, confidence = [], [], []
    for start in range(0, len(x), chunk):
        logits, target = head(x[start : start + chunk]), targets[start : start + chunk]
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        log_p, best = wide.log_softmax(-1), wide.argmax(-1)
        nats.append(F.nll_loss(log_p, target, reduction="none"))
        right.append(best == target)
        confidence.append(log_p.gather(-1, best[:, None])[:, 0].exp())
    if not nats:
        return TokenLosses(x.new_zeros(0), x.new_zeros(0).bool(), x.new_zeros(0))
    found = TokenLosses(torch.cat(nats), torch.cat(right), torch.cat(confidence))
    if bool(found.nll.isnan().any()):
        raise WeightError("the logits are not numbers; the weights are damaged, or too large for their dtype")
    return found


@contextmanager
def evaluation_mode(model: Transformer) -> Iterator[None]:
    """No gradients and no dropout; a device that is full is said to be."""
    try:
        with torch.no_grad(), eval_mode(model):
            yield
    except torch.OutOfMemoryError:
        raise InputError("the device has no memory for so much at once; lower the batch or the context") from None


def batch_by_length(
    items: Sequence[Item], length: Callable[[Item], int], batch_size: int | None, device: torch.device
) -> list[list[Item]]:
    """Items of like length together, the longest first: if memory is too small, that is known at once."""
    ordered = sorted(items, key=length, reverse=True)
    found, start, most = [], 0, TOKENS_PER_BATCH.get(device.type, DEFAULT_TOKENS_PER_BATCH)
    while start < len(ordered):
        rows = batch_size or max(1, most // max(1, length(ordered[start])))
        found.append(ordered[start : start + rows])
        start += rows
    return found


def pad_rows(rows: Sequence[Any], device: torch.device) -> tuple[Int[Tensor, "B T"], Tensor | None]:
    """Rows of ids as one tensor, padded on the right, and which are real; None if all are."""
    width = max(map(len, rows))
    tokens, real = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.bool)
    for place, row in enumerate(rows):
        tokens[place, : len(row)] = torch.from_numpy(np.asarray(row, np.int64))
        real[place, : len(row)] = True
    return tokens.to(device), None if bool(real.all()) else real.to(device)


def resolve_positive_int(name: str, value: int | None, default: int, maximum: int | None, reason: str) -> int:
    """A whole number from 1 to `maximum`, or what is taken when none is given."""
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{name} is {value!r:.40}; give a whole number from 1")
    if maximum is not None and value > maximum:
        raise InputError(f"{name} is {value}, {reason}; give at most {maximum}")
    return value


def resolve_context(model: Transformer, context: int | None) -> int:
    """How many tokens are read at once: as told, or the model's own context, up to DEFAULT_CONTEXT."""
    [stack] = model.stacks.values()
    limit: int | None = getattr(stack.embed.position, "max_positions", None)
    own = min(each for each in (model.config.context, limit, DEFAULT_CONTEXT) if each is not None)
    return resolve_positive_int("context", context, own, limit, f"but the model has positions for {limit} tokens")


def check_texts(texts: Any) -> Any:
    """Several texts, not one: its letters would be taken for texts."""
    if isinstance(texts, str):
        raise InputError("texts is one text; put it into a list")
    return texts


def require_tokenizer(tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise InputError("this model has no tokenizer to read text with; put its tokenizer's files beside the weights")
    return tokenizer


def special_prefix_and_suffix(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The special tokens that the tokenizer sets before a text, and those behind it."""
    whole, plain = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=False)
    for place in range(len(whole) - len(plain) + 1):
        if whole[place : place + len(plain)] == plain:
            return whole[:place], whole[place + len(plain) :]
    return [], []


def check_token_ids(max_id: int, vocab_size: int) -> None:
    if max_id >= vocab_size:
        raise InputError(
            f"the tokenizer makes the id {max_id}, and the model's vocabulary has ids 0 to {vocab_size - 1}; they do"
            " not belong together"
        )
