"""A SOURCE of the command line as a model: a checkpoint, or an untrained model from a preset or configuration file."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutaway.errors import InputError

if TYPE_CHECKING:  # torch is imported when the work begins
    from cutaway.families.checkpoint import Checkpoint


class DType(StrEnum):
    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


def load_checkpoint(
    source: str, device: str | None, dtype: DType | None, *, quiet: bool, keep_dtype: bool = False
) -> "Checkpoint":
    """A checkpoint, ready to be asked. `keep_dtype`: as stored, however slow that is here."""
    import torch

    from cutaway.cli.views.terminal import progress_bar
    from cutaway.families.load import load
    from cutaway.generate.fast.cpu_linear import should_upcast_on_cpu
    from cutaway.model.device import has_native_bf16

    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    with progress_bar("reading", quiet=quiet) as progress:
        numbers = None if dtype is None else getattr(torch, dtype)
        found = load(source, device=where, dtype=numbers, progress=progress)
    if numbers is None and not keep_dtype and should_upcast_on_cpu(found.model) and not has_native_bf16():
        found.model.float()
        if not quiet:
            sys.stderr.write(
                "this CPU has no units for 16-bit numbers, so weights are widened to 32; --dtype bfloat16 keeps 16\n"
            )
    found.model.eval()
    return found


def is_config_source(source: str) -> bool:
    """Whether a source is a preset's name or a file of settings, and no checkpoint."""
    from cutaway.config import presets
    from cutaway.pretrained import find_pretrained

    is_file = source.endswith((".toml", ".json"))
    if (Path(source).exists() and not is_file) or find_pretrained(source) is not None:
        return False
    return is_file or source in presets() or "/" not in source.partition("@")[0]


def build_untrained_model(source: str, device: str | None, dtype: DType | None) -> Any:
    """The model that a preset's name or a file of settings describes; None if it is a checkpoint's."""
    from cutaway.config import config

    if not is_config_source(source):
        return None
    described = config(source)  # a misspelt name is told its nearest
    import torch

    from cutaway.model import build
    from cutaway.model.device import free_memory
    from cutaway.model.inputs import resolve_device
    from cutaway.size.parameters import count_parameters

    here = resolve_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    numbers = torch.float32 if dtype is None else getattr(torch, dtype)
    room, need = free_memory(here), count_parameters(described).total * numbers.itemsize
    if room is not None and need > room:
        raise InputError(
            f"'{source}' takes {need / 1e9:.3g} GB as fresh weights, and {room / 1e9:.3g} are free; "
            "choose a smaller one, such as tiny-llama"
        )
    return build(described, device=here, dtype=numbers, seed=0)
