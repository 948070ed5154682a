"""Entities of tag sequences in the IOB2, IOB1, IOE and IOBES schemes, as in conlleval and seqeval."""

import re
from collections.abc import Sequence
from typing import NamedTuple

_TAG = re.compile(r"[BIESLU]-.")
"""Prefixes: begin, inside, end (E, L), single (S, U)."""


class Entity(NamedTuple):
    """Type of an entity, and the indices of its first and last word."""

    type: str
    first: int
    last: int


def marks_entities(labels: Sequence[str]) -> bool:
    """Whether tags mark entities: each is 'O' or has a prefix of a scheme, such as B-PER."""
    return any(label != "O" for label in labels) and all(label == "O" or _TAG.match(label) for label in labels)


def find_entities(tags: Sequence[str]) -> list[Entity]:
    """Entities of a sequence of tags. An I tag after another type, or after O, begins an entity."""
    entities, first = [], 0
    previous, previous_type = "O", ""
    for index, tag in enumerate([*tags, "O"]):
        prefix, _, type_ = tag.partition("-")
        ends = previous != "O" and (previous in "ESLU" or prefix in ("B", "S", "U", "O") or type_ != previous_type)
        if ends:
            entities.append(Entity(previous_type, first, index - 1))
        if prefix != "O" and (previous == "O" or ends):
            first = index
        previous, previous_type = prefix, type_
    return entities
