"""A checkpoint at work for many: the engine, threads for tokens and vectors, and what fits."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from cutaway.errors import InputError
from cutaway.generate import BusyError, Engine, EngineError, Settings
from cutaway.generate.texts import Source, fitting, make_plan, opened, own_limits, seeds
from cutaway.serve.limits import Limits
from cutaway.serve.metrics import Metrics
from cutaway.serve.openai.asked import Asked, Bell
from cutaway.serve.openai.spelling import Spelling
from cutaway.serve.refusal import Refused
from cutaway.text import Tokenizer

T = TypeVar("T")
USUAL_ROWS, USUAL_CONTEXT, USUAL_SOURCE = 32, 8192, 1024
log = logging.getLogger("cutaway.serve")


class Host:
    """One checkpoint, its name, and all that answers for it. Everything here is called on the event loop."""

    def __init__(
        self,
        checkpoint: Source,
        name: str,
        limits: Limits,
        *,
        rows: int | None = None,
        context: int | None = None,
        pooling: str | None = None,
        metrics: Metrics | None = None,
        **how: Any,
    ) -> None:
        """`how`: more of a `Plan`'s fields, such as bits."""
        self.model, self.tokenizer, self.start = opened(checkpoint)
        self.model.eval()
        self.name, self.limits, self.pooling = name, limits, pooling
        self.metrics = metrics or Metrics()
        self.spelling = None if self.tokenizer is None else Spelling(self.tokenizer)
        self.engine = self._engine(rows, context, how) if "decoder" in self.model.stacks else None
        self.reads = "encoder" in self.model.stacks and self.engine is not None
        """Whether a prompt is a source, which takes no part of the answer's context."""
        self.bell: Bell | None = None
        self.preparing = 0
        self.pool = ThreadPoolExecutor(2, "cutaway tokens")
        self.reader = ThreadPoolExecutor(1, "cutaway vectors")
        if self.engine is not None:
            engine = self.engine
            self.metrics.gauges |= {
                "waiting": ("Answers that wait for a row.", lambda: len(engine.waiting)),
                "running": ("Answers that are being written.", lambda: len(engine.seats.rows)),
                "rows": ("Answers that can be written at once.", lambda: engine.plan.rows),
                "cache_used_ratio": ("Share of the cache that holds tokens.", self.cache_used),
            }
        self.metrics.gauges["preparing"] = ("Requests whose texts wait to be read.", lambda: self.preparing)

    def _engine(self, rows: int | None, context: int | None, how: dict[str, Any]) -> Engine:
        own = self.model.config.context
        length = min(own or USUAL_CONTEXT, USUAL_CONTEXT) if context is None else context
        both = len(self.model.stacks) == 2
        how = how | {"source": min(own or USUAL_SOURCE, USUAL_SOURCE)} if both else how
        plan = make_plan(self.model, self.start, rows=rows or USUAL_ROWS, context=length, **how)
        plan = plan if rows is not None else fitting(plan)
        return Engine(plan, tokenizer=self.tokenizer, waiting=self.limits.waiting).start()

    @property
    def context(self) -> int:
        """Tokens of a prompt with its answer, or of a text to embed."""
        if self.engine is not None:
            return self.engine.plan.slots
        stack = self.model.stacks["encoder"]
        learned = getattr(stack.embed.position, "length", None)
        return min(each for each in (self.model.config.context, learned, USUAL_CONTEXT) if each)

    @property
    def room(self) -> int:
        """Tokens of a prompt at most."""
        if self.engine is None:
            return self.context
        return self.engine.plan.source if self.reads else self.context - 1

    @property
    def alive(self) -> bool:
        return self.engine is None or not self.engine.closed

    def cache_used(self) -> float:
        engine = self.engine
        assert engine is not None
        return sum(ticket.read for ticket in list(engine.seats.rows)) / (engine.plan.rows * engine.plan.slots)

    def named(self, model: str | None) -> None:
        if model is not None and model != self.name:
            raise Refused(404, f"there is no such model here; the one here is {self.name}", code="model_not_found")

    def words(self) -> Tokenizer:
        if self.tokenizer is None:
            raise Refused(400, "this model has no tokenizer to read text with; give token ids", code="no_tokenizer")
        return self.tokenizer

    # Work in threads

    async def aside(
        self,
        work: Callable[[], T],
        *,
        reader: bool = False,
        seconds: float | None = None,
        undo: Callable[[T], object] | None = None,
    ) -> T:
        """The result of some work in a thread, if not too many wait; `undo` is for one that nobody waits for."""
        if self.preparing >= self.limits.encoding:
            raise self.busy()
        self.preparing += 1
        task = asyncio.get_running_loop().run_in_executor(self.reader if reader else self.pool, work)
        task.add_done_callback(self._prepared)
        taken = False
        try:
            async with asyncio.timeout(seconds):
                found = await asyncio.shield(task)
            taken = True
            return found
        except TimeoutError:
            raise Refused(400, f"reading this took over {seconds:g} seconds; send less", code="timeout") from None
        finally:
            if undo is not None and not taken:
                task.add_done_callback(lambda done: undo(done.result()) if succeeded(done) else None)

    def _prepared(self, done: "asyncio.Future[Any]") -> None:
        self.preparing -= 1
        succeeded(done)  # whoever asked has had the error, or is gone

    def busy(self) -> Refused:
        wait = {"retry-after": str(self.limits.retry_after)}
        return Refused(429, "too many requests wait for an answer; try again later", code="queue_full", headers=wait)

    # Answers

    async def ask(self, read: Callable[[], list[list[int]]], settings: Settings, *, open_end: bool = False) -> Asked:
        """Read the prompts and ask the engine for answers to them. `open_end`: with no limit named, all the context."""
        if self.engine is None:
            raise Refused(400, "this model is an encoder, which continues no text; use /v1/embeddings")
        self.bell = self.bell or Bell(asyncio.get_running_loop())
        began = asyncio.get_running_loop().time()
        most = self.limits.reading_seconds
        asked = await self.aside(lambda: self._submit(read(), settings, open_end), seconds=most, undo=Asked.cancel)
        asked.began = began
        return asked

    def _submit(self, prompts: Sequence[Sequence[int]], settings: Settings, open_end: bool) -> Asked:
        """In a thread: all answers of the request are asked for, or none."""
        engine, tickets = self.engine, []
        assert engine is not None
        assert self.bell is not None
        begun = [self.start.forced_bos] if self.reads and self.start.forced_bos is not None else []
        try:
            for prompt in prompts:
                own = self._limited(prompt, settings, open_end)
                tickets += [engine.submit(prompt, own, seed=seed, begun=begun) for seed in seeds(settings)]
            return Asked(tickets, sum(map(len, prompts)), self.bell, self.metrics)
        except BaseException as error:
            for ticket in tickets:
                ticket.cancel()
            if isinstance(error, BusyError):
                raise self.busy() from None
            if isinstance(error, EngineError):
                raise Refused(503, "the engine broke down; the server must be started again") from error
            raise

    def _limited(self, prompt: Sequence[int], settings: Settings, open_end: bool) -> Settings:
        """What one prompt asks for, if prompt and answer fit."""
        self.check_length(len(prompt))
        before = 1 if self.reads else len(prompt)
        room, most = self.context - before, settings.max_new_tokens
        if most is not None and most > room:
            raise too_long(f"the prompt has {len(prompt)} tokens and the answer may have {most}", self.context)
        if most is None and open_end:
            most = min(self.start.most_new(before) or room, room, self.limits.max_tokens)
        return own_limits(replace(settings, max_new_tokens=most), self.start, before)

    def check_length(self, tokens: int) -> None:
        if not tokens:
            raise Refused(400, "the prompt is empty; give at least one token", param="prompt")
        if tokens > min(self.room, self.limits.prompt_tokens):
            raise too_long(f"the prompt has {tokens} tokens", min(self.room, self.limits.prompt_tokens))

    def check_ids(self, tokens: Sequence[int]) -> None:
        size = getattr(self.model.config, "source_vocab_size", None) or self.model.config.vocab_size
        if max(tokens) >= size:
            raise Refused(400, f"a token's id is {max(tokens)}; the vocabulary has ids 0 to {size - 1}", param="input")

    def check_characters(self, texts: Sequence[str], param: str) -> None:
        """Refuse, before it is read, what is too long by any measure."""
        if sum(map(len, texts)) > self.limits.characters:
            raise Refused(400, f"the texts have over {self.limits.characters} characters; send fewer", param=param)
        most = self.limits.characters_per_token * self.room
        if any(len(text) > most for text in texts):
            raise too_long(f"a text has over {most} characters", self.room)

    def close(self) -> None:
        """Whoever still waits is told so."""
        if self.engine is not None:
            self.engine.close()
        self.pool.shutdown(wait=False, cancel_futures=True)
        self.reader.shutdown(wait=False, cancel_futures=True)


def succeeded(done: "asyncio.Future[Any]") -> bool:
    return not done.cancelled() and done.exception() is None


def too_long(what: str, context: int) -> Refused:
    message = f"{what}; this model has room for {context} tokens, prompt and answer together: send fewer"
    return Refused(400, message, param="prompt", code="context_length_exceeded")


def why(error: Exception) -> Refused:
    """What a client is told of an error in the midst of an answer; the log has the rest."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, InputError):
        return Refused(400, str(error))
    log.error("an answer failed: %s", error)
    return Refused(500, "the server failed within this answer; its log says why")
