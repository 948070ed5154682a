"""How a model fares while it learns: what a step does to each layer, how long the stream grows, where heads look.

Readings are taken at a look, on the step before it and on one validation sequence. They change nothing of the run.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from cutaway.evaluate import functional
from cutaway.model import Transformer
from cutaway.model.attention import LatentAttention, MultiHead
from cutaway.model.stack import Stack
from cutaway.train.distributed.dtensor import to_local
from cutaway.train.objectives.objective import Objective
from cutaway.train.trainer.training_module import TrainingModule

SAMPLE_SIZE = 1 << 16
"""Values of a tensor, evenly spread, by which an update is measured: no second copy of a large model is needed."""
MAX_TOKENS = 512
"""Tokens of the sequence that is looked into, at most: a pattern has a value for each pair."""
COLLAPSED_ENTROPY_BITS = 0.01
"""Bits of entropy below which a head sees one token only."""
MAX_UPDATE_RATIO = 0.5
"""A change of a layer in one step, as a share of its weights, after which little is left of them."""
MAX_RESID_RMS = 1000.0
"""Root mean square of the stream from which on additions of usual size are lost in it."""

EPS = 1e-30

LayerStats = dict[str, Any]


class UpdateStats:
    """What one step does to each layer. Made between the gradient and the step, and read after the step."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters, self.layer_of_parameter = parameters, _layer_of_parameter(parameters)
        self.initial_values = {name: _sample_values(each).clone() for name, each in parameters.items()}
        held = {name: to_local(each.grad) for name, each in parameters.items() if each.grad is not None}
        self.parameter_grad_norms = dict(zip(held, torch._foreach_norm(list(held.values())), strict=True))

    def grad_norms(self) -> dict[str, float]:
        """The gradient's length by layer; 0 for one that has none."""
        lengths = {name: float(length) ** 2 for name, length in self.parameter_grad_norms.items()}
        return {layer: math.sqrt(each) for layer, each in self._sum_by_layer(lengths).items()}

    def update_ratios(self) -> dict[str, float]:
        """‖w' − w‖ / ‖w‖ by layer."""
        moved, whole = {}, {}
        for name, parameter in self.parameters.items():
            old, new = self.initial_values[name], _sample_values(parameter)
            stands_for = to_local(parameter).numel() / max(1, old.numel())
            moved[name] = stands_for * float((new - old).double().square().sum())
            whole[name] = stands_for * float(old.double().square().sum())
        of = self._sum_by_layer(whole)
        return {layer: math.sqrt(each / max(EPS, of[layer])) for layer, each in self._sum_by_layer(moved).items()}

    def _sum_by_layer(self, by_parameter: Mapping[str, float]) -> dict[str, float]:
        total = dict.fromkeys(self.layer_of_parameter.values(), 0.0)
        for name, value in by_parameter.items():
            total[self.layer_of_parameter[name]] += value
        return total


@torch.no_grad()
def compute_layer_stats(
    training_module: TrainingModule, objective: Objective, update_stats: UpdateStats | None
) -> LayerStats:
    """By layer: grad_norm, update_ratio, resid_norm (a token's mean), attn_entropy (bits, a number a head)."""
    found: LayerStats = {}
    if update_stats is not None:
        found = {"grad_norm": update_stats.grad_norms(), "update_ratio": update_stats.update_ratios()}
    with record_activations(training_module.model) as (streams, patterns), training_module.autocast():
        _first_sequence(objective).hidden_states(training_module.model)
    found["resid_norm"] = {layer: float(length) for layer, length in streams.items()}
    found["attn_entropy"] = {layer: bits.tolist() for layer, bits in patterns.items()}
    return {what: {layer: _round_stats(value) for layer, value in by.items()} for what, by in found.items()}


def layer_warnings(layer_stats: LayerStats, d_model: int) -> list[str]:
    """What of it is not as it should be, in words."""
    said = []
    for layer, length in layer_stats.get("grad_norm", {}).items():
        if length == 0:
            said.append(f"{layer} learns nothing: its gradient is 0")
        elif not math.isfinite(length):
            said.append(f"the gradient of {layer} is not finite")
    for layer, share in layer_stats.get("update_ratio", {}).items():
        if share > MAX_UPDATE_RATIO:
            said.append(f"{layer} changed by {share:.0%} in one step; lower optimizer.lr")
    resid_norms, most = layer_stats["resid_norm"], MAX_RESID_RMS * math.sqrt(d_model)
    loud = [layer for layer, length in resid_norms.items() if not length <= most]  # or no number
    if loud:
        said.append(f"the stream explodes at {loud[0]}: a token's length there is {resid_norms[loud[0]]:.3g}")
    for layer, bits in layer_stats["attn_entropy"].items():
        heads = [head for head, each in enumerate(bits) if each < COLLAPSED_ENTROPY_BITS]
        if heads:
            numbers = ", ".join(map(str, heads))
            said.append(f"{layer}: head{'s' * (len(heads) > 1)} {numbers} collapsed, seeing one token only")
    return said


