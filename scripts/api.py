"""Lists what others build on: public names and their signatures, verbs and options, fields of configurations, routes.

python scripts/api.py            # shows what has changed against docs/reference/api.txt
python scripts/api.py --write    # accepts it; say so in CHANGELOG.md

What is listed here changes only on purpose. A test holds the list against the code.
"""

import argparse
import difflib
import inspect
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

LIST = Path(__file__).parents[1] / "docs" / "reference" / "api.txt"
ROOMS = (
    "cutaway",
    "cutaway.check",
    "cutaway.generate",
    "cutaway.learn",
    "cutaway.lens",
    "cutaway.lens.readings",
    "cutaway.measure",
    "cutaway.size",
)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--write", action="store_true", help="accept what the code has now")
    made, kept = listed(), LIST.read_text() if LIST.exists() else ""
    if asked.parse_args().write:
        LIST.write_text(made)
        return
    sys.stdout.writelines(difflib.unified_diff(kept.splitlines(True), made.splitlines(True), "listed", "found", n=1))
    sys.exit(made != kept)


def listed() -> str:
    parts = [(room, list(names(room))) for room in ROOMS]
    parts += [("command line", list(verbs())), ("sites", sites()), ("HTTP, cutaway serve", list(routes()))]
    for title, room in (("a configuration's fields", "cutaway.config"), ("a recipe's fields", "cutaway.train.recipe")):
        parts.append((title, list(fields(room))))
    return "\n".join(f"# {title}\n" + "".join(f"{line}\n" for line in lines) for title, lines in parts)


def names(room: str) -> Iterator[str]:
    """A room's public names; of a class also what it offers."""
    module = import_module(room)
    for name in sorted(module.__all__):
        value = getattr(module, name)
        if inspect.isclass(value):
            yield f"class {name}{signature(value)}"
            if value.__module__.startswith("cutaway"):
                yield from (f"    .{member}" for member in members(value))
        elif inspect.ismodule(value):  # a room that can be called
            yield f"{name}{signature(value.__call__)}  (cutaway.{name} is a room too)"
        else:
            yield f"{name}{signature(value)}" if callable(value) else name


def members(kind: type) -> Iterator[str]:
    """What a class of ours has beyond what PyTorch or pydantic gave it."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("cutaway"):
            found |= dict.fromkeys(inspect.get_annotations(base)) | vars(base)
    for name, value in sorted(found.items()):
        if not name.startswith("_") and name != "model_config":
            plain = getattr(value, "__func__", value)  # of a class method
            yield f"{name}{signature(plain) if inspect.isfunction(plain) else ''}"


def signature(value: Any) -> str:
    """Names, kinds and defaults; annotations are the reference's matter."""
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in found.parameters.values()]
    text = str(found.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def verbs() -> Iterator[str]:
    """Each verb with its arguments and options."""
    from cutaway.cli import VERBS
    from cutaway.cli.verbs import as_command

    for verb, place in VERBS.items():
        yield from command(f"cutaway {verb}", as_command(verb, place))


def command(name: str, made: Any) -> Iterator[str]:
    inner = {verb: made.get_command(None, verb) for verb in made.list_commands(None)} if is_group(made) else {}
    options = [given for each in made.params for given in options_of(each) if given != "--help"]
    if options or not inner:
        yield f"{name} {' '.join(options)}".rstrip()
    for verb, each in sorted(inner.items()):
        yield from command(f"{name} {verb}", each)


def is_group(made: Any) -> bool:
    """Whether it has verbs of its own, which may be made only when asked for."""
    return hasattr(made, "list_commands")


def options_of(parameter: Any) -> list[str]:
    if parameter.param_type_name == "argument":
        return [(parameter.metavar or parameter.name).upper()]
    return ["|".join([*parameter.opts, *parameter.secondary_opts])]


def sites() -> list[str]:
    """The vocabulary of places inside, for the three forms and for experts."""
    import cutaway as ct
    from cutaway.lens import sites as sites_of

    models = [ct.build(preset) for preset in ("tiny-moe", "tiny-bert", "tiny-t5")]
    return sorted({re.sub(r"\.\d+\.", ".{i}.", name) for model in models for name in sites_of(model)})


def routes() -> Iterator[str]:
    """What `cutaway serve` answers, and the fields that it takes."""
    import cutaway as ct
    from cutaway.serve.openai.start import make_api

    app, host = make_api(ct.load("tiny-python"), "tiny-python")
    try:
        told = app.openapi()
    finally:
        host.close()
    for path, methods in sorted(told["paths"].items()):
        yield from (f"{method.upper()} {path}" for method in methods)
    for part, schema in sorted(told["components"]["schemas"].items()):
        if part.endswith("Fields"):
            yield f"{part}: {' '.join(schema['properties'])}"


def fields(room: str) -> Iterator[str]:
    """Each part of a schema with its keys and their defaults."""
    schema = import_module(room).schema()
    whole = {"": schema} | schema.get("$defs", {})
    for part in sorted(whole):
        for key, field in whole[part].get("properties", {}).items():
            default = (
                f" = {field['default']!r}" if "default" in field and not isinstance(field["default"], dict) else ""
            )
            yield f"{part}.{key}{default}".lstrip(".")


if __name__ == "__main__":
    main()
