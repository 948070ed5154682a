"""Spans of the text in `{% generation %}` blocks of a chat template."""

import re
from collections.abc import Callable

from cutaway.errors import InputError
from cutaway.tokenizer.chat.sandbox import GENERATION_MARKERS

Span = tuple[int, int]
"""First character, and the character after the last one."""
START_MARKER, END_MARKER = "\ufdd0", "\ufdd1"
"""Unicode noncharacters, which do not occur in text."""
_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\b")


def has_generation_blocks(template: str) -> bool:
    """Whether the source of a chat template contains generation blocks."""
    return _GENERATION_TAG.search(template) is not None


def find_generation_spans(render: Callable[[], str]) -> tuple[str, list[Span]]:
    """Render with and without markers. Returns the text and the spans of its generation blocks.

    Raises InputError if the markers change the text: a template that e.g. trims a captured block has no exact spans.
    """
    text = render()
    token = GENERATION_MARKERS.set((START_MARKER, END_MARKER))
    try:
        marked = render()
    finally:
        GENERATION_MARKERS.reset(token)
    plain, spans, start = [], list[Span](), None
    position = 0
    for piece in re.split(f"([{START_MARKER}{END_MARKER}])", marked):
        if piece == START_MARKER and start is None:
            start = position
        elif piece == END_MARKER and start is not None:
            spans.append((start, position))
            start = None
        else:
            plain.append(piece)
            position += len(piece)
    is_reserved = START_MARKER in text or END_MARKER in text
    if is_reserved or "".join(plain) != text or start is not None:
        raise InputError(
            "the generation blocks of the chat template have no exact position in its output, because they are nested,"
            " their output is changed afterwards, or the messages contain the characters U+FDD0 or U+FDD1; write"
            " {% generation %} directly around the text of the assistant"
        )
    return text, [span for span in spans if span[0] < span[1]]
