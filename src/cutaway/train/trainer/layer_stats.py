"""Statistics per layer during training: gradient norm, update ratio, residual stream norm, attention entropy.

The statistics are computed at each evaluation, from the training step before the evaluation and from one validation
sequence. Computing them does not change the run.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from cutaway.evaluate import functional
from cutaway.lens import sites
from cutaway.lens.hooks import HookContext, SiteHooks
from cutaway.model import Transformer
from cutaway.train.distributed.dtensor import to_local
from cutaway.train.objectives.objective import Objective
from cutaway.train.trainer.training_module import TrainingModule

SAMPLE_SIZE = 1 << 16
"""Maximum number of values per parameter from which the update ratio is estimated. The values are evenly spaced. A
sample is enough, and a second copy of all weights is not needed."""
MAX_TOKENS = 512
"""Maximum length of the analyzed sequence. Attention patterns need memory quadratic in this length."""
COLLAPSED_ENTROPY_BITS = 0.01
"""Attention entropy in bits below which a head counts as attending to one token only."""
MAX_UPDATE_RATIO = 0.5
"""Update ratio ‖Δw‖ / ‖w‖ of one step above which there is a warning, because most of the old weights are lost."""
MAX_RESID_RMS = 1000.0
"""Root mean square of the residual stream above which there is a warning: what layers add is lost in rounding."""

EPS = 1e-30
RECORDED_SITES = (".resid_post", ".scores", ".pattern")

LayerStats = dict[str, Any]


class UpdateStats:
    """Gradient norm and update ratio of one step by layer.

    Create it between the backward pass and the optimizer step, and call its methods after the optimizer step.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], loss_scale: Tensor | float = 1.0) -> None:
        """`loss_scale`: factor by which the gradients are too large (fp16)."""
        self.parameters, self.layer_of_parameter = parameters, _layer_of_parameter(parameters)
        self.initial_values = {name: _sample_values(parameter).clone() for name, parameter in parameters.items()}
        grads = {name: to_local(each.grad) for name, each in parameters.items() if each.grad is not None}
        norms = torch._foreach_norm(list(grads.values()))
        self.parameter_grad_norms = {name: norm / loss_scale for name, norm in zip(grads, norms, strict=True)}

    def grad_norms(self) -> dict[str, float]:
        """Gradient norm by layer; 0 for a layer without a gradient."""
        squares = {name: float(norm) ** 2 for name, norm in self.parameter_grad_norms.items()}
        return {layer: math.sqrt(total) for layer, total in self._sum_by_layer(squares).items()}

    def update_ratios(self) -> dict[str, float]:
        """Update ratio ‖w' − w‖ / ‖w‖ by layer, where w' are the weights after the step.

        The ratio is estimated from a sample of the weights.
        """
        change, norm = {}, {}
        for name, parameter in self.parameters.items():
            old, new = self.initial_values[name], _sample_values(parameter)
            scale = to_local(parameter).numel() / max(1, old.numel())  # parameters per sampled value
            change[name] = scale * float((new - old).double().square().sum())
            norm[name] = scale * float(old.double().square().sum())
        norm_by_layer = self._sum_by_layer(norm)
        return {
            layer: math.sqrt(total / max(EPS, norm_by_layer[layer]))
            for layer, total in self._sum_by_layer(change).items()
        }

    def _sum_by_layer(self, by_parameter: Mapping[str, float]) -> dict[str, float]:
        total = dict.fromkeys(self.layer_of_parameter.values(), 0.0)
        for name, value in by_parameter.items():
            total[self.layer_of_parameter[name]] += value
        return total


@torch.no_grad()
def compute_layer_stats(
    training_module: TrainingModule, objective: Objective, update_stats: UpdateStats | None
) -> LayerStats:
    """Compute statistics of all layers, as {name: {layer: value}}, with the first sequence of `objective` as input.

    The names are grad_norm, update_ratio, resid_norm (mean over tokens) and attn_entropy (in bits, one value per head).
    Without `update_stats`, the first two are left out.
    """
    stats: LayerStats = {}
    if update_stats is not None:
        stats = {"grad_norm": update_stats.grad_norms(), "update_ratio": update_stats.update_ratios()}
    with training_module.autocast():
        resid_norms, attn_entropies = _run_and_record(training_module.model, _first_sequence(objective))
    stats["resid_norm"] = {layer: float(norm) for layer, norm in resid_norms.items()}
    stats["attn_entropy"] = {layer: bits.tolist() for layer, bits in attn_entropies.items()}
    return {stat: {layer: _round_stats(value) for layer, value in by_layer.items()} for stat, by_layer in stats.items()}


