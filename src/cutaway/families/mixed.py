"""Stacks that mix kinds of layer: fields that are about some of the layers alone."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cutaway.families.fields import Field, Theirs
from cutaway.families.tree import Tree


@dataclass(frozen=True)
class Where:
    """Fields of those layers alone whose FFN is of one kind, in a stack that mixes them."""

    ffn: str
    fields: tuple[Field, ...]
    stack: str = "decoder"

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(key for entry in self.fields for key in entry.keys)

    def read(self, theirs: Theirs, ours: Tree) -> None:
        for entry in self.fields:
            entry.read(theirs, self._part(ours))

    def write(self, ours: Tree, theirs: dict[str, Any]) -> None:
        part = self._part(ours)
        for entry in self.fields if part.blocks(self.stack) else ():
            entry.write(part, theirs)

    def _part(self, ours: Tree) -> Tree:
        blocks = [block for block in ours.blocks(self.stack) if block["ffn"]["kind"] == self.ffn]
        part = Tree({})
        part.data = ours.data | {self.stack: ours.data[self.stack] | {"blocks": blocks}}
        return part


def every(n: int, key: str | None = None) -> Callable[[Theirs, int], list[str]]:
    """Each n-th layer looks far and the others near; n may stand under an older key."""

    def types(theirs: Theirs, layers: int) -> list[str]:
        period = theirs.number(key, n) if key else n
        return ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(layers)]

    return types
