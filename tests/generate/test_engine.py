"""The engine under load: outputs independent of the batch, no leaks, isolated failures, prefix caching, fair order."""

import gc
import random
import subprocess
import sys
import threading
import time
import tracemalloc
from itertools import pairwise
from typing import Any

import pytest
import torch
from support.config_strategies import build_randomized_model
from support.generation import build_translator, decoder_config
from support.nightly import nightly_except

from cutaway.errors import CutawayError, InputError
from cutaway.generate import (
    BusyError,
    Completion,
    Engine,
    EngineConfig,
    EngineError,
    Request,
    RequestGroup,
    SamplingParams,
)
from cutaway.generate.engine.kv_cache import CACHE_IMPLEMENTATIONS
from cutaway.model import Transformer

pytestmark = pytest.mark.unchecked
PAGE_SIZE = 8


@pytest.fixture(autouse=True)
def _small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("kv_cache", "config"):
        monkeypatch.setattr(f"cutaway.generate.engine.{module}.PAGE_SIZE", PAGE_SIZE)


@pytest.fixture(scope="module")
def model() -> Transformer:
    return build_randomized_model(decoder_config(), torch.float64)


def test_short_prompts_are_prefilled_together(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the KV cache has fewer slots per sequence than `prefill_chunk_size`."""
    engine = engine_for(model, max_num_seqs=8, max_model_len=8, prefill_chunk_size=40, cache_implementation="full")
    prefill, batches = engine.model_runner.prefill, []

    def recording_prefill(first_row: int, chunks: Any, num_computed: Any) -> Any:
        batches.append(len(chunks))
        return prefill(first_row, chunks, num_computed)

    monkeypatch.setattr(engine.model_runner, "prefill", recording_prefill)
    requests = [engine.submit([i, 3, 4, 5, 6], SamplingParams(max_new_tokens=3), seed=i) for i in range(8)]
    engine.run()
    assert batches == [8]
    assert [each.result().tokens for each in requests] == [run_alone(model, each).tokens for each in requests]


def engine_for(model: Transformer, max_waiting: int = 1024, **options: Any) -> Engine:
    return Engine(
        EngineConfig(
            model,
            **{
                "max_num_seqs": 4,
                "max_model_len": 64,
                "prefill_chunk_size": 16,
                "cache_implementation": "paged",
                **options,
            },
        ),
        max_waiting=max_waiting,
    )


def run_alone(model: Transformer, request: Request) -> Completion:
    """Output of the same request in an engine of its own."""
    engine = engine_for(model, max_num_seqs=1, max_model_len=128, cache_implementation="full", prefill_chunk_size=128)
    again = engine.submit(request.input_ids, request.sampling_params, seed=request.seed)
    engine.run()
    return again.result()


def output_fields(completion: Completion) -> tuple[list[int], str, int | str | None]:
    return completion.tokens, completion.finish_reason, completion.stop_reason


def check_empty(engine: Engine) -> None:
    """All rows and pages are released."""
    pages = engine.scheduler.page_pool
    assert not engine.has_unfinished_requests
    assert not engine.scheduler.num_decoding
    if pages is not None:
        assert pages.num_available == engine.model_runner.cache.num_pages - 1
        assert not pages.ref_counts
        assert engine.model_runner.cache.page_table is not None
        assert not engine.model_runner.cache.page_table.any()
    assert not engine.model_runner.cache.seq_lens.any()


def random_request(r: random.Random) -> tuple[list[int], SamplingParams]:
    """A random request; some share a prefix."""
    prefix = [(7 * i + r.choice([0, 1])) % 50 for i in range(r.choice([0, 9, 24, 40]))]
    prompt = (prefix + [r.randrange(53) for _ in range(r.randint(1, 60))])[:60]
    sampling = (
        {"temperature": 1.0, "top_p": r.choice([None, 0.9]), "top_k": r.choice([None, 5])} if r.random() < 0.6 else {}
    )
    return prompt, SamplingParams(
        max_new_tokens=r.randint(1, 40),
        stop_token_ids=r.choice([(), (), (3, 17), range(20)]),
        repetition_penalty=r.choice([1.0, 1.0, 1.2]),
        logprobs=r.choice([None, None, 0, 3]),
        **sampling,
    )


BAD = [
    ([], SamplingParams()),
    ([99], SamplingParams()),
    ([1] * 200, SamplingParams()),
    ([1], SamplingParams(suppress_tokens=[77])),
    ([-1], SamplingParams()),
]


def run_load(engine: Engine, count: int, seed: int) -> list[Request]:
    """Three threads submit and abort requests while the engine runs; some requests are invalid."""
    requests: list[Request] = []
    rejected: list[int] = []

    def submit_requests(thread_index: int) -> None:
        r = random.Random(seed + thread_index)
        own: list[Request] = []
        for i in range(count // 3 + (thread_index < count % 3)):
            if i % 40 == 39:
                prompt, params = r.choice(BAD)
                with pytest.raises(InputError):
                    engine.submit(prompt, params, seed=0)
                rejected.append(thread_index)
            prompt, params = random_request(r)
            own.append(engine.submit(prompt, params, seed=r.randrange(2**60), wait=True))
            if r.random() < 0.15:
                r.choice(own[-20:]).abort()
        requests.extend(own)

    threads = [threading.Thread(target=submit_requests, args=(thread_index,)) for thread_index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=240)
    assert not rejected or len(rejected) == 3 * (count // 3 // 40)
    assert len(requests) == count
    for request in requests:
        request.result(timeout=240)
    return requests


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@pytest.mark.nightly
@pytest.mark.parametrize(("async_scheduling", "count"), [(True, 150), (False, 500), (True, 500)])
def test_many_concurrent_requests(model: Transformer, async_scheduling: bool, count: int) -> None:
    """Too few pages, a full queue, prefix sharing and aborts; async scheduling as on a GPU."""
    config = EngineConfig(
        model, max_num_seqs=12, max_model_len=128, prefill_chunk_size=48, cache_implementation="paged"
    )
    config.kv_cache_memory_bytes = (
        config.bytes_for_slots(PAGE_SIZE) * 60
    )  # of the 192 pages that twelve sequences could need
    engine = Engine(config, max_waiting=40)
    engine.async_scheduling = async_scheduling
    engine.start()
    requests = run_load(engine, count, 0)
    wait_until_idle(engine)
    check_empty(engine)
    reasons = {reason: sum(t.result().finish_reason == reason for t in requests) for reason in ("stop", "length")}
    assert min(reasons.values()) > count // 10
    aborted = [request for request in requests if request.result().finish_reason == "abort"]
    assert aborted
    for request in aborted[:10]:
        tokens = request.result().tokens
        assert tokens == run_alone(model, request).tokens[: len(tokens)]
    complete = [request for request in requests if request.result().finish_reason != "abort"]
    for request in complete[:: len(complete) // 40]:
        assert output_fields(request.result()) == output_fields(run_alone(model, request))
        assert [token for chunk in request.stream() for token in chunk.tokens] == request.result().tokens
    del requests, complete, aborted, request, tokens
    check_memory(engine)
    engine.close()


def check_memory(engine: Engine) -> None:
    """A load leaves no tensors and no memory allocated."""
    before = live_tensors()
    tracemalloc.start()
    run_load(engine, 60, 10_000)
    wait_until_idle(engine)
    assert live_tensors() <= before
    traces = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/cutaway/*")])
    num_bytes = sum(
        statistic.size for statistic in traces.statistics("filename")
    )  # other modules in this process may log
    tracemalloc.stop()
    assert num_bytes < 100_000, f"{num_bytes} bytes are still allocated"


def wait_until_idle(engine: Engine) -> None:
    """Wait until the engine's thread has finished all requests."""
    for _ in range(48_000):
        if not engine.has_unfinished_requests:
            return
        time.sleep(0.005)
    raise AssertionError("the engine did not become idle")


@pytest.mark.nightly
@pytest.mark.parametrize("kind", CACHE_IMPLEMENTATIONS)
def test_thousands_of_requests_in_every_cache_implementation(model: Transformer, kind: str) -> None:
    engine = Engine(
        EngineConfig(model, max_num_seqs=12, max_model_len=128, prefill_chunk_size=48, cache_implementation=kind),
        max_waiting=40,
    ).start()
    requests = run_load(engine, 3000, 5)
    wait_until_idle(engine)
    check_empty(engine)
    engine.close()
    complete = [request for request in requests if request.result().finish_reason != "abort"]
    for request in complete[::20]:
        assert output_fields(request.result()) == output_fields(run_alone(model, request))


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", CACHE_IMPLEMENTATIONS)
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_async_scheduling_gives_the_same_output(model: Transformer, kind: str, async_scheduling: bool) -> None:
    """With stop tokens, one-token limits, and an abort while a step is pending."""
    engine = engine_for(model, cache_implementation=kind, max_num_seqs=3)
    engine.async_scheduling = async_scheduling
    r = random.Random(3)
    requests = [engine.submit(*random_request(r), seed=i) for i in range(12)]
    aborted = engine.submit([1, 2, 3], SamplingParams(max_new_tokens=40), seed=0)
    while not aborted.output.tokens:
        engine.step()
    aborted.abort()
    engine.run()
    check_empty(engine)
    assert aborted.result().finish_reason == "abort"
    for request in requests:
        expected = run_alone(model, request)
        if len(request.input_ids) + len(expected.tokens) <= 64:
            assert output_fields(request.result()) == output_fields(expected)
        else:
            assert request.result().tokens == expected.tokens[: 64 - len(request.input_ids)]


# Back-pressure, close, streaming


def test_full_queue_raises_busy_error_or_waits(model: Transformer) -> None:
    engine = engine_for(model, max_waiting=2)
    params = SamplingParams(max_new_tokens=3)
    first = [engine.submit([1], params, seed=0) for _ in range(2)]
    with pytest.raises(BusyError, match="2 requests are waiting"):
        engine.submit([1], params, seed=0)
    late: list[Request] = []
    thread = threading.Thread(target=lambda: late.append(engine.submit([1], params, seed=0, wait=True)))
    thread.start()
    first[0].abort()  # frees a place in the queue before any request has a row
    engine._remove_aborted()
    thread.join(timeout=240)
    engine.run()
    assert first[0].result().finish_reason == "abort"
    assert late[0].result().tokens == first[1].result().tokens


def test_close_fails_unfinished_requests(model: Transformer) -> None:
    engine = engine_for(model, max_num_seqs=2, max_waiting=6).start()
    requests = [engine.submit([i], SamplingParams(max_new_tokens=60), seed=0, wait=True) for i in range(8)]
    errors: list[CutawayError] = []

    def wait() -> None:
        try:
            while True:
                engine.submit([1], SamplingParams(max_new_tokens=60), seed=0, wait=True)
        except CutawayError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    engine.close()
    thread.join(timeout=240)
    assert isinstance(errors[0], EngineError)
    for request in requests:
        try:
            assert len(request.result(timeout=240).tokens) == 60
        except EngineError as error:
            assert "closed before" in str(error)  # noqa: PT017
    with pytest.raises(EngineError, match="closed before"):
        list(requests[-1].stream())
    with pytest.raises(EngineError, match="closed"):
        engine.submit([1], SamplingParams(), seed=0)
    engine.close()
    with pytest.raises(EngineError, match="build a new one"):
        engine.start()


@pytest.mark.nightly
def test_interpreter_exits_cleanly_with_a_running_engine() -> None:
    program = """
import cutaway as ct
from cutaway.generate import Engine, EngineConfig, SamplingParams
engine = Engine(EngineConfig(ct.build("tiny-gpt", seed=0), max_num_seqs=4)).start()
requests = [engine.submit([1], SamplingParams(), seed=i) for i in range(40)]
next(requests[0].stream())
raise SystemExit(3)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (result.returncode, result.stderr) == (3, "")


def test_stream_ends_again_after_the_last_chunk(model: Transformer) -> None:
    engine = engine_for(model)
    request = engine.submit([1, 2], SamplingParams(max_new_tokens=3), seed=0)
    assert request.pop_chunks() == []
    engine.run()
    assert len(request.pop_chunks()) == 3
    assert request.pop_chunks() == list(request.stream(timeout=240)) == list(request.stream(timeout=240)) == []
    with pytest.raises(TimeoutError):
        engine.submit([1], SamplingParams(), seed=0).result(timeout=0)


# Failures


@pytest.mark.parametrize("kind", CACHE_IMPLEMENTATIONS)
@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyError("a bug"), InputError("wrong")])
def test_failing_decode_step_fails_only_its_requests(
    model: Transformer, kind: str, async_scheduling: bool, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_for(model, cache_implementation=kind, max_num_seqs=3)
    engine.async_scheduling = async_scheduling
    params = SamplingParams(max_new_tokens=6)
    groups = [RequestGroup() for _ in range(2)]  # of different groups, so that decode does not wait for prefill
    decoding = [engine.submit([i, i], params, seed=0, group=groups[0]) for i in range(2)]
    prefilling = engine.submit([9] * 40, params, seed=0, group=groups[1])
    waiting = engine.submit([8] * 40, params, seed=0, group=groups[1])
    engine.step()
    engine.step()
    assert engine.num_decoding == 2
    decode = engine.model_runner.decode

    def fail(*_: Any) -> Any:
        monkeypatch.setattr(engine.model_runner, "decode", decode)
        raise error

    monkeypatch.setattr(engine.model_runner, "decode", fail)
    engine.run()
    for request in decoding:
        with pytest.raises(EngineError, match="a step failed"):
            request.result()
    for request in (prefilling, waiting):
        assert output_fields(request.result()) == output_fields(run_alone(model, request))
    check_empty(engine)


def test_failing_prefill_fails_only_its_request(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(model)
    params = SamplingParams(max_new_tokens=6)
    decoding = engine.submit([1], params, seed=0)
    engine.step()
    failing = engine.submit([2, 3, 4], params, seed=0)
    prefill = engine.model_runner.prefill

    def fail(*_: Any) -> None:
        monkeypatch.setattr(engine.model_runner, "prefill", prefill)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine.model_runner, "prefill", fail)
    engine.run()
    assert output_fields(decoding.result()) == output_fields(run_alone(model, decoding))
    with pytest.raises(EngineError, match="RuntimeError: out of memory"):
        failing.result()
    check_empty(engine)


def test_failing_encoder_fails_only_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_translator()
    engine = engine_for(model, decoder_start_token_id=2, max_source_len=20)
    first = engine.submit([4, 5], SamplingParams(max_new_tokens=5), seed=0)
    engine.step()
    encode_source = engine.model_runner.encode_source
    monkeypatch.setattr(engine.model_runner, "encode_source", lambda *_: 1 / 0)
    second = engine.submit([4, 5], SamplingParams(max_new_tokens=5), seed=0)
    engine.step()
    monkeypatch.setattr(engine.model_runner, "encode_source", encode_source)
    third = engine.submit([4, 5], SamplingParams(max_new_tokens=5), seed=0)
    engine.run()
    assert first.result().tokens == third.result().tokens
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        second.result()
    check_empty(engine)


def test_engine_failure_fails_all_requests(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the device is lost and not even `release` works."""
    engine = engine_for(model, max_num_seqs=2)
    monkeypatch.setattr(engine.scheduler, "release", lambda *_, **__: 1 / 0)
    requests = [engine.submit([i], SamplingParams(max_new_tokens=3 + i), seed=0) for i in range(4)]
    engine.start()
    for request in requests:
        with pytest.raises(EngineError, match=r"a step failed|the engine failed"):
            request.result(timeout=240)
    with pytest.raises(EngineError, match="closed"):
        engine.submit([1], SamplingParams(), seed=0)


@pytest.mark.parametrize("kind", CACHE_IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", nightly_except((None,), (None, torch.int8)))
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_nan_does_not_reach_other_requests(kind: str, dtype: torch.dtype | None, async_scheduling: bool) -> None:
    """A request with NaN fails; neither its neighbors nor later requests in its row or pages are affected."""
    model = build_randomized_model(decoder_config(), torch.float64)
    with torch.no_grad():
        model.stacks["decoder"].embed.token.weight[7] = float("nan")
    engine = engine_for(model, cache_implementation=kind, max_num_seqs=2, kv_cache_dtype=dtype)
    engine.async_scheduling = async_scheduling
    clean = [i for i in range(20) if i != 7]
    params = SamplingParams(max_new_tokens=8, suppress_tokens=[7])
    expected = engine.submit(clean[:9], params, seed=0)
    engine.run()
    for prompt in ([*clean[:9], 7, *clean[:9]], [7], [7] * 50, [*clean[:17], 7]):
        for max_new_tokens in (1, 8):
            neighbor = engine.submit(clean[:9], params, seed=0)
            invalid = engine.submit(prompt, SamplingParams(max_new_tokens=max_new_tokens), seed=0)
            again = engine.submit(prompt, SamplingParams(max_new_tokens=max_new_tokens), seed=0)
            after = [engine.submit(clean[:9] + [3] * i, params, seed=0) for i in range(3)]
            aborted = engine.submit([*clean[:9], 7, *clean[:9]] * 2, params, seed=0)
            engine.step()
            aborted.abort()
            engine.run()
            for request in (invalid, again):
                with pytest.raises(EngineError, match="NaN"):
                    request.result()
            assert neighbor.result().tokens == after[0].result().tokens == expected.result().tokens
            for request in after:
                assert request.result().tokens
    check_empty(engine)
    for tensor in engine.model_runner.cache.kv_tensors():
        assert torch.isfinite(tensor.float()).all()


# Prefix caching


def count_prefill_tokens(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of tokens of each prefill call from now on."""
    counts: list[int] = []
    prefill = engine.model_runner.prefill

    def counting_prefill(start: int, chunks: Any, num_computed: Any) -> Any:
        counts.append(sum(map(len, chunks)))
        return prefill(start, chunks, num_computed)

    monkeypatch.setattr(engine.model_runner, "prefill", counting_prefill)
    return counts


def test_cached_prefix_is_not_prefilled_again(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(model, max_model_len=128)
    counts = count_prefill_tokens(engine, monkeypatch)
    params = SamplingParams(max_new_tokens=20, temperature=1.0)
    prefix = [(5 * i) % 53 for i in range(50)]
    first = engine.submit(prefix, params, seed=1)
    engine.run()
    assert sum(counts) == 50
    counts.clear()
    second = engine.submit([*prefix, 4, 5, 6], params, seed=2)
    same = engine.submit(prefix, params, seed=1)
    engine.run()
    assert sum(counts) == (53 - 48) + (50 - 48)
    assert output_fields(same.result()) == output_fields(first.result())
    assert output_fields(second.result()) == output_fields(run_alone(model, second))
    counts.clear()
    continued = engine.submit([*prefix, *first.result().tokens, 8], params, seed=3)  # the next turn of a conversation
    engine.run()
    assert sum(counts) == 71 - 64
    assert output_fields(continued.result()) == output_fields(run_alone(model, continued))
    check_empty(engine)


def test_unused_cached_pages_are_evicted(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model, max_num_seqs=2, max_model_len=64, prefill_chunk_size=16, cache_implementation="paged")
    config.kv_cache_memory_bytes = config.bytes_for_slots(PAGE_SIZE) * 9.5  # one sequence of max_model_len
    engine = Engine(config)
    counts = count_prefill_tokens(engine, monkeypatch)
    params = SamplingParams(max_new_tokens=4)
    requests = []
    for token in (1, 2, 3, 1):
        requests.append(engine.submit([token] * 40, params, seed=0))
        engine.run()
    assert counts.count(8) == 4  # the first was evicted for the third, and prefilled again
    assert output_fields(requests[0].result()) == output_fields(requests[3].result())
    check_empty(engine)


def test_concurrent_equal_prefixes_write_to_separate_pages(model: Transformer) -> None:
    engine = engine_for(model)
    requests = [engine.submit([1] * 20, SamplingParams(max_new_tokens=20, temperature=1.5), seed=i) for i in range(4)]
    while engine.has_unfinished_requests:
        engine.step()
        for request in engine.scheduler.running:
            others = {page for other in engine.scheduler.running if other is not request for page in other.page_ids}
            assert not others & {*request.page_ids[request.num_computed_tokens // PAGE_SIZE :]}
    for request in requests:
        assert output_fields(request.result()) == output_fields(run_alone(model, request))


# Scheduling order


@pytest.mark.parametrize("kind", CACHE_IMPLEMENTATIONS)
def test_long_prompt_is_prefilled_between_decode_steps(
    model: Transformer, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_for(model, cache_implementation=kind, max_model_len=400, prefill_chunk_size=16)
    events: list[tuple[str, int]] = []
    decode, prefill = engine.model_runner.decode, engine.model_runner.prefill

    def record_decode(rows: int, *rest: int) -> Any:
        events.append(("decode", rows))
        return decode(rows, *rest)

    def record_prefill(start: int, chunks: Any, num_computed: Any) -> Any:
        events.append(("prefill", len(chunks) * max(map(len, chunks))))
        return prefill(start, chunks, num_computed)

    short = engine.submit([1], SamplingParams(max_new_tokens=60), seed=0)
    engine.step()
    long = engine.submit([2] * 300, SamplingParams(max_new_tokens=3), seed=0)
    monkeypatch.setattr(engine.model_runner, "decode", record_decode)
    monkeypatch.setattr(engine.model_runner, "prefill", record_prefill)
    engine.run()
    assert len(short.result().tokens) == 60
    assert len(long.result().tokens) == 3
    assert all(size <= 16 for event, size in events if event == "prefill")
    assert not any(a == b == "prefill" for (a, _), (b, _) in pairwise(events))
    assert sum(event == "prefill" for event, _ in events) == 19


def test_sources_are_encoded_between_decode_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_translator()
    engine = engine_for(model, max_num_seqs=8, prefill_chunk_size=16, decoder_start_token_id=2, max_source_len=20)
    first = engine.submit([4], SamplingParams(max_new_tokens=40), seed=0)
    engine.step()
    for _ in range(6):
        engine.submit([5] * 12, SamplingParams(max_new_tokens=3), seed=0)
    engine.step()
    assert engine.num_decoding == 3  # two more sources, together more than 16 tokens
    engine.run()
    assert len(first.result().tokens) == 40


def test_prefill_is_first_come_first_served(model: Transformer) -> None:
    """Swapping rows when requests finish does not change the order of prefill."""
    engine = engine_for(model, max_num_seqs=6, cache_implementation="full", max_model_len=200, prefill_chunk_size=8)
    for i in range(3):
        engine.submit([1], SamplingParams(max_new_tokens=2 + 2 * i), seed=0)
    engine.step()
    order: list[int] = []
    prompts = [engine.submit([i] * 40, SamplingParams(max_new_tokens=2), seed=0) for i in range(6)]
    while engine.has_unfinished_requests:
        engine.step()
        order += [i for i, request in enumerate(prompts) if request.output.tokens and i not in order]
    assert order == [*range(6)]


def test_padding_of_a_batch_fits_in_a_nearly_full_row(model: Transformer) -> None:
    """Padding takes slots too: a nearly prefilled row has too few for a longer neighbor's chunk."""
    engine = engine_for(model, max_model_len=80, prefill_chunk_size=64, cache_implementation="full")
    first = engine.submit([1] * 70, SamplingParams(max_new_tokens=4), seed=0)
    second = engine.submit([2] * 30, SamplingParams(max_new_tokens=4), seed=0)
    engine.run()
    for request in (first, second):
        assert output_fields(request.result()) == output_fields(run_alone(model, request))


@pytest.mark.nightly
def test_request_that_fills_the_context(model: Transformer) -> None:
    for kind in CACHE_IMPLEMENTATIONS:
        for length in (1, 8, 15):
            engine = engine_for(model, max_model_len=16, cache_implementation=kind, prefill_chunk_size=5)
            request = engine.submit([3] * length, SamplingParams(), seed=0)
            engine.run()
            assert len(request.result().tokens) == 16 - length
            assert request.result().tokens == run_alone(model, request).tokens[: 16 - length]


def test_on_update_is_called_for_every_chunk_and_the_end(model: Transformer) -> None:
    engine = engine_for(model)
    request = engine.submit([1, 2, 3], SamplingParams(max_new_tokens=5), seed=0)
    updates: list[tuple[int, bool]] = []
    request.on_update = lambda: updates.append((len(request.output.tokens), request.finished.is_set()))
    engine.run()
    assert updates == [(1, False), (2, False), (3, False), (4, False), (5, False), (5, True)]
    aborted = engine.submit([1, 2, 3], SamplingParams(max_new_tokens=50), seed=0)
    aborted.on_update = lambda: updates.append((-1, aborted.finished.is_set()))
    aborted.abort()
    engine.run()
    assert updates[-1] == (-1, True)
