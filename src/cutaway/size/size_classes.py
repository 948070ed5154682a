"""Size classes: a preset for a number of parameters, for `cutaway size 7b`."""

import re
from pathlib import Path

from cutaway.config.serialization import path_satisfies
from cutaway.errors import InputError

SIZE_CLASSES = {
    "135m": "smollm2-135m",
    "360m": "smollm2-360m",
    "0.5b": "qwen2.5-0.5b",
    "0.6b": "qwen3-0.6b",
    "1b": "llama-3.2-1b",
    "1.5b": "qwen2.5-1.5b",
    "1.7b": "qwen3-1.7b",
    "3b": "llama-3.2-3b",
    "4b": "qwen3-4b",
    "7b": "llama-2-7b",
    "8b": "llama-3-8b",
    "12b": "mistral-nemo-12b",
    "13b": "llama-2-13b",
    "14b": "qwen3-14b",
    "32b": "qwen3-32b",
    "70b": "llama-3-70b",
    "405b": "llama-3.1-405b",
}
"""A widely used dense decoder of each size."""


def find_size_class(name: str) -> str | None:
    """Preset of a size such as '7b'; None if the name is not a size. Raises InputError if there is no such preset."""
    if not isinstance(name, str) or not re.fullmatch(r"\d+(\.\d+)?[mb]", name.strip().lower()):
        return None
    if path_satisfies(Path(name), Path.exists):
        return None
    size = name.strip().lower()
    if size not in SIZE_CLASSES:
        raise InputError(
            f"there is no preset for the size '{name}'; use one of {', '.join(SIZE_CLASSES)}, or the name of a model"
            " (cutaway presets)"
        )
    return SIZE_CLASSES[size]
