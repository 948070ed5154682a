"""What heads look at: a wall of all of them, layer by layer, and one head from close by."""

from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from cutaway.errors import InputError
from cutaway.lens import edit, trace
from cutaway.lens.readings.heads import entropy_by_token
from cutaway.lens.readings.subject import wide
from cutaway.lens.sites import Site
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.job import Job
from cutaway.serve.inspect.look import Look
from cutaway.serve.inspect.question import OfText, Place, Question
from cutaway.serve.inspect.wire import Answer

CELLS = 48
"""Of a thumbnail's side at most: beyond it, a cell is the strongest of several."""
SIDE = 1024
"""Of one head's matrix, likewise."""

Name = Annotated[str, Field(max_length=100)]


class Attentions(Question):
    """Every attention of the model: its place, its heads, what it can see."""

    def answer(self, of: Inspector, job: Job) -> Answer:
        return Answer({"attentions": [told(of, site) for site in of.sites.values() if site.side == "pattern"]})


class Wall(OfText):
    """All heads of one attention, small."""

    attention: Name

    def answer(self, of: Inspector, job: Job) -> Answer:
        site = site_of(of, self.attention)
        pattern, visible, sink = seen(of, self.look, site, None, job)
        arrays = {"thumbs": pooled(pattern, CELLS), "visible": pooled(visible[None].float(), CELLS)[0] > 0}
        arrays |= {"entropy": entropy_by_token(pattern).mean(-1), "first": on_first(pattern)}
        if sink is not None:
            arrays["sink"] = sink.mean(-1)
        return Answer({"attention": self.attention, "size": list(pattern.shape[1:])}, arrays)


class Head(OfText):
    """One head: who looks at whom, how much, and how widely each token looks."""

    attention: Name
    head: Place

    def answer(self, of: Inspector, job: Job) -> Answer:
        site = site_of(of, self.attention, self.head)
        pattern, visible, sink = seen(of, self.look, site, [self.head], job)
        arrays = {"pattern": pooled(pattern, SIDE)[0], "visible": pooled(visible[None].float(), SIDE)[0] > 0}
        arrays |= {"entropy": entropy_by_token(pattern)[0]}
        facts = {"size": list(pattern.shape[1:]), "entropy": float(arrays["entropy"].mean())}
        facts |= {"first": float(on_first(pattern)), "sink": None if sink is None else float(sink.mean())}
        if sink is not None:
            arrays["sink"] = sink[0]
        return Answer(facts, arrays)


class Row(OfText):
    """Where one token of one head looks, exactly, however long the text is."""

    attention: Name
    head: Place
    at: Place

    def answer(self, of: Inspector, job: Job) -> Answer:
        site = site_of(of, self.attention, self.head)
        pattern, visible, sink = seen(of, self.look, site, [self.head], job)
        if self.at >= pattern.shape[1]:
            raise InputError(f"at is {self.at}; {pattern.shape[1]} tokens look here, from 0 on")
        facts = {"sink": None if sink is None else float(sink[0, self.at])}
        return Answer(facts, {"shares": pattern[0, self.at], "visible": visible[self.at]})


def told(of: Inspector, site: Site) -> dict[str, Any]:
    name = site.name.removesuffix(".pattern")
    side = next(side for side, stack in of.model.stacks.items() if stack is site.stack)
    cross = name.endswith(".cross")
    stack, layer = site.stack, site.layer
    assert stack is not None
    assert layer is not None
    block: Any = stack.blocks[layer]
    f = (block.cross if cross else block.attn).f
    return {
        "name": name,
        "stack": side,
        "cross": cross,
        "layer": layer,
        "heads": site.heads,
        "kv_heads": dict(site.widths)["G"],
        "window": None if cross else stack.windows[layer],
        "causal": stack.causal and not cross,
        "sink": getattr(f, "sink", None) is not None,
    }


def site_of(of: Inspector, attention: str, head: int | None = None) -> Site:
    site = of.sites.get(f"{attention}.pattern")
    if site is None:
        names = [name.removesuffix(".pattern") for name in of.sites if name.endswith(".pattern")]
        raise InputError(f"'{attention}' is no attention of this model; there is {', '.join(names[:4])} …")
    if head is not None and head >= (site.heads or 0):
        raise InputError(f"head is {head}; {attention} has the heads 0 to {(site.heads or 0) - 1}")
    return site


def seen(
    of: Inspector, look: Look, site: Site, heads: list[int] | None, job: Job
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Patterns (H, T, S) in fp32, what the mask lets be seen (T, S), and what a sink takes (H, T), if there is one."""
    name = site.name.removesuffix(".pattern")
    kept = of.with_values(look, [f"{name}.{part}" for part in "qkv"], job)
    if name not in kept.calls:
        raise InputError(f"{name} is passed by in this model as it was changed; choose a layer that is not skipped")
    with torch.no_grad():
        found = kept.seen(name, heads)
        visible = (found.scores[0] != -torch.inf).any(0)
        if is_edited(of, look, name):  # what was put there cannot be made from q and k
            with of.changed(look), trace(of.model, site.name, heads=heads) as t:
                of.hidden(look)
            pattern = wide(t[site.name])[0]
        else:
            pattern = wide(found.pattern())[0]
    sink = None if found.sink is None else (1 - pattern.sum(-1)).clamp(min=0)
    return pattern, visible, sink


def is_edited(of: Inspector, look: Look, attention: str) -> bool:
    """Whether its scores or its pattern are changed themselves."""
    own = {f"{attention}.scores", f"{attention}.pattern"}
    return bool(look.edits) and any(site.name in own for _, site, _ in edit(of.model, look.edits).values)


def pooled(values: Tensor, most: int) -> Tensor:
    """(H, T, S), or the strongest of several where an axis is longer than `most`."""
    size = [min(extent, most) for extent in values.shape[-2:]]
    return values if size == list(values.shape[-2:]) else F.adaptive_max_pool2d(values, size)


def on_first(pattern: Tensor) -> Tensor:
    """What each head spends on the first token, where heads rest, averaged over those that come after it."""
    later = pattern[:, 1:, 0]
    return later.mean(-1) if later.shape[-1] else pattern[:, :, 0].mean(-1)
