"""One token's way: the stream beneath all tokens, and the lane of the one that is followed."""

from typing import Any

import torch
from torch import Tensor

from cutaway.lens.journey import (
    Stage,
    TokenRecorder,
    build_stage,
    decode_residuals,
    residual_sum_error,
    resolve_position,
)
from cutaway.lens.sites import is_repeated_resid, is_resid_site
from cutaway.serve.inspect.activation_cache import ActivationCache
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.protocol import QueryJob, QueryResult
from cutaway.serve.inspect.queries.base import InputQuery, TokenIndex


class ResidualNorms(InputQuery):
    """The length of every token's vector at every point of the stream: the whole highway, as far as it has come."""

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        sides = {stack: side for side, stack in inspector.model.stacks.items()}
        points: dict[str, list[str]] = {side: [] for side in sides.values()}
        lengths: dict[str, list[Tensor]] = {side: [] for side in sides.values()}

        def passed(name: str, value: Tensor) -> None:
            stack = inspector.sites[name].stack
            if stack is not None and is_resid_site(name) and not is_repeated_resid(name):
                points[sides[stack]].append(name)
                lengths[sides[stack]].append(value.float().norm(dim=-1))
                if name.endswith(("embed", "resid_post")):
                    job.send_partial(told())

        def told() -> QueryResult:
            return QueryResult(
                {"sites": points}, {side: torch.stack(found) for side, found in lengths.items() if found}
            )

        kept = inspector.get_activations(self.input, job, passed)
        if not any(points.values()):  # it was there already
            for name in inspector.sites:
                if name in kept.values and is_resid_site(name):
                    passed(name, kept[name])
        return told()


class TokenJourney(InputQuery):
    """What the token at a place is at every stage: its length, what is added, what it would say by then."""

    position: TokenIndex
    source_position: TokenIndex = 0

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        kept = inspector.get_activations(self.input, job)
        with inspector.lock, torch.no_grad():
            notes = _collect_token_values(inspector, kept, self.position, self.source_position)
            names = [name for name in notes.vectors if not is_repeated_resid(name)]
            said = decode_residuals(inspector.model, notes, names, inspector.sites)
            stages = [build_stage(inspector.model, inspector.sites[name], notes, said) for name in names]
            error = residual_sum_error(inspector.model, notes, inspector.sites)
        return QueryResult(
            {"stages": [_stage_to_dict(inspector, each) for each in stages], "residual_sum_error": error}
        )


def _collect_token_values(
    inspector: Inspector, activations: ActivationCache, position: int, source_position: int
) -> TokenRecorder:
    """What was kept of the tokens at these places."""
    stacks = inspector.model.stacks
    position = resolve_position(position, torch.tensor([activations.model_input.tokens]))
    source_position = (
        resolve_position(source_position, torch.tensor([activations.model_input.source]))
        if activations.model_input.source is not None
        else position
    )
    where = {
        stack: source_position if name == "encoder" and len(stacks) > 1 else position for name, stack in stacks.items()
    }
    notes = TokenRecorder(where, source_position)
    for name in inspector.sites:
        if name in activations.values:
            notes.record(inspector.sites[name], activations.values[name])
    return notes


def _stage_to_dict(inspector: Inspector, token_stage: Stage) -> dict[str, Any]:
    return {
        "site": token_stage.site,
        "equation": token_stage.equation,
        "axes": token_stage.axes,
        "shape": token_stage.shape,
        "norm": token_stage.norm,
        "relative_norm": token_stage.relative_norm,
        "cosine": token_stage.cosine,
        "top_tokens": inspector.format_top_tokens(token_stage.top_tokens),
    }
