"""One token's way through a model: what it is at every site, what each part adds to it, what it would say by then.

Values are reduced while they pass, so that a journey costs one forward pass and holds a vector a site.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cutaway.errors import InputError
from cutaway.lens.adapters import require_cutaway_model, run_model, sites
from cutaway.lens.attention_pattern import unpack_kernel_args
from cutaway.lens.display import render_html_table
from cutaway.lens.equations import site_equation
from cutaway.lens.hooks import HookContext, SiteHooks
from cutaway.lens.sites import (
    Site,
    has_additive_residual,
    is_resid_site,
    is_sublayer_output,
    resid_before_sublayer,
    resolve_indices,
    select_sites,
)
from cutaway.model import Transformer
from cutaway.model.stack import Stack

TopTokens = tuple[tuple[int, float], ...]
"""Tokens and their probabilities, the likeliest first."""
TOP_K = 5


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
    relative_norm: float | None = None
    """Of what is added: its length, by that of the stream it is added to."""
    cosine: float | None = None
    """And whether it points along the stream (1), against it (−1) or elsewhere (0)."""
    top_tokens: TopTokens = ()
    """On the stream: the likeliest tokens, if the final norm and the head read it now."""


@dataclass(frozen=True)
class Journey:
    """Where the token went, what came out, and the proof that nothing was left out."""

    stages: tuple[Stage, ...]
    positions: dict[str, int]
    """The place of the token that was followed through each stack."""
    top_tokens: TopTokens
    """The likeliest tokens in the end, their probabilities over the whole vocabulary."""
    residual_sum_error: float | None
    """Largest difference between embedding + Σ additions and the final stream; None where norms stand on the stream."""
    pattern_row_error: float | None
    """Largest difference between a row of the patterns seen and 1; None where a sink takes a share."""

    def _repr_html_(self) -> str:
        return render_html_table(
            [(stage.site, stage.axes.replace(" ", ""), stage.shape, stage.norm) for stage in self.stages]
        )


@dataclass
class TokenRecorder:
    """What was seen of the followed tokens."""

    positions: dict[Stack, int]
    memory_position: int
    """The token that cross-attention's keys and values are shown of."""
    vectors: dict[str, Tensor] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    row_errors: list[Tensor] = field(default_factory=list)

    def record_hook(self, context: HookContext) -> None:
        if context.site.kind == "pattern" and unpack_kernel_args(context.module_args)[-1] is None:
            self.row_errors.append((context.value.detach().float().sum(-1) - 1).abs().max())
        self.record(context.site, context.value.detach())

    def record(self, site: Site, value: Tensor) -> None:
        """Take the followed token's vector out of a site's value."""
        if site.axes == "NK":  # tokens of all rows, and there is one row
            value = value.unsqueeze(0)
        place = (
            [*self.positions.values()][-1] if site.stack is None else self.positions[site.stack]
        )  # the head reads the last stack's
        if ".cross." in site.name and site.axes[1] == "S":
            place = self.memory_position
        vector = value[0, :, place] if site.axes[1] == "H" else value[0, place]
        self.shapes[site.name] = tuple(value.shape[1:])
        self.vectors[site.name] = vector.nan_to_num(neginf=0.0) if site.kind == "scores" else vector.clone()


@torch.no_grad()
def follow_token(
    model: Any,
    tokens: Tensor,
    source: Tensor | None = None,
    *,
    position: int = -1,
    source_position: int = -1,
    site_names: Iterable[str] | None = None,
) -> Journey:
    """Run the model on one text, (1, T), and follow the token at `position`.

    An encoder-decoder reads `source`, of which the token at `source_position` is followed. `site_names`: the sites to
    tell of, named as for a trace, all unless given; scores and patterns are made for no others.
    """
    model = require_cutaway_model(model)
    read = tokens if source is None else source
    for name, text in (("tokens", tokens), ("source", read)):
        if text.ndim != 2 or len(text) != 1 or not text.numel():
            raise InputError(f"{name} has shape {tuple(text.shape)}; one text is followed, so pass (1, length)")
    if model.device.type == "meta":
        raise InputError("the model is on the meta device, where it has shapes and no values; build it on another")
    stacks = model.stacks
    places = {
        "decoder": resolve_position(position, tokens),
        "encoder": resolve_position(source_position if len(stacks) > 1 else position, read),
    }
    known = sites(model)
    wanted = set(known) if site_names is None else _select_names(known, list(site_names))
    notes = TokenRecorder({stacks[name]: places[name] for name in stacks}, places["encoder"])
    needed = [
        site
        for name, site in known.items()
        if name in wanted or site.stack is None or is_sublayer_output(name) or is_resid_site(name)
    ]
    taps = SiteHooks()
    try:
        taps.register((site, notes.record_hook, None) for site in needed)
        run_model(model, tokens, read)
    finally:
        taps.remove()
    said = decode_residuals(model, notes, [name for name in known if name in wanted], known)
    stages = [
        build_stage(model, known[name], notes, said) for name in known if name in wanted and name in notes.vectors
    ]
    top = top_tokens(notes.vectors["logits"][None])[0] if "logits" in notes.vectors else ()
    row_error = max(map(float, notes.row_errors), default=None)
    found = {name: places[name] for name in stacks}
    return Journey(tuple(stages), found, top, residual_sum_error(model, notes, known), row_error)


