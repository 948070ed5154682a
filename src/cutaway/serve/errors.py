"""API errors in the format of the OpenAI API."""

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import JSONResponse

from cutaway.serve.limits import Limits

ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
"""Error type by status code. Other codes have invalid_request_error below 500 and server_error from 500 on."""


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

    def to_dict(self) -> dict[str, dict[str, str | None]]:
        default_type = "server_error" if self.status_code >= 500 else "invalid_request_error"
        error_type = ERROR_TYPES.get(self.status_code, default_type)
        return {"error": {"message": self.message, "type": error_type, "param": self.param, "code": self.code}}

    def to_response(self) -> JSONResponse:
        return JSONResponse(self.to_dict(), self.status_code, self.headers)


def overload_error(message: str, code: str, limits: Limits) -> APIError:
    """Return an error with status 429: the server is full, and the client may retry the request."""
    return APIError(429, message, code=code, headers={"retry-after": str(limits.retry_after_seconds)})


def shutdown_error() -> APIError:
    """Return the error for a request that is not finished when the server stops."""
    message = "the server is shutting down and did not finish the request; send it again later"
    return APIError(503, message, code="shutting_down", headers={"retry-after": "1", "connection": "close"})


def validation_error(errors: Sequence[Mapping[str, Any]], default_name: str) -> APIError:
    """Return the error for the first field that pydantic rejects. The message does not contain the field's value.

    A prompt, which is a string, a list of strings or of token ids, has an error for each of these types. For the token
    ids [-1], the relevant one is that an id is negative, not that a string is expected. `default_name` is the name in
    the message if the whole body is invalid.
    """
    error = next((error for error in errors if error["type"] not in ("string_type", "list_type")), errors[0])
    param = ".".join(str(part)[:40] for part in error["loc"][:6]) or None
    return APIError(400, f"{param or default_name}: {str(error['msg'])[:300]}", param=param)
