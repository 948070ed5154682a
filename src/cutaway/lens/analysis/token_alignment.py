"""Alignment of the tokens of two texts."""

from collections.abc import Sequence
from difflib import SequenceMatcher


def align_tokens(clean: Sequence[int], changed: Sequence[int]) -> list[tuple[int, int]]:
    """Return pairs of corresponding positions (in `clean`, in `changed`), in order.

    Texts of equal length are aligned by index. Otherwise equal tokens are aligned by the longest matching blocks, and
    a run of differing tokens is aligned if it has the same length in both texts.
    """
    if len(clean) == len(changed):
        return [(index, index) for index in range(len(clean))]
    pairs: list[tuple[int, int]] = []
    matcher = SequenceMatcher(None, clean, changed, autojunk=False)
    for _, start, end, changed_start, changed_end in matcher.get_opcodes():
        if end - start == changed_end - changed_start:
            pairs += zip(range(start, end), range(changed_start, changed_end), strict=True)
    return pairs
