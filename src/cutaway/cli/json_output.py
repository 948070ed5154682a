"""JSON output of the verbs (--json). This module does not import rich."""

import json
import math
import sys
from collections.abc import Callable


def print_json(data: object, *, indent: int | None = 2, default: Callable[[object], object] | None = None) -> None:
    """Print one JSON value and flush. NaN and infinity are printed as strings."""
    text = json.dumps(_json_safe(data), indent=indent, default=default, allow_nan=False)
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _json_safe(value: object) -> object:
    """Replace NaN and infinity, which JSON cannot represent, with strings."""
    if isinstance(value, dict):
        return {key: _json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_safe(item) for item in value]
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)
