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
from cutaway.serve.door import Door
from cutaway.serve.limits import Limits
from cutaway.serve.openai.host import Host
from cutaway.serve.openai.start import make_api
from cutaway.serve.server import listen, serving
from cutaway.text import byte_tokenizer

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}a:"


@dataclass
class Served:
    """A server at work."""

    at: str
    host: Host
    checkpoint: Checkpoint

    @property
    def port(self) -> int:
        port = urlsplit(self.at).port
        assert port is not None
        return port

    def ask(self, method: str, path: str, body: Any = None, headers: Any = None) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of one answer, on a connection of its own."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def idle(self, seconds: float = 60) -> bool:
        """Whether, within a moment, nobody sits in a row any more."""
        engine = self.host.engine
        assert engine is not None
        end = time.monotonic() + seconds
        while (engine.busy or self.host.preparing) and time.monotonic() < end:
            time.sleep(0.01)
        return not engine.busy and not self.host.preparing


def bytewise(preset: str, *, special: tuple[str, ...] = (), template: str | None = None) -> Checkpoint:
    """A tiny model that reads and writes bytes."""
    tokenizer = byte_tokenizer(special=special)
    tokenizer.chat_template = template
    model = ct.build(preset, seed=0)
    theirs = {"decoder_start_token_id": 0} if len(model.stacks) == 2 else {}
    return Checkpoint(model, model.config, theirs=theirs, read_tokenizer=lambda: tokenizer)


@contextmanager
def served(
    checkpoint: Checkpoint, *, door: Door | None = None, limits: Limits | None = None, sent: int = 0, **how: Any
) -> Iterator[Served]:
    """`sent`: bytes that the system takes for a client which does not read them."""
    app, host = make_api(checkpoint, "tiny", door=door, limits=limits, **{"rows": 4, **how})
    listening = listen("127.0.0.1", 0)
    if sent:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, sent)
    with serving(app, listening, limits) as at:
        yield Served(at, host, checkpoint)


def python_model() -> Checkpoint:
    """The shipped model in 32 bits, where an answer is the same in any company."""
    return ct.load("tiny-python", dtype=torch.float32)
