"""Which heads wrote a logit, and by which rule each head looks."""

from typing import Any

import torch
from torch import Tensor

from cutaway.errors import InputError
from cutaway.lens.analysis import direct_logit_attribution
from cutaway.lens.analysis.attribution import check_attributable, logit_contributions
from cutaway.lens.analysis.inputs import AnalysisInputs
from cutaway.serve.inspect.activation_cache import ActivationCache
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.model_input import ModelInput, TokenId
from cutaway.serve.inspect.protocol import QueryJob, QueryResult
from cutaway.serve.inspect.queries.base import InputQuery, TokenIndex


class LogitAttribution(InputQuery):
    """What each head adds to the logit of the next token (the likeliest, unless one is named) at a place.

    Direct logit attribution: the final norm's scale is held at what it was, so that the logit is a sum.
    """

    position: TokenIndex
    token: TokenId | None = None

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        if self.position >= len(self.input.tokens):
            raise InputError(f"position is {self.position}; the text has {len(self.input.tokens)} tokens, from 0 on")
        if self.token is not None and self.token >= inspector.config.vocab_size:
            raise InputError(f"token is {self.token}, and the vocabulary ends at {inspector.config.vocab_size - 1}")
        this = _build_analysis_inputs(inspector, self.input)
        check_attributable(this)
        final = f"{this.site_prefix}final_norm"
        kept = inspector.get_activations_at(self.input, [final, *_attribution_sites(this, inspector)], job)
        logits = inspector.logits(kept[final][self.position])
        chosen = int(logits.argmax()) if self.token is None else self.token
        parts = (
            _attribute_edited_model(inspector, self, chosen)
            if self.input.edits
            else _attribute_from_cache(this, kept, self.position, chosen)
        )
        heads: dict[str, list[float]] = {}
        others: list[dict[str, Any]] = []
        for name, amount in parts:
            layer, _, rest = name.partition(".")
            kind, _, number = rest.partition(".")
            if number.isdigit():
                heads.setdefault(f"{this.site_prefix}blocks.{layer}.{kind}", []).append(amount)
            else:
                others.append({"name": name, "contribution": amount})
        share = float(logits.softmax(-1)[chosen])
        facts = {
            "token": chosen,
            "text": inspector.tokenizer.decode_token(chosen),
            "probability": share,
            "logit": float(logits[chosen]),
        }
        total, cap = sum(amount for _, amount in parts), this.require_head().softcap
        return QueryResult({**facts, "attribution_sum": total, "softcap": cap, "heads": heads, "components": others})


class PositionView:
    """What was kept, at one place, as a trace of that place alone."""

    def __init__(self, activations: ActivationCache, position: int) -> None:
        self.activations, self.position = activations, position

    def __getitem__(self, name: str, /) -> Tensor:
        return self.activations.values[name][:, self.position : self.position + 1]


def _build_analysis_inputs(inspector: Inspector, model_input: ModelInput) -> AnalysisInputs:
    source = None if model_input.source is None else torch.tensor([model_input.source], device=inspector.model.device)
    return AnalysisInputs(
        inspector.model,
        inspector.tokenizer.tokenizer,
        torch.tensor([model_input.tokens], device=inspector.model.device),
        source,
    )


def _attribution_sites(inputs: AnalysisInputs, inspector: Inspector) -> list[str]:
    """The sites that a logit is put together from."""
    ends = (".attn.out", ".attn.z", ".cross.out", ".cross.z", ".ffn.out")
    stream = (f"{inputs.site_prefix}embed", f"{inputs.site_prefix}blocks.{len(inputs.stack.blocks) - 1}.resid_post")
    return [
        name
        for name in inspector.sites
        if name in stream or (name.startswith(inputs.site_prefix) and name.endswith(ends))
    ]


def _attribute_from_cache(
    inputs: AnalysisInputs, activations: ActivationCache, position: int, token: int
) -> list[tuple[str, float]]:
    here = PositionView(activations, position)
    with torch.no_grad():
        parts = list(logit_contributions(inputs, here, here, token, None, by_head=True, by_token=False))
        return [(part.name, float(part.contribution)) for part in parts]


def _attribute_edited_model(inspector: Inspector, query: LogitAttribution, token: int) -> list[tuple[str, float]]:
    """In a model whose build may be another one, by a pass of its own."""
    look = query.input
    source = None if look.source is None else list(look.source)
    with inspector.edited_model(look):
        found = direct_logit_attribution(
            inspector.model, list(look.tokens), token, position=query.position, source=source, by_head=True
        )
    return list(zip(found.labels[0], found.values.tolist(), strict=True))
