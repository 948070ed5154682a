"""What a model's configuration says it is, in cutaway's words: for our models, and those of families that we know."""

from typing import Any

from torch import nn

from cutaway.check.target import Target
from cutaway.config import Config
from cutaway.errors import CutawayError
from cutaway.families import read_config
from cutaway.model import Transformer


def config_of(target: Target) -> Config | None:
    """The configuration; None where it is not known."""
    return None if target.module is None else config_in(target.module)


def config_in(module: nn.Module) -> Config | None:
    if isinstance(module, Transformer):
        return module.config
    theirs: Any = getattr(module, "config", None)
    if not hasattr(theirs, "to_dict"):
        return None
    try:
        return read_config(theirs.to_dict())
    except (CutawayError, ValueError, KeyError, TypeError, AttributeError):
        return None


def own_layers(config: Config) -> list[Any]:
    """The attentions of a text to itself, in the order of a pass: those of the stack that is asked."""
    stack = config.stacks.get("decoder") or config.stacks["encoder"]
    return [block.attention for block in stack.blocks]


def all_layers(config: Config) -> list[Any]:
    """Every attention in the order of a pass: an encoder's, then each decoder block's own and its reading of that."""
    found: list[Any] = []
    for name in ("encoder", "decoder"):
        for block in config.stacks[name].blocks if name in config.stacks else ():
            found += [block.attention, *([block.cross] if hasattr(block, "cross") else [])]
    return found
