"""How well an encoder-decoder tells targets after their sources, and how often its own answer is the target."""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from cutaway.errors import InputError
from cutaway.evaluate.results import Seq2SeqResult
from cutaway.evaluate.token_loss import (
    ProgressFn,
    TokenLossSum,
    batch_by_length,
    check_token_ids,
    combine_loss_sums,
    evaluation_mode,
    pad_rows,
    require_tokenizer,
    resolve_positive_int,
    sum_token_losses,
)
from cutaway.generate import generate
from cutaway.generate.generation_config import CheckpointLike, GenerationConfig, unpack_checkpoint
from cutaway.model import EncoderDecoder
from cutaway.tokenizer import Tokenizer
from cutaway.tokenizer.formats.marian import MarianTokenizer


class EncodedPair(NamedTuple):
    source: list[int]
    target: list[int]
    """With the token that starts it, and the one that ends it."""
    text: str
    """The target as the tokenizer writes it."""


def evaluate_seq2seq(
    checkpoint: CheckpointLike,
    pairs: Iterable[tuple[str, str]],
    *,
    exact_match: bool = True,
    batch_size: int | None = None,
    progress: ProgressFn | None = None,
) -> Seq2SeqResult:
    """Loss of each target's tokens and its end after the true ones before them, and exact matches of greedy answers.

    An answer is right if its text is the target's, as the tokenizer writes it. Without `exact_match` none is generated.
    """
    model, found, start = unpack_checkpoint(checkpoint)
    if not isinstance(model, EncoderDecoder):
        raise InputError(
            "this model is no encoder-decoder, so it answers no sources; use evaluate_causal_lm or evaluate_masked_lm"
        )
    tokenizer = require_tokenizer(found)
    batch_size = batch_size if batch_size is None else resolve_positive_int("batch_size", batch_size, 1, None, "")
    every = [_encode_pair(model, tokenizer, start, number, pair) for number, pair in enumerate(pairs)]
    if not every:
        raise InputError("there are no pairs; give at least one source with its target")
    parts = batch_by_length(every, lambda pair: max(len(pair.source), len(pair.target)), batch_size, model.device)
    told, exact, done = [], 0, 0
    for part in parts:
        with evaluation_mode(model):
            told.append(_score_pairs(model, part))
        exact += _count_exact_matches(checkpoint, part, batch_size) if exact_match else 0
        done += len(part)
        if progress is not None:
            progress(done, len(every))
    tokens, whole = sum(len(pair.target) - 1 for pair in every), combine_loss_sums(told)
    return Seq2SeqResult(whole.total_nll, tokens, whole.calibration, exact, len(every))


def _encode_pair(
    model: EncoderDecoder,
    tokenizer: Tokenizer,
    generation_config: GenerationConfig,
    pair_index: int,
    pair: tuple[str, str],
) -> EncodedPair:
    """A pair as ids; refused if it is none, or too long."""
    if isinstance(tokenizer, MarianTokenizer):
        raise InputError("this tokenizer cuts the source's language only, so targets cannot be measured with it")
    if generation_config.decoder_start_token_id is None:
        raise InputError("the checkpoint does not say what a target begins with; set decoder_start_token_id")
    if isinstance(pair, str) or len(pair) != 2:
        raise InputError(f"pair {pair_index} is {pair!r:.60}; give a source and a target")
    source, target = map(tokenizer.encode, pair)
    text = tokenizer.decode(target)
    end = generation_config.eos_token_ids[0] if generation_config.eos_token_ids else None
    if end is not None and target[-1:] != [end]:
        target = [*target, end]
    start = generation_config.decoder_start_token_id
    if len(target) < 2 or target[0] != start:  # an end alone, which may be the same token, starts nothing
        target = [start, *target]
    if not source or len(target) < 2:
        raise InputError(f"pair {pair_index} has an empty side; give a source and a target")
    for name, stack, length in (("source", model.encoder, len(source)), ("target", model.decoder, len(target) - 1)):
        limit = getattr(stack.embed.position, "max_positions", None)
        if limit is not None and length > limit:
            raise InputError(
                f"the {name} of pair {pair_index} has {length} tokens, but the model has positions for {limit}; "
                "shorten it"
            )
    check_token_ids(max(source), model.config.source_vocab_size or model.config.vocab_size)  # type: ignore[union-attr]
    check_token_ids(max(target), model.config.vocab_size)
    return EncodedPair(source, target, text)


def _score_pairs(model: EncoderDecoder, pairs: list[EncodedPair]) -> TokenLossSum:
    source, source_real = pad_rows([pair.source for pair in pairs], model.device)
    target, real = pad_rows([pair.target[:-1] for pair in pairs], model.device)
    x = model.hidden_states(source, target, source_real, real)
    wanted = torch.cat([x[row, : len(pair.target) - 1] for row, pair in enumerate(pairs)])
    targets = torch.tensor([token for pair in pairs for token in pair.target[1:]], device=x.device)
    return sum_token_losses(model.head, wanted, targets, model.config.vocab_size)


def _count_exact_matches(checkpoint: CheckpointLike, pairs: list[EncodedPair], batch_size: int | None) -> int:
    """One token more than the longest target has is enough to see that an answer is another."""
    most = max(len(pair.target) for pair in pairs)
    found = generate(
        checkpoint,
        [pair.source for pair in pairs],
        beams=1,
        max_new_tokens=most,
        temperature=0.0,
        max_num_seqs=batch_size,
    )
    return sum((answer.text or "").strip() == pair.text.strip() for answer, pair in zip(found, pairs, strict=True))
