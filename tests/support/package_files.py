"""Files that installed packages carry."""

import importlib.util
from pathlib import Path


def find_package_file(package: str, path: str) -> Path:
    """A file in an installed package, which is not imported."""
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"{package} is not installed; run `make test`, which sets it up"
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / path
