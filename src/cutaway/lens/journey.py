"""One token's way through a model: what it is at every site, what each part adds to it, what it would say by then.

Values are reduced while they pass, so that a journey costs one forward pass and holds a vector a site.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cutaway.errors import InputError
from cutaway.lens.choice import chosen, numbers
from cutaway.lens.drawing import table
from cutaway.lens.equations import equation, is_added, on_stream, only_adds, stream_before
from cutaway.lens.models import ours, run
from cutaway.lens.pattern import given
from cutaway.lens.sites import Site, sites
from cutaway.lens.taps import Passing, Taps
from cutaway.model import Transformer
from cutaway.model.stack import Stack

Likely = tuple[tuple[int, float], ...]
"""Tokens and their probabilities, the likeliest first."""
BEST = 5


@dataclass(frozen=True)
class Stage:
    """A value on the way, by its site's name."""

    site: str
    equation: str
    axes: str
    """A letter for each axis, without the batch's."""
    shape: tuple[int, ...]
    norm: float
    """Length of the followed token's vector (of all its heads together)."""
    share: float | None = None
    """Of what is added: its length, by that of the stream it is added to."""
    cosine: float | None = None
    """And whether it points along the stream (1), against it (−1) or elsewhere (0)."""
    top: Likely = ()
    """On the stream: the likeliest tokens, if the final norm and the head read it now."""


@dataclass(frozen=True)
class Journey:
    """Where the token went, what came out, and the proof that nothing was left out."""

    stages: tuple[Stage, ...]
    at: dict[str, int]
    """The place of the token that was followed through each stack."""
    top: Likely
    """The likeliest tokens in the end, their probabilities over the whole vocabulary."""
    sum_error: float | None
    """Largest difference between embedding + Σ additions and the final stream; None where norms stand on the stream."""
    row_error: float | None
    """Largest difference between a row of the patterns seen and 1; None where a sink takes a share."""

    def _repr_html_(self) -> str:
        return table([(stage.site, stage.axes.replace(" ", ""), stage.shape, stage.norm) for stage in self.stages])


@dataclass
class Notes:
    """What was seen of the followed tokens."""

    at: dict[Stack, int]
    memory_at: int
    """The token that cross-attention's keys and values are shown of."""
    vectors: dict[str, Tensor] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    rows: list[Tensor] = field(default_factory=list)

    def look(self, passing: Passing) -> None:
        if passing.site.side == "pattern" and given(passing.args)[-1] is None:
            self.rows.append((passing.value.detach().float().sum(-1) - 1).abs().max())
        self.write(passing.site, passing.value.detach())

    def write(self, site: Site, value: Tensor) -> None:
        """Take the followed token's vector out of a site's value."""
        if site.axes == "NK":  # tokens of all rows, and there is one row
            value = value.unsqueeze(0)
        place = (
            [*self.at.values()][-1] if site.stack is None else self.at[site.stack]
        )  # the head reads the last stack's
        if ".cross." in site.name and site.axes[1] == "S":
            place = self.memory_at
        vector = value[0, :, place] if site.axes[1] == "H" else value[0, place]
        self.shapes[site.name] = tuple(value.shape[1:])
        self.vectors[site.name] = vector.nan_to_num(neginf=0.0) if site.side == "scores" else vector.clone()


@torch.no_grad()
def follow(
    model: Any,
    tokens: Tensor,
    source: Tensor | None = None,
    *,
    at: int = -1,
    source_at: int = -1,
    only: Iterable[str] | None = None,
) -> Journey:
    """Run the model on one text, (1, T), and follow the token `at` a place.

    An encoder-decoder reads `source`, of which the token `source_at` is followed. `only`: the sites to tell of, named
    as for a trace, all unless given; scores and patterns are made for no others.
    """
    model = ours(model)
    read = tokens if source is None else source
    for name, text in (("tokens", tokens), ("source", read)):
        if text.ndim != 2 or len(text) != 1 or not text.numel():
            raise InputError(f"{name} has shape {tuple(text.shape)}; one text is followed, so pass (1, length)")
    if model.device.type == "meta":
        raise InputError("the model is on the meta device, where it has shapes and no values; build it on another")
    stacks = model.stacks
    places = {"decoder": placed(at, tokens), "encoder": placed(source_at if len(stacks) > 1 else at, read)}
    known = sites(model)
    wanted = set(known) if only is None else asked_for(known, list(only))
    notes = Notes({stacks[name]: places[name] for name in stacks}, places["encoder"])
    needed = [
        site
        for name, site in known.items()
        if name in wanted or site.stack is None or is_added(name) or on_stream(name)
    ]
    taps = Taps()
    try:
        taps.open((site, notes.look, None) for site in needed)
        run(model, tokens, read)
    finally:
        taps.close()
    said = what_is_said(model, notes, [name for name in known if name in wanted], known)
    stages = [stage(model, known[name], notes, said) for name in known if name in wanted and name in notes.vectors]
    top = likeliest(notes.vectors["logits"][None])[0] if "logits" in notes.vectors else ()
    row_error = max(map(float, notes.rows), default=None)
    found = {name: places[name] for name in stacks}
    return Journey(tuple(stages), found, top, stream_error(model, notes, known), row_error)


