"""`cutaway open`: exported page, errors, notebook widget."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from support.cli_runner import CliRunner
from support.exported_page import read_exported_results
from support.inspector import _parse_data

import cutaway as ct

pytestmark = pytest.mark.unchecked


def test_exported_page_has_all_results_and_escapes_text(run_cli: CliRunner, tmp_path: Path) -> None:
    text, file = "</script><b>&", tmp_path / "page.html"
    data = json.loads(run_cli("open", "tiny-gpt", text, "--export", file, "--json"))
    assert data["is_complete"]
    page = file.read_text(encoding="utf-8")
    assert data["megabytes"] == pytest.approx(len(page.encode()) / 1e6)
    assert page.count("</script>") == 3
    assert "<b>" not in page.partition('id="cutaway-results"')[2].partition("</script>")[0]
    results = read_exported_results(page)
    tokens = next(data for name, (data, _) in results.items() if name.startswith("tokenize "))
    assert bytes(tokens["tokens"]).decode() == text
    assert {name.partition(" ")[0] for name in results} >= {
        "model_info", "residual_norms", "journey", "activation", "attention_thumbnails", "attention_head",
        "architecture", "interventions", "worked_attention",
        "consistency_check", "edit_effect", "generate", "model_sizes", "memory_fit", "lessons",
    }  # fmt: skip


def test_errors_have_one_message(run_cli: CliRunner, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("mine")
    for arguments, message in {
        ("tiny-gpt", "--export", tmp_path / "page.txt"): "does not end in .html",
        ("tiny-gpt", "--export", tmp_path / "page.html"): "exists and is not overwritten",
        ("tiny-gpt", "--export", tmp_path / "no" / "page.html"): "is not a directory",
        ("tiny-gpt", "--host", "0.0.0.0"): "no API key",
        ("tiny-gpd", "--export", tmp_path / "other.html"): "did you mean tiny-gpt",
    }.items():
        assert message in run_cli("open", *arguments, code=2)
    assert (tmp_path / "page.html").read_text() == "mine"


def test_widget_runs_queries() -> None:
    """Frames are sent as buffers, like over HTTP; unknown queries send an error frame."""
    page = ct.view(ct.build("tiny-gpt", seed=0), "abc", screen="attention")
    assert page.url_fragment == "/attention?text=abc"
    sent: list[tuple[Any, list[bytes]]] = []
    page.send = lambda content, buffers=None: sent.append((content, list(buffers or [])))
    page._handle_custom_msg({"id": 1, "query": "tokenize", "params": {"text": "abc"}}, [])
    page._handle_custom_msg({"id": 2, "query": "nothing", "params": {}}, [])

    deadline = time.monotonic() + 60
    while sum(content["end"] for content, _ in sent) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    frames = {
        query_id: b"".join(b"".join(buffers) for content, buffers in sent if content["id"] == query_id)
        for query_id in (1, 2)
    }
    assert _parse_data(frames[1][5:])["tokens"] == [97, 98, 99]
    assert "no such query" in json.loads(frames[2][5:])["message"]
    with pytest.raises(ct.CutawayError, match="screen is 'nowhere'"):
        ct.view(ct.build("tiny-gpt", seed=0), screen="nowhere")
