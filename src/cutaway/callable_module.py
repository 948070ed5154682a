"""Lets a room be called by its name: `cutaway.config` is a package, and `cutaway.config(...)` a function."""

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
