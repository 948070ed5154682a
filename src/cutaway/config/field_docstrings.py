"""Docstrings of configuration fields, read from the sources when a JSON schema is built."""

import ast
import inspect
import sys
from functools import cache
from itertools import pairwise


def read_field_docstrings(node_class: type) -> dict[str, str]:
    """Return {field name: docstring} of the documented fields of a class, including inherited fields."""
    notes: dict[str, str] = {}
    for owner in reversed(node_class.__mro__):
        for name in inspect.get_annotations(owner):
            notes.pop(name, None)  # this class redefines the field, with or without a docstring
        notes |= _read_module_docstrings(owner.__module__).get(owner.__name__, {})
    return notes


@cache
def _read_module_docstrings(module: str) -> dict[str, dict[str, str]]:
    if not module.startswith("cutaway."):  # base classes of other packages have no fields
        return {}
    try:
        classes = ast.parse(inspect.getsource(sys.modules[module])).body
    except OSError:  # packaged without sources: the schema has no descriptions
        return {}
    return {each.name: _read_class_docstrings(each) for each in classes if isinstance(each, ast.ClassDef)}


def _read_class_docstrings(definition: ast.ClassDef) -> dict[str, str]:
    notes = {}
    for field, below in pairwise(definition.body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(note))):
                notes[name] = inspect.cleandoc(note)
    return notes
