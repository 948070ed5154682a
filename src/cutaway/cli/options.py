"""Options and arguments that several verbs share, each with its type, flag and help text."""

import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

from cutaway.errors import InputError
from cutaway.pretrained import DEFAULT_MODEL

DType = Literal["float32", "float16", "bfloat16"]
TEXT_METAVARS = frozenset(["PROMPT", "TEXT"])
"""Names in the help of the argument that is the input text of a verb."""


def argument(
    help_text: str,
    *,
    metavar: str | None = None,
    show_default: bool = True,
    parser: Callable[[str], object] | None = None,
) -> object:
    return typer.Argument(help=help_text, metavar=metavar, show_default=show_default, parser=parser)


def option(
    help_text: str,
    *flags: str,
    metavar: str | None = None,
    min: float | None = None,
    max: float | None = None,
    panel: str | None = None,
) -> object:
    """Return a typer option. Without `flags`, the flag has the name of the verb's parameter.

    The help of an option in a panel does not show the option's default value.
    """
    return typer.Option(
        *flags, help=help_text, metavar=metavar, min=min, max=max, rich_help_panel=panel, show_default=panel is None
    )


def source_argument(help_text: str, metavar: str = "SOURCE") -> object:
    """Return a typer argument for the model, the first argument of a verb."""
    return typer.Argument(help=help_text, metavar=metavar, callback=check_not_text)


def check_not_text(context: typer.Context, source: str | None) -> str | None:
    """Raise if SOURCE is a text instead of a model: it contains whitespace and is not a path."""
    if source is None or not any(character.isspace() for character in source.strip()):
        return source
    from cutaway.config.serialization import path_satisfies  # imports pydantic

    if path_satisfies(Path(source).expanduser(), Path.exists):
        return source
    command = f"cutaway {context.info_name} {DEFAULT_MODEL}"
    if any(parameter.metavar in TEXT_METAVARS for parameter in context.command.params):
        quoted = shlex.quote(source) if set(source) & set('"$`\\!') else f'"{source}"'
        raise InputError(
            f"'{source}' does not exist; the first argument is the model, and the text follows it: {command} {quoted}"
        )
    raise InputError(f"'{source}' does not exist; the first argument is the model, as in {command}")


def check_none_is_text(context: typer.Context, sources: list[str]) -> list[str]:
    """Raise if one of the models is a text instead."""
    for source in sources:
        check_not_text(context, source)
    return sources


def json_flag(help_text: str) -> object:
    return option(help_text, "--json")


JsonFlag = Annotated[bool, json_flag("Print JSON.")]
JsonObjectFlag = Annotated[bool, json_flag("Print one JSON object.")]
ServerJsonFlag = Annotated[bool, json_flag("Print one JSON object when the server is ready.")]
CheckpointSources = Annotated[
    list[str],
    typer.Argument(
        help="Model or run directories, .gguf files or hub ids.", metavar="SOURCE", callback=check_none_is_text
    ),
]
CheckpointSource = Annotated[str, source_argument("Model or run directory, .gguf file or hub id.")]
ModelSource = Annotated[str, source_argument("Model or run directory, .gguf file, hub id or preset name.")]
Device = Annotated[str | None, option("Device: cpu or cuda; default cuda if available.")]
DeviceMap = Literal["auto"]
DEVICE_MAP_HELP = "auto: place weights on the GPU as far as they fit, and the others in CPU memory."
DEVICES_HELP = "Number of GPUs, or processes on the CPU, over which the model is split; default 1, or as torchrun."
WeightDType = Annotated[DType | None, option("Data type of the weights; default as stored.")]
WEIGHT_BITS_HELP = "Number of bits per weight during decode; 4 requires a GPU."
MAX_MODEL_LEN_HELP = "Maximum number of tokens of prompt plus output; 8Ki is 8,192."
MAX_NUM_SEQS_HELP = "Maximum number of sequences per batch; default up to 32."
Overrides = Annotated[list[str] | None, option("Override a recipe value; repeatable.", "--set", metavar="a.b=x")]
Host = Annotated[str, option("Address to bind to; an address other than loopback requires an API key.")]
Port = Annotated[int, option("Port; 0 selects a free port.")]
ApiKeyFile = Annotated[Path | None, option("File with the API key.", metavar="FILE")]


ADAPTER_HELP = "LoRA adapter to apply: a directory in PEFT's format, a run or a hub id."
Adapter = Annotated[str | None, option(ADAPTER_HELP, metavar="DIR")]


def parse_adapters(values: list[str] | None) -> dict[str, str]:
    """Parse NAME=DIR options to a dict."""
    adapters: dict[str, str] = {}
    for value in values or []:
        name, separator, directory = value.partition("=")
        if not separator or not name or not directory:
            raise InputError(f"--adapter is '{value}', which is not NAME=DIR; write it as in --adapter sql=runs/sql")
        if name in adapters:
            raise InputError(f"--adapter has the name '{name}' twice; pass another name for '{directory}'")
        adapters[name] = directory
    return adapters


def api_key_option(help_text: str) -> object:
    return typer.Option(envvar="CUTAWAY_API_KEY", show_envvar=True, help=help_text)


def check_weight_bits(weight_bits: int | None) -> None:
    if weight_bits not in (None, 16, 8, 4):
        raise InputError(f"--weight-bits is {weight_bits}; use 16, 8 or 4")


def parse_length(text: str | None) -> int | None:
    """Parse a number of tokens, such as 8192 or 8Ki (8 × 1024)."""
    from cutaway.size.units import parse_count

    return None if text is None else parse_count(text)


def check_output_path(path: Path) -> None:
    """Raise if an output file cannot be written. Verbs call this before they load the model."""
    if path.is_dir():
        raise InputError(f"'{path}' is a directory; pass the path of a file")
    if not path.parent.is_dir():
        raise InputError(f"'{path.parent}' is not a directory, so nothing can be written there; create it")
    if not os.access(path.parent, os.W_OK):
        raise InputError(
            f"the directory '{path.parent}' is read-only, so '{path.name}' cannot be written; pass another"
        )
