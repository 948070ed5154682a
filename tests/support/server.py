"""API servers with tiny checkpoints, run in threads of the test process."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import torch
from fastapi import FastAPI

import cutaway as ct
from cutaway.families.checkpoint import Checkpoint
from cutaway.generate import Engine
from cutaway.serve.limits import Limits
from cutaway.serve.middleware import AccessPolicy
from cutaway.serve.openai.api_server import build_openai_app
from cutaway.serve.openai.serving_engine import ServingEngine
from cutaway.serve.server import Server, bind_socket, server_url
from cutaway.tokenizer import byte_tokenizer

CHAT_TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}a:"


@dataclass
class RunningServer:
    """A running API server."""

    url: str
    serving: ServingEngine
    checkpoint: Checkpoint
    access_policy: AccessPolicy | None = None

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

    @property
    def engine(self) -> Engine:
        assert self.serving.engine is not None
        return self.serving.engine

    def wait_until_idle(self) -> bool:
        """Wait until no request is running; return whether that happened."""
        return wait_until(lambda: not self.engine.has_unfinished_requests and not self.serving.num_preprocessing)

    def metric(self, name: str) -> float:
        """Value of a metric of the server or of its model."""
        get_value = self.serving.metrics.server.registry.get_sample_value
        value = get_value(f"cutaway_{name}", {"model_name": self.serving.served_model_name})
        return value or get_value(f"cutaway_{name}") or 0.0

    @contextmanager
    def paused_engine(self) -> Iterator[None]:
        """Stop the engine between two steps: requests stay unfinished, however fast or busy the machine is."""
        resume, step = threading.Event(), self.engine.step

        def wait_and_step() -> bool:
            resume.wait()
            return step()

        self.engine.step = wait_and_step  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self.engine.step  # type: ignore[method-assign]
            resume.set()


def wait_until(condition: Callable[[], bool], seconds: float = 120) -> bool:
    """Wait for a condition; return whether it came true. Only a failing test reaches the time limit."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@contextmanager
def serve_in_thread(
    app: FastAPI, sock: socket.socket, limits: Limits | None = None, **server_options: Any
) -> Iterator[str]:
    """Run a server in a thread for the duration of the context; yields its URL."""
    ready = threading.Event()
    server = Server(app, limits or Limits(), ready.set, **server_options)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, name="cutaway server", daemon=True)
    url = server_url(sock)
    thread.start()
    try:
        if not ready.wait(120):
            raise RuntimeError("the server did not start")
        yield url
    finally:
        server.should_exit = True
        thread.join()


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
        yield RunningServer(url, serving, checkpoint, access_policy)


def load_tiny_python() -> Checkpoint:
    """Load the pretrained model in float32, where results do not depend on the batch."""
    return ct.load("tiny-python", dtype=torch.float32)
