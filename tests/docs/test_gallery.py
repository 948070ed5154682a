"""The gallery is what its program makes: no picture, number or table on the page is older than the model."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE, FOLDER = ROOT / "docs" / "gallery.md", ROOT / "docs" / "gallery"
NUMBER = re.compile(r"[-−+]?\d+(?:\.\d+)?(?:e[-+]\d+)?")


def sections() -> dict[str, str]:
    """The page's sentences by heading, without code and pictures."""
    plain = re.sub(r"```.*?```|!\[.*?\)|`[^`]*`", "", PAGE.read_text(), flags=re.DOTALL)
    parts = re.split(r"^## (.*)$", plain, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def flat(value: Any) -> list[float]:
    if isinstance(value, dict | list):
        return [each for inner in (value.values() if isinstance(value, dict) else value) for each in flat(inner)]
    return [value] if isinstance(value, float) else []


def test_every_number_on_the_page_was_measured() -> None:
    measured = json.loads((FOLDER / "numbers.json").read_text())
    said = {name: re.findall(r"−?\d+\.\d+", words) for name, words in sections().items()}
    assert {name for name, words in said.items() if words} == set(measured)
    for name, words in said.items():
        known = flat(measured.get(name, {}))
        for word in words:
            unit = 10.0 ** -len(word.split(".")[1])
            close = [each for each in known if abs(abs(each) - abs(float(word.replace("−", "-")))) <= 0.51 * unit]
            assert close, f"{word} in '{name}' is no number of numbers.json"


def test_every_picture_is_there_and_small() -> None:
    named = re.findall(r"\]\(gallery/([\w-]+\.svg)\)", PAGE.read_text())
    assert sorted(named) == sorted(path.name for path in FOLDER.glob("*.svg"))
    for path in FOLDER.glob("*.svg"):
        assert path.stat().st_size < 60_000
        assert "<text" in path.read_text()


def test_the_table_on_the_page_is_the_one_kept() -> None:
    assert f"resid_post\n{(FOLDER / 'trace.txt').read_text()}```" in PAGE.read_text()


@pytest.mark.nightly
def test_the_gallery_is_what_its_program_makes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "scripts" / "build_gallery.py", "--out", tmp_path], check=True, cwd=ROOT)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in FOLDER.iterdir()}
    same(*(json.loads((folder / "numbers.json").read_text()) for folder in (tmp_path, FOLDER)))
    made, kept = ((folder / "trace.txt").read_text() for folder in (tmp_path, FOLDER))
    assert NUMBER.sub("", made) == NUMBER.sub("", kept)
    found, held = ([float(word.replace("−", "-")) for word in NUMBER.findall(text)] for text in (made, kept))
    assert found == pytest.approx(held, rel=0.01, abs=0.11)


def same(made: Any, kept: Any) -> None:
    """Names alike, numbers up to what another machine rounds."""
    if isinstance(kept, dict):
        assert list(made) == list(kept)
        made, kept = list(made.values()), list(kept.values())
    if isinstance(kept, list):
        assert len(made) == len(kept)
        for mine, other in zip(made, kept, strict=True):
            same(mine, other)
    else:
        assert made == (pytest.approx(kept, rel=0.005, abs=0.005) if isinstance(kept, float) else kept)
