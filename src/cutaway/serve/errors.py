"""A request that is refused, in the shape in which OpenAI's clients expect it."""

import json
from collections.abc import Mapping
from typing import Any

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
"""By status; others are invalid_request_error, or server_error from 500 on."""


class APIError(Exception):
    """What a client is told instead of an answer."""

    def __init__(
        self,
        status_code: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status_code, self.message, self.param, self.code = status_code, message, param, code
        self.headers = dict(headers or {})

    def to_dict(self) -> dict[str, Any]:
        kind = ERROR_TYPES.get(self.status_code, "server_error" if self.status_code >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def to_json(self) -> bytes:
        return json.dumps(self.to_dict()).encode()
