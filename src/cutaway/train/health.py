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

from cutaway.measure import equations
from cutaway.model import Transformer
from cutaway.model.attention import Latent, MultiHead
from cutaway.model.stack import Stack
from cutaway.train.learner import Learner
from cutaway.train.objectives import Task

SAMPLE = 1 << 16
"""Values of a tensor, evenly spread, by which an update is measured: no second copy of a large model is needed."""
LONGEST = 512
"""Tokens of the sequence that is looked into, at most: a pattern has a value for each pair."""
COLLAPSED = 0.01
"""Bits of entropy below which a head sees one token only."""
FAST = 0.5
"""A change of a layer in one step, as a share of its weights, after which little is left of them."""
LOUD = 1000.0
"""Root mean square of the stream from which on additions of usual size are lost in it."""

TINY = 1e-30

Reading = dict[str, Any]


class Changes:
    """What one step does to each layer. Made between the gradient and the step, and read after the step."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters, self.layers = parameters, layers_of(parameters)
        self.before = {name: sampled(each).clone() for name, each in parameters.items()}
        held = {name: local(each.grad) for name, each in parameters.items() if each.grad is not None}
        self.lengths = dict(zip(held, torch._foreach_norm(list(held.values())), strict=True))

    def gradient(self) -> dict[str, float]:
        """The gradient's length by layer; 0 for one that has none."""
        lengths = {name: float(length) ** 2 for name, length in self.lengths.items()}
        return {layer: math.sqrt(each) for layer, each in self.summed(lengths).items()}

    def update(self) -> dict[str, float]:
        """‖w' − w‖ / ‖w‖ by layer."""
        moved, whole = {}, {}
        for name, parameter in self.parameters.items():
            old, new = self.before[name], sampled(parameter)
            stands_for = local(parameter).numel() / max(1, old.numel())
            moved[name] = stands_for * float((new - old).double().square().sum())
            whole[name] = stands_for * float(old.double().square().sum())
        of = self.summed(whole)
        return {layer: math.sqrt(each / max(TINY, of[layer])) for layer, each in self.summed(moved).items()}

    def summed(self, by_name: Mapping[str, float]) -> dict[str, float]:
        total = dict.fromkeys(self.layers.values(), 0.0)
        for name, value in by_name.items():
            total[self.layers[name]] += value
        return total


@torch.no_grad()
def read(learner: Learner, task: Task, changes: Changes | None) -> Reading:
    """All readings, by layer: gradient, update, stream (a token's mean length), entropy (bits, a number a head)."""
    found: Reading = {} if changes is None else {"gradient": changes.gradient(), "update": changes.update()}
    with watched(learner.model) as (streams, patterns), learner.numbers():
        first(task).hidden(learner.model)
    found["stream"] = {layer: float(length) for layer, length in streams.items()}
    found["entropy"] = {layer: bits.tolist() for layer, bits in patterns.items()}
    return {what: {layer: rounded(value) for layer, value in by.items()} for what, by in found.items()}


def troubles(found: Reading, d_model: int) -> list[str]:
    """What of it is not as it should be, in words."""
    said = []
    for layer, length in found.get("gradient", {}).items():
        if length == 0:
            said.append(f"{layer} learns nothing: its gradient is 0")
        elif not math.isfinite(length):
            said.append(f"the gradient of {layer} is not finite")
    for layer, share in found.get("update", {}).items():
        if share > FAST:
            said.append(f"{layer} changed by {share:.0%} in one step; lower optimiser.rate")
    loud = [
        layer for layer, length in found["stream"].items() if not length <= LOUD * math.sqrt(d_model)
    ]  # or no number
    if loud:
        said.append(f"the stream explodes at {loud[0]}: a token's length there is {found['stream'][loud[0]]:.3g}")
    for layer, bits in found["entropy"].items():
        heads = [head for head, each in enumerate(bits) if each < COLLAPSED]
        if heads:
            numbers = ", ".join(map(str, heads))
            said.append(f"{layer}: head{'s' * (len(heads) > 1)} {numbers} collapsed, seeing one token only")
    return said


