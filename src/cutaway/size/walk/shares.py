"""Weights in shares (PyTorch's FSDP2): gathered block by block when they are used, gradients scattered block by block.

What lies outside the blocks (tables, final norm, head) is one more group, gathered for the whole step.
"""

from collections.abc import Collection, Iterable
from math import prod

from cutaway.size.walk.storage import Key, Meter, Storage, Weight
from cutaway.size.walk.tally import Tally

Group = Key
ENDS: Group = ()
GATHERED, SENT = "gathered weights", "gradients to send"


def group_of(key: Key, common: Collection[str] = ()) -> Group:
    """A block's own, or the ends: a bias that layers share stands outside them, and in `common` stacks all do."""
    inside = len(key) > 2 and isinstance(key[1], int) and key[2] != "bias table" and key[0] not in common
    return key[:2] if inside else ENDS


class Shares:
    """Between `sharers` devices, of which there are `copies` times as many; `width` bytes a number when gathered."""

    def __init__(
        self,
        meter: Meter,
        tally: Tally,
        weights: Iterable[Weight],
        *,
        sharers: int,
        copies: int,
        width: int,
        kept: int,
        common: Collection[str] = (),
    ) -> None:
        """`common` are stacks whose layers share their weights, which then stay with the ends."""
        self.meter, self.tally, self.sharers, self.copies = meter, tally, sharers, copies
        self.width, self.kept, self.common = width, kept, common
        self.elements: dict[Group, int] = {}
        for weight in weights:
            group = group_of(weight.key, common)
            self.elements[group] = self.elements.get(group, 0) + self.share(weight)
        self.order: list[Group] = []
        """Groups as the forward pass has used them."""
        self.coming: dict[Group, Storage] = {}
        """What is being received, in one piece;"""
        self.open: dict[Group, Storage] = {}
        """what it is then cut into;"""
        self.before: Storage | None = None
        """and the piece before, which the forward pass keeps till the next is there."""
        self.unsent: dict[Key, Storage] = {}
        self.input: Storage | None = None
        """The last that was sent, kept till the next is."""
        self.scattered: dict[Group, Storage] = {}

    def share(self, weight: Weight) -> int:
        """Rows are dealt out; the last devices' are filled up."""
        return -(-weight.shape[0] // self.sharers) * prod(weight.shape[1:])

    def receive(self, group: Group) -> None:
        if self.sharers == 1 or group in self.coming or group in self.open:
            return
        size = self.elements[group] * self.width
        own = Storage(self.meter, size, GATHERED) if self.width != self.kept else None  # narrowed before it is sent
        self.coming[group] = Storage(self.meter, size * self.sharers, GATHERED)
        self.tally.send("all-gather", size * self.sharers)
        del own

    def cut(self, group: Group) -> None:
        if group not in self.open:
            self.open[group] = Storage(self.meter, self.elements[group] * self.width * self.sharers, GATHERED)

    def has(self, group: Group) -> bool:
        return group in self.elements

    def enter(self, group: Group) -> None:
        """Before a block is run."""
        self.receive(group)
        self.before = None
        self.cut(group)
        self.before = self.coming.pop(group, None)

    def leave(self, group: Group) -> None:
        """After it was run; the ends stay."""
        self.order.append(group)
        if group == ENDS:
            self.before = None
        else:
            del self.open[group]

    def enter_back(self, group: Group) -> None:
        """Before the way back through a block; the next one on that way is asked for at once."""
        assert self.order[-1] == group
        self.receive(group)
        self.cut(group)
        self.coming.pop(group, None)
        self.order.pop()
        if self.order:
            self.receive(self.order[-1])

    def take(self, key: Key, gradient: Storage) -> None:
        self.unsent[key] = gradient

    def leave_back(self, group: Group) -> None:
        """After it: weights go, gradients are put into one piece and scattered."""
        del self.open[group]
        self.input = None
        size = self.elements[group] * self.kept
        sent = Storage(self.meter, size * self.sharers, SENT)
        for key in [key for key in self.unsent if group_of(key, self.common) == group]:
            del self.unsent[key]
        fresh = Storage(self.meter, size, "gradients")
        self.input = sent
        if self.sharers > 1:
            self.tally.send("reduce-scatter", size * self.sharers)
        if self.copies > 1:
            self.tally.send("all-reduce", size)
        self.scattered.setdefault(group, fresh)  # a block that is used again adds to what is there

    def finish(self) -> int:
        """All is sent; bytes of the gradients that stay."""
        self.input = None
        return sum(each.bytes for each in self.scattered.values())
