"""Continuous batching: `Engine.step` admits requests, prefills one chunk and decodes one token per running request.

A request is waiting (no row), prefilling (its prompt is being written to the KV cache), decoding (one token per step)
or finished. Prompts are prefilled in chunks between decode steps, so that a long prompt does not stall other requests.
"""

import atexit
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from functools import partial

import torch
from torch import Tensor

from cutaway.errors import CutawayError, InputError
from cutaway.eval_mode import eval_mode
from cutaway.generate.engine.config import EngineConfig
from cutaway.generate.engine.model_runner import ModelRunner, PendingTokens
from cutaway.generate.engine.prefill_budget import PrefillBudget
from cutaway.generate.engine.request import Request, RequestGroup
from cutaway.generate.engine.request_queue import RequestQueue
from cutaway.generate.engine.scheduler import RowCounts, Scheduler
from cutaway.generate.sampling.sampling_params import SamplingParams
from cutaway.generate.structured_output.grammar import fill_bitmasks
from cutaway.tokenizer import Tokenizer

NO_MEMORY_MESSAGE = (
    "there is too little free memory for the KV cache of this request; shorten it, or stop other programs"
)
FAIR_SHARE_STEPS = 8
"""Number of steps that a request, whose client or group has no row, waits for one before others are preempted."""


class EngineError(CutawayError):
    """The engine could not complete a request."""


class BusyError(CutawayError):
    """The engine did not accept a request, because the waiting queue is full."""