@contextmanager
def watched(model: Transformer) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """By layer, a token's mean length behind it and the entropy of its heads' patterns, as passes go by.

    Attention is explicit meanwhile, so that there are patterns.
    """
    streams: dict[str, Tensor] = {}
    patterns: dict[str, Tensor] = {}
    attentions = [each for each in model.modules() if isinstance(each, MultiHead | Latent)]
    kernels = [each.kernel for each in attentions]
    handles = []
    try:
        for each in attentions:
            each.kernel = each.make_kernel("explicit").train(each.training)
        for name, stack in model.stacks.items():
            prefix = f"{name}." if len(model.stacks) > 1 else ""
            handles += watch(stack, prefix, streams, patterns)
        yield streams, patterns
    finally:
        for handle in handles:
            handle.remove()
        for each, kernel in zip(attentions, kernels, strict=True):
            each.kernel = kernel


def watch(stack: Stack, prefix: str, streams: dict[str, Tensor], patterns: dict[str, Tensor]) -> list[Any]:
    """Hooks on each distinct block: layers that share one come to it in turn."""
    come: dict[nn.Module, int] = {}

    def layer(module: nn.Module) -> str:
        mine = [number for number, each in enumerate(stack.blocks) if each is module]
        return f"{prefix}blocks.{mine[come.get(module, 0) % len(mine)]}"

    handles = []
    for block in dict.fromkeys(stack.blocks):

        def after(module: nn.Module, given: Any, out: Tensor) -> None:
            streams[layer(module)] = out.float().norm(dim=-1).mean()
            come[module] = come.get(module, 0) + 1

        handles.append(block.register_forward_hook(after))
        for part in ("attn", "cross"):
            branch: Any = getattr(block, part, None)
            if branch is None:
                continue

            def attended(
                module: nn.Module, given: Any, out: Tensor, block: nn.Module = block, cross: bool = part == "cross"
            ) -> None:
                bits = entropy(given[0], out)
                if bits is not None:
                    patterns[layer(block) + ".cross" * cross] = bits

            handles.append(branch.f.kernel.softmax.register_forward_hook(attended))
    return handles


def entropy(scores: Tensor, pattern: Tensor) -> Tensor | None:
    """−Σ p·log₂ p in bits, a number a head: the mean over queries that could choose. None if none could.

    What a sink takes is one more thing to choose.
    """
    wide = pattern.float()
    taken = 1 - wide.sum(-1, keepdim=True)
    taken = torch.where(taken > 0.01, taken, 0.0)  # less is rounding
    bits = (equations.entropy(wide) + equations.entropy(taken)) / equations.UNITS["bits"]
    choosing = ((scores > float("-inf")).sum(-1) > 1).expand_as(bits).float()
    count = choosing.sum((0, 2))
    return None if not bool((count > 0).all()) else (bits * choosing).sum((0, 2)) / count


def first(task: Task) -> Task:
    """Its first sequence, or the beginning of it."""

    def cut(each: Tensor | None) -> Tensor | None:
        return None if each is None else each[:1, :LONGEST] if each.ndim > 1 else each[:1]

    reads = tuple(cut(each) for each in task.reads)
    beside = {name: each[:1, :LONGEST] if each.ndim > 1 else each[:1] for name, each in task.beside.items()}
    return replace(task, reads=reads, beside=beside)


def layers_of(names: Iterable[str]) -> dict[str, str]:
    """Of each weight's name what says where it is: blocks.3, embed, head; with the stack's name if there are two."""
    parts = {name: re.match(r"(?:(encoder|decoder)\.)?(blocks\.\d+|\w+)", name) for name in names}
    two = len({found[1] for found in parts.values() if found and found[1]}) > 1
    return {name: f"{found[1]}.{found[2]}" if found[1] and two else found[2] for name, found in parts.items() if found}


def local(tensor: Tensor) -> Tensor:
    """A rank's own part of a tensor that several share."""
    part: Any = tensor.detach()
    return part.to_local() if hasattr(part, "to_local") else part


def sampled(tensor: Tensor) -> Tensor:
    mine = local(tensor).flatten()
    return mine[:: max(1, -(-mine.numel() // SAMPLE))]


def rounded(value: Any) -> Any:
    """Four digits say enough."""
    return [rounded(each) for each in value] if isinstance(value, list) else float(f"{value:.4g}")
