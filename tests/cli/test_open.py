"""`cutaway open`: a file that holds its answers, and what is refused before anything is loaded."""

import base64
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from support.cli_runner import CliRunner
from support.inspector import _parse_data

import cutaway as ct

pytestmark = pytest.mark.unchecked


def test_the_file_holds_its_answers_and_no_text_is_markup(run_cli: CliRunner, tmp_path: Path) -> None:
    text, file = "</script><b>&", tmp_path / "page.html"
    told = json.loads(run_cli("open", "tiny-gpt", text, "--export", file, "--json"))
    assert told["is_complete"]
    page = file.read_text(encoding="utf-8")
    assert told["megabytes"] == pytest.approx(len(page.encode()) / 1e6)
    assert page.count("</script>") == 2
    assert "<b>" not in page.partition('id="cutaway-results"')[2].partition("</script>")[0]
    held = json.loads(re.search(r'id="cutaway-results">(.*?)</script>', page, re.S)[1])["results"]  # type: ignore[index]

    tokens = next(_parse_data(base64.b64decode(each)) for name, each in held.items() if name.startswith("tokenize "))
    assert bytes(tokens["tokens"]).decode() == text
    assert {name.partition(" ")[0] for name in held} >= {
        "model_info", "residual_norms", "journey", "activation", "attention_thumbnails", "attention_head",
        "consistency_check",
    }  # fmt: skip


def test_what_is_refused(run_cli: CliRunner, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("mine")
    for arguments, said in {
        ("tiny-gpt", "--export", tmp_path / "page.txt"): "should end in .html",
        ("tiny-gpt", "--export", tmp_path / "page.html"): "exists already",
        ("tiny-gpt", "--export", tmp_path / "no" / "page.html"): "is no directory",
        ("tiny-gpt", "--host", "0.0.0.0"): "no key",
        ("tiny-gpd", "--export", tmp_path / "other.html"): "did you mean tiny-gpt",
    }.items():
        assert said in run_cli("open", *arguments, code=2)
    assert (tmp_path / "page.html").read_text() == "mine"


def test_a_widget_answers_by_messages() -> None:
    """The frames that HTTP would send, as buffers; what cannot be asked is told in words."""
    page = ct.view(ct.build("tiny-gpt", seed=0), "abc", screen="attention")
    assert page.url_fragment == "/attention?text=abc"
    sent: list[tuple[Any, list[bytes]]] = []
    page.send = lambda content, buffers=None: sent.append((content, list(buffers or [])))
    page._handle_custom_msg({"id": 1, "query": "tokenize", "params": {"text": "abc"}}, [])
    page._handle_custom_msg({"id": 2, "query": "nothing", "params": {}}, [])

    end = time.monotonic() + 60
    while sum(content["end"] for content, _ in sent) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    frames = {
        number: b"".join(b"".join(buffers) for content, buffers in sent if content["id"] == number) for number in (1, 2)
    }
    assert _parse_data(frames[1][5:])["tokens"] == [97, 98, 99]
    assert "no such question" in json.loads(frames[2][5:])["message"]
    with pytest.raises(ct.CutawayError, match="there is no screen"):
        ct.view(ct.build("tiny-gpt", seed=0), screen="nowhere")
