"""Steps are made fast when that pays, by what it cost before; and compiled or packed steps are the model's own."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import cutaway as ct
from cutaway.errors import InputError
from cutaway.generate import Engine, EngineConfig, SamplingParams
from cutaway.generate.engine.model_runner import ModelRunner
from cutaway.generate.fast.warmup_policy import WarmupCost, WarmupCostStore, WarmupPolicy
from cutaway.size.measured_hardware import measured_hardware_path

pytestmark = pytest.mark.unchecked
GPT, GEMMA, MLA = (pytest.param(name, marks=pytest.mark.nightly) for name in ("tiny-gpt", "tiny-gemma", "tiny-mla"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "kept"))


def test_it_pays_for_enough_steps() -> None:
    cost = WarmupCost(warmup_seconds=10.0, eager_step_seconds=0.3, fast_step_seconds=0.1)
    assert not cost.pays_off(50)
    assert cost.pays_off(51)
    assert not WarmupCost(warmup_seconds=1.0, eager_step_seconds=0.1, fast_step_seconds=0.2).pays_off(10**6)


def test_what_it_cost_decides_the_next_time(tmp_path: Path) -> None:
    model = ct.build("tiny-llama", seed=0)
    ledger = WarmupCostStore(model, 1, None)
    assert ledger.measured is None
    assert not ledger.estimate(10.0).pays_off(10**9)  # what nobody asked for once, nobody waits for
    ledger.save(WarmupCost(0.2, 0.01, 0.002))
    again = WarmupCostStore(model, 1, None)
    assert again.estimate(0.01).pays_off(100)
    assert not again.estimate(0.01).pays_off(10)
    assert WarmupCostStore(model, 2, None).measured is None
    (tmp_path / "kept" / "warmup_costs.json").write_text("{damaged")
    assert WarmupCostStore(model, 1, None).measured is None


def test_a_pace_watches_then_hastens_once() -> None:
    model = ct.build("tiny-llama", seed=0)
    ledger = WarmupCostStore(model, 1, None)
    ledger.save(WarmupCost(0.5, 0.1, 0.05))
    pace = WarmupPolicy(ledger)
    for _ in range(3):
        assert not pace.should_warm_up(1000)
        pace.record_step(0.1)
    assert not pace.should_warm_up(5)
    assert pace.should_warm_up(100)
    assert not pace.should_warm_up(100)
    assert [pace.record_step(seconds) for seconds in (0.9, 0.04, 0.04, 0.05, 0.04)] == [False] * 4 + [True]
    kept = WarmupCostStore(model, 1, None).measured
    assert kept is not None
    assert kept.warmup_seconds == pytest.approx(0.86)
    assert json.loads(measured_hardware_path().with_name("warmup_costs.json").read_text())


def test_short_work_is_never_compiled() -> None:
    model = ct.build("tiny-llama", seed=0)
    engine = Engine(EngineConfig(model, max_model_len=64))
    engine.submit([1, 2], SamplingParams(max_new_tokens=20), seed=0)
    engine.run()
    assert engine.model_runner.decode_model is model
    assert engine.model_runner.compiled_decode_logits is None


def answers(model: Any, **how: Any) -> list[list[int]]:
    engine = Engine(EngineConfig(model, max_num_seqs=2, max_model_len=64, **how))
    tickets = [engine.submit([1 + i, 2, 3], SamplingParams(max_new_tokens=24), seed=0) for i in range(3)]
    engine.run()
    return [ticket.result().tokens for ticket in tickets]


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-moe", GPT, GEMMA, MLA])
def test_sixteen_bits_pack_and_keep_the_weights(name: str) -> None:
    """A packed model answers as one whose matrices are rounded to bf16, near enough; the model itself is untouched."""
    model: Any = ct.build(name, seed=0)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    plain = answers(model, compile=False)
    packed = answers(model, weight_bits=16, compile=False)
    eight = answers(model, weight_bits=8, compile=False)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert answers(model, compile=False) == plain
    for other in (packed, eight):
        assert [len(tokens) for tokens in other] == [24] * 3


@pytest.mark.parametrize("name", ["tiny-llama", GPT, GEMMA])
def test_compiled_steps_are_one_graph_and_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No breaks (fullgraph), one graph for every length, the same tokens."""
    model: Any = ct.build(name, dtype=torch.float64, seed=0)
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **how: compiled(f, backend="aot_eager", **how))
    torch._dynamo.reset()
    plain = Engine(EngineConfig(model, max_num_seqs=1, max_model_len=64, compile=False))
    quick = Engine(EngineConfig(model, max_num_seqs=1, max_model_len=64, compile=True))
    said = []
    for engine in (plain, quick):
        ticket = engine.submit([5, 2, 3], SamplingParams(max_new_tokens=40), seed=0)
        engine.run()
        said.append(ticket.result().tokens)
    assert said[0] == said[1]
    counted = torch._dynamo.utils.counters
    assert counted["stats"]["unique_graphs"] >= 1
    graphs = counted["stats"]["unique_graphs"]
    for length in (1, 9, 20):
        quick.submit([5] * length, SamplingParams(max_new_tokens=20), seed=0)
        quick.run()
    assert counted["stats"]["unique_graphs"] == graphs
    assert not counted["graph_break"]


def test_bits_that_are_none_and_hooks() -> None:
    model: Any = ct.build("tiny-llama", seed=0)
    cache = EngineConfig(model, max_num_seqs=1, max_model_len=32).build_cache()
    for bits in (3, 4, "8", True):
        with pytest.raises(InputError, match="weight_bits is"):
            ModelRunner(model, cache, weight_bits=bits)  # type: ignore[arg-type]
    seen = []
    handle = model.decoder.blocks[0].register_forward_hook(lambda *_: seen.append(1))
    with pytest.raises(InputError, match="hooks"):
        ModelRunner(model, cache, weight_bits=8)
    engine = Engine(EngineConfig(model, max_num_seqs=1, max_model_len=32, compile=True))
    engine.submit([1, 2], SamplingParams(max_new_tokens=4), seed=0)
    engine.run()
    assert len(seen) == 5  # one prompt piece and four steps: what a hook sees is what is generated
    handle.remove()


def test_where_making_fast_fails_steps_stay_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that is not there costs nothing but a warning; one that was interrupted is the user's will."""
    model: Any = ct.build("tiny-llama", seed=0)
    plain = answers(model, compile=False)

    def broken(*_: Any, **__: Any) -> Any:
        def fail(*_: Any) -> Any:
            raise RuntimeError("no compiler") from why

        return fail

    why: BaseException | None = None
    monkeypatch.setattr(torch, "compile", broken)
    with pytest.warns(UserWarning, match="steps stay as they are"):
        assert answers(model, compile=True) == plain
    why = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        answers(model, compile=True)
