"""What a model's configuration says it is, in cutaway's words: for our models, and those of families that we know."""

from typing import Any

from torch import nn

from cutaway.check.checked_model import CheckedModel
from cutaway.config import Config
from cutaway.errors import CutawayError
from cutaway.families import config_from_hf
from cutaway.model import Transformer


def get_config(model: CheckedModel) -> Config | None:
    """The configuration; None where it is not known."""
    return None if model.module is None else get_module_config(model.module)


def get_module_config(module: nn.Module) -> Config | None:
    if isinstance(module, Transformer):
        return module.config
    theirs: Any = getattr(module, "config", None)
    if not hasattr(theirs, "to_dict"):
        return None
    try:
        return config_from_hf(theirs.to_dict())
    except (CutawayError, ValueError, KeyError, TypeError, AttributeError):
        return None


def self_attention_configs(config: Config) -> list[Any]:
    """The attentions of a text to itself, in the order of a pass: those of the stack that is asked."""
    stack = config.stacks.get("decoder") or config.stacks["encoder"]
    return [block.attention for block in stack.blocks]


def attention_configs(config: Config) -> list[Any]:
    """Every attention in the order of a pass: an encoder's, then each decoder block's own and its reading of that."""
    found: list[Any] = []
    for name in ("encoder", "decoder"):
        for block in config.stacks[name].blocks if name in config.stacks else ():
            found += [block.attention, *([block.cross] if hasattr(block, "cross") else [])]
    return found
