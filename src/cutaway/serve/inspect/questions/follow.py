"""One token's way: the stream beneath all tokens, and the lane of the one that is followed."""

from typing import Any

import torch
from torch import Tensor

from cutaway.lens.equations import on_stream, same_as_before
from cutaway.lens.journey import Notes, placed, stage, stream_error, what_is_said
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.job import Job
from cutaway.serve.inspect.kept import Kept
from cutaway.serve.inspect.question import OfText, Place
from cutaway.serve.inspect.wire import Answer


class Stream(OfText):
    """The length of every token's vector at every point of the stream: the whole highway, as far as it has come."""

    def answer(self, of: Inspector, job: Job) -> Answer:
        sides = {stack: side for side, stack in of.model.stacks.items()}
        points: dict[str, list[str]] = {side: [] for side in sides.values()}
        lengths: dict[str, list[Tensor]] = {side: [] for side in sides.values()}

        def passed(name: str, value: Tensor) -> None:
            stack = of.sites[name].stack
            if stack is not None and on_stream(name) and not same_as_before(name):
                points[sides[stack]].append(name)
                lengths[sides[stack]].append(value.float().norm(dim=-1))
                if name.endswith(("embed", "resid_post")):
                    job.part(told())

        def told() -> Answer:
            return Answer({"points": points}, {side: torch.stack(found) for side, found in lengths.items() if found})

        kept = of.kept(self.look, job, passed)
        if not any(points.values()):  # it was there already
            for name in of.sites:
                if name in kept.values and on_stream(name):
                    passed(name, kept[name])
        return told()


class Lane(OfText):
    """What the token at a place is at every stage: its length, what is added, what it would say by then."""

    at: Place
    source_at: Place = 0

    def answer(self, of: Inspector, job: Job) -> Answer:
        kept = of.kept(self.look, job)
        with of.alone, torch.no_grad():
            notes = notes_of(of, kept, self.at, self.source_at)
            names = [name for name in notes.vectors if not same_as_before(name)]
            said = what_is_said(of.model, notes, names, of.sites)
            stages = [stage(of.model, of.sites[name], notes, said) for name in names]
            error = stream_error(of.model, notes, of.sites)
        return Answer({"stages": [stage_told(of, each) for each in stages], "sum_error": error})


def notes_of(of: Inspector, kept: Kept, at: int, source_at: int) -> Notes:
    """What was kept of the tokens at these places."""
    stacks = of.model.stacks
    at = placed(at, torch.tensor([kept.look.tokens]))
    source_at = placed(source_at, torch.tensor([kept.look.source])) if kept.look.source is not None else at
    where = {stack: source_at if name == "encoder" and len(stacks) > 1 else at for name, stack in stacks.items()}
    notes = Notes(where, source_at)
    for name in of.sites:
        if name in kept.values:
            notes.write(of.sites[name], kept.values[name])
    return notes


def stage_told(of: Inspector, each: Any) -> dict[str, Any]:
    return {
        "site": each.site,
        "equation": each.equation,
        "axes": each.axes,
        "shape": each.shape,
        "norm": each.norm,
        "share": each.share,
        "cosine": each.cosine,
        "top": of.likely(each.top),
    }
