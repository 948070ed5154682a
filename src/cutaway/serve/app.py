"""The application that both verbs share: routes behind one door, and errors in one shape."""

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import anyio.to_thread
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from cutaway.errors import CutawayError
from cutaway.serve.errors import APIError
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
    """These routes behind one access policy. `on_shutdown` is called, in a thread, when the server ends; `on_response`
    is called with each response."""

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        yield
        for close in on_shutdown:
            await anyio.to_thread.run_sync(close)

    app = FastAPI(title="cutaway", docs_url=None, redoc_url=None, lifespan=life, redirect_slashes=False)
    for router in routers:
        app.include_router(router)
    described = app.openapi
    app.openapi = lambda: _remove_422_responses(described())  # type: ignore[method-assign]
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
    """FastAPI's description of the API, without its 422: see `_handle_validation_error`."""
    for methods in schema["paths"].values():
        for method in methods.values():
            method["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        schema.get("components", {}).get("schemas", {}).pop(name, None)
    return schema


def _error_response(error: APIError) -> Response:
    return Response(error.to_json(), error.status_code, error.headers, media_type="application/json")


def _handle_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, APIError)
    return _error_response(error)


def _handle_http_exception(_: Request, error: Exception) -> Response:
    """There is no such route, or not with this method."""
    assert isinstance(error, HTTPException)
    words = {404: "there is nothing at this address", 405: "this address does not take this method"}
    message = words.get(error.status_code, "the request cannot be answered")
    return _error_response(APIError(error.status_code, message, headers=error.headers))


def _handle_validation_error(_: Request, error: Exception) -> Response:
    """Of what is wrong with the fields, the first; their values are not said back."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = [part for part in first["loc"] if part not in ("body", "query", "path")]
    param = ".".join(str(part)[:40] for part in place[:6]) or None
    return _error_response(APIError(400, f"{param or 'the body'}: {str(first['msg'])[:300]}", param=param))


def _handle_cutaway_error(_: Request, error: Exception) -> Response:
    """What a model or a tokenizer cannot take."""
    return _error_response(APIError(400, str(error)))
