"""Sequence-to-sequence evaluation: loss of targets given sources, and exact match of greedy decoding."""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from cutaway.errors import InputError
from cutaway.evaluate.results import EvalResult, Seq2SeqResult
from cutaway.evaluate.token_loss import (
    ProgressFn,
    check_token_ids,
    pad_rows,
    require_tokenizer,
    score_batches,
    sum_token_losses,
)
from cutaway.generate import generate
from cutaway.generate.generation_config import CheckpointLike, GenerationConfig, unpack_checkpoint
from cutaway.model import EncoderDecoder
from cutaway.tokenizer import Tokenizer
from cutaway.tokenizer.formats.marian import MarianTokenizer


class _EncodedPair(NamedTuple):
    source: list[int]
    target: list[int]
    """Token ids of the target, with the decoder start token and the EOS token."""
    text: str
    """Text of the target after encoding and decoding."""


def evaluate_seq2seq(
    checkpoint: CheckpointLike,
    pairs: Iterable[tuple[str, str]],
    *,
    exact_match: bool = True,
    batch_size: int | None = None,
    progress: ProgressFn | None = None,
) -> Seq2SeqResult:
    """Evaluate an encoder-decoder on (source, target) pairs: teacher-forced loss, and exact match of greedy decoding.

    The loss is over the target's tokens and the EOS token. For the exact match, the generated text is compared with the
    target after encoding and decoding. Without `exact_match` nothing is generated.
    """
    model, tokenizer, generation_config = unpack_checkpoint(checkpoint)
    if not isinstance(model, EncoderDecoder):
        raise InputError("this model is not an encoder-decoder; use evaluate_causal_lm or evaluate_masked_lm")
    tokenizer = require_tokenizer(tokenizer)
    encoded = [_encode_pair(model, tokenizer, generation_config, index, pair) for index, pair in enumerate(pairs)]
    if not encoded:
        raise InputError("pairs is empty; pass at least one (source, target)")
    num_matches = 0

    def score(batch: list[_EncodedPair]) -> EvalResult:
        nonlocal num_matches
        loss_sum = _score_pairs(model, batch)
        num_matches += _count_exact_matches(checkpoint, batch, batch_size) if exact_match else 0
        return loss_sum

    total = score_batches(model, encoded, lambda pair: max(map(len, pair[:2])), score, batch_size, progress)
    return Seq2SeqResult(**vars(total), num_exact_matches=num_matches, num_pairs=len(encoded))


def _encode_pair(
    model: EncoderDecoder,
    tokenizer: Tokenizer,
    generation_config: GenerationConfig,
    pair_index: int,
    pair: tuple[str, str],
) -> _EncodedPair:
    """Tokenize a pair. Raise if it is not a pair, or if the source or target is empty or too long."""
    if isinstance(tokenizer, MarianTokenizer):
        raise InputError("a Marian tokenizer cannot encode targets, so none can be scored; use another checkpoint")
    if generation_config.decoder_start_token_id is None:
        raise InputError("no decoder start token is known; set decoder_start_token_id in the generation config")
    if isinstance(pair, str) or len(pair) != 2:
        raise InputError(f"pair {pair_index} must be a tuple (source, target) of two strings, not {pair!r:.60}")
    source, target = map(tokenizer.encode, pair)
    text = tokenizer.decode(target)
    eos_token_id = generation_config.eos_token_ids[0] if generation_config.eos_token_ids else None
    if eos_token_id is not None and target[-1:] != [eos_token_id]:
        target = [*target, eos_token_id]
    start_token_id = generation_config.decoder_start_token_id
    # The start token and EOS may be the same token. A target of only one token is then EOS, not the start.
    if len(target) < 2 or target[0] != start_token_id:
        target = [start_token_id, *target]
    if not source or len(target) < 2:
        raise InputError(f"pair {pair_index} has an empty source or target; pass text for both")
    for name, stack, length in (("source", model.encoder, len(source)), ("target", model.decoder, len(target) - 1)):
        limit = getattr(stack.embed.position, "max_positions", None)
        if limit is not None and length > limit:
            raise InputError(f"the {name} of pair {pair_index} has {length} tokens; shorten it to {limit} tokens")
    check_token_ids(max(source), model.config.source_vocab_size or model.config.vocab_size)  # type: ignore[union-attr]
    check_token_ids(max(target), model.config.vocab_size)
    return _EncodedPair(source, target, text)


def _score_pairs(model: EncoderDecoder, pairs: list[_EncodedPair]) -> EvalResult:
    source, source_mask = pad_rows([pair.source for pair in pairs], model.device)
    target, target_mask = pad_rows([pair.target[:-1] for pair in pairs], model.device)
    x = model.hidden_states(source, target, source_mask, target_mask)  # (B, T, d)
    scored = torch.cat([x[row, : len(pair.target) - 1] for row, pair in enumerate(pairs)])
    targets = torch.tensor([token for pair in pairs for token in pair.target[1:]], device=x.device)
    return sum_token_losses(model.lm_head, scored, targets, model.config.vocab_size)


def _count_exact_matches(checkpoint: CheckpointLike, pairs: list[_EncodedPair], batch_size: int | None) -> int:
    """Count the pairs whose greedy output equals the target.

    Generating one token more than the longest target is enough to detect a mismatch.
    """
    max_new_tokens = max(len(pair.target) for pair in pairs)
    sources = [pair.source for pair in pairs]
    outputs = generate(
        checkpoint, sources, beams=1, max_new_tokens=max_new_tokens, temperature=0.0, max_num_seqs=batch_size
    )
    return sum((output.text or "").strip() == pair.text.strip() for output, pair in zip(outputs, pairs, strict=True))
