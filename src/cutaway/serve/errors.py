"""API errors in the format of the OpenAI API."""

import json
from collections.abc import Mapping
from typing import Any

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
"""Error type by status code; default invalid_request_error, and server_error from 500."""


class APIError(Exception):
    """Error response: a status code and a JSON body in the format of the OpenAI API."""

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
        error_type = ERROR_TYPES.get(
            self.status_code, "server_error" if self.status_code >= 500 else "invalid_request_error"
        )
        return {"error": {"message": self.message, "type": error_type, "param": self.param, "code": self.code}}

    def to_json(self) -> bytes:
        return json.dumps(self.to_dict()).encode()
