"""Files of installed packages."""

import importlib.util
from pathlib import Path


def find_package_file(package: str, path: str) -> Path:
    """Path of a file in an installed package, without importing it."""
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"{package} is not installed; run `make test`, which sets it up"
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / path
