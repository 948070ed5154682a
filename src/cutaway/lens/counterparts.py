"""Which module of another library's model does what a module of ours does, by the rows of its family."""

from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cutaway.families.family import Family
from cutaway.families.plan import Step, steps_of
from cutaway.model import Transformer
from cutaway.model.rope import Rope


class Held(NamedTuple):
    """The path of the module that would hold a tensor of ours in a file of theirs, and the row that says so."""

    path: str
    step: Step


class Counterparts:
    """Their modules by the paths of ours."""

    def __init__(self, family: Family, ours: Transformer, theirs: nn.Module) -> None:
        self.ours, self.theirs = ours, theirs
        self.modules = dict(theirs.named_modules(remove_duplicate=False))
        bare = not any(f"{path}.".startswith(family.prefix) for path in self.modules)
        self.held: dict[str, list[Held]] = {}
        for step in steps_of(family.rows, ours.config, ours):
            names = [name.removeprefix(family.prefix if bare else "") for name in step.theirs]
            for name in step.ours:
                self.held.setdefault(name, []).extend(Held(each.rpartition(".")[0], step) for each in names)

    def find(self, ours: str) -> Held | None:
        """The first place in which theirs does have a module for this one of ours."""
        held = self.held.get(f"{ours}.weight", []) + self.held.get(f"{ours}.bias", [])
        return next((each for each in held if each.path in self.modules), None)

    def module(self, ours: str) -> nn.Module | None:
        """The module with the weights of this one of ours."""
        held = self.find(ours)
        return None if held is None else self.modules[held.path]

    def caller(self, *ours: str) -> nn.Module | None:
        """The innermost module around all that these of ours hold; lists are never called."""
        inside = tuple(f"{each}." for each in ours)
        paths = [each.path.split(".") for name, held in self.held.items() if name.startswith(inside) for each in held]
        common = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))]
        while isinstance(self.modules.get(".".join(common)), nn.ModuleList | nn.ModuleDict):
            common.pop()
        return self.modules.get(".".join(common)) if common else None

    def has(self, ours: str) -> bool:
        """Whether theirs has anything of this one of ours."""
        return any(name.startswith(f"{ours}.") for name in self.held)

    def turn(self, stack: str, layer: int) -> int | None:
        """How many layers before this one use the same block; None where each has its own."""
        blocks = list(self.ours.stacks[stack].blocks)
        if len(set(blocks)) == len(blocks):
            return None
        return sum(block is blocks[layer] for block in blocks[:layer])

    def turns(self, stack: str, layer: int) -> bool:
        """Whether queries and keys are turned in this layer."""
        inside = self.ours.stacks[stack]
        position = inside.position_of[layer]
        return position in inside.positions and isinstance(inside.positions[position], Rope)

    def columns(self, ours: str) -> Tensor | None:
        """Where the output of this one of ours stands in that of theirs, if it is not all of it: the row's operation,
        done to numbers that count."""
        held = self.find(ours)
        if held is None:
            return None
        step = held.step
        heights = [(self.ours.get_parameter(name).shape[0],) for name in step.ours]
        count = torch.arange(sum(height for (height,) in heights))
        place = [name.rpartition(".")[0] for name in step.ours].index(ours)
        own = step.op.load([count], heights, step.d_head)[place]
        return None if torch.equal(own, count) else own