def _select_names(sites: dict[str, Site], site_names: list[str]) -> set[str]:
    """Full names stand for themselves; ends of names and globs are looked up, and refused if there is no such site."""
    others = [name for name in site_names if name not in sites]
    return {*site_names} - {*others} | {site.name for site in (select_sites(sites, others) if others else ())}


def resolve_position(position: int, tokens: Tensor) -> int:
    return resolve_indices(position, tokens.shape[-1], "position", "the tokens of this text")[0]


def build_stage(model: Transformer, site: Site, recorder: TokenRecorder, decoded: dict[str, TopTokens]) -> Stage:
    vector = _to_float64(recorder.vectors[site.name]).flatten()
    share, cosine = None, None
    if is_sublayer_output(site.name):
        stream = _to_float64(recorder.vectors[resid_before_sublayer(site)]) * _skip_scale(site)
        lengths = float(stream.norm()), float(vector.norm())
        share = lengths[1] / lengths[0] if lengths[0] else None
        cosine = float((stream @ vector) / (lengths[0] * lengths[1])) if all(lengths) else None
    axes = site.axes[1:] if site.axes[0] == "B" else site.axes.replace("N", "T")
    shape, top = recorder.shapes[site.name], decoded.get(site.name, ())
    return Stage(site.name, site_equation(model, site), " ".join(axes), shape, float(vector.norm()), share, cosine, top)


def _to_float64(vector: Tensor) -> Tensor:
    return vector.cpu().double()  # not every accelerator has doubles


def _skip_scale(site: Site) -> float:
    """How loud the stream is beside the sublayer."""
    assert site.stack is not None
    assert site.layer is not None
    return float(getattr(site.stack.blocks[site.layer], "skip_scale", 1.0))


def decode_residuals(
    model: Any, recorder: TokenRecorder, site_names: Iterable[str], sites: dict[str, Site]
) -> dict[str, TopTokens]:
    """What the head would say of the stream at each site, read all at once."""
    head, writer = getattr(model, "head", None), [*model.stacks.values()][-1]
    if head is None:
        return {}
    own = [name for name in site_names if sites[name].stack is writer]
    raw = [name for name in own if is_resid_site(name) and name in recorder.vectors]
    normed = [name for name in own if name.endswith("final_norm")]
    vectors = [recorder.vectors[name] for name in normed]
    if raw:
        vectors = [*writer.final_norm.forward(torch.stack([recorder.vectors[name] for name in raw])), *vectors]
    if not vectors:
        return {}
    # `forward` passes hooks by: for whoever traces the model around this, it has run once.
    return dict(zip(raw + normed, top_tokens(head.forward(torch.stack(vectors))), strict=True))


def top_tokens(logits: Tensor) -> list[TopTokens]:
    best = logits.float().softmax(-1).topk(min(TOP_K, logits.shape[-1]))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [tuple(zip(ids, shares, strict=True)) for ids, shares in pairs]


def residual_sum_error(model: Transformer, recorder: TokenRecorder, sites: dict[str, Site]) -> float | None:
    """Of all stacks together; None where one of them does more than add."""
    errors = [_stack_sum_error(stack, recorder, sites) for stack in model.stacks.values()]
    found = [error for error in errors if error is not None]
    return max(found) if len(found) == len(errors) else None


def _stack_sum_error(stack: Stack, recorder: TokenRecorder, sites: dict[str, Site]) -> float | None:
    """In the model's own order and dtype, so that it is the same sum."""
    if not all(has_additive_residual(block) for block in stack.blocks):
        return None
    own = [name for name, site in sites.items() if site.stack is stack]
    total = recorder.vectors[next(name for name in own if name.endswith("embed"))]
    for name in own:
        if is_sublayer_output(name) and name in recorder.vectors:  # a block that an edit skips adds nothing
            total = total + recorder.vectors[name]
    last = next(name for name in reversed(own) if name.endswith("resid_post"))
    return float((total - recorder.vectors[last]).abs().max())
