"""The application that both verbs share: routes behind one door, and errors in one shape."""

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import anyio.to_thread
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from cutaway.errors import CutawayError
from cutaway.serve.door import Door, Doorway, Watch
from cutaway.serve.limits import Limits
from cutaway.serve.refusal import Refused


def make_app(
    routers: Iterable[APIRouter],
    *,
    door: Door | None = None,
    limits: Limits | None = None,
    closing: Iterable[Callable[[], object]] = (),
    watch: Watch | None = None,
) -> FastAPI:
    """These routes behind the door. What is in `closing` is called, in a thread, when the server ends; `watch` is told
    of each answer."""

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        yield
        for close in closing:
            await anyio.to_thread.run_sync(close)

    app = FastAPI(title="cutaway", docs_url=None, redoc_url=None, lifespan=life, redirect_slashes=False)
    for router in routers:
        app.include_router(router)
    described = app.openapi
    app.openapi = lambda: without_422(described())  # type: ignore[method-assign]
    app.add_middleware(Doorway, door=door or Door(), limits=limits or Limits(), watch=watch)
    app.add_exception_handler(Refused, say_refused)
    app.add_exception_handler(HTTPException, say_status)
    app.add_exception_handler(RequestValidationError, say_invalid)
    app.add_exception_handler(CutawayError, say_wrong)
    return app


def without_422(described: dict[str, Any]) -> dict[str, Any]:
    """FastAPI's description of the API, less the answer to wrong fields that ours is not: see `say_invalid`."""
    for methods in described["paths"].values():
        for method in methods.values():
            method["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        described.get("components", {}).get("schemas", {}).pop(name, None)
    return described


def told(refused: Refused) -> Response:
    return Response(refused.encoded, refused.status, refused.headers, media_type="application/json")


def say_refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return told(error)


def say_status(_: Request, error: Exception) -> Response:
    """There is no such route, or not with this method."""
    assert isinstance(error, HTTPException)
    words = {404: "there is nothing at this address", 405: "this address does not take this method"}
    message = words.get(error.status_code, "the request cannot be answered")
    return told(Refused(error.status_code, message, headers=error.headers))


def say_invalid(_: Request, error: Exception) -> Response:
    """Of what is wrong with the fields, the first; their values are not said back."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = [part for part in first["loc"] if part not in ("body", "query", "path")]
    param = ".".join(str(part)[:40] for part in place[:6]) or None
    return told(Refused(400, f"{param or 'the body'}: {str(first['msg'])[:300]}", param=param))


def say_wrong(_: Request, error: Exception) -> Response:
    """What a model or a tokenizer cannot take."""
    return told(Refused(400, str(error)))
