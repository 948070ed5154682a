"""Reading of files of bounded size."""

import os
from pathlib import Path

import pytest

from cutaway.bounded_files import read_file, read_json_object, read_text_file
from cutaway.errors import InputError


def test_reads_a_json_object(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"a": "é"}', encoding="utf-8")
    assert read_json_object(path, InputError) == {"a": "é"}
    assert read_file(path, InputError, max_bytes=path.stat().st_size) == path.read_bytes()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xff{}", "cannot be read as text"),
        (b"{", "is not valid JSON"),
        (b"[" * 100_000, "nested too deeply|is not valid JSON"),
        (b"[]", "holds a list, not a JSON object"),
        (b" " * 101, "has more than 100 bytes"),
    ],
)
def test_invalid_content_is_an_error(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(data)
    with pytest.raises(InputError, match=message):
        read_json_object(path, InputError, max_bytes=100 if len(data) == 101 else 1 << 20)


def test_missing_and_irregular_files_are_errors(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, message in (("none", "does not exist"), ("pipe", "not a regular file"), (".", "not a regular file")):
        with pytest.raises(InputError, match=message):
            read_text_file(tmp_path / name, InputError)
    with pytest.raises(InputError, match="not a regular file"):
        read_text_file(Path("/dev/zero"), InputError)
    with pytest.raises(InputError, match="cannot be read"):
        read_text_file(tmp_path / "a\0b", InputError)
