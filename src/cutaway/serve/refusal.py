"""A request that is refused, in the shape in which OpenAI's clients expect it."""

import json
from collections.abc import Mapping
from typing import Any

KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
"""By status; others are invalid_request_error, or server_error from 500 on."""


class Refused(Exception):  # noqa: N818  # what happened, as it reads at a `raise`
    """What a client is told instead of an answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def encoded(self) -> bytes:
        return json.dumps(self.body).encode()
