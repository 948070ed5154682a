"""API servers with tiny checkpoints, run in threads of the test process."""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import torch

import cutaway as ct
from cutaway.families.checkpoint import Checkpoint
from cutaway.serve.limits import Limits
from cutaway.serve.middleware import AccessPolicy
from cutaway.serve.openai.api_server import build_openai_app
from cutaway.serve.openai.serving_engine import ServingEngine
from cutaway.serve.server import bind_socket, serve_in_thread
from cutaway.tokenizer import byte_tokenizer

CHAT_TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}a:"


@dataclass
class RunningServer:
    """A running API server."""

    url: str
    serving: ServingEngine
    checkpoint: Checkpoint

    @property
    def port(self) -> int:
        port = urlsplit(self.url).port
        assert port is not None
        return port

    def request(
        self, method: str, path: str, body: Any = None, headers: Any = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Send a request on a new connection and return status, headers and body."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
        finally:
            connection.close()

    def wait_until_idle(self, timeout: float = 60) -> bool:
        """Wait until no request is running; return whether that happened within the timeout."""
        engine = self.serving.engine
        assert engine is not None
        deadline = time.monotonic() + timeout
        while (engine.has_unfinished_requests or self.serving.num_preprocessing) and time.monotonic() < deadline:
            time.sleep(0.01)
        return not engine.has_unfinished_requests and not self.serving.num_preprocessing


def byte_checkpoint(
    preset: str, *, special_tokens: tuple[str, ...] = (), chat_template: str | None = None
) -> Checkpoint:
    """Return a tiny untrained checkpoint with a byte tokenizer."""
    tokenizer = byte_tokenizer(special_tokens=special_tokens)
    tokenizer.chat_template = chat_template
    model = ct.build(preset, seed=0)
    hf_config = {"decoder_start_token_id": 0} if len(model.stacks) == 2 else {}
    return Checkpoint(model, model.config, hf_config=hf_config, tokenizer_loader=lambda: tokenizer)


@contextmanager
def start_server(
    checkpoint: Checkpoint,
    *,
    access_policy: AccessPolicy | None = None,
    limits: Limits | None = None,
    send_buffer_bytes: int = 0,
    **engine_options: Any,
) -> Iterator[RunningServer]:
    """Run an API server; `send_buffer_bytes` sets SO_SNDBUF, to test clients that do not read."""
    app, serving = build_openai_app(
        checkpoint, "tiny", access_policy=access_policy, limits=limits, **{"max_num_seqs": 4, **engine_options}
    )
    sock = bind_socket("127.0.0.1", 0)
    if send_buffer_bytes:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
    with serve_in_thread(app, sock, limits) as url:
        yield RunningServer(url, serving, checkpoint)


def load_tiny_python() -> Checkpoint:
    """Load the pretrained model in float32, where results do not depend on the batch."""
    return ct.load("tiny-python", dtype=torch.float32)
