"""The HTTP request that the current task handles: its client, and what is known about it at its end.

The middleware sets the context variable, so that limits, logs and the scheduler need no argument in each route.
"""

import re
import secrets
import time
from contextvars import ContextVar
from dataclasses import dataclass, field

from cutaway.serve.api_keys import KeyUsage

REQUEST_ID_PATTERN = re.compile(r"[A-Za-z0-9._:-]{1,64}")
MAX_MODEL_NAME_LENGTH = 120


@dataclass
class RequestContext:
    """One HTTP request. The routes and the engine add what they know."""

    request_id: str
    """Value of the response header X-Request-Id: the client's own if it sent a valid one, else a random one."""
    address: str
    """Address of the client. Behind a trusted proxy, the address that the proxy states."""
    method: str = ""
    path: str = ""
    start_time: float = field(default_factory=time.monotonic)
    usage: KeyUsage | None = None
    """Use of the client's API key, if the key is one of a file of keys."""
    model: str | None = None
    """Model name in the request."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    time_to_first_token: float | None = None
    """Time from the arrival of the request to its first token, in seconds."""
    finish_reasons: list[str] = field(default_factory=list)
    error_code: str | None = None

    @property
    def key_name(self) -> str | None:
        return None if self.usage is None else self.usage.key.name

    @property
    def client(self) -> str:
        """Identity of the client, for a fair share of the engine: the name of its API key, else its address."""
        return self.address if self.usage is None else f"key:{self.usage.key.name}"

    def set_model(self, name: str) -> None:
        self.model = name[:MAX_MODEL_NAME_LENGTH]

    def allows_model(self, name: str) -> bool:
        """Whether the client's API key may use this model or adapter."""
        return self.usage is None or self.usage.key.allows_model(name)

    def add_tokens(self, prompt_tokens: int, completion_tokens: int = 0) -> None:
        """Add tokens to the counts of the request, and to the use of the client's API key."""
        self.prompt_tokens += prompt_tokens
        self.completion_tokens += completion_tokens
        if self.usage is not None:
            self.usage.add_tokens(prompt_tokens + completion_tokens)


_NO_REQUEST = RequestContext("", "")
_CURRENT: ContextVar[RequestContext] = ContextVar("cutaway_request", default=_NO_REQUEST)


def current_request() -> RequestContext:
    """The request that the current task handles. Outside of a request, a placeholder without API key."""
    return _CURRENT.get()


def set_current_request(context: RequestContext) -> None:
    _CURRENT.set(context)


def choose_request_id(client_value: str | None) -> str:
    """The client's X-Request-Id if it is short and has no special characters, else a random id."""
    if client_value is not None and REQUEST_ID_PATTERN.fullmatch(client_value):
        return client_value
    return secrets.token_hex(16)
