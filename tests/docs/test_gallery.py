"""The figures, numbers and tables of the gallery page are those that scripts/build_gallery.py computes."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE, GALLERY_DIR = ROOT / "docs" / "gallery.md", ROOT / "docs" / "gallery"
NUMBER = re.compile(r"[-−+]?\d+(?:\.\d+)?(?:e[-+]\d+)?")


def sections() -> dict[str, str]:
    """Text of the page by heading, without code and figures."""
    plain = re.sub(r"```.*?```|!\[.*?\)|`[^`]*`", "", PAGE.read_text(), flags=re.DOTALL)
    parts = re.split(r"^## (.*)$", plain, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def flatten(value: Any) -> list[float]:
    if isinstance(value, dict | list):
        return [each for inner in (value.values() if isinstance(value, dict) else value) for each in flatten(inner)]
    return [value] if isinstance(value, float) else []


def test_numbers_in_the_text_are_measured() -> None:
    measured = json.loads((GALLERY_DIR / "numbers.json").read_text())
    found = {name: re.findall(r"−?\d+\.\d+", text) for name, text in sections().items()}
    assert {name for name, numbers in found.items() if numbers} == set(measured)
    for name, numbers in found.items():
        known = flatten(measured.get(name, {}))
        for number in numbers:
            unit = 10.0 ** -len(number.split(".")[1])
            close = [each for each in known if abs(abs(each) - abs(float(number.replace("−", "-")))) <= 0.51 * unit]
            assert close, f"{number} in '{name}' is not in numbers.json"


def test_figures_exist_and_are_small() -> None:
    pages = PAGE.read_text() + PAGE.with_name("mechanisms.md").read_text()
    linked = re.findall(r"\]\(gallery/([\w-]+\.svg)\)", pages)
    assert sorted(linked) == sorted(path.name for path in GALLERY_DIR.glob("*.svg"))
    for path in GALLERY_DIR.glob("*.svg"):
        assert path.stat().st_size < 60_000
        assert "<text" in path.read_text()


def test_trace_table_is_up_to_date() -> None:
    assert f"resid_post\n{(GALLERY_DIR / 'trace.txt').read_text()}```" in PAGE.read_text()


@pytest.mark.nightly
def test_gallery_is_up_to_date(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "scripts" / "build_gallery.py", "--out", tmp_path], check=True, cwd=ROOT)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in GALLERY_DIR.iterdir()}
    directories = (tmp_path, GALLERY_DIR)
    assert_close(*(json.loads((directory / "numbers.json").read_text()) for directory in directories))
    actual, expected = ((directory / "trace.txt").read_text() for directory in directories)
    assert NUMBER.sub("", actual) == NUMBER.sub("", expected)
    actual_numbers, expected_numbers = (
        [float(number.replace("−", "-")) for number in NUMBER.findall(text)] for text in (actual, expected)
    )
    assert actual_numbers == pytest.approx(expected_numbers, rel=0.01, abs=0.11)


def assert_close(actual: Any, expected: Any) -> None:
    """Assert that names are equal, and that numbers are equal up to rounding differences between machines."""
    if isinstance(expected, dict):
        assert list(actual) == list(expected)
        actual, expected = list(actual.values()), list(expected.values())
    if isinstance(expected, list):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_close(one, other)
    else:
        assert actual == (pytest.approx(expected, rel=0.005, abs=0.005) if isinstance(expected, float) else expected)
