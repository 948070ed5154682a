"""HTTP route of the inspector: a query is posted, and the response is a stream of frames.

A query is canceled when its client disconnects.
"""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import ThreadPoolExecutor

from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse
from pydantic import ValidationError

from cutaway.errors import CutawayError
from cutaway.serve.disconnect import run_until_disconnect
from cutaway.serve.errors import APIError, validation_error
from cutaway.serve.inspect.exercise_access import ExerciseAccess
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.protocol import ERROR, QueryCancelled, QueryJob, encode_json_frame
from cutaway.serve.inspect.queries import QUERIES
from cutaway.serve.inspect.queries.base import Query
from cutaway.serve.json_body import INLINE_BODY_BYTES

NUM_WORKERS = 4
"""Number of queries that run at the same time. The inspector's lock allows only one forward pass at a time."""
MAX_PENDING_QUERIES = 64
QUERY_TIMEOUT = 300.0
"""Maximum duration of a query in seconds."""
GENERATION_HEADER = "x-cutaway-model-generation"
"""Request header: generation of the model catalog that the page was loaded with."""
BINARY_MEDIA_TYPE = "application/octet-stream"
log = logging.getLogger("cutaway.serve")


class QueryExecutor:
    """Thread pool that runs queries."""

    def __init__(self, inspector: Inspector, exercise_access: ExerciseAccess | None = None) -> None:
        self.exercise_access = exercise_access or ExerciseAccess()
        self.catalog = inspector.catalog
        self._fixed_inspector = inspector if self.catalog is None else None
        self.pool = ThreadPoolExecutor(NUM_WORKERS, "cutaway-query")
        self.jobs: set[QueryJob] = set()

    @property
    def inspector(self) -> Inspector:
        """Inspector of the open model."""
        if self.catalog is not None:
            return self.catalog.current
        assert self._fixed_inspector is not None
        return self._fixed_inspector

    def close(self) -> None:
        for job in list(self.jobs):
            job.cancelled.set()
        self.pool.shutdown(wait=True, cancel_futures=True)

    async def stream(self, query: Query) -> AsyncGenerator[bytes, None]:
        """Run a query in the thread pool and yield the frames of its result.

        Raise an error with status 429 if too many queries wait. The query is canceled when the generator is closed.
        """
        if len(self.jobs) >= MAX_PENDING_QUERIES:
            raise APIError(429, "too many queries are waiting; try again later", headers={"retry-after": "1"})
        loop = asyncio.get_running_loop()
        frames: asyncio.Queue[bytes | None] = asyncio.Queue()
        job = QueryJob(lambda frame: _enqueue_frame(loop, frames, frame), QUERY_TIMEOUT, self.exercise_access)
        self.jobs.add(job)
        work = loop.run_in_executor(self.pool, self.execute, query, job, self.inspector)
        work.add_done_callback(lambda _: frames.put_nowait(None))
        try:
            while (frame := await frames.get()) is not None:
                yield frame
        finally:
            job.cancelled.set()
            self.jobs.discard(job)

    def execute(self, query: Query, job: QueryJob, inspector: Inspector | None = None) -> None:
        """Run a query with this inspector, by default that of the open model, and send its result or error."""
        try:
            job.check_cancelled()
            job.send_result(query.run(inspector or self.inspector, job))
        except QueryCancelled:
            return
        except CutawayError as error:
            job.send(encode_json_frame(ERROR, {"message": str(error)}))
        except Exception:
            log.exception("query failed")
            message = "internal server error; see the server log"
            job.send(encode_json_frame(ERROR, {"message": message, "status": 500}))


def _enqueue_frame(loop: asyncio.AbstractEventLoop, frames: "asyncio.Queue[bytes | None]", frame: bytes) -> None:
    try:
        loop.call_soon_threadsafe(frames.put_nowait, frame)
    except RuntimeError:  # the event loop is closed
        raise QueryCancelled from None


def parse_query(name: str, params: bytes | object) -> Query:
    """Return the query of this name. Raise an APIError if the name or the parameters are invalid.

    `params` is a JSON body (bytes), or parameters that a notebook has already parsed.
    """
    query_class = QUERIES.get(name)
    if query_class is None:
        raise APIError(404, f"there is no such query; use one of {', '.join(QUERIES)}")
    try:
        return query_class.model_validate_json(params if isinstance(params, bytes) else json.dumps(params))
    except ValidationError as error:
        raise validation_error(error.errors(include_url=False, include_input=False), "the query") from None


def check_generation(executor: QueryExecutor, generation: str | None) -> None:
    """Raise an APIError if the page was loaded before another model was opened, such as in another browser tab."""
    if generation is not None and executor.catalog is not None and generation != str(executor.catalog.generation):
        name = executor.inspector.name
        raise APIError(409, f"the server has opened another model, {name}; reload the page to inspect it")


def build_router(executor: QueryExecutor) -> APIRouter:
    router = APIRouter(prefix="/api")

    @router.post("/query/{name}", include_in_schema=False)
    async def query(name: str, request: Request) -> StreamingResponse:
        body = await request.body()
        check_generation(executor, request.headers.get(GENERATION_HEADER))
        is_large = len(body) > INLINE_BODY_BYTES
        frames = executor.stream(
            await asyncio.to_thread(parse_query, name, body) if is_large else parse_query(name, body)
        )
        try:
            first = await run_until_disconnect(anext(frames, None), request.receive)
            if first is None:
                raise APIError(503, "the server is shutting down; try again later", headers={"retry-after": "1"})
            if first[4] == ERROR:  # an error before the first result sets the status code
                data = json.loads(first[5:])
                raise APIError(data.get("status", 400), data["message"])
        except BaseException:
            await frames.aclose()
            raise

        async def stream_frames() -> AsyncIterator[bytes]:
            yield first
            async for frame in frames:
                yield frame

        return StreamingResponse(stream_frames(), media_type=BINARY_MEDIA_TYPE, headers={"x-accel-buffering": "no"})

    return router
