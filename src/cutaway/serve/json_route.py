"""FastAPI routes whose JSON body is parsed and validated only once, off the event loop if it is large."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError

from cutaway.serve.errors import validation_error
from cutaway.serve.json_body import INLINE_BODY_BYTES, JSON_VALUE


class JSONRoute(APIRoute):
    """Route that validates the value parsed by the middleware, instead of parsing the body a second time."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        model: Any = self.body_field.field_info.annotation
        adapter = TypeAdapter(model)

        async def validate_and_handle(request: Request) -> Response:
            if JSON_VALUE in request.scope:
                request = _ValidatedRequest(request.scope, request.receive)
                work = partial(validate, adapter, request.scope.pop(JSON_VALUE))
                is_large = len(await request.body()) > INLINE_BODY_BYTES
                request.value = await asyncio.to_thread(work) if is_large else work()
            return await handle(request)

        return validate_and_handle


class _ValidatedRequest(Request):
    """Request whose body is already an instance of the request model. FastAPI does not validate it again."""

    value: object

    async def json(self) -> object:
        return self.value


def validate(adapter: TypeAdapter[Any], value: object) -> object:
    """Return the value as an instance of the request model. Raise an APIError that names the first invalid field."""
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        raise validation_error(error.errors(include_url=False, include_input=False), "the body") from None
