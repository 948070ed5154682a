"""One pass of a model over a text, kept: every value but what grows with the square of the text.

Scores and patterns are made again from the q and k that were kept, for the heads that are asked for.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from cutaway.lens import pattern
from cutaway.lens.sites import Site
from cutaway.lens.taps import Passing
from cutaway.model import Transformer
from cutaway.serve.inspect.job import Job
from cutaway.serve.inspect.look import Look

SQUARE = ("scores", "pattern")


class Kept:
    """Values by site, and what each attention was given."""

    def __init__(self, look: Look) -> None:
        self.look = look
        self.values: dict[str, Tensor] = {}
        self.calls: dict[str, tuple[Any, tuple[Any, ...]]] = {}
        """By the name of an attention: its kernel, and what it was given."""
        self.inputs: dict[str, Any] = {}
        """What says where tokens stand: `embed.position`, and rotations by layer."""
        self.results: dict[str, Any] = {}
        """What else was worked out for this look, by a name; small."""

    def reader(self, job: Job, passed: Callable[[str, Tensor], None]) -> Any:
        """Writes down what passes, and tells of it; a pass that nobody waits for ends at its next value."""

        def look(passing: Passing) -> None:
            job.check()
            site = passing.site
            self.values[site.name] = passing.value.detach()
            passed(site.name, self[site.name])
            if site.name.endswith(".q"):
                self.calls[site.name.removesuffix(".q")] = (site.module, passing.args)

        return look

    def watch(self, model: Transformer) -> Iterator[RemovableHandle]:
        """Hooks for what has no site of its own: what says where tokens stand."""
        for side, stack in model.stacks.items():
            prefix = f"{side}." if len(model.stacks) > 1 else ""
            parts = {"embed.position": stack.embed.position, **stack.positions}
            for name, module in parts.items():
                if module is not None:
                    yield module.register_forward_hook(self.put_down(f"{prefix}{name}"))

    def put_down(self, name: str) -> Any:
        def look(module: Any, args: Any, out: Any) -> None:
            self.inputs[name] = out

        return look

    def __getitem__(self, name: str) -> Tensor:
        """Of the one row, without its axis."""
        return self.values[name][0]

    def seen(self, attention: str, heads: list[int] | None = None) -> pattern.Seen:
        """Scores and pattern (1, H, T, S) of an attention's heads."""
        kernel, args = self.calls[attention]
        return pattern.seen(kernel, args, heads, pattern.drawn(args))

    @property
    def nbytes(self) -> int:
        storages = [value.untyped_storage() for value in self.values.values()]
        return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def planned(found: Iterable[Site], length: int, source: int | None, itemsize: int) -> int:
    """Bytes that these sites will take."""
    total = 0
    for site in found:
        size = itemsize
        for extent in site.shape(1, length, source):
            size *= extent
        total += size
    return total
