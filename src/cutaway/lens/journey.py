"""`follow_token`: one token's vector at every site, what each sublayer adds to it, and its logit lens predictions.

The hooks keep only the followed token's vector, so a journey needs one forward pass and stores one vector per site.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cutaway.errors import InputError
from cutaway.lens.adapters import ModelLike, require_cutaway_model, run_model, sites
from cutaway.lens.attention_pattern import unpack_kernel_args
from cutaway.lens.display import render_html_table
from cutaway.lens.equations import site_equation
from cutaway.lens.hooks import HookContext, SiteHooks
from cutaway.lens.sites import (
    Site,
    get_blocks,
    has_additive_residual,
    is_resid_site,
    is_sublayer_output,
    resid_before_sublayer,
    resolve_index,
    select_sites,
)
from cutaway.model import Transformer
from cutaway.model.block import ParallelBlock
from cutaway.model.head import LMHead
from cutaway.model.stack import Stack

TopTokens = tuple[tuple[int, float], ...]
"""(token id, probability) pairs, most likely first."""
TOP_K = 5


@dataclass(frozen=True)
class Stage:
    """Equation, shape, norm and logit lens predictions of the followed token's vector at one site."""

    site: str
    equation: str
    axes: str
    """One letter per axis, separated by spaces, without the batch axis."""
    shape: tuple[int, ...]
    norm: float
    """L2 norm of the token's vector, over all heads."""
    relative_norm: float | None = None
    """Norm of a sublayer output divided by the norm of the residual stream it is added to. None at other sites."""
    cosine: float | None = None
    """Cosine similarity of a sublayer output with the residual stream it is added to. None at other sites."""
    top_tokens: TopTokens = ()
    """Logit lens: the most likely tokens if final norm and head are applied here. Empty outside the residual stream."""


@dataclass(frozen=True)
class Journey:
    """All stages of a followed token, the prediction, and consistency checks of the recorded values."""

    stages: tuple[Stage, ...]
    positions: dict[str, int]
    """Stack name → position of the followed token."""
    top_tokens: TopTokens
    """The model's most likely next tokens, with probabilities over the whole vocabulary."""
    residual_sum_error: float | None
    """Largest |embed + Σ sublayer outputs − last resid_post|. None if resid_post is not this sum (post-norm)."""
    pattern_row_error: float | None
    """Largest |row sum − 1| of the recorded attention patterns without a sink. None if there are none."""

    def _repr_html_(self) -> str:
        rows = [(stage.site, stage.axes.replace(" ", ""), stage.shape, stage.norm) for stage in self.stages]
        return render_html_table(rows)


@dataclass
class TokenRecorder:
    """Stores the vectors of the followed tokens. Its `record_hook` is called at each site."""

    positions: dict[Stack, int]
    memory_position: int
    """Position in the encoder output whose cross-attention keys and values are recorded."""
    vectors: dict[str, Tensor] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    row_errors: list[Tensor] = field(default_factory=list)

    def record_hook(self, context: HookContext) -> None:
        if context.site.kind == "pattern" and unpack_kernel_args(context.module_args)[-1] is None:
            self.row_errors.append((context.value.detach().float().sum(-1) - 1).abs().max())
        self.record(context.site, context.value.detach())

    def record(self, site: Site, value: Tensor) -> None:
        """Store the vector of the followed token, which is a part of the activation `value`."""
        if site.axes == "NK":  # all tokens of the batch, which has one row
            value = value.unsqueeze(0)
        # Logits have no stack. They belong to the last stack, whose output the head reads.
        position = [*self.positions.values()][-1] if site.stack is None else self.positions[site.stack]
        if ".cross." in site.name and site.axes[1] == "S":
            position = self.memory_position
        vector = value[0, :, position] if site.axes[1] == "H" else value[0, position]
        self.shapes[site.name] = tuple(value.shape[1:])
        self.vectors[site.name] = vector.nan_to_num(neginf=0.0) if site.kind == "scores" else vector.clone()


@torch.no_grad()
def follow_token(
    model: ModelLike,
    tokens: Tensor,
    source: Tensor | None = None,
    *,
    position: int = -1,
    source_position: int = -1,
    site_names: Iterable[str] | None = None,
) -> Journey:
    """Run the model on one text, (1, T), and record the vector of the token at `position` at every site.

    For an encoder-decoder, `source` is the encoder input and `source_position` the position of the token that is
    followed in it. `site_names` are the sites to record, named as for `trace`; the default is all sites. Scores and
    patterns are computed only at the selected sites.
    """
    model = require_cutaway_model(model)
    encoder_tokens = tokens if source is None else source
    for name, ids in (("tokens", tokens), ("source", encoder_tokens)):
        if ids.ndim != 2 or len(ids) != 1 or not ids.numel():
            raise InputError(f"{name} has shape {tuple(ids.shape)}; pass one text, with shape (1, length)")
    if model.device.type == "meta":
        raise InputError("the model is on the meta device, so its weights have no values; build it on another device")
    stacks = model.stacks
    positions = {
        "decoder": resolve_position(position, tokens),
        "encoder": resolve_position(source_position if len(stacks) > 1 else position, encoder_tokens),
    }
    all_sites = sites(model)
    selected = set(all_sites) if site_names is None else _select_names(all_sites, list(site_names))
    recorder = TokenRecorder({stacks[name]: positions[name] for name in stacks}, positions["encoder"])
    # Sublayer outputs and the residual stream are also needed for the norms, cosines and the sum check.
    recorded = [
        site
        for name, site in all_sites.items()
        if name in selected or site.stack is None or is_sublayer_output(name) or is_resid_site(name)
    ]
    hooks = SiteHooks()
    try:
        hooks.register((site, recorder.record_hook, None) for site in recorded)
        run_model(model, tokens, encoder_tokens)
    finally:
        hooks.remove()
    selected_names = [name for name in all_sites if name in selected]
    decoded = decode_residuals(model, recorder, selected_names, all_sites)
    recorded_names = [name for name in selected_names if name in recorder.vectors]
    stages = [build_stage(model, all_sites[name], recorder, decoded) for name in recorded_names]
    top = top_tokens(recorder.vectors["logits"][None])[0] if "logits" in recorder.vectors else ()
    row_error = max(map(float, recorder.row_errors), default=None)
    stack_positions = {name: positions[name] for name in stacks}
    return Journey(tuple(stages), stack_positions, top, residual_sum_error(model, recorder, all_sites), row_error)


