"""FastAPI application shared by `cutaway serve` and `cutaway open`: routes, middleware, error handlers."""

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import anyio.to_thread
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from cutaway.errors import CutawayError
from cutaway.serve.errors import APIError, invalid_field_error
from cutaway.serve.limits import Limits
from cutaway.serve.middleware import AccessPolicy, ResponseCallback, SecurityMiddleware


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
    app.add_exception_handler(APIError, _handle_api_error)
    app.add_exception_handler(HTTPException, _handle_http_exception)
    app.add_exception_handler(RequestValidationError, _handle_validation_error)
    app.add_exception_handler(CutawayError, _handle_cutaway_error)
    return app


def _remove_422_responses(schema: dict[str, Any]) -> dict[str, Any]:
    """Remove status 422 from FastAPI's OpenAPI schema, because validation errors have status 400 here."""
    for methods in schema["paths"].values():
        for method in methods.values():
            method["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        schema.get("components", {}).get("schemas", {}).pop(name, None)
    return schema


def _handle_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, APIError)
    return error.to_response()


def _handle_http_exception(_: Request, error: Exception) -> Response:
    """Return the error response for a path (404) or an HTTP method (405) without a route."""
    assert isinstance(error, HTTPException)
    messages = {
        404: "there is no such path on this server; check the URL",
        405: "this path does not support this HTTP method; use another method",
    }
    message = messages.get(error.status_code, "the request cannot be handled")
    return APIError(error.status_code, message, headers=error.headers).to_response()


def _handle_validation_error(_: Request, error: Exception) -> Response:
    """Report the first invalid field. The response does not contain the field's value."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    path = [part for part in first["loc"] if part not in ("body", "query", "path")]
    return invalid_field_error(path, str(first["msg"]), "the body").to_response()


def _handle_cutaway_error(_: Request, error: Exception) -> Response:
    """Return the error response for input that the model or the tokenizer rejects."""
    return APIError(400, str(error)).to_response()
