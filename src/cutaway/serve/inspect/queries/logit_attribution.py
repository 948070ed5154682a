"""Query: direct logit attribution by head and component."""

import torch
from torch import Tensor

from cutaway.errors import InputError
from cutaway.lens.analysis import direct_logit_attribution
from cutaway.lens.analysis.attribution import check_attributable, logit_contributions
from cutaway.lens.analysis.inputs import AnalysisInputs
from cutaway.serve.inspect.activation_cache import ActivationCache
from cutaway.serve.inspect.inspector import check_position
from cutaway.serve.inspect.model_input import TokenId
from cutaway.serve.inspect.queries.base import InputQuery, Inspector, QueryJob, QueryResult, TokenIndex


class LogitAttribution(InputQuery):
    """Contribution of each head and component to the logit of a next token, by default the most likely one.

    This is direct logit attribution: the final norm's scale is held constant, so that the logit is a sum.
    """

    position: TokenIndex
    token: TokenId | None = None

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        check_position(self.position, self.input.tokens)
        if self.token is not None and self.token >= inspector.config.vocab_size:
            raise InputError(f"token is {self.token}; use ids 0 to {inspector.config.vocab_size - 1}, the vocabulary")
        tokens, source = inspector.to_tensors(self.input)
        inputs = AnalysisInputs(inspector.model, inspector.tokenizer.tokenizer, tokens, source)
        check_attributable(inputs)
        final_norm = f"{inputs.site_prefix}final_norm"
        sites = [final_norm, *_attribution_sites(inputs, inspector)]
        activations = inspector.get_activations_at(self.input, sites, job)
        logits = inspector.logits(activations[final_norm][self.position])
        token = int(logits.argmax()) if self.token is None else self.token
        if self.input.edits:
            contributions = _attribute_edited_model(inspector, self, token)
        else:
            contributions = _attribute_from_cache(inputs, activations, self.position, token)
        heads: dict[str, list[float]] = {}
        components: list[dict[str, object]] = []
        for name, contribution in contributions:
            layer, _, component = name.partition(".")
            sublayer, _, head = component.partition(".")
            if head.isdigit():
                heads.setdefault(f"{inputs.site_prefix}blocks.{layer}.{sublayer}", []).append(contribution)
            else:
                components.append({"name": name, "contribution": contribution})
        data = {
            "token": token,
            "text": inspector.tokenizer.decode_token(token),
            "probability": float(logits.softmax(-1)[token]),
            "logit": float(logits[token]),
            "attribution_sum": sum(contribution for _, contribution in contributions),
            "softcap": inputs.require_head().softcap,
            "heads": heads,
            "components": components,
        }
        return QueryResult(data)


class _PositionView:
    """The cached activations at one position, indexed by site name like a trace."""

    def __init__(self, activations: ActivationCache, position: int) -> None:
        self.activations, self.position = activations, position

    def __getitem__(self, name: str, /) -> Tensor:
        return self.activations.values[name][:, self.position : self.position + 1]


def _attribution_sites(inputs: AnalysisInputs, inspector: Inspector) -> list[str]:
    """Return the sites whose activations are needed to split a logit into contributions."""
    ends = (".attn.out", ".attn.z", ".cross.out", ".cross.z", ".ffn.out")
    prefix = inputs.site_prefix
    stream = (f"{prefix}embed", f"{prefix}blocks.{len(inputs.stack.blocks) - 1}.resid_post")
    outputs = {name for name in inspector.sites if name.startswith(prefix) and name.endswith(ends)}
    return [name for name in inspector.sites if name in stream or name in outputs]


def _attribute_from_cache(
    inputs: AnalysisInputs, activations: ActivationCache, position: int, token: int
) -> list[tuple[str, float]]:
    view = _PositionView(activations, position)
    with torch.no_grad():
        components = list(logit_contributions(inputs, view, view, token, None, by_head=True, by_token=False))
        return [(component.name, float(component.contribution)) for component in components]


def _attribute_edited_model(inspector: Inspector, query: LogitAttribution, token: int) -> list[tuple[str, float]]:
    """Attribute with a new forward pass of the edited model, because structural edits may change its components."""
    model_input = query.input
    source = None if model_input.source is None else list(model_input.source)
    with inspector.edited_model(model_input):
        attribution = direct_logit_attribution(
            inspector.model, list(model_input.tokens), token, position=query.position, source=source, by_head=True
        )
    return list(zip(attribution.labels[0], attribution.values.tolist(), strict=True))
