"""Query: direct logit attribution by head and component."""

import torch
from torch import Tensor

from cutaway.errors import InputError
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
        inspector.check_token(self.token)
        tokens, source = inspector.to_tensors(self.input)
        inputs = AnalysisInputs(inspector.model, inspector.tokenizer.tokenizer, tokens, source)
        check_attributable(inputs)
        final_norm = f"{inputs.site_prefix}final_norm"
        sites = [final_norm, *_attribution_sites(inputs, inspector)]
        activations = inspector.get_activations_at(self.input, sites, job)
        logits = inspector.logits(activations[final_norm][self.position])
        token = int(logits.argmax()) if self.token is None else self.token
        view = _PositionView(activations, self.position)
        heads: dict[str, list[float]] = {}
        components: list[dict[str, object]] = []
        with torch.no_grad():
            attribution = list(logit_contributions(inputs, view, view, token, None, by_head=True, by_token=False))
        for name, contribution in ((part.name, float(part.contribution)) for part in attribution):
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
            "attribution_sum": sum(float(part.contribution) for part in attribution),
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
        if name not in self.activations.values:
            raise InputError(f"the edits skip {name}, so logits cannot be attributed to it; remove the skip")
        return self.activations.values[name][:, self.position : self.position + 1]


def _attribution_sites(inputs: AnalysisInputs, inspector: Inspector) -> list[str]:
    """Return the sites whose activations are needed to split a logit into contributions."""
    ends = (".attn.out", ".attn.z", ".cross.out", ".cross.z", ".ffn.out")
    prefix = inputs.site_prefix
    stream = (f"{prefix}embed", f"{prefix}blocks.{len(inputs.stack.blocks) - 1}.resid_post")
    outputs = {name for name in inspector.sites if name.startswith(prefix) and name.endswith(ends)}
    return [name for name in inspector.sites if name in stream or name in outputs]