@contextmanager
def record_activations(model: Transformer) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """By layer, a token's mean length behind it and the entropy of its heads' patterns, as passes go by.

    Attention is explicit meanwhile, so that there are patterns.
    """
    streams: dict[str, Tensor] = {}
    patterns: dict[str, Tensor] = {}
    attentions = [each for each in model.modules() if isinstance(each, MultiHead | LatentAttention)]
    kernels = [each.kernel for each in attentions]
    handles = []
    try:
        for each in attentions:
            each.kernel = each.build_kernel("explicit").train(each.training)
        for name, stack in model.stacks.items():
            prefix = f"{name}." if len(model.stacks) > 1 else ""
            handles += _register_hooks(stack, prefix, streams, patterns)
        yield streams, patterns
    finally:
        for handle in handles:
            handle.remove()
        for each, kernel in zip(attentions, kernels, strict=True):
            each.kernel = kernel


def _register_hooks(
    stack: Stack, prefix: str, resid_norms: dict[str, Tensor], attn_entropies: dict[str, Tensor]
) -> list[Any]:
    """Hooks on each distinct block: layers that share one come to it in turn."""
    come: dict[nn.Module, int] = {}

    def layer(module: nn.Module) -> str:
        mine = [number for number, each in enumerate(stack.blocks) if each is module]
        return f"{prefix}blocks.{mine[come.get(module, 0) % len(mine)]}"

    handles = []
    for block in dict.fromkeys(stack.blocks):

        def after(module: nn.Module, given: Any, out: Tensor) -> None:
            resid_norms[layer(module)] = out.float().norm(dim=-1).mean()
            come[module] = come.get(module, 0) + 1

        handles.append(block.register_forward_hook(after))
        for part in ("attn", "cross"):
            branch: Any = getattr(block, part, None)
            if branch is None:
                continue

            def attended(
                module: nn.Module, given: Any, out: Tensor, block: nn.Module = block, cross: bool = part == "cross"
            ) -> None:
                bits = attention_entropy(given[0], out)
                if bits is not None:
                    attn_entropies[layer(block) + ".cross" * cross] = bits

            handles.append(branch.f.kernel.softmax.register_forward_hook(attended))
    return handles


def attention_entropy(scores: Tensor, pattern: Tensor) -> Tensor | None:
    """−Σ p·log₂ p in bits, a number a head: the mean over queries that could choose. None if none could.

    What a sink takes is one more thing to choose.
    """
    wide = pattern.float()
    taken = 1 - wide.sum(-1, keepdim=True)
    taken = torch.where(taken > 0.01, taken, 0.0)  # less is rounding
    bits = (functional.entropy(wide) + functional.entropy(taken)) / functional.NATS_PER_UNIT["bits"]
    choosing = ((scores > float("-inf")).sum(-1) > 1).expand_as(bits).float()
    count = choosing.sum((0, 2))
    return None if not bool((count > 0).all()) else (bits * choosing).sum((0, 2)) / count


def _first_sequence(objective: Objective) -> Objective:
    """Its first sequence, or the beginning of it."""

    def cut(each: Tensor | None) -> Tensor | None:
        return None if each is None else each[:1, :MAX_TOKENS] if each.ndim > 1 else each[:1]

    reads = tuple(cut(each) for each in objective.inputs)
    beside = {
        name: each[:1, :MAX_TOKENS] if each.ndim > 1 else each[:1] for name, each in objective.model_kwargs.items()
    }
    return replace(objective, inputs=reads, model_kwargs=beside)


def _layer_of_parameter(parameter_names: Iterable[str]) -> dict[str, str]:
    """Of each weight's name what says where it is: blocks.3, embed, head; with the stack's name if there are two."""
    parts = {name: re.match(r"(?:(encoder|decoder)\.)?(blocks\.\d+|\w+)", name) for name in parameter_names}
    two = len({found[1] for found in parts.values() if found and found[1]}) > 1
    return {name: f"{found[1]}.{found[2]}" if found[1] and two else found[2] for name, found in parts.items() if found}


def _sample_values(tensor: Tensor) -> Tensor:
    mine = to_local(tensor.detach()).flatten()
    return mine[:: max(1, -(-mine.numel() // SAMPLE_SIZE))]


def _round_stats(value: Any) -> Any:
    """Four digits say enough."""
    return [_round_stats(each) for each in value] if isinstance(value, list) else float(f"{value:.4g}")
