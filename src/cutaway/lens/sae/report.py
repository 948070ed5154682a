"""`feature_report`: the tokens that activate a feature most, its density, and the logits that its direction changes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cutaway.argument_checks import check_positive_int
from cutaway.errors import InputError
from cutaway.lens.activations import ActivationDataset
from cutaway.lens.adapters import ModelLike
from cutaway.lens.adapters.tokenizer import TokenizerLike
from cutaway.lens.analysis.attribution import apply_norm_gain, unembedding
from cutaway.lens.analysis.inputs import AnalysisInputs, inputs_without_text, token_text, upcast_float32
from cutaway.lens.labeled_tensor import LabeledTensor, show_whitespace
from cutaway.lens.sae.autoencoder import SparseAutoencoder
from cutaway.lens.sites import is_resid_site, is_sublayer_output, resolve_indices

_BATCH_TOKENS = 4096


@dataclass(frozen=True)
class ActivatingToken:
    """A token that activates a feature, with the text around it."""

    activation: float
    index: int
    """Index of the token in the dataset."""
    before: str
    token: str
    after: str

    def __str__(self) -> str:
        return f"{self.activation:8.2f}  {self.before}⟦{show_whitespace(self.token)}⟧{self.after}"


@dataclass(frozen=True)
class FeatureReport:
    """Description of one feature: where it is active, and which logits it changes directly."""

    feature: int
    density: float
    """Fraction of the tokens that activate the feature."""
    mean_activation: float
    """Mean over the tokens that activate it."""
    max_activation: float
    top_tokens: list[ActivatingToken]
    logit_effects: LabeledTensor | None
    """Change of the logits by the decoder direction. None if the site is not on the residual stream."""

    def __str__(self) -> str:
        lines = [
            f"feature {self.feature}: active on {self.density:.2%} of the tokens, "
            f"mean {self.mean_activation:.2f}, maximum {self.max_activation:.2f}"
        ]
        lines += [str(token).replace("\n", "↵") for token in self.top_tokens]
        if self.logit_effects is not None:
            half = len(self.logit_effects.labels[0]) // 2
            names = [show_whitespace(label) for label in self.logit_effects.labels[0]]
            lines += [f"logits raised:  {' '.join(names[:half])}", f"logits lowered: {' '.join(names[half:][::-1])}"]
        return "\n".join(lines)


@torch.no_grad()
def feature_report(
    model: ModelLike,
    sae: SparseAutoencoder,
    dataset: ActivationDataset,
    features: Sequence[int] | int,
    *,
    num_examples: int = 10,
    top_k: int = 8,
    context: tuple[int, int] = (12, 4),
) -> list[FeatureReport]:
    """Return a report of each feature, in one pass over the dataset.

    Args:
        num_examples: number of tokens that activate the feature most, at most one from each sequence.
        top_k: number of tokens whose logits the decoder direction raises most, and of those it lowers most.
        context: number of tokens before and after an example.
    """
    check_positive_int("num_examples", num_examples)
    indices = resolve_indices(features, sae.cfg.d_sae, "features", "the features of the autoencoder")
    site = dataset.resolve_site(sae.cfg.site)
    columns, sequences = [], []
    for batch in dataset.batches(_BATCH_TOKENS, shuffle=False, sites=[site]):
        columns.append(sae.encode(batch[site].flatten(1).to(sae.W_enc.device))[:, indices].cpu())
        sequences.append(batch.sequences)
    acts, sequence_ids = torch.cat(columns), torch.cat(sequences)  # (tokens, features)
    tokenizer = getattr(model, "tokenizer", None)
    reports = []
    for column, feature in enumerate(indices):
        values = acts[:, column]
        active = values > 0
        top = [
            _describe_token(dataset, tokenizer, index, float(values[index]), context)
            for index in _top_by_sequence(values, sequence_ids, num_examples)
        ]
        effects = feature_logit_effects(model, sae, feature, top_k=top_k) if _is_on_resid(site) else None
        mean = float(values[active].mean()) if bool(active.any()) else 0.0
        reports.append(FeatureReport(feature, float(active.float().mean()), mean, float(values.max()), top, effects))
    return reports


@torch.no_grad()
def feature_density(sae: SparseAutoencoder, dataset: ActivationDataset) -> Tensor:
    """Return the fraction of the tokens that activate each feature, (d_sae,)."""
    site, total = dataset.resolve_site(sae.cfg.site), torch.zeros(sae.cfg.d_sae)
    for batch in dataset.batches(_BATCH_TOKENS, shuffle=False, sites=[site]):
        total += (sae.encode(batch[site].flatten(1).to(sae.W_enc.device)) > 0).sum(0).cpu()
    return total / len(dataset)


@torch.no_grad()
def feature_logit_effects(model: ModelLike, sae: SparseAutoencoder, feature: int, *, top_k: int = 10) -> LabeledTensor:
    """The `top_k` tokens whose logits a feature's decoder direction raises most, and those it lowers most.

    The direction is multiplied by the gain of the final norm and by the unembedding: its direct effect, without later
    blocks. The scale of the final norm depends on the text, so the values are proportional to logits.
    """
    inputs = inputs_without_text(model)
    (feature,) = resolve_indices(feature, sae.cfg.d_sae, "feature", "the features of the autoencoder")
    direction = sae.W_dec[feature]
    if sae.cfg.d_in != inputs.structure.config.d_model:
        raise InputError("the feature's direction is not on the residual stream; use a resid or .out site")
    effects = _unembedding_directions(inputs) @ direction.to(inputs.device).float()
    size = len(effects)
    if isinstance(top_k, bool) or not isinstance(top_k, int) or not 1 <= top_k <= size // 2:
        raise InputError(f"top_k is {top_k!r}; pass an integer from 1 to {size // 2}, half the vocabulary size")
    order = effects.argsort(descending=True, stable=True)
    ids = torch.cat((order[:top_k], order[-top_k:]))
    labels = (inputs.decode_tokens(ids.tolist()),)
    return LabeledTensor(
        f"logit effects of feature {feature}", effects[ids], ("token",), labels, "proportional to logits"
    )


def _unembedding_directions(inputs: AnalysisInputs) -> Tensor:
    """Return the unembedding with the gain of the final norm, (V, d)."""
    head = inputs.require_linear_head("logit effects of a feature")
    return apply_norm_gain(inputs.stack.final_norm, upcast_float32(unembedding(head))) * head.scale


def _is_on_resid(site: str) -> bool:
    return is_resid_site(site) or is_sublayer_output(site)


def _top_by_sequence(values: Tensor, sequences: Tensor, count: int) -> list[int]:
    """Return the indices of the largest positive values, at most one from each sequence."""
    found: dict[int, int] = {}
    for index in values.argsort(descending=True, stable=True).tolist():
        if len(found) == count or float(values[index]) <= 0:
            break
        found.setdefault(int(sequences[index]), index)
    return list(found.values())


def _describe_token(
    dataset: ActivationDataset, tokenizer: TokenizerLike | None, index: int, activation: float, context: tuple[int, int]
) -> ActivatingToken:
    ids, at = dataset.sequence_context(index, *context)
    texts = [token_text(tokenizer, token) for token in ids.tolist()]
    return ActivatingToken(activation, index, "".join(texts[:at]), texts[at], "".join(texts[at + 1 :]))
