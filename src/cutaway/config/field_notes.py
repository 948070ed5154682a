"""The strings that stand under a configuration's fields, read from the sources only when a schema is asked for."""

import ast
import inspect
import sys
from functools import cache
from itertools import pairwise


def field_notes(part: type) -> dict[str, str]:
    """What stands under each field of a class, its own and those it takes over, by the field's name."""
    notes: dict[str, str] = {}
    for owner in reversed(part.__mro__):
        for name in inspect.get_annotations(owner):
            notes.pop(name, None)  # said anew, with a note of its own or none
        notes |= _notes_of_module(owner.__module__).get(owner.__name__, {})
    return notes


@cache
def _notes_of_module(module: str) -> dict[str, dict[str, str]]:
    if not module.startswith("cutaway."):  # the classes that ours come from have no fields
        return {}
    try:
        classes = ast.parse(inspect.getsource(sys.modules[module])).body
    except OSError:  # packed without its sources: the schema is right, and says less
        return {}
    return {each.name: _notes_of_class(each) for each in classes if isinstance(each, ast.ClassDef)}


def _notes_of_class(definition: ast.ClassDef) -> dict[str, str]:
    notes = {}
    for field, below in pairwise(definition.body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(note))):
                notes[name] = inspect.cleandoc(note)
    return notes
