"""Questions over HTTP: a form is posted, frames come back. Whoever goes away before the answer stops the work."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import ThreadPoolExecutor

from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse
from pydantic import ValidationError

from cutaway.errors import CutawayError
from cutaway.serve.errors import APIError
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.protocol import ERROR, QueryCancelled, QueryJob, encode_json_frame
from cutaway.serve.inspect.queries import QUERIES
from cutaway.serve.inspect.queries.base import Query

NUM_WORKERS = 4
"""Questions at work at once. Passes of the model take turns; what needs none does not wait for them."""
MAX_PENDING_QUERIES = 64
QUERY_TIMEOUT = 300.0
"""For one question."""
BINARY_MEDIA_TYPE = "application/octet-stream"
log = logging.getLogger("cutaway.serve")


class QueryExecutor:
    """Where questions are taken and worked on."""

    def __init__(self, inspector: Inspector) -> None:
        self.inspector = inspector
        self.pool = ThreadPoolExecutor(NUM_WORKERS, "cutaway-query")
        self.jobs: set[QueryJob] = set()

    def close(self) -> None:
        for job in list(self.jobs):
            job.cancelled.set()
        self.pool.shutdown(wait=True, cancel_futures=True)

    async def stream(self, query: Query) -> AsyncGenerator[bytes, None]:
        """Frames as they come; None ends them."""
        if len(self.jobs) >= MAX_PENDING_QUERIES:
            raise APIError(429, "too many questions are waiting; ask again in a moment", headers={"retry-after": "1"})
        loop = asyncio.get_running_loop()
        frames: asyncio.Queue[bytes | None] = asyncio.Queue()
        job = QueryJob(lambda frame: _enqueue_frame(loop, frames, frame), QUERY_TIMEOUT)
        self.jobs.add(job)
        work = loop.run_in_executor(self.pool, self.execute, query, job)
        work.add_done_callback(lambda _: frames.put_nowait(None))
        try:
            while (frame := await frames.get()) is not None:
                yield frame
        finally:
            job.cancelled.set()
            self.jobs.discard(job)

    def execute(self, query: Query, job: QueryJob) -> None:
        try:
            job.check_cancelled()
            job.send_result(query.run(self.inspector, job))
        except QueryCancelled:
            return
        except CutawayError as error:
            job.send(encode_json_frame(ERROR, {"message": str(error)}))
        except Exception:
            log.exception("a question could not be answered")
            mistake = "the server made a mistake with this question; its log says more"
            job.send(encode_json_frame(ERROR, {"message": mistake, "status": 500}))


def _enqueue_frame(loop: asyncio.AbstractEventLoop, frames: "asyncio.Queue[bytes | None]", frame: bytes) -> None:
    try:
        loop.call_soon_threadsafe(frames.put_nowait, frame)
    except RuntimeError:  # the server has ended
        raise QueryCancelled from None


def parse_query(name: str, params: bytes | object) -> Query:
    """From a body, or from what a notebook has parsed."""
    form = QUERIES.get(name)
    if form is None:
        raise APIError(404, "there is no such question")
    try:
        return form.model_validate_json(params if isinstance(params, bytes) else json.dumps(params))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part)[:40] for part in first["loc"][:6])
        raise APIError(400, f"{place or 'the question'}: {first['msg'][:300]}", param=place or None) from None


def build_router(executor: QueryExecutor) -> APIRouter:
    made = APIRouter(prefix="/api")

    @made.post("/query/{name}", include_in_schema=False)
    async def query(name: str, request: Request) -> StreamingResponse:
        parsed = parse_query(name, await request.body())
        frames = executor.stream(parsed)
        try:
            first = await _first_frame(frames, request)  # what is refused at once is told by its status
        except BaseException:
            await frames.aclose()
            raise

        async def rest() -> AsyncIterator[bytes]:
            yield first
            async for frame in frames:
                yield frame

        return StreamingResponse(rest(), media_type=BINARY_MEDIA_TYPE, headers={"x-accel-buffering": "no"})

    return made


async def _first_frame(frames: AsyncIterator[bytes], request: Request) -> bytes:
    """The first frame, unless whoever asked has gone away meanwhile."""
    coming = asyncio.ensure_future(anext(frames, None))
    try:
        while not (await asyncio.wait([coming], timeout=0.2))[0]:
            if await request.is_disconnected():
                raise APIError(499, "nobody waits for this answer any more")
    finally:
        if not coming.done():
            coming.cancel()
            await asyncio.wait([coming])
    first = coming.result()
    if first is None:
        raise APIError(503, "the server is ending", headers={"retry-after": "1"})
    if first[4] == ERROR:
        said = json.loads(first[5:])
        raise APIError(said.get("status", 400), said["message"])
    return first
