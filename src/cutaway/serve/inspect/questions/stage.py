"""One stage of a token's way: its formula, its axes, its values, and how to get them in Python."""

from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from cutaway.errors import InputError
from cutaway.lens import pattern
from cutaway.lens.equations import equation
from cutaway.lens.sites import Site
from cutaway.serve.inspect.formulas import formulas
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.job import Job
from cutaway.serve.inspect.kept import Kept
from cutaway.serve.inspect.question import OfText, Place
from cutaway.serve.inspect.snippet import snippet
from cutaway.serve.inspect.wire import Answer

AXES = {
    "T": "tokens", "S": "tokens looked at", "H": "heads", "G": "heads of keys and values", "D": "width of a head",
    "E": "width of a value", "d": "model width", "h": "FFN width", "V": "vocabulary", "K": "experts chosen",
    "P": "pairs turned",
}  # fmt: skip
SHOWN = 50
"""Of a vocabulary, the likeliest."""
BINS = 60


class Stage(OfText):
    """A site, or what has no site of its own: `embed.token`, `….attn.position`, `….attn.mask`, `softmax`."""

    site: Annotated[str, Field(max_length=80)]
    at: Place
    source_at: Place = 0

    def answer(self, of: Inspector, job: Job) -> Answer:
        name, at = self.site, self.at
        beside = name.startswith("encoder.") and len(of.model.stacks) > 1
        where = self.source_at if beside or (".cross." in name and name.endswith((".k", ".v"))) else at
        text = (self.look.source or ()) if where is not at or beside else self.look.tokens
        if where >= len(text):
            raise InputError(f"the text has {len(text)} tokens, and place {where} is none of them")
        if name in ("logits", "softmax"):
            return last(of, of.with_values(self.look, [final(of)], job), self, name)
        whole, _, end = name.rpartition(".")
        needed = f"{whole}.q" if end in ("scores", "pattern", "mask", "position") else name
        needed = whole if end in ("token", "position") and whole.endswith("embed") else needed
        if needed not in of.sites:
            raise InputError(f"'{name}' is no stage of this model; it has {', '.join(list(of.sites)[:4])} …")
        kept = of.with_values(self.look, [needed], job)
        with of.alone, torch.no_grad():
            values, axes, shape = read(of, kept, name, where)
        site = of.sites.get(name)
        facts: dict[str, Any] = {
            "site": name,
            "equation": "" if site is None else equation(of.model, site),
            "formulas": formulas(of.model, name, of.sites),
            "axes": [
                {"letter": letter, "name": AXES[letter], "size": size} for letter, size in zip(axes, shape, strict=True)
            ],
            "shown": values_axes(axes),
            "python": snippet(of, self.look, name, where),
        }
        hidden = values == -torch.inf
        seen = values.masked_fill(hidden, 0.0) if hidden.any() else values
        arrays = {"values": seen} | ({"hidden": hidden} if hidden.any() else {})
        return Answer(facts | summary(values), arrays)


def values_axes(axes: str) -> str:
    """Those that the values of one token have."""
    return axes.replace("T", "").replace("S", "", 1) if "T" not in axes else axes.replace("T", "")


def summary(values: Tensor) -> dict[str, Any]:
    finite = values[values.isfinite()].float()
    if not len(finite):
        return {"norm": 0.0, "least": 0.0, "most": 0.0, "mean": 0.0}
    return {
        "norm": float(finite.norm()),
        "least": float(finite.min()),
        "most": float(finite.max()),
        "mean": float(finite.mean()),
    }


def read(of: Inspector, kept: Kept, name: str, at: int) -> tuple[Tensor, str, tuple[int, ...]]:
    """The chosen token's values, with the axes and the shape of the whole."""
    if name.endswith((".scores", ".pattern", ".mask")):
        return of_attention(kept, name, at)
    if name.endswith(".position") or name.endswith("embed.token"):
        return of_position(of, kept, name, at)
    site: Site = of.sites[name]
    value = kept.values[name]
    value = value if site.axes == "NK" else value[0]
    axes = "TK" if site.axes == "NK" else site.axes[1:]
    return value[at].float(), axes, tuple(value.shape)


