"""List the public API: names and signatures, verbs and options, configuration fields, HTTP routes.

python scripts/list_public_api.py            # show changes relative to docs/reference/api.txt
python scripts/list_public_api.py --write    # accept them; describe them in CHANGELOG.md

A test compares the list with the code.
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
    "cutaway.lens.activations",
    "cutaway.lens.analysis",
    "cutaway.lens.probes",
    "cutaway.lens.sae",
    "cutaway.evaluate",
    "cutaway.size",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the current API to the list")
    api, listed = list_api(), API_LIST.read_text() if API_LIST.exists() else ""
    if parser.parse_args().write:
        API_LIST.write_text(api)
        return
    sys.stdout.writelines(difflib.unified_diff(listed.splitlines(True), api.splitlines(True), "listed", "found", n=1))
    sys.exit(api != listed)


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
        ("configuration fields", list(list_fields(schema()))),
        ("recipe fields", list(list_fields(recipe_json_schema()))),
    ]
    return "\n".join(f"# {title}\n" + "".join(f"{line}\n" for line in lines) for title, lines in parts)


def list_names(module_name: str) -> Iterator[str]:
    """Yield a line for each public name of a module, and for each public member of its classes."""
    module = import_module(module_name)
    for name in sorted(module.__all__):
        value = getattr(module, name)
        if inspect.isclass(value):
            yield f"class {name}{format_signature(value)}"
            if value.__module__.startswith("cutaway"):
                yield from (f"    .{member}" for member in list_members(value))
        elif inspect.ismodule(value):  # a callable package
            yield f"{name}{format_signature(value.__call__)}  (cutaway.{name} is a package too)"
        else:
            yield f"{name}{format_signature(value)}" if callable(value) else name


def list_members(cls: type) -> Iterator[str]:
    """Yield the public members of a class, without those inherited from other libraries."""
    members: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("cutaway"):
            members |= dict.fromkeys(inspect.get_annotations(base)) | vars(base)
    for name, value in sorted(members.items()):
        if not name.startswith("_") and name != "model_config":
            function = getattr(value, "__func__", value)  # unwrap class methods
            yield f"{name}{format_signature(function) if inspect.isfunction(function) else ''}"


def format_signature(value: Any) -> str:
    """Return the signature with parameter names and defaults, without annotations. Empty if there is none."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    parameters = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    text = str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def list_verbs() -> Iterator[str]:
    """Yield a line for each verb and subcommand, with its arguments and options."""
    from cutaway.cli import VERBS
    from cutaway.cli.lazy_group import load_command

    for verb, import_path in VERBS.items():
        yield from list_command(f"cutaway {verb}", load_command(verb, import_path))


def list_command(name: str, click_command: Any) -> Iterator[str]:
    subcommands = (
        {verb: click_command.get_command(None, verb) for verb in click_command.list_commands(None)}
        if is_group(click_command)
        else {}
    )
    options = [
        option for parameter in click_command.params for option in format_options(parameter) if option != "--help"
    ]
    if options or not subcommands:
        yield f"{name} {' '.join(options)}".rstrip()
    for verb, subcommand in sorted(subcommands.items()):
        yield from list_command(f"{name} {verb}", subcommand)


def is_group(command: Any) -> bool:
    """Whether a click command has subcommands. Some groups load them lazily."""
    return hasattr(command, "list_commands")


def format_options(parameter: Any) -> list[str]:
    if parameter.param_type_name == "argument":
        return [(parameter.metavar or parameter.name).upper()]
    return ["|".join([*parameter.opts, *parameter.secondary_opts])]


def list_sites() -> list[str]:
    """Return the site names of a decoder with experts, an encoder and an encoder-decoder, with {i} for the layer."""
    import cutaway as ct
    from cutaway.lens import sites as list_model_sites

    models = [ct.build(preset) for preset in ("tiny-moe", "tiny-bert", "tiny-t5")]
    return sorted({re.sub(r"\.\d+\.", ".{i}.", name) for model in models for name in list_model_sites(model)})


def list_routes() -> Iterator[str]:
    """Yield the routes of `cutaway serve`, and the fields of each request schema."""
    import cutaway as ct
    from cutaway.serve.openai.api_server import build_openai_app

    app, serving = build_openai_app(ct.load("tiny-python"), "tiny-python")
    try:
        openapi = app.openapi()
    finally:
        serving.close()
    for path, methods in sorted(openapi["paths"].items()):
        yield from (f"{method.upper()} {path}" for method in methods)
    for name, schema in sorted(openapi["components"]["schemas"].items()):
        if name.endswith("Request"):
            yield f"{name}: {' '.join(schema['properties'])}"


def list_fields(schema: dict[str, Any]) -> Iterator[str]:
    """Yield the keys of a JSON schema and its definitions, with their defaults."""
    definitions = {"": schema} | schema.get("$defs", {})
    for name in sorted(definitions):
        for key, field in definitions[name].get("properties", {}).items():
            default = (
                f" = {field['default']!r}" if "default" in field and not isinstance(field["default"], dict) else ""
            )
            yield f"{name}.{key}{default}".lstrip(".")


if __name__ == "__main__":
    main()
