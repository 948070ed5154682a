"""`cutaway serve`: startup, shutdown, errors."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from support.cli_runner import CliRunner

from cutaway.cli.verbs.serve import default_model_name

pytestmark = pytest.mark.unchecked


@contextmanager
def running_server(*arguments: str, **environment: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "cutaway", "serve", "tiny-python", "--port", "0", "--dtype", "float32", *arguments]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, env={**os.environ, **environment}) as process:
        try:
            yield process
        finally:
            process.kill()


def post(url: str, body: Any, key: str | None = None) -> Any:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    return urllib.request.urlopen(request, timeout=120)


def accepts_connections(url: str) -> bool:
    try:
        socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), timeout=120).close()
    except ConnectionRefusedError:
        return False
    return True


def test_sigterm_finishes_requests_in_progress() -> None:
    with running_server(
        "--json", "--max-num-seqs", "2", "--shutdown-timeout", "120", CUTAWAY_API_KEY="from-the-environment"
    ) as process:
        assert process.stdout is not None
        info = json.loads(process.stdout.readline())
        assert info["model"] == "tiny-python"
        assert info["max_num_seqs"] == 2
        assert info["requires_api_key"] is True
        url = info["url"]
        with pytest.raises(urllib.error.HTTPError, match="401"):
            post(url, {})
        stream = post(url, {"prompt": "def", "max_tokens": 60, "stream": True}, "from-the-environment")
        stream.readline()
        process.send_signal(signal.SIGTERM)
        assert stream.read().endswith(b"data: [DONE]\n\n")
        assert process.wait(120) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert not accepts_connections(url)


@pytest.mark.nightly
def test_second_sigint_exits_at_once() -> None:
    with running_server("--shutdown-timeout", "600") as process:
        assert process.stdout is not None
        output = "".join(process.stdout.readline() for _ in range(5))
        match = re.search(r"http://127\.0\.0\.1:\d+", output)
        assert match is not None
        assert re.search(r"KV cache grows as needed to at most \d+ MiB: .* \(change with --", output)
        assert "curl" in output
        streams = [post(match[0], {"prompt": "x", "max_tokens": 500, "n": 16, "stream": True}) for _ in range(3)]
        process.send_signal(signal.SIGINT)
        while accepts_connections(match[0]):  # until the server has handled the signal
            time.sleep(0.05)
        assert process.poll() is None  # waits for requests in progress
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0  # second signal
        for stream in streams:
            with suppress(OSError, http.client.HTTPException):
                assert b"[DONE]" not in stream.read()


def test_errors_before_loading_the_model(run_cli: CliRunner, tmp_path: Path) -> None:
    assert "key" in run_cli("serve", "tiny-python", "--host", "0.0.0.0", code=2)
    assert "8 to 512" in run_cli("serve", "tiny-python", "--api-key", "short", code=2)
    (tmp_path / "key").write_text("\n")
    assert "empty" in run_cli("serve", "tiny-python", "--api-key-file", tmp_path / "key", code=2)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "already in use" in run_cli("serve", "tiny-python", "--port", taken.getsockname()[1], code=2)
    assert "--weight-bits" in run_cli("serve", "tiny-python", "--weight-bits", 3, code=2)
    assert "--max-num-seqs" in run_cli("serve", "tiny-python", "--max-num-seqs", 0, code=2)
    assert "does not exist" in run_cli("serve", "no-such-model", "--port", 0, code=2)


def test_default_model_name(tmp_path: Path) -> None:
    (tmp_path / "model.Q4.gguf").write_bytes(b"")
    assert default_model_name(str(tmp_path / "model.Q4.gguf")) == "model.Q4"
    assert default_model_name(str(tmp_path)) == tmp_path.name
    assert default_model_name("owner/name@main") == "owner/name"


def test_help_imports_neither_torch_nor_fastapi() -> None:
    code = """
import sys
from cutaway.cli import main
sys.argv = ["cutaway", "serve", "--help"]
try:
    main()
except SystemExit:
    sys.exit(any(name in sys.modules for name in ("torch", "fastapi", "uvicorn")))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False, stdout=subprocess.DEVNULL).returncode == 0
