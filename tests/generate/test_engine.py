"""The engine under load: nothing lost, nothing mixed up, nothing kept; what fails fails alone, and all are served."""

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

from cutaway.errors import CutawayError, InputError
from cutaway.generate import BusyError, Completion, Engine, EngineConfig, EngineError, Request, SamplingParams
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


def engine_for(model: Transformer, waiting: int = 1024, **how: Any) -> Engine:
    return Engine(
        EngineConfig(
            model,
            **{
                "max_num_seqs": 4,
                "max_model_len": 64,
                "prefill_chunk_size": 16,
                "cache_implementation": "paged",
                **how,
            },
        ),
        max_waiting=waiting,
    )


def alone(model: Transformer, ticket: Request) -> Completion:
    """The same request with nobody else there."""
    engine = engine_for(model, max_num_seqs=1, max_model_len=128, cache_implementation="full", prefill_chunk_size=128)
    again = engine.submit(ticket.input_ids, ticket.sampling_params, seed=ticket.seed)
    engine.run()
    return again.result()


def said(answer: Completion) -> tuple[list[int], str, int | str | None]:
    return answer.tokens, answer.finish_reason, answer.stop_reason


def check_empty(engine: Engine) -> None:
    """Every row and page is back."""
    pages = engine.scheduler.page_pool
    assert not engine.has_unfinished_requests
    assert not engine.scheduler.num_decoding
    if pages is not None:
        assert pages.num_available == engine.model_runner.cache.num_pages - 1
        assert not pages.ref_counts
        assert engine.model_runner.cache.page_table is not None
        assert not engine.model_runner.cache.page_table.any()
    assert not engine.model_runner.cache.seq_lens.any()


def some_request(r: random.Random) -> tuple[list[int], SamplingParams]:
    """Some begin alike, some are wrong in one way or another."""
    common = [(7 * i + r.choice([0, 1])) % 50 for i in range(r.choice([0, 9, 24, 40]))]
    prompt = (common + [r.randrange(53) for _ in range(r.randint(1, 60))])[:60]
    drawn = (
        {"temperature": 1.0, "top_p": r.choice([None, 0.9]), "top_k": r.choice([None, 5])} if r.random() < 0.6 else {}
    )
    return prompt, SamplingParams(
        max_new_tokens=r.randint(1, 40),
        stop_token_ids=r.choice([(), (), (3, 17), range(20)]),
        repetition_penalty=r.choice([1.0, 1.0, 1.2]),
        logprobs=r.choice([None, None, 0, 3]),
        **drawn,
    )


BAD = [
    ([], SamplingParams()),
    ([99], SamplingParams()),
    ([1] * 200, SamplingParams()),
    ([1], SamplingParams(suppress_tokens=[77])),
    ([-1], SamplingParams()),
]


