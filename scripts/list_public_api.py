"""Lists what others build on: public names and their signatures, verbs and options, fields of configurations, routes.

python scripts/list_public_api.py            # shows what has changed against docs/reference/api.txt
python scripts/list_public_api.py --write    # accepts it; say so in CHANGELOG.md

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

API_LIST = Path(__file__).parents[1] / "docs" / "reference" / "api.txt"
PUBLIC_MODULES = (
    "cutaway",
    "cutaway.check",
    "cutaway.generate",
    "cutaway.learn",
    "cutaway.lens",
    "cutaway.lens.analysis",
    "cutaway.evaluate",
    "cutaway.size",
)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--write", action="store_true", help="accept what the code has now")
    made, kept = list_api(), API_LIST.read_text() if API_LIST.exists() else ""
    if asked.parse_args().write:
        API_LIST.write_text(made)
        return
    sys.stdout.writelines(difflib.unified_diff(kept.splitlines(True), made.splitlines(True), "listed", "found", n=1))
    sys.exit(made != kept)


def list_api() -> str:
    from cutaway.config import schema
    from cutaway.train.recipe.schema import recipe_json_schema

    parts = [(module, list(list_names(module))) for module in PUBLIC_MODULES]
    parts += [
        ("command line", list(list_verbs())),
        ("sites", list_sites()),
        ("HTTP, cutaway serve", list(list_routes())),
    ]
    parts += [
        ("a configuration's fields", list(list_fields(schema()))),
        ("a recipe's fields", list(list_fields(recipe_json_schema()))),
    ]
    return "\n".join(f"# {title}\n" + "".join(f"{line}\n" for line in lines) for title, lines in parts)


def list_names(module_name: str) -> Iterator[str]:
    """A module's public names; of a class also its members."""
    module = import_module(module_name)
    for name in sorted(module.__all__):
        value = getattr(module, name)
        if inspect.isclass(value):
            yield f"class {name}{format_signature(value)}"
            if value.__module__.startswith("cutaway"):
                yield from (f"    .{member}" for member in list_members(value))
        elif inspect.ismodule(value):  # a package that can be called
            yield f"{name}{format_signature(value.__call__)}  (cutaway.{name} is a package too)"
        else:
            yield f"{name}{format_signature(value)}" if callable(value) else name


def list_members(cls: type) -> Iterator[str]:
    """What a class of ours has beyond what PyTorch or pydantic gave it."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("cutaway"):
            found |= dict.fromkeys(inspect.get_annotations(base)) | vars(base)
    for name, value in sorted(found.items()):
        if not name.startswith("_") and name != "model_config":
            plain = getattr(value, "__func__", value)  # of a class method
            yield f"{name}{format_signature(plain) if inspect.isfunction(plain) else ''}"


def format_signature(value: Any) -> str:
    """Names, kinds and defaults; annotations are the reference's matter."""
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in found.parameters.values()]
    text = str(found.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def list_verbs() -> Iterator[str]:
    """Each verb with its arguments and options."""
    from cutaway.cli import VERBS
    from cutaway.cli.lazy_group import load_command

    for verb, place in VERBS.items():
        yield from list_command(f"cutaway {verb}", load_command(verb, place))


def list_command(name: str, click_command: Any) -> Iterator[str]:
    inner = (
        {verb: click_command.get_command(None, verb) for verb in click_command.list_commands(None)}
        if is_group(click_command)
        else {}
    )
    options = [given for each in click_command.params for given in format_options(each) if given != "--help"]
    if options or not inner:
        yield f"{name} {' '.join(options)}".rstrip()
    for verb, each in sorted(inner.items()):
        yield from list_command(f"{name} {verb}", each)


def is_group(made: Any) -> bool:
    """Whether it has verbs of its own, which may be made only when asked for."""
    return hasattr(made, "list_commands")


def format_options(parameter: Any) -> list[str]:
    if parameter.param_type_name == "argument":
        return [(parameter.metavar or parameter.name).upper()]
    return ["|".join([*parameter.opts, *parameter.secondary_opts])]


def list_sites() -> list[str]:
    """The vocabulary of places inside, for the three forms and for experts."""
    import cutaway as ct
    from cutaway.lens import sites as sites_of

    models = [ct.build(preset) for preset in ("tiny-moe", "tiny-bert", "tiny-t5")]
    return sorted({re.sub(r"\.\d+\.", ".{i}.", name) for model in models for name in sites_of(model)})


def list_routes() -> Iterator[str]:
    """What `cutaway serve` answers, and the fields that it takes."""
    import cutaway as ct
    from cutaway.serve.openai.api_server import build_openai_app

    app, host = build_openai_app(ct.load("tiny-python"), "tiny-python")
    try:
        told = app.openapi()
    finally:
        host.close()
    for path, methods in sorted(told["paths"].items()):
        yield from (f"{method.upper()} {path}" for method in methods)
    for part, schema in sorted(told["components"]["schemas"].items()):
        if part.endswith("Request"):
            yield f"{part}: {' '.join(schema['properties'])}"


def list_fields(schema: dict[str, Any]) -> Iterator[str]:
    """Each part of a JSON schema with its keys and their defaults."""
    whole = {"": schema} | schema.get("$defs", {})
    for part in sorted(whole):
        for key, field in whole[part].get("properties", {}).items():
            default = (
                f" = {field['default']!r}" if "default" in field and not isinstance(field["default"], dict) else ""
            )
            yield f"{part}.{key}{default}".lstrip(".")


if __name__ == "__main__":
    main()
