"""Scripts that write the documentation can be imported, so that none uses a name that no longer exists."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

SCRIPTS_DIR = Path(__file__).parents[2] / "scripts"


@pytest.mark.parametrize("path", sorted(SCRIPTS_DIR.rglob("*.py")), ids=lambda path: path.stem)
def test_script_can_be_imported(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(SCRIPTS_DIR), *sys.path])
    monkeypatch.chdir(SCRIPTS_DIR.parent)
    spec = spec_from_file_location(f"script_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(module_from_spec(spec))
