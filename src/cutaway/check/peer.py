"""A directory opened by transformers, so that its model is checked and not ours."""

import json
from contextlib import redirect_stderr
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

from cutaway.errors import InputError, first_line
from cutaway.families.load import find


def by_transformers(source: str, *, device: Any = None, dtype: Any = None) -> Any:
    """The model as transformers has it, by the class that its config.json names."""
    try:
        transformers: Any = import_module("transformers")
    except ImportError:
        raise InputError("--library transformers needs transformers, which is not here; pip install it") from None
    path = find(source)
    if not (path / "config.json").is_file():
        raise InputError(
            f"'{source}' has no config.json, so transformers does not open it; convert it to hf first: cutaway convert"
        )
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        with redirect_stderr(StringIO()):  # its progress bars
            opens = class_of(transformers, path)
            model = opens.from_pretrained(path, dtype=dtype or "auto", trust_remote_code=False, use_safetensors=True)
    except Exception as error:  # whatever it is, it is the other library's
        raise InputError(f"transformers does not open '{source}': {first_line(error)}") from None
    return model.to(device).eval() if device is not None else model.eval()


def class_of(transformers: Any, path: Path) -> Any:
    """The class that wrote the checkpoint; where it is not known, whatever opens it."""
    named = json.loads((path / "config.json").read_text(encoding="utf-8")).get("architectures") or []
    return next((getattr(transformers, name) for name in named if hasattr(transformers, name)), transformers.AutoModel)
