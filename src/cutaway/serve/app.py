"""FastAPI application shared by `cutaway serve` and `cutaway open`: routes, middleware, error handlers."""

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import anyio.to_thread
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from cutaway.errors import CutawayError
from cutaway.serve.errors import APIError, validation_error
from cutaway.serve.limits import Limits
from cutaway.serve.middleware import AccessPolicy, ResponseCallback, SecurityMiddleware
from cutaway.serve.request_context import current_request

HTTP_ERROR_MESSAGES = {
    404: "there is no such path on this server; check the URL",
    405: "this path does not support this HTTP method; use another method",
}


def build_app(
    routers: Iterable[APIRouter],
    *,
    access_policy: AccessPolicy | None = None,
    limits: Limits | None = None,
    on_shutdown: Iterable[Callable[[], object]] = (),
    on_response: ResponseCallback | None = None,
) -> FastAPI:
    """Build a FastAPI application with these routers. Each request first passes `SecurityMiddleware`.

    The `on_shutdown` callbacks run in a thread when the server shuts down. `on_response` is called after each response.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        for close in on_shutdown:
            await anyio.to_thread.run_sync(close)

    app = FastAPI(title="cutaway", docs_url=None, redoc_url=None, lifespan=lifespan, redirect_slashes=False)
    for router in routers:
        app.include_router(router)
    build_schema = app.openapi
    app.openapi = lambda: _remove_422_responses(build_schema())  # type: ignore[method-assign]
    app.add_middleware(
        SecurityMiddleware,
        access_policy=access_policy or AccessPolicy(),
        limits=limits or Limits(),
        on_response=on_response,
    )
    for error_type in (APIError, HTTPException, RequestValidationError, CutawayError):
        app.add_exception_handler(error_type, _handle_error)
    return app


def _remove_422_responses(schema: dict[str, Any]) -> dict[str, Any]:
    """Remove status 422 from FastAPI's OpenAPI schema, because validation errors have status 400 here."""
    for methods in schema["paths"].values():
        for method in methods.values():
            method["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        schema.get("components", {}).get("schemas", {}).pop(name, None)
    return schema


def _handle_error(_: Request, error: Exception) -> Response:
    """Return the error response for an invalid request, a path or method without a route, or rejected model input.

    The response to an invalid request names the first invalid field, without the field's value.
    """
    if isinstance(error, RequestValidationError):
        errors = [{**item, "loc": item["loc"][1:]} for item in error.errors()]  # without "body", "query" or "path"
        error = validation_error(errors, "the body")
    elif isinstance(error, HTTPException):
        message = HTTP_ERROR_MESSAGES.get(error.status_code, "the request cannot be handled")
        error = APIError(error.status_code, message, headers=error.headers)
    if not isinstance(error, APIError):
        error = APIError(400, str(error))
    current_request().error_code = error.code
    return error.to_response()
