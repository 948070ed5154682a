"""Lets a room be called by its name: `ct.config(...)` is a function and `cutaway.config` a package, as the contract asks."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def make_callable(module_name: str, function: Callable[..., Any]) -> None:
    """Make the imported package `module_name` answer calls with `function`."""
    kind = type(
        "CallableModule",
        (ModuleType,),
        {"__call__": staticmethod(function), "__doc__": function.__doc__},
    )
    sys.modules[module_name].__class__ = kind