def of_attention(kept: Kept, name: str, at: int) -> tuple[Tensor, str, tuple[int, ...]]:
    """What the token sees: heads × tokens looked at."""
    attention, _, what = name.rpartition(".")
    kernel, args = kept.calls[attention]
    q, k, v, plan, sink = pattern.given(args)
    mask = pattern.drawn(args)
    shape = (q.shape[2], q.shape[1], k.shape[1])
    if what == "mask":
        hidden = mask.hidden[0, :, at].expand(q.shape[2], -1)
        return torch.zeros_like(hidden, dtype=torch.float32).masked_fill(hidden, -torch.inf), "HTS", shape
    blind = None if mask.blind is None else mask.blind[:, :, at : at + 1]
    bias = None if mask.bias is None else mask.bias[:, :, at : at + 1]
    row = pattern.Mask(mask.hidden[:, :, at : at + 1], blind, bias)
    seen = pattern.seen(kernel, (q[:, at : at + 1], k, v, plan, sink), None, row)
    values = seen.scores if what == "scores" else seen.pattern()
    return values[0, :, 0].float(), "HTS", shape


def of_position(of: Inspector, kept: Kept, name: str, at: int) -> tuple[Tensor, str, tuple[int, ...]]:
    """What says where a token stands: a vector beside its own, angles, or what is added to its scores."""
    if name.endswith("embed.token"):
        side = name.removesuffix("embed.token")
        text = kept.look.source if side == "encoder." and kept.look.source else kept.look.tokens
        stack = of.sites[f"{side}embed"].stack
        assert stack is not None
        row = stack.embed.token.forward(torch.tensor([text[at]], device=of.model.device))[0]
        return row.float(), "Td", (len(text), len(row))
    if "embed." in name:
        if name not in kept.inputs:
            raise InputError("this model adds no positions to its embedding; see position in its attention")
        value = kept.inputs[name][0]
        value = value if value.ndim == 2 else value[None]
        return value[min(at, len(value) - 1)].float(), "Td", tuple(value.shape)
    attention, prefix = name.removesuffix(".position"), name[: name.index("blocks.")]
    layer, stack = of.sites[f"{attention}.q"].layer, of.sites[f"{attention}.q"].stack
    assert stack is not None
    assert layer is not None
    turned = kept.inputs.get(f"{prefix}{stack.position_of[layer]}")
    if turned is not None:
        angles = torch.atan2(turned.sin, turned.cos)[0].squeeze(-2)
        return angles[min(at, len(angles) - 1)].float(), "TP", tuple(angles.shape)
    args = kept.calls[attention][1]
    bias = pattern.drawn(args).bias
    if bias is None:
        raise InputError("nothing in this layer's attention says where a token stands; it may come with the embedding")
    heads, length, slots = args[0].shape[2], args[0].shape[1], args[1].shape[1]
    return bias.expand(1, heads, length, slots)[0, :, at].float(), "HTS", (heads, length, slots)


def final(of: Inspector) -> str:
    return next(name for name in reversed(of.sites) if name.endswith("final_norm"))


def last(of: Inspector, kept: Kept, asked: Stage, name: str) -> Answer:
    """The whole vocabulary: its likeliest tokens, and how all of its numbers lie."""
    logits = of.logits(kept[final(of)][asked.at])
    values = logits if name == "logits" else logits.softmax(-1)
    best = values.topk(min(SHOWN, len(values)))
    low, high = float(values.min()), float(values.max())
    counts = torch.histc(values, BINS, low, high) if high > low else torch.zeros(BINS)
    length = len(asked.look.tokens)
    facts = {
        "site": name,
        "equation": equation(of.model, of.sites["logits"]) if name == "logits" else "softmax(logits)",
        "formulas": formulas(of.model, name, of.sites),
        "axes": [
            {"letter": letter, "name": AXES[letter], "size": size}
            for letter, size in (("T", length), ("V", len(values)))
        ],
        "shown": "V",
        "python": snippet(of, asked.look, name, asked.at),
        "tokens": best.indices.tolist(),
        "words": [of.words.of(token) for token in best.indices.tolist()],
    }
    return Answer(facts | summary(values), {"values": best.values, "counts": counts})
