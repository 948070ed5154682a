"""Memory and fairness of the engine: a cache that grows, preemption, shared prompts, order of admission."""

import random
from typing import Any

import pytest
import torch
from support.config_strategies import build_randomized_model
from support.generation import build_translator, decoder_config

from cutaway.errors import InputError
from cutaway.generate import Engine, EngineConfig, EngineError, Request, SamplingParams
from cutaway.generate.engine.request import RequestGroup
from cutaway.generate.engine.request_queue import RequestQueue
from cutaway.model import Transformer

pytestmark = pytest.mark.unchecked
PAGE_SIZE = 8


@pytest.fixture(autouse=True)
def _small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("kv_cache", "config"):
        monkeypatch.setattr(f"cutaway.generate.engine.{module}.PAGE_SIZE", PAGE_SIZE)
    monkeypatch.setattr("cutaway.generate.engine.config.GROWTH_STEP_BYTES", 1)  # one page


@pytest.fixture(scope="module")
def model() -> Transformer:
    return build_randomized_model(decoder_config(), torch.float64)


def build_engine(model: Transformer, *, pages: int | None = None, **options: Any) -> Engine:
    """`pages`: number of pages that fit in memory."""
    options = {"max_num_seqs": 4, "max_model_len": 64, "prefill_chunk_size": 16, **options}
    config = EngineConfig(model, cache_implementation="paged", **options)
    if pages is not None:
        config.kv_cache_memory_bytes = config.bytes_for_slots(PAGE_SIZE) * (pages + 1)
    return Engine(config)


def mixed_requests(count: int, seed: int = 0) -> list[tuple[list[int], SamplingParams]]:
    """Greedy and sampled requests, with penalties, log-probabilities and stop tokens."""
    r = random.Random(seed)
    requests = []
    for i in range(count):
        params = SamplingParams(
            max_new_tokens=r.randint(8, 40),
            temperature=float(i % 2),
            top_p=0.9 if i % 4 == 1 else None,
            repetition_penalty=1.2 if i % 3 == 0 else 1.0,
            presence_penalty=0.5 if i % 5 == 0 else 0.0,
            min_new_tokens=6 if i % 7 == 0 else 0,
            stop_token_ids=(3, 17),
            logprobs=2 if i % 3 == 1 else None,
        )
        requests.append(([r.randrange(53) for _ in range(r.randint(1, 24))], params))
    return requests


def run(engine: Engine, requests: list[tuple[list[int], SamplingParams]]) -> list[Request]:
    submitted = [engine.submit(prompt, params, seed=i) for i, (prompt, params) in enumerate(requests)]
    engine.run()
    return submitted


def assert_equal_outputs(requests: list[Request], expected: list[Request]) -> None:
    for request, other in zip(requests, expected, strict=True):
        ours, theirs = request.result(), other.result()
        assert (ours.tokens, ours.finish_reason) == (theirs.tokens, theirs.finish_reason)
        assert (ours.logprobs or []) == pytest.approx(theirs.logprobs or [], abs=1e-9)
        assert [token for chunk in request.stream() for token in chunk.tokens] == ours.tokens


def run_in_full_cache(model: Transformer, requests: list[tuple[list[int], SamplingParams]]) -> list[Request]:
    config = EngineConfig(model, max_num_seqs=4, max_model_len=64, prefill_chunk_size=16, cache_implementation="full")
    return run(Engine(config), requests)


def assert_released(engine: Engine) -> None:
    pool = engine.scheduler.page_pool
    assert pool is not None
    assert not engine.has_unfinished_requests
    assert not pool.ref_counts
    assert pool.num_available == pool.num_pages - 1


# Growth


def test_growing_cache_equals_full_cache(model: Transformer) -> None:
    requests = mixed_requests(16)
    engine = build_engine(model)
    pool = engine.scheduler.page_pool
    assert pool is not None
    assert pool.num_grown == 1  # only the null page
    assert pool.num_pages == 1 + 4 * 64 // PAGE_SIZE
    peak = 0
    submitted = [engine.submit(prompt, params, seed=i) for i, (prompt, params) in enumerate(requests)]
    while engine.step():
        peak = max(peak, len(pool.ref_counts))
    assert_equal_outputs(submitted, run_in_full_cache(model, requests))
    assert 1 + peak <= pool.num_grown <= 1 + peak + 4  # unused cached pages are evicted before the pool grows
    assert engine.scheduler.stats.num_preemptions == 0
    assert_released(engine)


