"""Attribution patching: a linear approximation of activation patching from one gradient.

Nanda 2023, https://www.neelnanda.io/mechanistic-interpretability/attribution-patching
"""

import torch
from torch import Tensor

from cutaway.errors import InputError
from cutaway.eval_mode import eval_mode
from cutaway.lens.adapters import ModelLike
from cutaway.lens.analysis.inputs import TextOrTokens, TokenOrId, upcast_float32
from cutaway.lens.analysis.patching import PatchingExperiment
from cutaway.lens.edit import edit
from cutaway.lens.labeled_tensor import LabeledTensor
from cutaway.lens.sites import Indices, Site
from cutaway.lens.trace import trace


def attribution_patching(
    model: ModelLike,
    clean: TextOrTokens,
    corrupted: TextOrTokens,
    answer_token: TokenOrId,
    *,
    incorrect_token: TokenOrId | None = None,
    site: str = "resid_post",
    by_head: bool = False,
    position: int = -1,
    layers: Indices | None = None,
    source: tuple[TextOrTokens, TextOrTokens] | None = None,
) -> LabeledTensor:
    """Approximate `activation_patching`: layer × token, or layer × head with `by_head`.

    The effect of a patch is approximated by (clean − corrupted activation) · ∂metric/∂activation, with the gradient of
    the corrupted run, divided by the difference of the metric between the two runs. One backward pass gives all values,
    where `activation_patching` needs a forward pass of a batch row for each. The arguments are the same.

    The approximation is exact if the metric is linear in the activation between its two values. It is wrong where the
    gradient is not representative of the whole step: for large steps (`resid_post` in early layers), and for attention
    that is saturated, whose softmax has a gradient near 0.
    """
    experiment = PatchingExperiment(model, clean, corrupted, answer_token, incorrect_token, position, source)
    layer_sites = experiment.select_layer_sites(site, layers)
    axis = "H" if by_head else "T"
    if any(axis not in layer_site.axes for layer_site in layer_sites):
        missing = "head axis; use attn.z" if by_head else "token axis; use resid_post"
        raise InputError(f"'{site}' has no {missing}")
    clean_values = experiment.cache_activations(experiment.clean, layer_sites)
    values, gradients = _corrupted_gradients(experiment, layer_sites)
    rows = []
    for layer_site in layer_sites:
        name, dim = layer_site.name, layer_site.axes.index(axis)
        step = upcast_float32(clean_values[name]) - upcast_float32(values[name])
        # Masked attention scores are −∞ in both runs.
        effect = torch.where(step.isnan(), 0.0, step) * upcast_float32(gradients[name])
        rows.append(effect.sum([other for other in range(effect.ndim) if other != dim]))
    if len({len(row) for row in rows}) > 1:
        raise InputError("the layers differ in their number of heads; pass layers with equal numbers of heads")
    scores = torch.stack(rows) / (experiment.clean_metric - experiment.corrupted_metric)
    labels = tuple(str(head) for head in range(len(rows[0]))) if by_head else experiment.token_labels
    names = tuple(layer_site.name.removesuffix(f".{site}").replace("blocks.", "") for layer_site in layer_sites)
    title = f"attribution patching of {site}: approximate recovered fraction of {experiment.title}"
    axes = ("layer", "head" if by_head else "token")
    return LabeledTensor(title, scores, axes, (names, labels), note=experiment.note)


def _corrupted_gradients(
    experiment: PatchingExperiment, sites: list[Site]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Run the corrupted text with gradients. Return the activations and ∂metric/∂activation, both by site name."""
    model, names, leaves = experiment.clean.model, [site.name for site in sites], list[Tensor]()

    def make_leaf(value: Tensor) -> Tensor:
        """Start the autograd graph at the embedding, whether or not parameters require gradients."""
        leaves.append(value.detach().requires_grad_())
        return leaves[-1]

    with torch.enable_grad(), eval_mode(experiment.clean.module), edit(model, {"embed": make_leaf}):
        with trace(model, *names, gradients=True) as t:
            metric = experiment.logit_metric(experiment.corrupted.forward())
        torch.autograd.grad(metric.sum(), leaves, allow_unused=True)
    values = {name: t[name].as_subclass(Tensor) for name in names}
    return values, {name: t.gradient(name).as_subclass(Tensor) for name in names}
