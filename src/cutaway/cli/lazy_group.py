"""Verbs as commands, each made when it is first needed: all for --help, one to run it."""

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command


def lazy_group(import_paths: dict[str, str]) -> type[TyperGroup]:
    """A group of the verbs whose functions stand at these places; a file is imported when its verb is asked for."""

    class Verbs(TyperGroup):
        def list_commands(self, ctx: Any) -> list[str]:
            return list(import_paths)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            needed = (
                [cmd_name] if cmd_name in import_paths else import_paths
            )  # a misspelt verb: typer suggests the nearest of all
            for verb in needed:
                if verb not in self.commands:
                    self.commands[verb] = load_command(verb, import_paths[verb])
            return self.commands.get(cmd_name)

    return Verbs


def load_command(verb: str, import_path: str) -> Any:
    """One verb as typer runs it: its options read from its function. The verb that a file is named after is a group
    where the file has VERBS of its own."""
    file, name = import_path.split(":")
    found = import_module(file)
    inner = getattr(found, "VERBS", None) if file.endswith(f".{name}") else None
    if inner is None:
        alone = typer.Typer(add_completion=False)
        alone.command(verb)(getattr(found, name))
    else:
        alone = typer.Typer(add_completion=False, no_args_is_help=True, cls=lazy_group(inner))
        alone.callback()(getattr(found, name))
    command = get_command(alone)
    command.name = verb
    return command
