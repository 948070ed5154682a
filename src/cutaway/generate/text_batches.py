"""Batches of encoded texts of similar length, for models that compute one output per text."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from cutaway.config import Config
from cutaway.errors import InputError
from cutaway.model import EncoderDecoder, Transformer
from cutaway.tokenizer import Tokenizer
from cutaway.tokenizer.text_encoder import EncodedText

MAX_BATCH_TOKENS = 4096
"""Maximum number of tokens per forward pass, padding included."""
MAX_BATCH_TEXTS = 128


def max_text_len(config: Config, tokenizer: Tokenizer) -> int:
    """Maximum number of tokens of a text: the context of the model, or less if the tokenizer or the head says so."""
    limits = (config.context, tokenizer.model_max_length, getattr(config.head, "max_length", None))
    return min((limit for limit in limits if limit is not None), default=2**31 - 1)


def has_token_types(config: Config) -> bool:
    """Whether the model distinguishes the first and the second text of a pair."""
    return any(stack.embedding.token_types > 1 for stack in config.stacks.values())


def batches_by_length(lengths: Sequence[int], batch_size: int | None = None) -> Iterator[list[int]]:
    """Indices of the texts of each batch. Texts of similar length are in one batch, which reduces padding.

    `batch_size`: number of texts per batch. Default: as many as fit in MAX_BATCH_TOKENS, at most MAX_BATCH_TEXTS.
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        num_tokens = lengths[index] * (len(batch) + 1)  # the longest text is the last one
        is_full = len(batch) == (batch_size or MAX_BATCH_TEXTS)
        if batch and (is_full or (batch_size is None and num_tokens > MAX_BATCH_TOKENS)):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def run_on_texts(
    run: Callable[..., Tensor],
    model: Transformer,
    texts: Sequence[EncodedText],
    pad_id: int,
    *,
    batch_size: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Tensor]:
    """Outputs of `run(tokens, mask, token_types=…)` for each text, in fp32 on the CPU, without those of padding.

    An output with one row per token is cut to the length of its text.
    """
    if isinstance(model, EncoderDecoder):
        raise InputError("this model is an encoder-decoder, which computes no output per text; pass an encoder")
    outputs: dict[int, Tensor] = {}
    lengths = [len(text.ids) for text in texts]
    if 0 in lengths:
        raise InputError(f"text {lengths.index(0)} has no tokens, so it has no output; leave out empty texts")
    with_types = has_token_types(model.config)
    for batch in batches_by_length(lengths, batch_size):
        width = max(lengths[index] for index in batch)
        # (B, T), padded on the right
        tokens = torch.tensor([[*texts[i].ids, *[pad_id] * (width - lengths[i])] for i in batch])
        mask = torch.arange(width) < torch.tensor([lengths[i] for i in batch])[:, None]
        types = torch.tensor([[*texts[i].type_ids, *[0] * (width - lengths[i])] for i in batch])
        kwargs = {"token_types": types.to(model.device)} if with_types else {}
        with torch.no_grad():
            result = run(tokens.to(model.device), None if bool(mask.all()) else mask.to(model.device), **kwargs)
        rows = result.float().cpu()
        outputs |= {
            index: row[: lengths[index]] if row.ndim > 1 else row for index, row in zip(batch, rows, strict=True)
        }
        if progress is not None:
            progress(len(outputs), len(texts))
    return [outputs[index] for index in range(len(texts))]
