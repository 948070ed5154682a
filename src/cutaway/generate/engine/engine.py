"""Continuous batching: requests come and go while the others' steps go on; prompts are read in pieces between them."""

import atexit
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from cutaway.errors import CutawayError
from cutaway.generate.engine.config import EngineConfig
from cutaway.generate.engine.model_runner import ModelRunner, PendingTokens, eval_mode
from cutaway.generate.engine.request import Request
from cutaway.generate.engine.scheduler import Scheduler
from cutaway.generate.sampling.sampling_params import SamplingParams
from cutaway.tokenizer import Tokenizer


class EngineError(CutawayError):
    """The engine could not go on with a request."""


class BusyError(CutawayError):
    """More requests wait than the engine takes."""


class Engine:
    """One owner of a model and its device. Call `step` until it is False, or `start` a thread that does.

    It keeps what it read and packed: once weights are changed or hooks are added, it is for another engine to answer.
    """

    def __init__(self, config: EngineConfig, *, tokenizer: Tokenizer | None = None, max_waiting: int = 1024) -> None:
        """`max_waiting`: how many requests may wait for a row before more are refused."""
        self.config, self.tokenizer, self.max_waiting = config, tokenizer, max_waiting
        self.model_runner = ModelRunner(
            config.model, config.build_cache(), compile=config.compile, weight_bits=config.weight_bits
        )
        self.rope_switch_lengths, self.dynamic_rope_len = config.rope_switch_lengths, config.dynamic_rope_len
        # Where a token's key depends on how long its text became, no two texts share any.
        self.scheduler = Scheduler(self.model_runner, config, prefix_caching=self.dynamic_rope_len is None)
        self.waiting: deque[Request] = deque()
        self.pending: PendingTokens | None = None
        self.async_scheduling = config.model.device.type == "cuda" and not self.rope_switch_lengths
        """Whether the next step is sent off before the last one's tokens are looked at."""
        self.condition = threading.Condition()
        self.num_submitted = 0
        self.thread: threading.Thread | None = None
        self.closed = False

    # What others may call, from any thread

    def submit(
        self,
        prompt: Sequence[int],
        sampling_params: SamplingParams,
        *,
        seed: int,
        wait: bool = False,
        output_prefix: Sequence[int] = (),
    ) -> Request:
        """Ask for an answer that begins with `output_prefix` to a prompt of tokens; an encoder's is its source.

        One answer, by this seed: `n` and `seed` of the sampling parameters are for `generate`.
        """
        ticket = self.config.build_request(
            prompt, sampling_params, self.tokenizer, seed=seed, output_prefix=output_prefix
        )
        with self.condition:
            while wait and not self.closed and len(self.waiting) >= self.max_waiting:
                self.condition.wait()
            if self.closed:
                raise EngineError("the engine is closed; start another")
            if ticket.output.finish_reason is not None:  # what it was begun with is all of it
                ticket.finish()
                return ticket
            if len(self.waiting) >= self.max_waiting:
                raise BusyError(f"{len(self.waiting)} requests are waiting, which is the limit; try again later")
            self.num_submitted += 1
            ticket.arrival_index = self.num_submitted
            self.waiting.append(ticket)
            self.condition.notify_all()
        return ticket

    def start(self) -> "Engine":
        """Let a thread do the work from now on."""
        if self.thread is not None or self.closed:
            raise EngineError("the engine was started or closed before; make another")
        self.thread = threading.Thread(target=self._run_loop, name="cutaway-engine", daemon=True)
        self.thread.start()
        atexit.register(self.close)  # a program that ends while a thread is inside PyTorch is aborted
        return self

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop; whoever still waits is told so."""
        with self.condition:
            self.closed = True
            self.condition.notify_all()
        if self.thread is not None:
            self.thread.join()
            atexit.unregister(self.close)
        self._fail_all("the engine was closed before the answer was complete")
        self.model_runner.release_compiled()

    def run(self) -> None:
        """Work until nobody waits."""
        while self.step():
            """Another."""

    # The owner's

    @property
    def num_decoding(self) -> int:
        """Texts that take steps now."""
        return self.scheduler.num_decoding

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting or self.scheduler.running or self.pending)

    def step(self) -> bool:
        """Take in who waits, read one piece of prompts, take one step. False if there is nothing left to do."""
        model = self.config.model
        try:
            with eval_mode(model) if model.training else nullcontext():
                self._process_pending_if_finishing()
                self._remove_aborted()
                self._admit_waiting()
                self._prefill_step()
                self._decode_step()
            return self.has_unfinished_requests
        except Exception as error:  # not a request's fault: the device is gone, or the books are wrong
            with self.condition:
                self.closed = True
                self.condition.notify_all()
            self._fail_all(f"the engine broke down ({type(error).__name__}: {error}); start another")
            raise EngineError(f"the engine broke down ({type(error).__name__}: {error}); start another") from error

    def _run_loop(self) -> None:
        while True:
            with self.condition:
                while not (self.closed or self.has_unfinished_requests):
                    self.condition.wait()
                if self.closed:
                    return
            try:
                self.step()
            except EngineError:  # everybody has been told
                return

    @contextmanager
    def _isolate_failures(self, requests: Sequence[Request]) -> Iterator[None]:
        """What fails here fails for these requests; the others go on."""
        try:
            yield
        except Exception as error:
            for ticket in requests:
                ticket.finish(error=EngineError(f"a step failed ({type(error).__name__}: {error}); ask again"))
            for ticket in requests:
                self.scheduler.release(ticket, cache_valid=False)

    def _process_pending_if_finishing(self) -> None:
        """Look at the last step before the next is sent off, if it ends a text."""
        flight = self.pending
        if flight is not None and any(
            ticket.num_launched_tokens >= ticket.output.max_tokens for ticket in flight.requests
        ):
            self._process_pending()

    def _remove_aborted(self) -> None:
        with self.condition:
            gone = [ticket for ticket in self.waiting if ticket.aborted]
            for ticket in gone:
                self.waiting.remove(ticket)
            if gone:
                self.condition.notify_all()
        for ticket in gone:
            ticket.finish("abort")
        gone = [ticket for ticket in self.scheduler.running if ticket.aborted]
        if gone:
            self._process_pending()
        for ticket in gone:
            self.scheduler.release(ticket, cache_valid=ticket.num_sampled_tokens > 0)
            ticket.finish("abort")

    def _admit_waiting(self) -> None:
        """Rows to those who wait longest; who needs more pages than are free waits, and so do those behind.

        Sources are read here, each as a whole, but not many of them while others wait for their next step.
        """
        others, sources = self.scheduler.num_decoding, 0
        while self.waiting and not (others and sources >= self.config.prefill_chunk_size):
            ticket = self.waiting[0]
            if not self.scheduler.allocate(ticket):
                return
            with self.condition:
                self.waiting.popleft()
                self.condition.notify_all()
            sources += len(ticket.source_tokens or ())
            with self._isolate_failures([ticket]):
                self.scheduler.start_prefill(ticket)

    def _prefill_step(self) -> None:
        """A piece of those prompts that wait longest, no more tokens than the configuration allows between steps."""
        readers = self.scheduler.prefilling()
        if not readers:
            return
        group: list[Request] = []
        pieces: list[list[int]] = []
        for ticket in readers:
            piece = self._next_prefill_chunk(ticket)
            longest = max(map(len, [*pieces, piece]))
            furthest = max(each.num_computed_tokens for each in [*group, ticket])
            # A batch is as wide as its longest piece, and padding takes slots too.
            wide = longest * (len(group) + 1) > self.config.prefill_chunk_size
            if group and (wide or furthest + longest > self.model_runner.cache.num_slots):
                break
            group.append(ticket)
            pieces.append(piece)
        with self._isolate_failures(group):
            self.model_runner.prefill(
                self.scheduler.num_decoding, pieces, [ticket.num_computed_tokens for ticket in group]
            )
            for ticket, piece in zip(group, pieces, strict=True):
                ticket.num_computed_tokens += len(piece)
                if self._needs_full_prefill(ticket.all_token_ids):  # its last token is read again, by its first step
                    ticket.num_computed_tokens -= 1
                    self.model_runner.cache.seq_lens[ticket.row] = ticket.num_computed_tokens
            for ticket in group:
                self.scheduler.maybe_start_decode(ticket)

    def _next_prefill_chunk(self, request: Request) -> list[int]:
        text = request.all_token_ids
        if self._needs_full_prefill(text):
            return text[request.num_computed_tokens :]
        return text[
            request.num_computed_tokens : min(
                len(text) - 1, request.num_computed_tokens + self.config.prefill_chunk_size
            )
        ]

    def _needs_full_prefill(self, token_ids: Sequence[int]) -> bool:
        """Whether all tokens of a text must be read together, since they turn by angles that go by its length."""
        return self.dynamic_rope_len is not None and len(token_ids) > self.dynamic_rope_len

    def _decode_step(self) -> None:
        """All rows that can take their next step; then the last step's tokens (of this one, on the CPU) are told."""
        last = self.pending if self.async_scheduling else None
        steppers = self.scheduler.decoding
        flight = None
        if steppers:
            with self._isolate_failures(steppers):
                most = max(ticket.num_computed_tokens for ticket in steppers)
                ahead = max(ticket.output.max_tokens - ticket.num_launched_tokens for ticket in steppers)
                flight = PendingTokens(self.model_runner.decode(len(steppers), most, ahead), steppers)
                for ticket in steppers:
                    ticket.num_computed_tokens += 1
                    ticket.num_launched_tokens += 1
        if last is not None:
            self._process_pending()
        self.pending = flight
        if not self.async_scheduling:
            self._process_pending()

    def _process_pending(self) -> None:
        """Tell the last step's tokens to those who asked."""
        flight, self.pending = self.pending, None
        if flight is None:
            return
        with self._isolate_failures(flight.requests):
            for ticket, token, bad, logprob, top in flight.results():
                if not ticket.finished.is_set():
                    with self._isolate_failures([ticket]):
                        self._process_token(ticket, token, bad, logprob, top)

    def _process_token(
        self, request: Request, token: int, invalid: bool, logprob: float | None, top_logprobs: dict[int, float] | None
    ) -> None:
        if invalid:
            request.finish(error=EngineError(self.config.format_invalid_logits(request)))
            self.scheduler.release(request, cache_valid=False)
            return
        end = self.config.forced_eos_token_id
        cut = end is not None and len(request.output.tokens) + 1 >= request.output.max_tokens
        if end is not None and cut:
            token, logprob, top_logprobs = end, 0.0, top_logprobs and {end: 0.0}
        request.add_chunk(request.output.append_token(token, logprob, top_logprobs, forced_eos=cut))
        if request.output.finish_reason is not None:
            self.scheduler.release(request)
            request.finish()
        elif request.num_computed_tokens in self.rope_switch_lengths and request.row is not None:
            self.scheduler.restart_prefill(request)  # its tokens turn by other angles from here on

    def _fail_all(self, reason: str) -> None:
        """It is over, for those at work and those who wait."""
        tickets = [*self.scheduler.running, *self.waiting, *(self.pending.requests if self.pending is not None else ())]
        self.waiting.clear()
        self.scheduler.running, self.scheduler.num_decoding, self.pending = [], 0, None
        for ticket in tickets:
            ticket.finish(error=EngineError(reason))
