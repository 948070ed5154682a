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
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.job import GivenUp, Job
from cutaway.serve.inspect.question import Question
from cutaway.serve.inspect.questions import QUESTIONS
from cutaway.serve.inspect.wire import ERROR, told
from cutaway.serve.refusal import Refused

WORKERS = 4
"""Questions at work at once. Passes of the model take turns; what needs none does not wait for them."""
WAITING = 64
SECONDS = 300.0
"""For one question."""
BINARY = "application/octet-stream"
log = logging.getLogger("cutaway.serve")


class Desk:
    """Where questions are taken and worked on."""

    def __init__(self, of: Inspector) -> None:
        self.of = of
        self.pool = ThreadPoolExecutor(WORKERS, "cutaway question")
        self.jobs: set[Job] = set()

    def close(self) -> None:
        for job in list(self.jobs):
            job.stop.set()
        self.pool.shutdown(wait=True, cancel_futures=True)

    async def answer(self, question: Question) -> AsyncGenerator[bytes, None]:
        """Frames as they come; None ends them."""
        if len(self.jobs) >= WAITING:
            raise Refused(429, "too many questions are waiting; ask again in a moment", headers={"retry-after": "1"})
        loop = asyncio.get_running_loop()
        frames: asyncio.Queue[bytes | None] = asyncio.Queue()
        job = Job(lambda frame: deliver(loop, frames, frame), SECONDS)
        self.jobs.add(job)
        work = loop.run_in_executor(self.pool, self.work, question, job)
        work.add_done_callback(lambda _: frames.put_nowait(None))
        try:
            while (frame := await frames.get()) is not None:
                yield frame
        finally:
            job.stop.set()
            self.jobs.discard(job)

    def work(self, question: Question, job: Job) -> None:
        try:
            job.check()
            job.done(question.answer(self.of, job))
        except GivenUp:
            return
        except CutawayError as error:
            job.tell(told(ERROR, {"message": str(error)}))
        except Exception:
            log.exception("a question could not be answered")
            mistake = "the server made a mistake with this question; its log says more"
            job.tell(told(ERROR, {"message": mistake, "status": 500}))


def deliver(loop: asyncio.AbstractEventLoop, frames: "asyncio.Queue[bytes | None]", frame: bytes) -> None:
    try:
        loop.call_soon_threadsafe(frames.put_nowait, frame)
    except RuntimeError:  # the server has ended
        raise GivenUp from None


def read_question(name: str, given: bytes | object) -> Question:
    """From a body, or from what a notebook has parsed."""
    form = QUESTIONS.get(name)
    if form is None:
        raise Refused(404, "there is no such question")
    try:
        return form.model_validate_json(given if isinstance(given, bytes) else json.dumps(given))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part)[:40] for part in first["loc"][:6])
        raise Refused(400, f"{place or 'the question'}: {first['msg'][:300]}", param=place or None) from None


def router(desk: Desk) -> APIRouter:
    made = APIRouter(prefix="/api")

    @made.post("/ask/{name}", include_in_schema=False)
    async def ask(name: str, request: Request) -> StreamingResponse:
        question = read_question(name, await request.body())
        frames = desk.answer(question)
        try:
            first = await first_of(frames, request)  # what is refused at once is told by its status
        except BaseException:
            await frames.aclose()
            raise

        async def rest() -> AsyncIterator[bytes]:
            yield first
            async for frame in frames:
                yield frame

        return StreamingResponse(rest(), media_type=BINARY, headers={"x-accel-buffering": "no"})

    return made


async def first_of(frames: AsyncIterator[bytes], request: Request) -> bytes:
    """The first frame, unless whoever asked has gone away meanwhile."""
    coming = asyncio.ensure_future(anext(frames, None))
    try:
        while not (await asyncio.wait([coming], timeout=0.2))[0]:
            if await request.is_disconnected():
                raise Refused(499, "nobody waits for this answer any more")
    finally:
        if not coming.done():
            coming.cancel()
            await asyncio.wait([coming])
    first = coming.result()
    if first is None:
        raise Refused(503, "the server is ending", headers={"retry-after": "1"})
    if first[4] == ERROR:
        said = json.loads(first[5:])
        raise Refused(said.get("status", 400), said["message"])
    return first
