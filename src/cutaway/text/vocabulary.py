"""A vocabulary on its way from a file to a pipeline, and the merges that a list of ranked pieces implies."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tokenizers import AddedToken

from cutaway.errors import InputError

LONGEST_PIECE = 4096
"""Characters; a longer piece would make the search for its merges quadratic."""


@dataclass
class Vocabulary:
    """What every source of tokens comes down to, whichever file it was read from."""

    kind: Literal["BPE", "Unigram", "WordPiece"]
    ids: dict[str, int] = field(default_factory=dict)
    """For BPE and WordPiece."""
    scores: list[tuple[str, float]] = field(default_factory=list)
    """For Unigram: the id is the place in the list."""
    merges: list[tuple[str, str]] = field(default_factory=list)
    unk_id: int | None = None
    charsmap: bytes | None = None
    """SentencePiece's compiled table of normalisations."""
    added: list[AddedToken] = field(default_factory=list)
    """Pieces that are matched whole, before the text is split."""
    post_processor: Any = None
    """As tokenizer.json has it."""


def merges_of(ranks: Mapping[str, int], skip: Collection[str] = ()) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, best rank first: what BPE without a list of merges does.

    Llama's SentencePiece models and tiktoken's files hold only pieces and their order. A pair may be joined whenever
    the result is a piece, and the best result is joined first.
    """
    found: list[tuple[int, int, int, int, str, str]] = []
    for piece, rank in ranks.items():
        if len(piece) > LONGEST_PIECE:
            raise InputError(f"a token of the vocabulary has {len(piece):,} characters; get the tokenizer's file again")
        if piece in skip:
            continue
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in ranks and right in ranks and left not in skip and right not in skip:
                found.append((rank, cut, ranks[left], ranks[right], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]