def _select_names(sites: dict[str, Site], site_names: list[str]) -> set[str]:
    """Expand suffixes and globs to full site names. Raise if a suffix or glob matches no site."""
    patterns = [name for name in site_names if name not in sites]
    return {*site_names} - {*patterns} | {site.name for site in (select_sites(sites, patterns) if patterns else ())}


def resolve_position(position: int, tokens: Tensor) -> int:
    return resolve_index(position, tokens.shape[-1], "position", "the tokens of this text")


def build_stage(model: Transformer, site: Site, recorder: TokenRecorder, decoded: dict[str, TopTokens]) -> Stage:
    vector = _to_float64(recorder.vectors[site.name]).flatten()
    relative_norm, cosine, norm = None, None, float(vector.norm())
    if is_sublayer_output(site.name):
        resid = _to_float64(_skip_connection(site, recorder.vectors[resid_before_sublayer(site)]))
        resid_norm = float(resid.norm())
        relative_norm = norm / resid_norm if resid_norm else None
        cosine = float((resid @ vector) / (resid_norm * norm)) if resid_norm and norm else None
    axes = " ".join(site.axes[1:] if site.axes[0] == "B" else site.axes.replace("N", "T"))
    equation, shape, top = site_equation(model, site), recorder.shapes[site.name], decoded.get(site.name, ())
    return Stage(site.name, equation, axes, shape, norm, relative_norm, cosine, top)


def _to_float64(vector: Tensor) -> Tensor:
    return vector.cpu().double()  # not every accelerator supports float64


@torch.no_grad()
def _skip_connection(site: Site, resid: Tensor) -> Tensor:
    """Return what the block adds the sublayer output to, given the residual stream (d,) before the sublayer."""
    assert site.stack is not None
    assert site.layer is not None
    block = get_blocks(site.stack)[site.layer]
    if isinstance(block, ParallelBlock):
        return resid
    return block.skip_connection(resid[None, None], getattr(block, site.name.split(".")[-2]))[0, 0]


def decode_residuals(
    model: Transformer, recorder: TokenRecorder, site_names: Iterable[str], sites: dict[str, Site]
) -> dict[str, TopTokens]:
    """Logit lens: top tokens of the residual stream at each site, from one batched call of final norm and head."""
    head, stack = getattr(model, "head", None), [*model.stacks.values()][-1]
    if not isinstance(head, LMHead):
        return {}
    names = [name for name in site_names if sites[name].stack is stack]
    raw = [name for name in names if is_resid_site(name) and name in recorder.vectors]
    normed = [name for name in names if name.endswith("final_norm")]
    vectors = [recorder.vectors[name] for name in normed]
    if raw:
        vectors = [*stack.final_norm.forward(torch.stack([recorder.vectors[name] for name in raw])), *vectors]
    if not vectors:
        return {}
    # `forward` does not run hooks, so that a trace around this call records only the call of the model.
    return dict(zip(raw + normed, top_tokens(head.forward(torch.stack(vectors))), strict=True))


def top_tokens(logits: Tensor) -> list[TopTokens]:
    top = logits.float().softmax(-1).topk(min(TOP_K, logits.shape[-1]))
    rows = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return [tuple(zip(ids, probabilities, strict=True)) for ids, probabilities in rows]


def residual_sum_error(model: Transformer, recorder: TokenRecorder, sites: dict[str, Site]) -> float | None:
    """Largest |embed + Σ sublayer outputs − last resid_post| of all stacks, or None if post-norm changes the sum."""
    errors = [_stack_sum_error(stack, recorder, sites) for stack in model.stacks.values()]
    defined = [error for error in errors if error is not None]
    return max(defined) if len(defined) == len(errors) else None


def _stack_sum_error(stack: Stack, recorder: TokenRecorder, sites: dict[str, Site]) -> float | None:
    """Return max |embed + Σ sublayer outputs − last resid_post| of one stack, or None if post-norm changes the sum.

    The sum is computed in the model's order and dtype.
    """
    if not has_additive_residual(stack):
        return None
    names = [name for name, site in sites.items() if site.stack is stack]
    total = recorder.vectors[next(name for name in names if name.endswith("embed"))]
    for name in names:
        if is_sublayer_output(name) and name in recorder.vectors:  # a block that an edit skips adds nothing
            total = total + recorder.vectors[name]
    last = next(name for name in reversed(names) if name.endswith("resid_post"))
    return float((total - recorder.vectors[last]).abs().max())
