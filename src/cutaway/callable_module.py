"""Callable packages: `cutaway.config` is a package, and `cutaway.config(...)` calls its main function."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def make_callable(module_name: str, function: Callable[..., Any]) -> None:
    """Make the imported package `module_name` callable: a call runs `function`, and `help` shows its signature."""

    def signature(module: ModuleType) -> object:
        import inspect  # imported here: `import cutaway` does not need it

        return inspect.signature(function)

    attributes = {"__call__": staticmethod(function), "__doc__": function.__doc__, "__signature__": property(signature)}
    sys.modules[module_name].__class__ = type("CallableModule", (ModuleType,), attributes)
