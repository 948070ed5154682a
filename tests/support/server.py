"""Servers for tests: tiny checkpoints behind the API, in threads of this process."""

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
    """A server at work."""

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
        """Status, headers and body of one answer, on a connection of its own."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def wait_until_idle(self, timeout: float = 60) -> bool:
        """Whether, within a moment, nobody sits in a row any more."""
        engine = self.serving.engine
        assert engine is not None
        end = time.monotonic() + timeout
        while (engine.has_unfinished_requests or self.serving.num_preprocessing) and time.monotonic() < end:
            time.sleep(0.01)
        return not engine.has_unfinished_requests and not self.serving.num_preprocessing


def byte_checkpoint(
    preset: str, *, special_tokens: tuple[str, ...] = (), chat_template: str | None = None
) -> Checkpoint:
    """A tiny model that reads and writes bytes."""
    tokenizer = byte_tokenizer(special_tokens=special_tokens)
    tokenizer.chat_template = chat_template
    model = ct.build(preset, seed=0)
    theirs = {"decoder_start_token_id": 0} if len(model.stacks) == 2 else {}
    return Checkpoint(model, model.config, hf_config=theirs, tokenizer_loader=lambda: tokenizer)


@contextmanager
def start_server(
    checkpoint: Checkpoint,
    *,
    access_policy: AccessPolicy | None = None,
    limits: Limits | None = None,
    send_buffer_bytes: int = 0,
    **engine_options: Any,
) -> Iterator[RunningServer]:
    """`send_buffer_bytes`: bytes that the system takes for a client which does not read them."""
    app, host = build_openai_app(
        checkpoint, "tiny", access_policy=access_policy, limits=limits, **{"max_num_seqs": 4, **engine_options}
    )
    listening = bind_socket("127.0.0.1", 0)
    if send_buffer_bytes:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
    with serve_in_thread(app, listening, limits) as at:
        yield RunningServer(at, host, checkpoint)


def load_tiny_python() -> Checkpoint:
    """The shipped model in 32 bits, where an answer is the same in any company."""
    return ct.load("tiny-python", dtype=torch.float32)
