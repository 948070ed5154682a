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
from support.certificates import Certificate, make_certificate
from support.cli_runner import CliRunner

from cutaway.cli.server_models import default_model_name

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


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("certificate"))


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
        stream = post(
            url, {"prompt": "def", "max_tokens": 60, "ignore_eos": True, "stream": True}, "from-the-environment"
        )
        stream.readline()
        process.send_signal(signal.SIGTERM)
        assert stream.read().endswith(b"data: [DONE]\n\n")
        assert process.wait(120) == 0
        assert process.stderr is not None
        unauthorized, completion = process.stderr.read().splitlines()
        assert "status=401 " in unauthorized
        assert "finish_reason=length" in completion
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


def test_several_models_with_tls_and_json_log(tmp_path: Path, certificate: Certificate) -> None:
    """One process: two models, TLS, a file of API keys that SIGHUP reads again, and one JSON object per log line."""
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nname = "alice"\nkey = "sk-alice-1"\n')
    keys.chmod(0o644)
    options = ("tiny-english", "--api-keys", str(keys), "--ssl-certfile", str(certificate.certfile),
               "--ssl-keyfile", str(certificate.keyfile), "--log-format", "json", "--json")  # fmt: skip
    with running_server(*options) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        info = json.loads(process.stdout.readline())
        assert info["url"].startswith("https://")
        assert [model["model"] for model in info["models"]] == ["tiny-python", "tiny-english"]
        assert all(model["weight_bytes"] > 1e6 and model["cache_bytes"] > 1e6 for model in info["models"])
        warning = json.loads(process.stderr.readline())
        assert warning["level"] == "WARNING"
        assert "can be read by other users (mode 644)" in warning["message"]

        def status(key: str) -> int:
            request = urllib.request.Request(f"{info['url']}/v1/models", headers={"Authorization": f"Bearer {key}"})
            try:
                with urllib.request.urlopen(request, context=certificate.client_context(), timeout=120) as response:
                    return response.status
            except urllib.error.HTTPError as error:
                return error.code

        assert (status("sk-alice-1"), status("sk-alice-2")) == (200, 401)
        assert [json.loads(process.stderr.readline()).get("key") for _ in range(2)] == ["alice", None]
        keys.write_text('[[keys]]\nname = "alice"\nkey = "sk-alice-2"\n')
        process.send_signal(signal.SIGHUP)
        messages = [json.loads(process.stderr.readline())["message"] for _ in range(2)]
        assert messages == [f"SIGHUP: '{path}' was read again" for path in (keys, certificate.certfile)]
        assert (status("sk-alice-1"), status("sk-alice-2")) == (401, 200)
        keys.write_text("[[keys]]")
        process.stderr.readline()
        process.stderr.readline()
        process.send_signal(signal.SIGHUP)
        assert "the previous content stays in use" in json.loads(process.stderr.readline())["message"]
        assert status("sk-alice-2") == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0


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
    assert "two models have the name" in run_cli("serve", "tiny-python", "tiny-python", code=2)
    name = "--served-model-name"
    assert "1 times for 2 models" in run_cli("serve", "tiny-python", "tiny-english", name, "a", code=2)
    assert "without --ssl-certfile" in run_cli("serve", "tiny-python", "--ssl-keyfile", tmp_path / "key", code=2)
    assert "does not exist" in run_cli("serve", "tiny-python", "--ssl-certfile", tmp_path / "no.pem", code=2)
    assert "does not exist" in run_cli("serve", "tiny-python", "--api-keys", tmp_path / "no.toml", code=2)
    assert "clients could forge" in run_cli("serve", "tiny-python", "--forwarded-allow-ips", "*", code=2)


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
