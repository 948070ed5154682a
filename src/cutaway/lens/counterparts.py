"""Which module of another library's model does what a module of ours does, by the rows of its family."""

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
        self.shapes = {name: tensor.shape for name, tensor in ours.state_dict().items()}
        named = current_names(family, theirs.state_dict(keep_vars=True))
        self.held: dict[str, Held] = {}
        for step in steps_of(family.rows, ours.config, ours):
            there = [named[name] for name in step.theirs if name in named]
            for name in step.ours if there else ():
                self.held.setdefault(name, Held(there[0], step))

    def path_of(self, ours: str) -> str | None:
        """The path of the module that holds the weights of this one of ours."""
        held = self.held.get(f"{ours}.weight") or self.held.get(f"{ours}.bias")
        return None if held is None else held.name.rpartition(".")[0]

    def module(self, ours: str) -> nn.Module | None:
        path = self.path_of(ours)
        return None if path is None else self.theirs.get_submodule(path)

    def caller(self, ours: str) -> nn.Module | None:
        """The innermost module around all that this one of ours holds; lists are never called."""
        paths = [held.name.split(".")[:-1] for name, held in self.held.items() if name.startswith(f"{ours}.")]
        if not paths:
            return None
        common = [parts[0] for parts in zip(*paths, strict=False) if len(set(parts)) == 1]
        while common and isinstance(self.theirs.get_submodule(".".join(common)), nn.ModuleList | nn.ModuleDict):
            common.pop()
        return self.theirs.get_submodule(".".join(common)) if common else None

    def shared(self, block: str) -> bool:
        """Whether the same module serves several layers."""
        stack, _, _ = block.split(".")
        blocks = self.ours.stacks[stack].blocks
        return len({id(each) for each in blocks}) < len(blocks)

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