def asked_for(known: dict[str, Site], only: list[str]) -> set[str]:
    """Full names stand for themselves; ends of names and globs are looked up, and refused if there is no such site."""
    others = [name for name in only if name not in known]
    return {*only} - {*others} | {site.name for site in (chosen(known, others) if others else ())}


def placed(at: int, tokens: Tensor) -> int:
    return numbers(at, tokens.shape[-1], "at", "the tokens of this text")[0]


def stage(model: Transformer, site: Site, notes: Notes, said: dict[str, Likely]) -> Stage:
    vector = exact(notes.vectors[site.name]).flatten()
    share, cosine = None, None
    if is_added(site.name):
        stream = exact(notes.vectors[stream_before(site)]) * kept_of(site)
        lengths = float(stream.norm()), float(vector.norm())
        share = lengths[1] / lengths[0] if lengths[0] else None
        cosine = float((stream @ vector) / (lengths[0] * lengths[1])) if all(lengths) else None
    axes = site.axes[1:] if site.axes[0] == "B" else site.axes.replace("N", "T")
    shape, top = notes.shapes[site.name], said.get(site.name, ())
    return Stage(site.name, equation(model, site), " ".join(axes), shape, float(vector.norm()), share, cosine, top)


def exact(vector: Tensor) -> Tensor:
    return vector.cpu().double()  # not every accelerator has doubles


def kept_of(site: Site) -> float:
    """How loud the stream is beside the sublayer."""
    assert site.stack is not None
    assert site.layer is not None
    return float(getattr(site.stack.blocks[site.layer], "keep", 1.0))


def what_is_said(model: Any, notes: Notes, wanted: Iterable[str], known: dict[str, Site]) -> dict[str, Likely]:
    """What the head would say of the stream at each site, read all at once."""
    head, writer = getattr(model, "head", None), [*model.stacks.values()][-1]
    if head is None:
        return {}
    own = [name for name in wanted if known[name].stack is writer]
    raw = [name for name in own if on_stream(name) and name in notes.vectors]
    normed = [name for name in own if name.endswith("final_norm")]
    vectors = [notes.vectors[name] for name in normed]
    if raw:
        vectors = [*writer.final_norm.forward(torch.stack([notes.vectors[name] for name in raw])), *vectors]
    if not vectors:
        return {}
    # `forward` passes hooks by: for whoever traces the model around this, it has run once.
    return dict(zip(raw + normed, likeliest(head.forward(torch.stack(vectors))), strict=True))


def likeliest(logits: Tensor) -> list[Likely]:
    best = logits.float().softmax(-1).topk(min(BEST, logits.shape[-1]))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [tuple(zip(ids, shares, strict=True)) for ids, shares in pairs]


def stream_error(model: Transformer, notes: Notes, known: dict[str, Site]) -> float | None:
    """Of all stacks together; None where one of them does more than add."""
    errors = [sum_error(stack, notes, known) for stack in model.stacks.values()]
    found = [error for error in errors if error is not None]
    return max(found) if len(found) == len(errors) else None


def sum_error(stack: Stack, notes: Notes, known: dict[str, Site]) -> float | None:
    """In the model's own order and dtype, so that it is the same sum."""
    if not all(only_adds(block) for block in stack.blocks):
        return None
    own = [name for name, site in known.items() if site.stack is stack]
    total = notes.vectors[next(name for name in own if name.endswith("embed"))]
    for name in own:
        if is_added(name) and name in notes.vectors:  # a block that an edit skips adds nothing
            total = total + notes.vectors[name]
    last = next(name for name in reversed(own) if name.endswith("resid_post"))
    return float((total - notes.vectors[last]).abs().max())
