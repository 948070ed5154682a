"""`--devices N`: rank 0 serves requests, its workers run the same steps, and all of them end together."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from support.checkpoints import save_small_checkpoint

import cutaway as ct

COMMAND = [sys.executable, "-m", "cutaway"]


class DevicesServer:
    """A server process with a worker."""

    def __init__(self, model: Path) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, "serve", str(model), "--devices", "2", "--device", "cpu", "--port", "0", "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.address = urlsplit(json.loads(self.process.stdout.readline())["url"]).netloc

    def request(self, path: str, **body: Any) -> dict[str, Any]:
        connection = HTTPConnection(self.address, timeout=60)
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        answer: dict[str, Any] = json.loads(connection.getresponse().read())
        return answer

    def tokens(self, prompt: list[int], count: int) -> str:
        body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
        text: str = self.request("/v1/completions", **body)["choices"][0]["text"]
        return text

    def abort_stream(self) -> None:
        """Start a long stream and close the connection after its first event."""
        connection = HTTPConnection(self.address, timeout=60)
        body = {"prompt": [1, 2, 3], "max_tokens": 100, "stream": True, "ignore_eos": True, "temperature": 0}
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        connection.getresponse().readline()
        connection.close()

    def child_pids(self) -> list[int]:
        children = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return [int(pid) for file in children for pid in file.read_text().split()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_checkpoint(tmp_path_factory.mktemp("devices") / "model")


@pytest.fixture
def server(model: Path) -> Iterator[DevicesServer]:
    server = DevicesServer(model)
    yield server
    server.process.kill()
    server.process.communicate()


@pytest.mark.nightly
def test_workers_of_a_server(server: DevicesServer, model: Path) -> None:
    """Answers are those of one process, also after aborted streams. If the worker is killed, the server ends."""
    checkpoint = ct.load(model)
    prompts = [[5, 6, 7], [9], [*range(20, 60)]]
    expected = [completion.text for completion in ct.generate(checkpoint, prompts, max_new_tokens=12, ignore_eos=True)]
    for prompt, text in zip(prompts, expected, strict=True):
        server.abort_stream()
        assert server.tokens(prompt, 12) == text
    echo = {"prompt": prompts[2], "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
    logprobs = server.request("/v1/completions", **echo)["choices"][0]["logprobs"]["token_logprobs"]
    [completion] = ct.generate(checkpoint, [prompts[2]], max_new_tokens=1, prompt_logprobs=0)
    assert completion.prompt_logprobs is not None
    known = [each.logprob for each in completion.prompt_logprobs if each is not None]
    assert logprobs[1 : 1 + len(known)] == pytest.approx(known, abs=1e-4)
    error = server.request("/v1/embeddings", model="model", input="text")["error"]
    assert "the model is split over 2 processes" in error["message"]
    assert server.tokens(prompts[0], 12) == expected[0]
    [worker] = server.child_pids()
    os.kill(worker, signal.SIGKILL)
    assert server.process.wait(60) == 2
    assert server.process.stderr is not None
    assert "process 1 of 2: was killed by signal 9; all processes were stopped" in server.process.stderr.read()


@pytest.mark.nightly
@pytest.mark.parametrize("torchrun", [False, True])
def test_generate(model: Path, *, torchrun: bool) -> None:
    """Only rank 0 prints. Options that are not supported are refused once, in a sentence."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "cutaway"]
    command = [*(launcher if torchrun else COMMAND), "generate", str(model), "--token-ids", "1,2,3", "--device", "cpu"]
    options = [] if torchrun else ["--devices", "2"]
    result = subprocess.run([*command, "-n", "8", "--json", *options], capture_output=True, text=True, check=True)
    [expected] = ct.generate(ct.load(model), [[1, 2, 3]], max_new_tokens=8)
    assert [json.loads(line)["tokens"] for line in result.stdout.splitlines()] == [expected.tokens]
    refused = [*command, "--weight-bits", "8", *options]
    result = subprocess.run(refused, capture_output=True, text=True, check=False)
    assert result.returncode == (1 if torchrun else 2)
    assert result.stderr.count("a model on several processes does not support weight_bits") == 1


@pytest.mark.nightly
def test_error_of_all_ranks_is_reported_once(model: Path) -> None:
    command = [*COMMAND, "generate", str(model), "--token-ids", "1", "--devices", "3", "--device", "cpu"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr == "cutaway: 4 query heads cannot be split over 3 processes; use a divisor of 4: 2, 4\n"