def load(engine: Engine, count: int, seed: int) -> list[Request]:
    """Three threads ask and cancel while the engine works."""
    found: list[Request] = []
    refused: list[int] = []

    def ask(who: int) -> None:
        r = random.Random(seed + who)
        mine: list[Request] = []
        for number in range(count // 3 + (who < count % 3)):
            if number % 40 == 39:
                prompt, settings = r.choice(BAD)
                with pytest.raises(InputError):
                    engine.submit(prompt, settings, seed=0)
                refused.append(who)
            prompt, settings = some_request(r)
            mine.append(engine.submit(prompt, settings, seed=r.randrange(2**60), wait=True))
            if r.random() < 0.15:
                r.choice(mine[-20:]).abort()
        found.extend(mine)

    threads = [threading.Thread(target=ask, args=(who,)) for who in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=240)
    assert not refused or len(refused) == 3 * (count // 3 // 40)
    assert len(found) == count
    for ticket in found:
        ticket.result(timeout=240)
    return found


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


MANY = [(True, 150), *(pytest.param(ahead, 500, marks=pytest.mark.nightly) for ahead in (False, True))]


@pytest.mark.parametrize(("ahead", "count"), MANY)
def test_many_requests_at_once(model: Transformer, ahead: bool, count: int) -> None:
    """Too few pages for all, back-pressure, sharing, cancels; `ahead` is how a GPU is driven."""
    plan = EngineConfig(model, max_num_seqs=12, max_model_len=128, prefill_chunk_size=48, cache_implementation="paged")
    plan.kv_cache_memory_bytes = plan.bytes_for_slots(PAGE_SIZE) * 60  # of the 192 that twelve such texts could need
    engine = Engine(plan, max_waiting=40)
    engine.async_scheduling = ahead
    engine.start()
    tickets = load(engine, count, 0)
    settle(engine)
    check_empty(engine)
    reasons = {reason: sum(t.result().finish_reason == reason for t in tickets) for reason in ("stop", "length")}
    assert min(reasons.values()) > count // 10
    cancelled = [ticket for ticket in tickets if ticket.result().finish_reason == "abort"]
    assert cancelled
    for ticket in cancelled[:10]:
        tokens = ticket.result().tokens
        assert tokens == alone(model, ticket).tokens[: len(tokens)]
    whole = [ticket for ticket in tickets if ticket.result().finish_reason != "abort"]
    for ticket in whole[:: len(whole) // 40]:
        assert said(ticket.result()) == said(alone(model, ticket))
        assert [token for piece in ticket.stream() for token in piece.tokens] == ticket.result().tokens
    del tickets, whole, cancelled, ticket, tokens
    check_memory(engine)
    engine.close()


def check_memory(engine: Engine) -> None:
    """What a load leaves behind is nothing."""
    before = live_tensors()
    tracemalloc.start()
    load(engine, 60, 10_000)
    settle(engine)
    assert live_tensors() <= before
    ours = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/cutaway/*")])
    kept = sum(each.size for each in ours.statistics("filename"))  # others in this process may log
    tracemalloc.stop()
    assert kept < 100_000, f"{kept} bytes are kept"


def settle(engine: Engine) -> None:
    """Wait until the thread has put everything away."""
    for _ in range(2000):
        if not engine.has_unfinished_requests:
            return
        time.sleep(0.005)
    raise AssertionError("the engine does not come to rest")


@pytest.mark.nightly
@pytest.mark.parametrize("kind", CACHE_IMPLEMENTATIONS)
def test_thousands_of_requests_in_every_kind_of_cache(model: Transformer, kind: str) -> None:
    engine = Engine(
        EngineConfig(model, max_num_seqs=12, max_model_len=128, prefill_chunk_size=48, cache_implementation=kind),
        max_waiting=40,
    ).start()
    tickets = load(engine, 3000, 5)
    settle(engine)
    check_empty(engine)
    engine.close()
    whole = [ticket for ticket in tickets if ticket.result().finish_reason != "abort"]
    for ticket in whole[::20]:
        assert said(ticket.result()) == said(alone(model, ticket))


@pytest.mark.parametrize("kind", CACHE_IMPLEMENTATIONS)
@pytest.mark.parametrize("ahead", [False, True])
def test_steps_sent_ahead_answer_alike(model: Transformer, kind: str, ahead: bool) -> None:
    """With stops in the middle, limits of one token, and a cancel while a step is on its way."""
    engine = engine_for(model, cache_implementation=kind, max_num_seqs=3)
    engine.async_scheduling = ahead
    r = random.Random(3)
    tickets = [engine.submit(*some_request(r), seed=i) for i in range(12)]
    gone = engine.submit([1, 2, 3], SamplingParams(max_new_tokens=40), seed=0)
    while not gone.output.tokens:
        engine.step()
    gone.abort()
    engine.run()
    check_empty(engine)
    assert gone.result().finish_reason == "abort"
    for ticket in tickets:
        expected = alone(model, ticket)
        if len(ticket.input_ids) + len(expected.tokens) <= 64:
            assert said(ticket.result()) == said(expected)
        else:
            assert ticket.result().tokens == expected.tokens[: 64 - len(ticket.input_ids)]


# Who asks too much, and who stops


def test_too_many_are_told_so_and_may_wait(model: Transformer) -> None:
    engine = engine_for(model, waiting=2)
    asked = SamplingParams(max_new_tokens=3)
    first = [engine.submit([1], asked, seed=0) for _ in range(2)]
    with pytest.raises(BusyError, match="2 requests are waiting"):
        engine.submit([1], asked, seed=0)
    late: list[Request] = []
    thread = threading.Thread(target=lambda: late.append(engine.submit([1], asked, seed=0, wait=True)))
    thread.start()
    first[0].abort()  # which makes room, before anybody has a row
    engine._remove_aborted()
    thread.join(timeout=10)
    engine.run()
    assert first[0].result().finish_reason == "abort"
    assert late[0].result().tokens == first[1].result().tokens


def test_closing_tells_everybody(model: Transformer) -> None:
    engine = engine_for(model, max_num_seqs=2, waiting=6).start()
    tickets = [engine.submit([i], SamplingParams(max_new_tokens=60), seed=0, wait=True) for i in range(8)]
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
    thread.join(timeout=10)
    assert isinstance(errors[0], EngineError)
    for ticket in tickets:
        try:
            assert len(ticket.result(timeout=1).tokens) == 60
        except EngineError as error:
            assert "closed before" in str(error)  # noqa: PT017
    with pytest.raises(EngineError, match="closed before"):
        list(tickets[-1].stream())
    with pytest.raises(EngineError, match="closed"):
        engine.submit([1], SamplingParams(), seed=0)
    engine.close()
    with pytest.raises(EngineError, match="make another"):
        engine.start()


def test_a_program_may_end_with_an_engine_at_work() -> None:
    program = """
import cutaway as ct
from cutaway.generate import Engine, EngineConfig, SamplingParams
engine = Engine(EngineConfig(ct.build("tiny-gpt", seed=0), max_num_seqs=4)).start()
tickets = [engine.submit([1], SamplingParams(), seed=i) for i in range(40)]
next(tickets[0].stream())
raise SystemExit(3)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (3, "")


def test_pieces_can_be_asked_for_again(model: Transformer) -> None:
    engine = engine_for(model)
    ticket = engine.submit([1, 2], SamplingParams(max_new_tokens=3), seed=0)
    assert ticket.pop_chunks() == []
    engine.run()
    assert len(ticket.pop_chunks()) == 3
    assert ticket.pop_chunks() == list(ticket.stream(timeout=1)) == list(ticket.stream(timeout=1)) == []
    with pytest.raises(TimeoutError):
        engine.submit([1], SamplingParams(), seed=0).result(timeout=0)


# What fails


@pytest.mark.parametrize("kind", CACHE_IMPLEMENTATIONS)
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyError("a bug"), InputError("wrong")])
def test_a_step_that_fails_fails_for_those_in_it(
    model: Transformer, kind: str, ahead: bool, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_for(model, cache_implementation=kind, max_num_seqs=3)
    engine.async_scheduling = ahead
    asked = SamplingParams(max_new_tokens=6)
    inside = [engine.submit([i, i], asked, seed=0) for i in range(2)]
    reading = engine.submit([9] * 40, asked, seed=0)
    waiting = engine.submit([8] * 40, asked, seed=0)
    engine.step()
    engine.step()
    assert engine.num_decoding == 2
    step = engine.model_runner.decode

    def fail(*_: Any) -> Any:
        monkeypatch.setattr(engine.model_runner, "decode", step)
        raise error

    monkeypatch.setattr(engine.model_runner, "decode", fail)
    engine.run()
    for ticket in inside:
        with pytest.raises(EngineError, match="a step failed"):
            ticket.result()
    for ticket in (reading, waiting):
        assert said(ticket.result()) == said(alone(model, ticket))
    check_empty(engine)


def test_a_prompt_that_fails_fails_alone(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(model)
    asked = SamplingParams(max_new_tokens=6)
    inside = engine.submit([1], asked, seed=0)
    engine.step()
    failing = engine.submit([2, 3, 4], asked, seed=0)
    read = engine.model_runner.prefill

    def fail(*_: Any) -> None:
        monkeypatch.setattr(engine.model_runner, "prefill", read)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine.model_runner, "prefill", fail)
    engine.run()
    assert said(inside.result()) == said(alone(model, inside))
    with pytest.raises(EngineError, match="RuntimeError: out of memory"):
        failing.result()
    check_empty(engine)


def test_a_source_that_fails_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_translator()
    engine = engine_for(model, decoder_start_token_id=2, max_source_len=20)
    first = engine.submit([4, 5], SamplingParams(max_new_tokens=5), seed=0)
    engine.step()
    read = engine.model_runner.encode_source
    monkeypatch.setattr(engine.model_runner, "encode_source", lambda *_: 1 / 0)
    second = engine.submit([4, 5], SamplingParams(max_new_tokens=5), seed=0)
    engine.step()
    monkeypatch.setattr(engine.model_runner, "encode_source", read)
    third = engine.submit([4, 5], SamplingParams(max_new_tokens=5), seed=0)
    engine.run()
    assert first.result().tokens == third.result().tokens
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        second.result()
    check_empty(engine)


def test_an_engine_that_breaks_down_says_so_to_all(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the device is gone: nothing can be put in order any more."""
    engine = engine_for(model, max_num_seqs=2)
    monkeypatch.setattr(engine.scheduler, "release", lambda *_, **__: 1 / 0)
    tickets = [engine.submit([i], SamplingParams(max_new_tokens=3 + i), seed=0) for i in range(4)]
    engine.start()
    for ticket in tickets:
        with pytest.raises(EngineError, match=r"a step failed|broke down"):
            ticket.result(timeout=20)
    with pytest.raises(EngineError, match="closed"):
        engine.submit([1], SamplingParams(), seed=0)


@pytest.mark.parametrize("kind", CACHE_IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [None, torch.int8])
@pytest.mark.parametrize("ahead", [False, True])
def test_what_is_not_a_number_stays_where_it_is(kind: str, dtype: torch.dtype | None, ahead: bool) -> None:
    """A text that overflows is an error; neither its neighbours nor those who get its row or pages feel it."""
    model = build_randomized_model(decoder_config(), torch.float64)
    with torch.no_grad():
        model.stacks["decoder"].embed.token.weight[7] = float("nan")
    engine = engine_for(model, cache_implementation=kind, max_num_seqs=2, kv_cache_dtype=dtype)
    engine.async_scheduling = ahead
    clean = [i for i in range(20) if i != 7]
    asked = SamplingParams(max_new_tokens=8, suppress_tokens=[7])
    expected = engine.submit(clean[:9], asked, seed=0)
    engine.run()
    for prompt in ([*clean[:9], 7, *clean[:9]], [7], [7] * 50, [*clean[:17], 7]):
        for most in (1, 8):
            beside = engine.submit(clean[:9], asked, seed=0)
            spoilt = engine.submit(prompt, SamplingParams(max_new_tokens=most), seed=0)
            again = engine.submit(prompt, SamplingParams(max_new_tokens=most), seed=0)
            after = [engine.submit(clean[:9] + [3] * i, asked, seed=0) for i in range(3)]
            stopped = engine.submit([*clean[:9], 7, *clean[:9]] * 2, asked, seed=0)
            engine.step()
            stopped.abort()
            engine.run()
            for ticket in (spoilt, again):
                with pytest.raises(EngineError, match="NaN"):
                    ticket.result()
            assert beside.result().tokens == after[0].result().tokens == expected.result().tokens
            for ticket in after:
                assert ticket.result().tokens
    check_empty(engine)
    for tensor in engine.model_runner.cache.kv_tensors():
        assert torch.isfinite(tensor.float()).all()


# What is shared


def read_by(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each call reads, from now on."""
    counts: list[int] = []
    read = engine.model_runner.prefill

    def counted(start: int, pieces: Any, before: Any) -> None:
        counts.append(sum(map(len, pieces)))
        read(start, pieces, before)

    monkeypatch.setattr(engine.model_runner, "prefill", counted)
    return counts


def test_what_was_read_is_not_read_again(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(model, max_model_len=128)
    counts = read_by(engine, monkeypatch)
    asked = SamplingParams(max_new_tokens=20, temperature=1.0)
    begin = [(5 * i) % 53 for i in range(50)]
    first = engine.submit(begin, asked, seed=1)
    engine.run()
    assert sum(counts) == 49
    counts.clear()
    second = engine.submit([*begin, 4, 5, 6], asked, seed=2)
    same = engine.submit(begin, asked, seed=1)
    engine.run()
    assert sum(counts) == (53 - 48 - 1) + (50 - 48 - 1)
    assert said(same.result()) == said(first.result())
    assert said(second.result()) == said(alone(model, second))
    counts.clear()
    onward = engine.submit([*begin, *first.result().tokens, 8], asked, seed=3)  # a conversation goes on
    engine.run()
    assert sum(counts) == 70 - 64
    assert said(onward.result()) == said(alone(model, onward))
    check_empty(engine)


def test_pages_that_nobody_asks_for_make_room(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = EngineConfig(model, max_num_seqs=2, max_model_len=64, prefill_chunk_size=16, cache_implementation="paged")
    plan.kv_cache_memory_bytes = plan.bytes_for_slots(PAGE_SIZE) * 9.5  # one text of the context's length
    engine = Engine(plan)
    counts = read_by(engine, monkeypatch)
    asked = SamplingParams(max_new_tokens=4)
    tickets = []
    for begin in (1, 2, 3, 1):
        tickets.append(engine.submit([begin] * 40, asked, seed=0))
        engine.run()
    assert counts.count(7) == 4  # the first was forgotten in favour of the third, and read anew
    assert said(tickets[0].result()) == said(tickets[3].result())
    check_empty(engine)


def test_texts_that_begin_alike_at_once_write_to_their_own_pages(model: Transformer) -> None:
    engine = engine_for(model)
    tickets = [engine.submit([1] * 20, SamplingParams(max_new_tokens=20, temperature=1.5), seed=i) for i in range(4)]
    while engine.has_unfinished_requests:
        engine.step()
        for ticket in engine.scheduler.running:
            others = {page for other in engine.scheduler.running if other is not ticket for page in other.page_ids}
            assert not others & {*ticket.page_ids[ticket.num_computed_tokens // PAGE_SIZE :]}
    for ticket in tickets:
        assert said(ticket.result()) == said(alone(model, ticket))


# In what order


@pytest.mark.parametrize("kind", CACHE_IMPLEMENTATIONS)
def test_a_long_prompt_holds_nobody_up(model: Transformer, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(model, cache_implementation=kind, max_model_len=400, prefill_chunk_size=16)
    events: list[tuple[str, int]] = []
    step, read = engine.model_runner.decode, engine.model_runner.prefill

    def stepped(rows: int, *rest: int) -> Any:
        events.append(("step", rows))
        return step(rows, *rest)

    def reads(start: int, pieces: Any, before: Any) -> None:
        events.append(("read", len(pieces) * max(map(len, pieces))))
        read(start, pieces, before)

    short = engine.submit([1], SamplingParams(max_new_tokens=60), seed=0)
    engine.step()
    long = engine.submit([2] * 300, SamplingParams(max_new_tokens=3), seed=0)
    monkeypatch.setattr(engine.model_runner, "decode", stepped)
    monkeypatch.setattr(engine.model_runner, "prefill", reads)
    engine.run()
    assert len(short.result().tokens) == 60
    assert len(long.result().tokens) == 3
    assert all(size <= 16 for what, size in events if what == "read")
    assert not any(a == b == "read" for (a, _), (b, _) in pairwise(events))
    assert sum(what == "read" for what, _ in events) == 19


def test_sources_are_read_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_translator()
    engine = engine_for(model, max_num_seqs=8, prefill_chunk_size=16, decoder_start_token_id=2, max_source_len=20)
    first = engine.submit([4], SamplingParams(max_new_tokens=40), seed=0)
    engine.step()
    for _ in range(6):
        engine.submit([5] * 12, SamplingParams(max_new_tokens=3), seed=0)
    engine.step()
    assert engine.num_decoding == 3  # two more sources, of over 16 tokens together
    engine.run()
    assert len(first.result().tokens) == 40


def test_who_came_first_is_read_first(model: Transformer) -> None:
    """Rows change places as texts end; a prompt is not overtaken for it."""
    engine = engine_for(model, max_num_seqs=6, cache_implementation="full", max_model_len=200, prefill_chunk_size=8)
    for i in range(3):
        engine.submit([1], SamplingParams(max_new_tokens=2 + 2 * i), seed=0)
    engine.step()
    order: list[int] = []
    prompts = [engine.submit([i] * 40, SamplingParams(max_new_tokens=2), seed=0) for i in range(6)]
    while engine.has_unfinished_requests:
        engine.step()
        order += [i for i, ticket in enumerate(prompts) if ticket.output.tokens and i not in order]
    assert order == [*range(6)]


def test_a_short_piece_beside_a_text_near_its_end(model: Transformer) -> None:
    """Padding takes slots too: a prompt that is nearly read has no room for a longer neighbour's."""
    engine = engine_for(model, max_model_len=80, prefill_chunk_size=64, cache_implementation="full")
    first = engine.submit([1] * 70, SamplingParams(max_new_tokens=4), seed=0)
    second = engine.submit([2] * 30, SamplingParams(max_new_tokens=4), seed=0)
    engine.run()
    for ticket in (first, second):
        assert said(ticket.result()) == said(alone(model, ticket))


def test_a_text_that_fills_the_context(model: Transformer) -> None:
    for kind in CACHE_IMPLEMENTATIONS:
        for length in (1, 8, 15):
            engine = engine_for(model, max_model_len=16, cache_implementation=kind, prefill_chunk_size=5)
            ticket = engine.submit([3] * length, SamplingParams(), seed=0)
            engine.run()
            assert len(ticket.result().tokens) == 16 - length
            assert ticket.result().tokens == alone(model, ticket).tokens[: 16 - length]


def test_who_asked_hears_of_every_piece_and_of_the_end(model: Transformer) -> None:
    engine = engine_for(model)
    ticket = engine.submit([1, 2, 3], SamplingParams(max_new_tokens=5), seed=0)
    heard: list[tuple[int, bool]] = []
    ticket.on_update = lambda: heard.append((len(ticket.output.tokens), ticket.finished.is_set()))
    engine.run()
    assert heard == [(1, False), (2, False), (3, False), (4, False), (5, False), (5, True)]
    left = engine.submit([1, 2, 3], SamplingParams(max_new_tokens=50), seed=0)
    left.on_update = lambda: heard.append((-1, left.finished.is_set()))
    left.abort()
    engine.run()
    assert heard[-1] == (-1, True)
