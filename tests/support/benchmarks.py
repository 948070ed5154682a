"""Import of the programs in bench/, which import each other as scripts of one directory do."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

BENCH_DIR = Path(__file__).parents[2] / "bench"


@contextmanager
def benchmarks_on_path() -> Iterator[None]:
    """Context manager: the modules of bench/ can be imported by name; at exit they are removed from `sys.modules`."""
    names = {path.stem for path in BENCH_DIR.glob("*.py")} - set(sys.modules)
    sys.path.insert(0, str(BENCH_DIR))
    try:
        yield
    finally:
        sys.path.remove(str(BENCH_DIR))
        for name in names:
            sys.modules.pop(name, None)


@contextmanager
def import_benchmark(name: str) -> Iterator[ModuleType]:
    with benchmarks_on_path():
        yield importlib.import_module(name)
