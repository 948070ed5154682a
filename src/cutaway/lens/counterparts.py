"""Which module of another library's model does what a module of ours does, by the rows of its family."""

from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cutaway.families.family import Family
from cutaway.families.plan import Step, current_names, steps_of
from cutaway.model import Transformer
from cutaway.model.rope import Rope


class Held(NamedTuple):
    """A tensor of ours: the name of theirs that holds it, and the row."""

    name: str
    step: Step


class Counterparts:
    """Their modules by the paths of ours."""

    def __init__(self, family: Family, ours: Transformer, theirs: nn.Module) -> None:
        self.ours, self.theirs = ours, theirs
        self.modules = dict(theirs.named_modules(remove_duplicate=False))
        self.shapes = {name: tensor.shape for name, tensor in ours.state_dict().items()}
        named = current_names(family, theirs.state_dict(keep_vars=True))
        self.held: dict[str, Held] = {}
        self.paths: dict[str, list[str]] = {}
        """Where a file would have each tensor of ours; their modules may hold several of those in one."""
        bare = all(not there.startswith(family.prefix) for there in named.values())
        for step in steps_of(family.rows, ours.config, ours):
            there = [named[name] for name in step.theirs if name in named]
            paths = [name.removeprefix(family.prefix if bare else "") for name in step.theirs]
            for name in step.ours:
                self.paths.setdefault(name, []).extend(paths)
                if there:
                    self.held.setdefault(name, Held(there[0], step))

    def path_of(self, ours: str) -> str | None:
        """The path of the module that holds the weights of this one of ours."""
        held = self.held.get(f"{ours}.weight") or self.held.get(f"{ours}.bias")
        return None if held is None else held.name.rpartition(".")[0]

    def module(self, ours: str) -> nn.Module | None:
        path = self.path_of(ours)
        return None if path is None else self.modules[path]

    def caller(self, *ours: str) -> nn.Module | None:
        """The innermost module around all that these of ours hold; lists are never called."""
        heads = tuple(f"{each}." for each in ours)
        paths = [path.split(".")[:-1] for name in self.paths if name.startswith(heads) for path in self.paths[name]]
        parts = zip(*paths, strict=False)
        common = [part[0] for part in takewhile(lambda part: len(set(part)) == 1, parts)]
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

    def turning(self, stack: str) -> set[str]:
        """The position methods of a stack that turn queries and keys."""
        return {name for name, module in self.ours.stacks[stack].positions.items() if isinstance(module, Rope)}

    def columns(self, ours: str) -> Tensor | None:
        """Where the output of this one of ours stands in that of theirs, if it is not all of it: the row's operation,
        done to numbers that count."""
        name = f"{ours}.weight"
        if name not in self.held:
            return None
        step = self.held[name].step
        heights = [(self.shapes[each][0],) for each in step.ours]
        count = torch.arange(sum(height for (height,) in heights))
        own = step.op.load([count], heights, step.d_head)[step.ours.index(name)]
        return None if torch.equal(own, count) else own
