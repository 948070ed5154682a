"""Lazy loading of CLI verbs. A verb's file is imported when the verb runs, and --help imports all files."""

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command


def lazy_group(import_paths: dict[str, str]) -> type[TyperGroup]:
    """Return a Typer group that imports the module of a verb when the verb is used. Paths are `module:function`."""

    class Verbs(TyperGroup):
        def list_commands(self, ctx: Any) -> list[str]:
            return list(import_paths)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            # For an unknown verb, load all verbs, so that typer can suggest the one with the most similar name.
            verbs = [cmd_name] if cmd_name in import_paths else import_paths
            for verb in verbs:
                if verb not in self.commands:
                    self.commands[verb] = load_command(verb, import_paths[verb])
            return self.commands.get(cmd_name)

    return Verbs


def load_command(verb: str, import_path: str) -> Any:
    """Build the Typer command of one verb from its function.

    If the file defines VERBS, the verb with the same name as the file is a group of these sub-verbs. If it defines
    CommandClass, this is the class of its commands.
    """
    module_name, name = import_path.split(":")
    module = import_module(module_name)
    subverbs = getattr(module, "VERBS", None) if module_name.endswith(f".{name}") else None
    if subverbs is None:
        typer_app = typer.Typer(add_completion=False)
        typer_app.command(verb, cls=getattr(module, "CommandClass", None))(getattr(module, name))
    else:
        typer_app = typer.Typer(add_completion=False, no_args_is_help=True, cls=lazy_group(subverbs))
        typer_app.callback()(getattr(module, name))
    command = get_command(typer_app)
    command.name = verb
    return command
