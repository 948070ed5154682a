"""A vocabulary on its way from a file to a pipeline, and the merges that a list of ranked pieces implies."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tokenizers import AddedToken

from cutaway.errors import InputError
from cutaway.tokenizer.file_io import MAX_VOCAB_SIZE

MAX_PIECE_LENGTH = 4096
"""Characters; a longer piece would make the search for its merges quadratic."""


@dataclass
class Vocabulary:
    """What every source of tokens comes down to, whichever file it was read from."""

    model_type: Literal["BPE", "Unigram", "WordPiece"]
    ids: dict[str, int] = field(default_factory=dict)
    """For BPE and WordPiece."""
    scores: list[tuple[str, float]] = field(default_factory=list)
    """For Unigram: the id is the place in the list."""
    merges: list[tuple[str, str]] = field(default_factory=list)
    unk_id: int | None = None
    precompiled_charsmap: bytes | None = None
    """SentencePiece's compiled table of normalizations."""
    added_tokens: list[AddedToken] = field(default_factory=list)
    """Pieces that are matched whole, before the text is split."""
    post_processor: Any = None
    """As tokenizer.json has it."""


def generate_merges(ranks: Mapping[str, int], skip_tokens: Collection[str] = ()) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, best rank first: what BPE without a list of merges does.

    Llama's SentencePiece models and tiktoken's files hold only pieces and their order. A pair may be joined whenever
    the result is a piece, and the best result is joined first.
    """
    found: list[tuple[int, int, int, int, str, str]] = []
    for piece, rank in ranks.items():
        if len(piece) > MAX_PIECE_LENGTH:
            raise InputError(f"a token of the vocabulary has {len(piece):,} characters; get the tokenizer's file again")
        if piece in skip_tokens:
            continue
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in ranks and right in ranks and left not in skip_tokens and right not in skip_tokens:
                found.append((rank, cut, ranks[left], ranks[right], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def validate_vocab(value: object, source: object) -> dict[str, int]:
    """A token → id object, each id a small whole number used once."""
    if not isinstance(value, dict) or not value or len(value) > MAX_VOCAB_SIZE:
        raise InputError(f"{source} has no vocabulary of tokens and ids; get the file again")
    for token, number in value.items():
        if not isinstance(token, str) or isinstance(number, bool) or not isinstance(number, int):
            raise InputError(
                f"{source} gives token {token!r} the id {number!r}, not a whole number; get the file again"
            )
        if not 0 <= number < MAX_VOCAB_SIZE:
            raise InputError(
                f"{source} gives token {token!r} the id {number}, outside 0 to {MAX_VOCAB_SIZE - 1}; fix it"
            )
    return value
