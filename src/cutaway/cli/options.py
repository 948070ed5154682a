"""Options and arguments that several verbs share: the type, the flag and the help text of each, written once."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from cutaway.errors import InputError

DType = Literal["float32", "float16", "bfloat16"]


def _source(help_text: str) -> object:
    return typer.Argument(metavar="SOURCE", help=help_text)


def json_flag(help_text: str) -> object:
    return typer.Option("--json", help=help_text)


JsonFlag = Annotated[bool, json_flag("Print JSON.")]
JsonObjectFlag = Annotated[bool, json_flag("Print one JSON object.")]
ServerJsonFlag = Annotated[bool, json_flag("Print one JSON object when the server is ready.")]
CheckpointSource = Annotated[str, _source("Model directory, run directory, .gguf file or hub id.")]
ModelSource = Annotated[str, _source("Model directory, run directory, .gguf file, hub id or preset name.")]
Device = Annotated[str | None, typer.Option(help="Device: cpu or cuda; default cuda if available.")]
WeightDType = Annotated[DType | None, typer.Option(help="Data type of the weights; default as stored.")]
WEIGHT_BITS_HELP = "Weight quantization during decode; 4 requires a GPU."
MAX_MODEL_LEN_HELP = "Maximum length of prompt and output; 8Ki is 8,192."
MAX_NUM_SEQS_HELP = "Maximum number of sequences per batch; default up to 32."
Host = Annotated[str, typer.Option(help="Address to bind; others than loopback require an API key.")]
Port = Annotated[int, typer.Option(help="Port; 0 selects a free port.")]
ApiKeyFile = Annotated[Path | None, typer.Option(metavar="FILE", help="File with the API key.")]


def api_key_option(help_text: str) -> object:
    return typer.Option(envvar="CUTAWAY_API_KEY", show_envvar=True, help=help_text)


def check_weight_bits(weight_bits: int | None) -> None:
    if weight_bits not in (None, 16, 8, 4):
        raise InputError(f"--weight-bits is {weight_bits}; use 16, 8 or 4")


def parse_length(text: str | None) -> int | None:
    """Parse a number of tokens, such as 8Ki."""
    from cutaway.size.units import parse_count

    return None if text is None else parse_count(text)


def check_parent_directory(path: Path) -> None:
    """Raise if the directory of an output file does not exist, before loading the model."""
    if not path.parent.is_dir():
        raise InputError(
            f"'{path.parent}' is not a directory, so the file cannot be written; create it, or name another"
        )
