"""`module.path:factory`: a target that somebody's own Python makes."""

import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from cutaway.errors import InputError, raised

NAMED = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)")
Made = tuple[Any, dict[str, Any]]
"""A target, and what it offers beside."""
GIVES = "a model, a function tokens → logits, (model, dict of what it offers), or that dict alone"


def is_named(source: str) -> bool:
    """Whether a source is of this form, and no file."""
    return ":" in source and "://" not in source and not Path(source).exists()


def found(source: str, folder: Path | None = None) -> Any:
    """What `module.path:factory` names. Its module is imported, as Python does from the directory one stands in."""
    named = NAMED.fullmatch(source)
    if named is None or named[1].endswith(".py"):
        raise InputError(
            f"'{source}' is no module.path:factory; write the module as Python imports it, as in models.gpt:make"
        )
    module, name = named.groups()
    here = str(folder or Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        value: Any = import_module(module)
    except Exception as error:  # whatever it is, it is the module's own
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
            raise InputError(
                f"there is no module '{error.name}' in {here} or installed; stand where it can be imported from"
            ) from error
        raise InputError(f"the module '{module}' cannot be imported: it {raised(error)}; mend it first") from error
    for part in name.split("."):
        if not hasattr(value, part):
            raise InputError(f"'{module}' has no '{name}'; name a function of it that makes the model")
        value = getattr(value, part)
    return value


def made(source: str, value: Any, *, seed: int = 0) -> Made:
    """What the named function gives, called without arguments and seeded; or the named thing itself, where it is a
    model already."""
    import torch
    from torch import nn

    from cutaway.check.target import Target

    if not isinstance(value, nn.Module | Target | dict | tuple) and callable(value):
        value = called(source, value, lambda: torch.manual_seed(seed))
    if isinstance(value, dict):
        return as_offers(source, None, value)
    if isinstance(value, tuple):
        if len(value) != 2 or not isinstance(value[1], dict):
            kinds = ", ".join(type(each).__name__ for each in value)
            raise InputError(f"'{source}' gave a tuple of ({kinds}); it should give {GIVES}")
        return as_offers(source, *value)
    if value is None:
        raise InputError(f"'{source}' gave nothing back; it should return {GIVES}")
    return value, {}


def called(source: str, function: Callable[[], Any], seeded: Callable[[], object]) -> Any:
    """What a function gives; its own mistakes in one sentence."""
    seeded()
    try:
        return function()
    except Exception as error:
        raise InputError(
            f"'{source}' was called without arguments and {raised(error)}; it should return {GIVES}"
        ) from error


def as_offers(source: str, target: Any, offers: dict[Any, Any]) -> Made:
    """A dict of offers, whose names are checked later."""
    strange = [name for name in offers if not isinstance(name, str)]
    if strange:
        raise InputError(f"'{source}' offers {strange[0]!r}, which is no name; use those of cutaway.check.Target")
    offers = dict(offers)
    target = offers.pop("module", None) if target is None else target
    if target is None and not {"logits", "attention"} & offers.keys():
        raise InputError(f"'{source}' gave a dict without a model to ask; it needs logits, attention or module")
    return target, offers
