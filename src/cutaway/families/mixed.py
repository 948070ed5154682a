"""Stacks that mix kinds of layer: fields that are about some of the layers alone."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cutaway.errors import ConfigError
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


@dataclass(frozen=True)
class LayerTypes:
    """Which layers look near and which far: `layer_types` and the window's width."""

    default: Callable[[Theirs, int], list[str]]
    """What an absent list means, for so many layers."""
    stack: str = "decoder"
    window: str = "sliding_window"
    window_default: int | None = None
    extra: tuple[str, ...] = ()
    """Older keys that the default reads."""
    on: Callable[[Theirs], bool] = lambda theirs: True
    """Whether windows are used at all."""
    to: Callable[[int], int] = lambda window: window
    back: Callable[[int], int] = lambda window: window

    @property
    def keys(self) -> tuple[str, ...]:
        return ("layer_types", self.window, *self.extra)

    def read(self, theirs: Theirs, ours: Tree) -> None:
        blocks = ours.blocks(self.stack)
        types = theirs.get("layer_types")
        types = self.default(theirs, len(blocks)) if types is None else types
        window = theirs.get(self.window, self.window_default) if self.on(theirs) else None
        if not isinstance(types, list) or len(types) < len(blocks):
            raise ConfigError(f"config.json's 'layer_types' must be a list of {len(blocks)} words, one a layer")
        for block, kind in zip(blocks, types, strict=False):
            if kind not in ("full_attention", "sliding_attention"):
                raise ConfigError(
                    f"config.json's 'layer_types' has {kind!r}; cutaway has full_attention and sliding_attention"
                )
            near = window if kind == "sliding_attention" else None
            block["attention"]["window"] = None if near is None else self.to(near)

    def write(self, ours: Tree, theirs: dict[str, Any]) -> None:
        windows = [block["attention"]["window"] for block in ours.blocks(self.stack)]
        near = {window for window in windows if window is not None}
        if len(near) > 1:
            raise ConfigError(f"layers have windows of {sorted(near)}, and this family has one width for all")
        theirs["layer_types"] = ["full_attention" if window is None else "sliding_attention" for window in windows]
        if near:
            theirs[self.window] = self.back(near.pop())


def every(n: int, key: str | None = None) -> Callable[[Theirs, int], list[str]]:
    """Each n-th layer looks far and the others near; n may stand under an older key."""

    def types(theirs: Theirs, layers: int) -> list[str]:
        period = theirs.number(key, n) if key else n
        return ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(layers)]

    return types
