"""Check configurations of one library, in the library's environment. `run_library` of worker_process.py starts it.

    python worker.py LIBRARY_FILE SOURCE_FOLDER SKIPPED…

Writes one JSON object per line: the names of all configurations, then for each one that is not skipped its start and
its result. What the library prints goes to stderr.
"""

import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import IO, Any


def main() -> None:
    path, source, *skipped = sys.argv[1:]
    messages = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    # scripts/ecosystem has files with the names of libraries, and the folder of this file is not needed
    sys.path[0] = str(Path(__file__).parents[1])
    if source:
        sys.path.insert(0, source)
    configurations = dict(load_module(Path(path)).configurations())
    send(messages, {"configurations": list(configurations)})
    for name, make in configurations.items():
        if name not in skipped:
            send(messages, {"started": name})
            send(messages, {"finished": name, **check_configuration(make)})


def load_module(path: Path) -> Any:
    spec = spec_from_file_location(f"ecosystem_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)  # torch.compile imports modules by name
    spec.loader.exec_module(module)
    return module


def check_configuration(make: Callable[[], Any]) -> dict[str, Any]:
    """Run all checks; an exception of the library or of the library file is the result `error`."""
    import torch

    import cutaway as ct

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        made = make()
        model, arguments = made if isinstance(made, tuple) else (made, {})
        report = ct.check(model, **{"budget": 300, **arguments})
    except Exception as error:
        traceback.print_exc()
        return {"error": shorten(f"{type(error).__name__}: {error}"), "counts": {}, "findings": []}
    findings = [
        {"check": each.check, "verdict": each.verdict, "message": shorten(each.message)}
        for each in report.findings
        if each.is_problem
    ]
    return {"error": "", "counts": dict(report.counts()), "findings": findings}


def shorten(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 300 else f"{text[:299]}…"


def send(messages: IO[str], message: dict[str, Any]) -> None:
    messages.write(json.dumps(message) + "\n")


if __name__ == "__main__":
    main()
