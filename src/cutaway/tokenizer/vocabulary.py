"""Vocabulary read from a tokenizer file, and BPE merges generated from ranked pieces."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from tokenizers import AddedToken
from tokenizers.processors import PostProcessor

from cutaway.errors import InputError
from cutaway.tokenizer.file_io import MAX_VOCAB_SIZE

MAX_PIECE_LENGTH = 4096
"""Maximum number of characters of a piece. The time to generate merges is quadratic in this number."""


@dataclass
class Vocabulary:
    """Contents of a vocabulary file in any format: tokens, merges, scores and normalization table."""

    model_type: Literal["BPE", "Unigram", "WordPiece"]
    ids: dict[str, int] = field(default_factory=dict)
    """Token → id, for BPE and WordPiece."""
    scores: list[tuple[str, float]] = field(default_factory=list)
    """(piece, score), for Unigram; the id is the index."""
    merges: list[tuple[str, str]] = field(default_factory=list)
    unk_id: int | None = None
    precompiled_charsmap: bytes | None = None
    """Compiled normalization table of SentencePiece."""
    added_tokens: list[AddedToken] = field(default_factory=list)
    """Tokens that are found in the text before it is normalized and split."""
    post_processor: PostProcessor | None = None
    """Post-processor of tokenizer.json."""


def generate_merges(ranks: Mapping[str, int], skip_tokens: Collection[str] = ()) -> list[tuple[str, str]]:
    """Generate BPE merges: all pairs of pieces whose concatenation is a piece, ordered by its rank, lowest first.

    SentencePiece models of Llama and tiktoken files contain only pieces and their ranks, no merges.
    """
    merges: list[tuple[int, int, int, int, str, str]] = []
    for piece, rank in ranks.items():
        if len(piece) > MAX_PIECE_LENGTH:
            raise InputError(f"a token of the vocabulary has {len(piece):,} characters; download the file again")
        if piece in skip_tokens:
            continue
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in ranks and right in ranks and left not in skip_tokens and right not in skip_tokens:
                merges.append((rank, cut, ranks[left], ranks[right], left, right))
    merges.sort()
    return [(left, right) for *_, left, right in merges]


def validate_vocab(value: object, source: object) -> dict[str, int]:
    """Return a token → id mapping; raise InputError unless tokens are strings and ids integers below MAX_VOCAB_SIZE."""
    if not isinstance(value, dict) or not value:
        raise InputError(f"{source} has no vocabulary that maps tokens to ids; download the file again")
    if len(value) > MAX_VOCAB_SIZE:
        raise InputError(
            f"{source} has {len(value):,} tokens, but at most {MAX_VOCAB_SIZE:,} are supported; download the file again"
        )
    for token, token_id in value.items():
        if not isinstance(token, str) or isinstance(token_id, bool) or not isinstance(token_id, int):
            raise InputError(f"{source} has the id {token_id!r} for token {token!r}, not an integer; fix it")
        if not 0 <= token_id < MAX_VOCAB_SIZE:
            raise InputError(f"{source} has the id {token_id} for token {token!r}; the maximum is {MAX_VOCAB_SIZE - 1}")
    return value
