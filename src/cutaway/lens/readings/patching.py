"""Which site carries the answer: values of one run put into another, place by place.

A score of 1 means that the answer is all there, 0 that nothing is: (patched − corrupt) / (clean − corrupt), of one
token's logit, or of the difference of two.
"""

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from cutaway.errors import InputError
from cutaway.lens.choice import Numbers, chosen
from cutaway.lens.edit import edit
from cutaway.lens.readings.reading import Reading
from cutaway.lens.readings.subject import Subject, Text, Token, resting, subject, wide
from cutaway.lens.sites import Site, sites
from cutaway.lens.trace import trace

ROWS = 32
"""Cells of the matrix that are computed in one pass, each as a row of its batch."""


def patching(
    model: Any,
    clean: Text,
    corrupt: Text,
    of: Token,
    *,
    against: Token | None = None,
    site: str = "resid_post",
    heads: bool = False,
    position: int = -1,
    layers: Numbers | None = None,
    source: tuple[Text, Text] | None = None,
    progress: bool = True,
) -> Reading:
    """Put each layer's clean value at `site` into the corrupt run, one position at a time (or one head): layer × place.

    The texts must be of one length. An encoder-decoder reads `source`: the clean and the corrupt one.
    """
    pair = Pair(model, clean, corrupt, of, against, position, source)
    asked = pair.sites(site, layers)
    axis = "H" if heads else "T"
    if any(axis not in each.axes for each in asked):
        missing = "heads; take attn.z" if heads else "tokens; take resid_post"
        raise InputError(f"'{site}' has no axis for {missing}")
    kept = pair.values(pair.clean, asked)
    rows = []
    for each in shown_as_bar(asked, progress, f"patching {site}"):
        value, place = kept[each.name], each.axes.index(axis)
        cells = range(value.shape[place])
        patches = [Patch(value, place, cells[at : at + ROWS]) for at in range(0, len(cells), ROWS)]
        rows.append(torch.cat([pair.share({each.name: patch}, patch.rows) for patch in patches]))
    if len({len(row) for row in rows}) > 1:
        raise InputError("layers differ in their heads, so they make no matrix; choose layers that are alike")
    labels = tuple(str(head) for head in range(len(rows[0]))) if heads else pair.words
    names = tuple(each.name.removesuffix(f".{site}").replace("blocks.", "") for each in asked)
    title = f"what of {pair.title} comes back with the clean {site}"
    return Reading(title, torch.stack(rows), ("layer", "head" if heads else "token"), (names, labels), note=pair.note)


class Pair:
    """A clean and a corrupt run of one model, and the answer that is looked for."""

    def __init__(
        self,
        model: Any,
        clean: Text,
        corrupt: Text,
        of: Token,
        against: Token | None,
        position: int,
        source: tuple[Text, Text] | None,
    ) -> None:
        first, second = (None, None) if source is None else source
        self.clean, self.corrupt = subject(model, clean, first), subject(model, corrupt, second)
        texts = (self.clean.tokens, self.corrupt.tokens, "texts"), (self.clean.source, self.corrupt.source, "sources")
        for mine, other, what in texts:
            if mine is not None and other is not None and mine.shape != other.shape:
                raise InputError(
                    f"the {what} have {mine.shape[1]} and {other.shape[1]} tokens; a value is put where it came from, "
                    "so give texts of one length"
                )
        self.clean.need_head()
        self.of = self.clean.token(of, "of")
        self.against = None if against is None else self.clean.token(against, "against")
        self.position = self.clean.position(position)
        self.known = sites(self.clean.model)
        with resting(self.clean.model):
            self.high, self.low = self.answer(self.clean.run()), self.answer(self.corrupt.run())
        if torch.equal(self.high, self.low):
            raise InputError("both texts give the same answer, so nothing carries a difference; give two that differ")
        first_word, *rest = self.clean.texts([self.of] if self.against is None else [self.of, self.against])
        self.title = f"the logit of {first_word!r}" + (f" − {rest[0]!r}" if rest else "")
        self.note = f"clean {float(self.high):.3f}, corrupt {float(self.low):.3f}; 1 is all of the difference"

    @property
    def words(self) -> tuple[str, ...]:
        pairs = zip(self.clean.words, self.corrupt.words, strict=True)
        return tuple(mine if mine == other else f"{mine}/{other}" for mine, other in pairs)

    def sites(self, site: str, layers: Numbers | None) -> list[Site]:
        mine = self.clean.prefix
        return chosen(self.known, [f"{mine}blocks.*.{site}"], layers)

    def answer(self, logits: Tensor) -> Tensor:
        """(rows,)"""
        found = wide(logits)[:, self.position]
        return found[:, self.of] - (0 if self.against is None else found[:, self.against])

    def values(self, which: Subject, asked: Iterable[Site]) -> dict[str, Tensor]:
        names = [each.name for each in asked]
        with resting(which.model), trace(which.model, *names) as t:
            which.run()
        return {name: t[name].as_subclass(Tensor) for name in names}

    def share(self, changes: Any, rows: int = 1) -> Tensor:
        """(rows,): how much of the difference is there in the corrupt run, changed so."""
        model = self.clean.model
        with resting(model), edit(model, changes):
            found = self.answer(repeated(self.corrupt, rows).run())
        return (found - self.low) / (self.high - self.low)


class Patch:
    """Row r takes the clean value at its own place of an axis."""

    def __init__(self, clean: Tensor, axis: int, cells: range) -> None:
        self.clean, self.axis, self.cells = clean, axis, cells

    @property
    def rows(self) -> int:
        return len(self.cells)

    def __call__(self, value: Tensor) -> Tensor:
        changed = value.clone()
        for row, cell in enumerate(self.cells):
            changed[row].select(self.axis - 1, cell).copy_(self.clean[0].select(self.axis - 1, cell))
        return changed


def repeated(which: Subject, rows: int) -> Subject:
    source = None if which.source is None else which.source.expand(rows, -1)
    return Subject(which.model, which.tokenizer, which.tokens.expand(rows, -1), source)


def shown_as_bar(steps: list[Site], progress: bool, what: str) -> Iterable[Site]:
    """A bar for a person, which goes when it is done."""
    if not progress or not sys.stderr.isatty():
        return steps
    from rich.console import Console
    from rich.progress import track

    return track(steps, what, transient=True, console=Console(stderr=True))