def test_cache_does_not_grow_into_memory_that_is_not_free(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = mixed_requests(12)
    engine = build_engine(model)
    page_bytes, pool = engine.config.bytes_for_slots(PAGE_SIZE), engine.scheduler.page_pool
    assert pool is not None
    expected = run_in_full_cache(model, requests)
    # Half of the free memory may be used, and there is free memory for twelve pages.
    free = lambda device: 2 * page_bytes * (13 - pool.num_grown)  # noqa: E731
    monkeypatch.setattr("cutaway.generate.engine.config.free_memory", free)
    submitted = run(engine, requests)
    assert pool.num_grown == 13
    assert engine.scheduler.stats.num_preemptions
    assert_equal_outputs(submitted, expected)


def test_request_fails_if_there_is_no_memory_for_it_alone(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine(model)
    pool = engine.scheduler.page_pool
    assert pool is not None
    monkeypatch.setattr(pool, "can_grow", lambda count: pool.num_grown < 4)
    long = engine.submit([1] * 20, SamplingParams(max_new_tokens=20), seed=0)
    short = engine.submit([2] * 10, SamplingParams(max_new_tokens=5), seed=0)
    engine.run()
    with pytest.raises(EngineError, match="too little free memory for the KV cache"):
        long.result()
    assert len(short.result().tokens) == 5


def test_memory_utilization_limits_the_pages(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    page_bytes = EngineConfig(model, max_model_len=64, cache_implementation="paged").bytes_for_slots(PAGE_SIZE)
    monkeypatch.setattr("cutaway.generate.engine.config.free_memory", lambda device: 100 * page_bytes)
    options: dict[str, Any] = {"max_num_seqs": 32, "max_model_len": 64, "cache_implementation": "paged"}
    assert EngineConfig(model, **options).num_pages() == 50 - 1
    assert EngineConfig(model, memory_utilization=0.25, **options).num_pages() == 25 - 1
    assert EngineConfig(model, **options | {"max_num_seqs": 2}).num_pages() == 2 * 8
    with pytest.raises(InputError, match=r"memory_utilization is 0\.05 of the free memory, .* too small for"):
        EngineConfig(model, memory_utilization=0.05, **options)
    value: Any
    for value in (0, 1.5, float("nan"), "half"):
        with pytest.raises(InputError, match="memory_utilization is"):
            EngineConfig(model, memory_utilization=value, **options)


# Preemption


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("kv_cache_dtype", [None, torch.int8])
def test_preempted_requests_have_the_same_output(
    model: Transformer, async_scheduling: bool, kv_cache_dtype: torch.dtype | None
) -> None:
    requests = mixed_requests(16)
    limited, unlimited = (build_engine(model, pages=pages, kv_cache_dtype=kv_cache_dtype) for pages in (9, None))
    limited.async_scheduling = async_scheduling
    submitted = run(limited, requests)
    assert limited.scheduler.stats.num_preemptions >= 3
    assert_equal_outputs(submitted, run(unlimited, requests))
    assert_released(limited)


def test_preempted_translations_have_the_same_output() -> None:
    model = build_translator()
    options = {"decoder_start_token_id": 2, "max_source_len": 20}
    requests = [([4 + i, 5, 6], SamplingParams(max_new_tokens=40, temperature=float(i % 2))) for i in range(6)]
    limited, unlimited = (build_engine(model, pages=pages, **options) for pages in (9, None))
    submitted = run(limited, requests)
    assert limited.scheduler.stats.num_preemptions
    assert_equal_outputs(submitted, run(unlimited, requests))


def test_aborted_while_preempted(model: Transformer) -> None:
    engine = build_engine(model, pages=9)
    requests = [engine.submit([i], SamplingParams(max_new_tokens=40), seed=0) for i in range(4)]
    while not engine.scheduler.stats.num_preemptions:
        engine.step()
    (preempted,) = (request for request in engine.waiting if request.num_preemptions)
    generated = len(preempted.output.tokens)
    preempted.abort()
    engine.run()
    assert preempted.result().finish_reason == "abort"
    assert len(preempted.result().tokens) == generated > 0
    assert all(len(request.result().tokens) == 40 for request in requests if request is not preempted)
    assert_released(engine)


# Completions of one prompt


def count_prefill_tokens(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counts: list[int] = []
    prefill = engine.model_runner.prefill

    def counting_prefill(first_row: int, chunks: Any, num_computed: Any) -> Any:
        counts.append(sum(map(len, chunks)))
        return prefill(first_row, chunks, num_computed)

    monkeypatch.setattr(engine.model_runner, "prefill", counting_prefill)
    return counts


@pytest.mark.parametrize("length", [5, 17, 24, 33, 41])
def test_completions_of_one_prompt_share_its_pages(
    model: Transformer, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt is prefilled once, and its full pages are stored once, also if its last page is not full."""
    prompt, params = [(7 * i) % 53 for i in range(length)], SamplingParams(max_new_tokens=12, temperature=1.0)
    engine = build_engine(model)
    counts, pool = count_prefill_tokens(engine, monkeypatch), engine.scheduler.page_pool
    assert pool is not None
    group = RequestGroup()
    requests = [engine.submit(prompt, params, seed=seed, group=group) for seed in range(3)]
    peak = 0
    while engine.step():
        peak = max(peak, len(pool.ref_counts))
    assert sum(counts) == length - (length % 16 == 1)  # a single token after the last chunk is left to a decode step
    shared = (length - 1) // PAGE_SIZE
    assert peak <= shared + 3 * (-(-(length + 12) // PAGE_SIZE) - shared)
    alone = build_engine(model, max_num_seqs=1)
    assert_equal_outputs(requests, [alone_result(alone, prompt, params, seed) for seed in range(3)])
    assert_released(engine)


def alone_result(engine: Engine, prompt: list[int], params: SamplingParams, seed: int) -> Request:
    request = engine.submit(prompt, params, seed=seed)
    engine.run()
    return request


def test_prefix_cache_statistics(model: Transformer) -> None:
    engine = build_engine(model)
    params = SamplingParams(max_new_tokens=3)
    run(engine, [([1] * 20, params)])
    run(engine, [([1] * 20, params), ([2] * 10, params)])
    stats = engine.scheduler.stats
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (20 + 20 + 10, 16)


# Order of admission


def admission_order(engine: Engine, submitted: dict[str, list[Request]]) -> list[str]:
    """Names of the groups in the order in which their requests got a row."""
    names = {id(request): name for name, requests in submitted.items() for request in requests}
    order: list[str] = []
    start_prefill = engine.scheduler.start_prefill

    def record(request: Request) -> None:
        order.append(names[id(request)])
        start_prefill(request)

    engine.scheduler.start_prefill = record  # type: ignore[method-assign]
    engine.run()
    return order


def submit_group(engine: Engine, group: RequestGroup, count: int, length: int = 4, **options: Any) -> list[Request]:
    params = SamplingParams(max_new_tokens=length)
    return [engine.submit([seed + 1], params, seed=seed, group=group, **options) for seed in range(count)]


def test_clients_and_their_requests_take_turns(model: Transformer) -> None:
    engine = build_engine(model, max_num_seqs=1)
    submitted = {
        "a1": submit_group(engine, RequestGroup("a"), 4),
        "a2": submit_group(engine, RequestGroup("a"), 2),
        "b": submit_group(engine, RequestGroup("b"), 2),
        "c": submit_group(engine, RequestGroup("c"), 1),
    }
    assert admission_order(engine, submitted) == ["a1", "b", "c", "a2", "b", "a1", "a2", "a1", "a1"]


def test_queue_waits_for_at_most_one_request_of_each_other_client() -> None:
    queue, r = RequestQueue(), random.Random(0)
    groups = [RequestGroup(f"client {i}") for i in range(5)]
    params, arrival = SamplingParams(), 0
    passed: dict[str, list[str]] = {}
    for _ in range(500):
        if r.random() < 0.55:
            arrival += 1
            request = Request([1], params, 0, None)  # type: ignore[arg-type]
            request.group, request.arrival_index = r.choice(groups), arrival
            if all(each.group is not request.group for each in queue):
                passed[request.group.client] = []
            queue.append(request)
        elif (selected := queue.select(lambda request: True)) is not None:
            queue.pop(selected)
            client = selected.group.client
            assert len(passed[client]) == len(set(passed[client])), "another client was served twice in between"
            for other in passed:
                passed[other] = [] if other == client else [*passed[other], client]
    assert len(queue) == len(list(queue)) == len([*queue])


def test_priority_is_admitted_first(model: Transformer) -> None:
    engine = build_engine(model, max_num_seqs=1, scheduling_policy="priority")
    submitted = {
        "low": submit_group(engine, RequestGroup("a"), 2, priority=5),
        "normal": submit_group(engine, RequestGroup("b"), 2),
        "high": submit_group(engine, RequestGroup("c"), 2, priority=-1),
    }
    assert admission_order(engine, submitted) == ["high", "high", "normal", "normal", "low", "low"]
    with pytest.raises(InputError, match=r"priority is 1, but scheduling_policy is 'round-robin'"):
        build_engine(model).submit([1], SamplingParams(), seed=0, priority=1)
    with pytest.raises(InputError, match="scheduling_policy is 'fifo'; use round-robin, priority"):
        build_engine(model, scheduling_policy="fifo")


def test_low_priority_is_preempted_first(model: Transformer) -> None:
    engine = build_engine(model, pages=9, scheduling_policy="priority")
    low = submit_group(engine, RequestGroup("a"), 1, 40, priority=1)
    high = submit_group(engine, RequestGroup("b"), 3, 30)
    engine.run()
    assert low[0].num_preemptions > 0
    assert [request.num_preemptions for request in high][:2] == [0, 0]
    assert len(low[0].result().tokens) == 40


def test_group_takes_at_most_its_number_of_rows(model: Transformer) -> None:
    engine = build_engine(model, max_num_seqs=8)
    limit = engine.config.resolved_max_seqs_per_request
    assert limit == 6
    large = submit_group(engine, RequestGroup("a", limit), 20, 20)
    engine.step()
    assert len(engine.scheduler.running) == 6
    small = submit_group(engine, RequestGroup("a", limit), 1)
    for _ in range(5):
        engine.step()
    assert small[0].result(0).tokens
    assert not large[0].finished.is_set()
    engine.run()
    assert engine.scheduler.stats.num_preemptions == 0


@pytest.mark.parametrize("same_client", [False, True])
def test_request_gets_a_row_although_others_have_all_rows(model: Transformer, same_client: bool) -> None:
    """A row is preempted for it, and the preempted request has the same output."""
    engine = build_engine(model, max_num_seqs=4)
    large = submit_group(engine, RequestGroup("a"), 8, 40)
    for _ in range(6):
        engine.step()
    small = submit_group(engine, RequestGroup("a" if same_client else "b"), 2)
    while not small[0].finished.is_set():
        engine.step()
    assert engine.scheduler.stats.num_preemptions == 1
    assert not any(request.finished.is_set() for request in large)
    engine.run()
    expected = build_engine(model, max_num_seqs=4)
    assert_equal_outputs(large, run(expected, [([i + 1], SamplingParams(max_new_tokens=40)) for i in range(8)]))
    assert_released(engine)


def test_long_prompt_does_not_delay_the_prefill_of_another_request(model: Transformer) -> None:
    engine = build_engine(model, max_model_len=400)
    params = SamplingParams(max_new_tokens=2)
    long = engine.submit([1] * 300, params, seed=0, group=RequestGroup("a"))
    engine.step()
    short = engine.submit([2] * 5, params, seed=0, group=RequestGroup("b"))
    for _ in range(4):
        engine.step()
    assert short.finished.is_set()
    assert not long.output.tokens
    engine.run()
    assert len(long.result().tokens) == 2


@pytest.mark.parametrize("kind", ["paged", "full"])
def test_large_request_pauses_in_every_second_step_beside_a_small_one(model: Transformer, kind: str) -> None:
    config = EngineConfig(model, max_num_seqs=16, max_model_len=64, cache_implementation=kind)  # type: ignore[arg-type]
    engine = Engine(config)
    large = submit_group(engine, RequestGroup("a", 12), 14, 40)
    for _ in range(4):
        engine.step()
    small = submit_group(engine, RequestGroup("b"), 2, 8)
    while not small[0].output.tokens:
        engine.step()
    small_len, large_len = len(small[0].output.tokens), len(large[0].output.tokens)
    for _ in range(6):
        engine.step()
    assert len(small[0].output.tokens) == small_len + 6
    assert len(large[0].output.tokens) == large_len + 3
    engine.run()
    expected = build_engine(model)
    requests = [([i + 1], SamplingParams(max_new_tokens=40)) for i in range(14)]
    assert_equal_outputs(large, run(expected, requests))
    assert_equal_outputs(small, run(expected, [([i + 1], SamplingParams(max_new_tokens=8)) for i in range(2)]))


def test_prefill_share_grows_with_the_requests_that_wait_for_it(model: Transformer) -> None:
    """One API request that decodes leaves the time to several others in prefill, but not to one large request."""
    budgets = []
    for groups in ([RequestGroup()] * 6, [RequestGroup() for _ in range(6)]):
        engine = build_engine(model, prefill_chunk_size=200, max_num_seqs=8)
        engine.submit([1, 2], SamplingParams(max_new_tokens=20), seed=0, group=RequestGroup())
        engine.step()
        for group in groups:
            engine.submit([3] * 40, SamplingParams(max_new_tokens=2), seed=0, group=group)
        engine.prefill_budget.decode_seconds, engine.prefill_budget.prefill_seconds_per_token = 0.1, 0.002
        budgets.append(engine._max_prefill_tokens())
    assert budgets == [50, 200]
