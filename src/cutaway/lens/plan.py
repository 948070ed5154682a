"""What a trace will hold, before anything runs."""

from typing import NamedTuple

from cutaway.lens.drawing import bytes_in_words, listing


class Planned(NamedTuple):
    """A site, and what one call holds of it."""

    site: str
    axes: str
    shape: tuple[int, ...]
    nbytes: int


class Plan(list[Planned]):
    """What a trace will hold."""

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for row in self)

    def __repr__(self) -> str:
        return f"{listing(list(self))}\n{bytes_in_words(self.nbytes)} a call"