def layer_warnings(layer_stats: LayerStats, d_model: int) -> list[str]:
    """Warnings about zero or non-finite gradients, large updates, a growing residual stream and collapsed heads."""
    warnings = []
    for layer, grad_norm in layer_stats.get("grad_norm", {}).items():
        if grad_norm == 0:
            warnings.append(f"{layer} does not train: its gradient is 0")
        elif not math.isfinite(grad_norm):
            warnings.append(f"{layer}: the gradient is not finite")
    for layer, ratio in layer_stats.get("update_ratio", {}).items():
        if ratio > MAX_UPDATE_RATIO:
            warnings.append(f"{layer} changed by {ratio:.0%} in one step; lower optimizer.lr")
    resid_norms, max_norm = layer_stats["resid_norm"], MAX_RESID_RMS * math.sqrt(d_model)
    exploding = [layer for layer, norm in resid_norms.items() if not norm <= max_norm]  # true for NaN too
    if exploding:
        first = exploding[0]
        warnings.append(f"the residual stream explodes at {first}: its mean norm is {resid_norms[first]:.3g}")
    for layer, bits in layer_stats["attn_entropy"].items():
        heads = [head for head, entropy in enumerate(bits) if entropy < COLLAPSED_ENTROPY_BITS]
        if heads:
            numbers = ", ".join(map(str, heads))
            warnings.append(f"{layer}: head{'s' * (len(heads) > 1)} {numbers} collapsed to one token")
    return warnings


def _run_and_record(model: Transformer, objective: Objective) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Run the model. Return the mean residual stream norm after each layer, and the attention entropy of each head."""
    resid_norms: dict[str, Tensor] = {}
    attn_entropies: dict[str, Tensor] = {}
    num_visible: dict[str, Tensor] = {}

    def record(hook: HookContext) -> None:
        path, _, suffix = hook.site.name.rpartition(".")
        layer = path.removesuffix(".attn")
        if suffix == "resid_post":
            resid_norms[layer] = hook.value.float().norm(dim=-1).mean()
        elif suffix == "scores":
            num_visible[layer] = (hook.value > float("-inf")).sum(-1)
        else:  # the hook for the pattern runs after the hook for the scores
            bits = attention_entropy(num_visible.pop(layer), hook.value)
            if bits is not None:
                attn_entropies[layer] = bits

    hooks = SiteHooks()
    hooks.register((site, record, None) for site in sites(model).values() if site.name.endswith(RECORDED_SITES))
    try:
        objective.hidden_states(model)
    finally:
        hooks.remove()
    return resid_norms, attn_entropies


def attention_entropy(num_visible: Tensor, pattern: Tensor) -> Tensor | None:
    """Attention entropy −Σ p·log₂ p in bits of each head, averaged over queries with more than one visible key.

    `num_visible` (B, H or 1, T) is the number of visible keys of each query. Returns None if a head has no query with
    more than one visible key. An attention sink counts as one more key in the entropy.
    """
    pattern = pattern.float()
    sink = 1 - pattern.sum(-1, keepdim=True)
    sink = torch.where(sink > 0.01, sink, 0.0)  # smaller values are rounding errors
    bits = (functional.entropy(pattern) + functional.entropy(sink)) / functional.NATS_PER_UNIT["bits"]
    has_choice = (num_visible > 1).expand_as(bits).float()
    count = has_choice.sum((0, 2))
    return None if not bool((count > 0).all()) else (bits * has_choice).sum((0, 2)) / count


def _first_sequence(objective: Objective) -> Objective:
    """Copy of the objective with its first sequence only, truncated to MAX_TOKENS."""

    def truncate(tensor: Tensor) -> Tensor:
        return tensor[:1, :MAX_TOKENS] if tensor.ndim > 1 else tensor[:1]

    inputs = tuple(None if tensor is None else truncate(tensor) for tensor in objective.inputs)
    model_kwargs = {name: truncate(tensor) for name, tensor in objective.model_kwargs.items()}
    return replace(objective, inputs=inputs, model_kwargs=model_kwargs)


def _layer_of_parameter(parameter_names: Iterable[str]) -> dict[str, str]:
    """Layer of each parameter, e.g. blocks.3, embed or head. With two stacks, the name of the stack is prepended."""
    matches = {name: re.match(r"(?:(encoder|decoder)\.)?(blocks\.\d+|\w+)", name) for name in parameter_names}
    has_two_stacks = len({match[1] for match in matches.values() if match and match[1]}) > 1
    return {
        name: f"{match[1]}.{match[2]}" if match[1] and has_two_stacks else match[2]
        for name, match in matches.items()
        if match
    }


def _sample_values(tensor: Tensor) -> Tensor:
    values = to_local(tensor.detach()).flatten()
    return values[:: max(1, -(-values.numel() // SAMPLE_SIZE))]


def _round_stats(value: float | list[float]) -> float | list[float]:
    """Round to four significant digits."""
    return [float(f"{item:.4g}") for item in value] if isinstance(value, list) else float(f"{value:.4g}")
