"""Queries: residual stream norms of all tokens, and norms and logit lens of one token at every site."""

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
from cutaway.serve.inspect.model_input import TokenizerAdapter
from cutaway.serve.inspect.queries.base import InputQuery, Inspector, QueryJob, QueryResult, TokenIndex


class ResidualNorms(InputQuery):
    """Norm of every token at every residual-stream site. Partial results are sent during the forward pass."""

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        stack_names = {stack: stack_name for stack_name, stack in inspector.model.stacks.items()}
        sites: dict[str, list[str]] = {stack_name: [] for stack_name in stack_names.values()}
        norms: dict[str, list[Tensor]] = {stack_name: [] for stack_name in stack_names.values()}

        def on_site(name: str, value: Tensor) -> None:
            stack = inspector.sites[name].stack
            if stack is not None and is_resid_site(name) and not is_repeated_resid(name):
                sites[stack_names[stack]].append(name)
                norms[stack_names[stack]].append(value.float().norm(dim=-1))
                if name.endswith(("embed", "resid_post")):
                    job.send_partial(build_result())

        def build_result() -> QueryResult:
            stacked = {stack_name: torch.stack(rows) for stack_name, rows in norms.items() if rows}
            return QueryResult({"sites": sites}, stacked)

        activations = inspector.get_activations(self.input, job, on_site)
        if not any(sites.values()):  # the activations were cached, so on_site was not called
            for name in inspector.sites:
                if name in activations.values and is_resid_site(name):
                    on_site(name, activations[name])
        return build_result()


class TokenJourney(InputQuery):
    """Norm of one token's activation at every cached site, with logit lens predictions at residual-stream sites.

    Sublayer outputs also have their norm relative to the residual stream, and their cosine similarity with it.
    """

    position: TokenIndex
    source_position: TokenIndex = 0

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        activations = inspector.get_activations(self.input, job)
        with inspector.lock, torch.no_grad():
            recorder = _collect_token_values(inspector, activations, self.position, self.source_position)
            names = [name for name in recorder.vectors if not is_repeated_resid(name)]
            top_tokens = decode_residuals(inspector.model, recorder, names, inspector.sites)
            stages = [build_stage(inspector.model, inspector.sites[name], recorder, top_tokens) for name in names]
            error = residual_sum_error(inspector.model, recorder, inspector.sites)
        stage_data = [_stage_to_dict(stage, inspector.tokenizer) for stage in stages]
        return QueryResult({"stages": stage_data, "residual_sum_error": error})


def _collect_token_values(
    inspector: Inspector, activations: ActivationCache, position: int, source_position: int
) -> TokenRecorder:
    """Return the cached activations of the token at `position`.

    In the encoder of an encoder-decoder, they are the activations of the token at `source_position`.
    """
    stacks = inspector.model.stacks
    tokens, source = inspector.to_tensors(activations.model_input)
    position = resolve_position(position, tokens)
    source_position = position if source is None else resolve_position(source_position, source)
    position_by_stack = {
        stack: source_position if name == "encoder" and len(stacks) > 1 else position for name, stack in stacks.items()
    }
    recorder = TokenRecorder(position_by_stack, source_position)
    for name in inspector.sites:
        if name in activations.values:
            recorder.record(inspector.sites[name], activations.values[name])
    return recorder


def _stage_to_dict(stage: Stage, tokenizer: TokenizerAdapter) -> dict[str, object]:
    top_tokens = [
        {"token": token, "text": tokenizer.decode_token(token), "probability": probability}
        for token, probability in stage.top_tokens
    ]
    return vars(stage) | {"top_tokens": top_tokens}