class Engine:
    """Continuous-batching engine for one model. Call `step` until it returns False, or `start` to do so in a thread.

    The engine caches keys, values and packed weights: build a new engine after a change of weights or hooks.
    `submit`, `Request.abort` and `close` are thread-safe; everything else runs in the one thread that calls `step`.
    """

    def __init__(self, config: EngineConfig, *, tokenizer: Tokenizer | None = None, max_waiting: int = 1024) -> None:
        """`max_waiting`: maximum length of the waiting queue; `submit` raises BusyError when the queue is full."""
        self.config, self.tokenizer, self.max_waiting = config, tokenizer, max_waiting
        self.models = [config.model]
        self.model_runner = ModelRunner(
            config.model,
            config.build_cache(),
            compile=config.compile,
            weight_bits=config.weight_bits,
            adapters=config.adapters,
        )
        self.rope_switch_lengths, self.dynamic_rope_len = config.rope_switch_lengths, config.dynamic_rope_len
        self.samples_after_prefill = not self.rope_switch_lengths and self.dynamic_rope_len is None
        """Whether the last prefill step of a request also samples its first token. Otherwise its last token is left to
        the first decode step, which lets that step repeat the token with other RoPE frequencies."""
        # With dynamic RoPE a token's key depends on the length of its sequence when it was computed, so that pages
        # cannot be shared and keys cannot be computed again.
        is_static = self.dynamic_rope_len is None
        self.scheduler = Scheduler(self.model_runner, config, prefix_caching=is_static, preemption=is_static)
        self.waiting = RequestQueue()
        self.default_group = RequestGroup()
        """Group of requests that are submitted without a group. They are admitted in the order of their arrival."""
        self.prefill_budget = PrefillBudget(config, has_padding=self.model_runner.packed_prefill is None)
        self.pending: list[PendingTokens] = []
        """Sampled tokens that are being copied to the host, in the order of their steps."""
        self.async_scheduling = config.model.device.type == "cuda" and not self.rope_switch_lengths
        """Launch the next decode step before the previous step's tokens are on the host, so that the GPU never idles.

        Disabled with LongRoPE, where the host needs each token to decide whether to prefill again."""
        self.can_pause = config.model.device.type == "cpu"
        self.paused_group: RequestGroup | None = None
        """Group whose rows are left out of the current step."""
        self.condition = threading.Condition()
        self.num_submitted = self.num_steps = 0
        self.thread: threading.Thread | None = None
        self.closed = False

    # Thread-safe methods

    def submit(
        self,
        prompt: Sequence[int],
        sampling_params: SamplingParams,
        *,
        seed: int,
        wait: bool = False,
        output_prefix: Sequence[int] = (),
        adapter: str | None = None,
        group: RequestGroup | None = None,
        priority: int = 0,
    ) -> Request:
        """Queue a request for one completion of a tokenized prompt. For an encoder-decoder, the prompt is the source.

        The completion starts with `output_prefix`. `n` and `seed` of `sampling_params` are ignored: `generate` submits
        one request per completion. `wait`: block while the waiting queue is full, instead of raising BusyError.
        `adapter`: name of the adapter, '__base__' for the base model, or None for the engine's default adapter.
        `group`: the completions of one API request; groups and their clients take turns. `priority`: smaller values are
        admitted earlier, if scheduling_policy is 'priority'.
        """
        if priority and self.config.scheduling_policy != "priority":
            raise InputError(
                f"priority is {priority}, but scheduling_policy is '{self.config.scheduling_policy}'; leave out"
                " priority, or set scheduling_policy='priority'"
            )
        request = self._build_request(prompt, sampling_params, seed, output_prefix, adapter)
        request.group, request.priority = group or self.default_group, priority
        with self.condition:
            while wait and not self.closed and len(self.waiting) >= self.max_waiting:
                self.condition.wait()
            if self.closed:
                raise EngineError("the engine is closed; build a new one")
            if request.output.finish_reason is not None:  # output_prefix already reaches a limit or a stop token
                request.finish()
                return request
            if len(self.waiting) >= self.max_waiting:
                raise BusyError(
                    f"{len(self.waiting)} requests are waiting, which is the maximum (max_waiting); try again later"
                )
            self.num_submitted += 1
            request.arrival_index, request.arrival_step = self.num_submitted, self.num_steps
            self.waiting.append(request)
            self.condition.notify_all()
        return request

    def _build_request(
        self,
        prompt: Sequence[int],
        sampling_params: SamplingParams,
        seed: int,
        output_prefix: Sequence[int],
        adapter: str | None,
    ) -> Request:
        return self.config.build_request(
            prompt, sampling_params, self.tokenizer, seed=seed, output_prefix=output_prefix, adapter=adapter
        )

    def start(self) -> "Engine":
        """Start a thread that calls `step` while there are requests. Edits (`ct.edit`) of the caller apply in it."""
        if self.thread is not None or self.closed:
            raise EngineError("the engine was already started or closed; build a new one")
        self.thread = threading.Thread(
            target=copy_context().run, args=(self._run_loop,), name="cutaway-engine", daemon=True
        )
        self.thread.start()
        atexit.register(self.close)  # exiting the interpreter while a thread is inside PyTorch aborts the process
        return self

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the engine and stop its thread, if one was started. Unfinished requests fail with an EngineError."""
        with self.condition:
            self.closed = True
            self.condition.notify_all()
        if self.thread is not None:
            self.thread.join()
            atexit.unregister(self.close)
        self._fail_all("the engine was closed before the completion was finished")
        self.model_runner.release_compiled()

    def run(self) -> None:
        """Call `step` until all requests are finished."""
        while self.step():
            pass

    # Methods for the one thread that calls `step`

    @property
    def num_decoding(self) -> int:
        """Number of running requests whose prefill is complete, so that they decode in each step."""
        return self.scheduler.num_decoding

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting or self.scheduler.running or self.pending)

    def step(self) -> bool:
        """Admit waiting requests, run a prefill step and a decode step. Return whether unfinished requests remain."""
        self.num_steps += 1
        training = any(model.training for model in self.models)
        try:
            with eval_mode(*self.models) if training else nullcontext():
                if self.waiting:
                    self._process_pending_if_finishing()  # which frees rows for them
                self._remove_aborted()
                self._admit_waiting()
                self.paused_group = self.scheduler.dominant_group() if self._may_pause() else None
                has_decoding = self.num_decoding > 0
                has_first_tokens = self._prefill_step()
                # First tokens are returned before they are decoded further, unless others wait for a decode step.
                if not self._prefills_first and (has_decoding or not has_first_tokens):
                    self._decode_step()
                elif not self.async_scheduling:
                    self._process_pending()
            return self.has_unfinished_requests
        except Exception as error:  # not specific to a request: device lost, or inconsistent bookkeeping
            with self.condition:
                self.closed = True
                self.condition.notify_all()
            reason = f"the engine failed ({type(error).__name__}: {error}); build a new one"
            self._fail_all(reason)
            raise EngineError(reason) from error

    @property
    def _prefills_first(self) -> bool:
        """Whether decode steps wait until all admitted requests are prefilled: on a GPU, in one `generate` call.

        Then all of them decode in one batch. Requests of a server have a group each, and decode without such waits."""
        running = self.scheduler.running
        return (
            self.async_scheduling
            and len(running) > self.num_decoding
            and all(request.group is self.default_group for request in running)
        )

    def _may_pause(self) -> bool:
        """Whether the dominant group pauses in this step: on the CPU, in every second step.

        There, the time of a step grows with the number of rows. Steps without the rows of a large request keep the
        latency of small requests beside it below about twice their latency alone."""
        return self.can_pause and self.num_steps % 2 == 0

    def _run_loop(self) -> None:
        while True:
            with self.condition:
                while not (self.closed or self.has_unfinished_requests):
                    self.condition.wait()
                if self.closed:
                    return
            try:
                self.step()
            except EngineError:  # all requests have failed with this error
                return

    @contextmanager
    def _isolate_failures(self, requests: Sequence[Request]) -> Iterator[None]:
        """Context manager: if its body raises, only `requests` fail, and their cache rows are zeroed."""
        try:
            yield
        except Exception as error:
            ranks = self.config.model.tensor_parallel
            if ranks is not None and ranks.has_failed:
                raise  # the other processes of the model cannot continue
            reason = f"a step failed ({type(error).__name__}: {error}); submit the request again"
            for request in requests:
                request.finish(error=EngineError(reason))
            for request in requests:
                self.scheduler.release(request, cache_valid=False)

    def _process_pending_if_finishing(self) -> None:
        """Process the tokens of the previous decode step now if a request reaches its max_tokens with them.

        Otherwise the next decode step would be launched with a row that is already finished."""
        if any(
            request.num_launched_tokens >= request.output.max_tokens
            for pending in self.pending
            for request in pending.requests
        ):
            self._process_pending()

    def _remove_aborted(self) -> None:
        """Finish aborted requests with the finish reason "abort" and free their KV cache rows."""
        with self.condition:
            aborted = [request for request in self.waiting if request.aborted]
            for request in aborted:
                self.waiting.remove(request)
            if aborted:
                self.condition.notify_all()
        for request in aborted:
            request.finish("abort")
        aborted = [request for request in self.scheduler.running if request.aborted]
        if aborted:
            self._process_pending()
        for request in aborted:
            self.scheduler.release(request, cache_valid=request.num_sampled_tokens > 0)
            request.finish("abort")

    def _admit_waiting(self) -> None:
        """Allocate rows and pages to waiting requests in the order of `RequestQueue`.

        The next request blocks those behind it if it does not fit, so that large requests are not starved. If its
        client or group has no row, requests of others are preempted for it. Sources of an encoder-decoder are encoded
        here, each in one pass. While other requests decode, admission stops after `prefill_chunk_size` source tokens
        per step, to bound the latency of those requests.
        """
        num_decoding, num_source_tokens = self.scheduler.num_decoding, 0
        chunk_size = self.config.resolved_prefill_chunk_size
        while self.waiting and not (num_decoding and num_source_tokens >= chunk_size):
            request = self._allocate_next()
            if request is None:
                return
            with self.condition:
                self.waiting.pop(request)
                self.condition.notify_all()
            num_source_tokens += len(request.source_tokens or ())
            with self._isolate_failures([request]):
                self.scheduler.start_prefill(request)

    def _allocate_next(self) -> Request | None:
        """Assign a row and pages to the next waiting request and return it; None if it has to wait."""
        scheduler, counts = self.scheduler, RowCounts(self.scheduler.running)

        def is_eligible(request: Request) -> bool:
            return not counts.is_at_limit(request) and not scheduler.prefix_is_being_computed(request)

        request = self._select_waiting(is_eligible) if scheduler.has_free_row else None
        if request is not None and self._can_batch(request) and scheduler.allocate(request):
            return request
        if not scheduler.preemption or (request is None and scheduler.has_free_row):
            return None

        def may_preempt(request: Request) -> bool:
            has_waited = self.num_steps - request.arrival_step >= FAIR_SHARE_STEPS
            return has_waited and counts.victim_for(request) is not None and is_eligible(request)

        request = self._select_waiting(may_preempt)
        if request is None or not self._can_batch(request):
            return None
        while not scheduler.allocate(request):
            victim = RowCounts(scheduler.running).victim_for(request)
            if victim is None:
                return None
            self._preempt(victim)
        return request

    def _select_waiting(self, is_eligible: Callable[[Request], bool]) -> Request | None:
        with self.condition:
            return self.waiting.select(is_eligible, by_priority=self.config.scheduling_policy == "priority")

    def _can_batch(self, request: Request) -> bool:
        """Whether the request's adapter can run in one batch with the running requests."""
        running = self.scheduler.running
        return not running or running[0].adapter == request.adapter or self.model_runner.can_mix_adapters

    def _preempt(self, request: Request) -> None:
        """Move a running request back to the waiting queue, unless the tokens of the pending step finish it."""
        self._process_pending()
        if request.row is not None:
            self.scheduler.preempt(request)
            with self.condition:
                self.waiting.append(request)

    def _prefill_step(self) -> bool:
        """Prefill the next chunk of one or more prompts. Return whether first tokens of requests were sampled."""
        first_row = self.scheduler.num_decoding
        batch, chunks = self._next_prefill_batch(first_row)
        if not batch:
            return False
        self.scheduler.num_prefill_steps += 1
        for request in batch:
            if request.group is not self.default_group:
                request.group.prefill_turn = self.scheduler.num_prefill_steps
        completed: list[Request] = []
        incomplete: list[Request] = []
        with self._isolate_failures(batch):
            num_computed = [request.num_computed_tokens for request in batch]
            start = time.perf_counter()
            x = self.model_runner.prefill(first_row, chunks, num_computed)
            self.prefill_budget.record_prefill(time.perf_counter() - start, sum(map(len, chunks)))
            self.model_runner.add_prompt_logprobs(batch, x, chunks, num_computed)
            last_hidden_states = []
            for request, chunk, hidden_states in zip(batch, chunks, x, strict=True):
                request.num_computed_tokens += len(chunk)
                if request.num_computed_tokens == len(request.all_token_ids) and self.samples_after_prefill:
                    completed.append(request)
                    last_hidden_states.append(hidden_states[-1])
                    continue
                incomplete.append(request)
                if self._needs_full_prefill(request.all_token_ids):  # the first decode step repeats the last token
                    request.num_computed_tokens -= 1
                    self.model_runner.cache.seq_lens[request.row] = request.num_computed_tokens
            for request in [*completed, *incomplete]:  # completed ones first, so that they are in consecutive rows
                self.scheduler.maybe_start_decode(request)
            if completed:
                self._sample_first_tokens(completed, last_hidden_states)
        return bool(completed)

    def _next_prefill_batch(self, first_row: int) -> tuple[list[Request], list[list[int]]]:
        """Move requests to rows first_row, … for a prefill step. Return them and the tokens of each."""
        batch: list[Request] = []
        chunks: list[list[int]] = []
        if len(self.scheduler.running) == first_row:
            return batch, chunks
        budget = self._max_prefill_tokens()
        has_padding = self.model_runner.packed_prefill is None
        num_tokens = longest = max_computed = 0
        while request := self.scheduler.next_prefill(first_row + len(batch), self.paused_group):
            chunk = self._next_prefill_chunk(request, budget if has_padding else budget - num_tokens)
            num_tokens += len(chunk)
            longest = max(longest, len(chunk))
            max_computed = max(max_computed, request.num_computed_tokens)
            # A padded batch is (requests, longest chunk). Padding is written to slots as well, so the row with the
            # most computed tokens must have `longest` free slots.
            is_full = longest * (len(batch) + 1) > budget or max_computed + longest > self.model_runner.cache.num_slots
            if not chunk or (has_padding and batch and is_full):
                break
            batch.append(request)
            chunks.append(chunk)
        return batch, chunks

    def _max_prefill_tokens(self) -> int:
        """Maximum number of tokens of the next prefill step: see `PrefillBudget`."""
        decoding = {request.group for request in self.scheduler.decoding}
        before_decode = {request.group for request in self.scheduler.running[self.num_decoding :]}
        if self.scheduler.has_free_row:
            with self.condition:
                before_decode |= {request.group for request in self.waiting}
        num_decoding = 0 if self._prefills_first else len(decoding)
        return self.prefill_budget.max_tokens(num_decoding, len(before_decode - decoding))

    def _next_prefill_chunk(self, request: Request, max_tokens: int) -> list[int]:
        """Return the next tokens of `request` to prefill, at most `max_tokens`."""
        token_ids = request.all_token_ids
        if self._needs_full_prefill(token_ids):
            return token_ids[request.num_computed_tokens :]
        last = len(token_ids) if self.samples_after_prefill else len(token_ids) - 1
        end = min(last, request.num_computed_tokens + max_tokens)
        return token_ids[request.num_computed_tokens : end]

    def _needs_full_prefill(self, token_ids: Sequence[int]) -> bool:
        """Whether all tokens must be prefilled in one pass, because their RoPE frequencies depend on the length."""
        return self.dynamic_rope_len is not None and len(token_ids) > self.dynamic_rope_len

    def _sample_first_tokens(self, requests: Sequence[Request], hidden_states: Sequence[Tensor]) -> None:
        """Sample the first tokens of requests in consecutive rows, from the hidden states of their last tokens."""
        first_row = requests[0].row
        assert first_row is not None
        assert [request.row for request in requests] == list(range(first_row, first_row + len(requests)))
        before_sampling = self._before_sampling(requests, first_row)
        x = torch.stack(list(hidden_states))
        output = self.model_runner.sample_after_prefill(x, first_row, before_sampling)
        for request in requests:
            request.num_launched_tokens += 1
        self.pending.append(PendingTokens(output, requests))

    def _decode_step(self) -> None:
        """Launch a decode step of all decoding rows, then process the tokens of earlier steps.

        Without async scheduling, this step's tokens are processed too.
        """
        if self.async_scheduling:
            self._process_pending_if_finishing()  # of requests whose first token was sampled in this step's prefill
        else:
            self._process_pending()
        self._allocate_decode_pages()
        paused = self.paused_group
        decoding = self.scheduler.decoding if paused is None else self.scheduler.decoding_without(paused)
        launched: list[PendingTokens] = []
        start = time.perf_counter()
        if decoding:
            with self._isolate_failures(decoding):
                max_len = max(request.num_computed_tokens for request in decoding)
                steps_left = max(request.output.max_tokens - request.num_launched_tokens for request in decoding)
                before_sampling = self._before_sampling(decoding, 0)
                output = self.model_runner.decode(len(decoding), max_len, steps_left, before_sampling)
                launched.append(PendingTokens(output, decoding))
                for request in decoding:
                    request.num_computed_tokens += 1
                    request.num_launched_tokens += 1
            if paused is None:
                self.prefill_budget.record_decode(time.perf_counter() - start)
        self._process_pending()
        self.pending = launched
        if not self.async_scheduling:
            self._process_pending()

    def _before_sampling(self, requests: Sequence[Request], first_row: int) -> Callable[[], object] | None:
        """What to call between forward pass and sampling: `_fill_bitmasks` if any request has a grammar."""
        has_grammar = any(request.grammar is not None for request in requests)
        return partial(self._fill_bitmasks, requests, first_row) if has_grammar else None

    def _fill_bitmasks(self, requests: Sequence[Request], first_row: int) -> None:
        """Write the tokens that the grammars allow next to the sampler, while the device runs the forward pass.

        `requests` are in rows first_row, … With async scheduling, tokens of earlier steps are still pending: the
        grammars accept them here."""
        for pending in self.pending:
            for request, token, invalid, *_ in pending.results():
                if request.grammar is not None and not invalid and not request.finished.is_set():
                    request.grammar.accept(token, request.num_sampled_tokens)
        grammars = [request.grammar for request in requests]
        bitmask = self.model_runner.host_bitmask[: len(grammars)]
        fill_bitmasks(bitmask, grammars)
        self.model_runner.sampler.set_grammar_bitmask(bitmask, first_row)

    def _allocate_decode_pages(self) -> None:
        """Allocate the page that each decoding request writes to. If there is none, preempt requests."""
        for request in sorted(self.scheduler.decoding, key=lambda each: (each.priority, each.arrival_index)):
            while request.row is not None and not self.scheduler.append_page(request):
                if len(self.scheduler.running) > 1:
                    self._preempt(self.scheduler.preemption_victim())
                    continue
                request.finish(error=EngineError(NO_MEMORY_MESSAGE))
                self.scheduler.release(request)

    def _process_pending(self) -> None:
        """Wait until the tokens of the pending steps are on the host, and append them to their requests."""
        steps, self.pending = self.pending, []
        # Each request is in one of the steps. In reverse, because releasing the last rows first moves no other row.
        for pending in reversed(steps):
            with self._isolate_failures(pending.requests):
                for request, token, invalid, logprob, top in reversed(list(pending.results())):
                    if not request.finished.is_set():
                        with self._isolate_failures([request]):
                            self._process_token(request, token, invalid, logprob, top)

    def _process_token(
        self, request: Request, token: int, invalid: bool, logprob: float | None, top_logprobs: dict[int, float] | None
    ) -> None:
        """Append a sampled token to a request; finish the request, or prefill it again at a LongRoPE switch length."""
        error: CutawayError | None = None
        grammar = request.grammar
        if grammar is not None:
            if not invalid:
                grammar.accept(token, request.num_sampled_tokens)
            if grammar.error is not None:
                error = InputError(f"the completion cannot follow its grammar ({grammar.error}); change or simplify it")
        if invalid and error is None:
            error = EngineError(
                f"the logits for token {len(request.output.tokens)} of the completion contain NaN or +inf, or all"
                " tokens are suppressed; check the weights (ct.load(..., check=True)), the dtype (float16 overflows in"
                " some models) and suppress_tokens"
            )
        if error is not None:
            request.finish(error=error)
            self.scheduler.release(request, cache_valid=not invalid)
            return
        forced_eos_token_id = self.config.forced_eos_token_id
        is_last = forced_eos_token_id is not None and len(request.output.tokens) + 1 >= request.output.max_tokens
        if forced_eos_token_id is not None and is_last:
            token, logprob, top_logprobs = forced_eos_token_id, 0.0, top_logprobs and {forced_eos_token_id: 0.0}
        request.add_chunk(
            request.output.append_token(
                token,
                logprob,
                top_logprobs,
                forced_eos=is_last,
                completes_grammar=grammar is not None and grammar.is_finished,
            )
        )
        if request.output.finish_reason is not None:
            self.scheduler.release(request)
            request.finish()
        elif request.num_computed_tokens in self.rope_switch_lengths and request.row is not None:
            self.scheduler.restart_prefill(request)  # from this length on, LongRoPE uses other frequencies for all keys

    def _fail_all(self, reason: str) -> None:
        """Finish all running, waiting and pending requests with an EngineError that has the message `reason`."""
        pending = [request for step in self.pending for request in step.requests]
        requests = [*self.scheduler.running, *self.waiting, *pending]
        self.waiting.clear()
        self.scheduler.running, self.scheduler.num_decoding, self.pending = [], 0, []
        for request in requests:
            request.finish(error=EngineError(reason))
