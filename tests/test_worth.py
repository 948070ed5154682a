"""Steps are made fast when that pays, by what it cost before; and compiled or packed steps are the model's own."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import cutaway as ct
from cutaway.errors import InputError
from cutaway.generate import Engine, Plan, Settings
from cutaway.generate.fast.worth import Cost, Ledger, Pace
from cutaway.generate.runner import Runner

pytestmark = pytest.mark.unchecked
GPT, GEMMA, MLA = (pytest.param(name, marks=pytest.mark.nightly) for name in ("tiny-gpt", "tiny-gemma", "tiny-mla"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "kept"))


def test_it_pays_for_enough_steps() -> None:
    cost = Cost(ready=10.0, plain=0.3, fast=0.1)
    assert not cost.pays(50)
    assert cost.pays(51)
    assert not Cost(ready=1.0, plain=0.1, fast=0.2).pays(10**6)


def test_what_it_cost_decides_the_next_time(tmp_path: Path) -> None:
    model = ct.build("tiny-llama", seed=0)
    ledger = Ledger(model, 1, None)
    assert ledger.known is None
    assert not ledger.cost(10.0).pays(10**9)  # what nobody asked for once, nobody waits for
    ledger.keep(Cost(0.2, 0.01, 0.002))
    again = Ledger(model, 1, None)
    assert again.cost(0.01).pays(100)
    assert not again.cost(0.01).pays(10)
    assert Ledger(model, 2, None).known is None
    (tmp_path / "kept" / "steps.json").write_text("{damaged")
    assert Ledger(model, 1, None).known is None


def test_a_pace_watches_then_hastens_once() -> None:
    model = ct.build("tiny-llama", seed=0)
    ledger = Ledger(model, 1, None)
    ledger.keep(Cost(0.5, 0.1, 0.05))
    pace = Pace(ledger)
    for _ in range(3):
        assert not pace.pays(1000)
        pace.took(0.1)
    assert not pace.pays(5)
    assert pace.pays(100)
    assert not pace.pays(100)
    assert [pace.took(seconds) for seconds in (0.9, 0.04, 0.04, 0.05, 0.04)] == [False] * 4 + [True]
    kept = Ledger(model, 1, None).known
    assert kept is not None
    assert kept.ready == pytest.approx(0.86)
    assert json.loads((Path(ct.size.calibration.where()).with_name("steps.json")).read_text())


def test_short_work_is_never_compiled() -> None:
    model = ct.build("tiny-llama", seed=0)
    engine = Engine(Plan(model, context=64))
    engine.submit([1, 2], Settings(max_new_tokens=20), seed=0)
    engine.run()
    assert engine.runner.quick is model
    assert engine.runner.compiled_logits is None


def answers(model: Any, **how: Any) -> list[list[int]]:
    engine = Engine(Plan(model, rows=2, context=64, **how))
    tickets = [engine.submit([1 + i, 2, 3], Settings(max_new_tokens=24), seed=0) for i in range(3)]
    engine.run()
    return [ticket.result().tokens for ticket in tickets]


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-moe", GPT, GEMMA, MLA])
def test_sixteen_bits_pack_and_keep_the_weights(name: str) -> None:
    """A packed model answers as one whose matrices are rounded to bf16, near enough; the model itself is untouched."""
    model: Any = ct.build(name, seed=0)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    plain = answers(model, compiled=False)
    packed = answers(model, bits=16, compiled=False)
    eight = answers(model, bits=8, compiled=False)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert answers(model, compiled=False) == plain
    for other in (packed, eight):
        assert [len(tokens) for tokens in other] == [24] * 3


@pytest.mark.parametrize("name", ["tiny-llama", GPT, GEMMA])
def test_compiled_steps_are_one_graph_and_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No breaks (fullgraph), one graph for every length, the same tokens."""
    model: Any = ct.build(name, dtype=torch.float64, seed=0)
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **how: compiled(f, backend="aot_eager", **how))
    torch._dynamo.reset()
    plain = Engine(Plan(model, rows=1, context=64, compiled=False))
    quick = Engine(Plan(model, rows=1, context=64, compiled=True))
    said = []
    for engine in (plain, quick):
        ticket = engine.submit([5, 2, 3], Settings(max_new_tokens=40), seed=0)
        engine.run()
        said.append(ticket.result().tokens)
    assert said[0] == said[1]
    counted = torch._dynamo.utils.counters
    assert counted["stats"]["unique_graphs"] >= 1
    graphs = counted["stats"]["unique_graphs"]
    for length in (1, 9, 20):
        quick.submit([5] * length, Settings(max_new_tokens=20), seed=0)
        quick.run()
    assert counted["stats"]["unique_graphs"] == graphs
    assert not counted["graph_break"]


def test_bits_that_are_none_and_hooks() -> None:
    model: Any = ct.build("tiny-llama", seed=0)
    cache = Plan(model, rows=1, context=32).cache()
    for bits in (3, 4, "8", True):
        with pytest.raises(InputError, match="bits is"):
            Runner(model, cache, bits=bits)  # type: ignore[arg-type]
    seen = []
    handle = model.decoder.blocks[0].register_forward_hook(lambda *_: seen.append(1))
    with pytest.raises(InputError, match="hooks"):
        Runner(model, cache, bits=8)
    engine = Engine(Plan(model, rows=1, context=32, compiled=True))
    engine.submit([1, 2], Settings(max_new_tokens=4), seed=0)
    engine.run()
    assert len(seen) == 5  # one prompt piece and four steps: what a hook sees is what is generated
    handle.remove()


def test_where_making_fast_fails_steps_stay_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that is not there costs nothing but a warning; one that was interrupted is the user's will."""
    model: Any = ct.build("tiny-llama", seed=0)
    plain = answers(model, compiled=False)

    def broken(*_: Any, **__: Any) -> Any:
        def fail(*_: Any) -> Any:
            raise RuntimeError("no compiler") from why

        return fail

    why: BaseException | None = None
    monkeypatch.setattr(torch, "compile", broken)
    with pytest.warns(UserWarning, match="steps stay as they are"):
        assert answers(model, compiled=True) == plain
    why = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        answers(model, compiled=True)
