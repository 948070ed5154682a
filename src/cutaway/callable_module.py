"""Callable packages: `cutaway.config` is a package, and `cutaway.config(...)` calls its main function."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def make_callable(module_name: str, function: Callable[..., Any]) -> None:
    """Make calls of the imported package `module_name` call `function`."""
    callable_class = type(
        "CallableModule",
        (ModuleType,),
        {"__call__": staticmethod(function), "__doc__": function.__doc__},
    )
    sys.modules[module_name].__class__ = callable_class
