"""Warm-up policy and its stored costs; packed and compiled decode steps equal eager ones."""

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
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "cache"))


def test_warmup_pays_off_for_enough_steps() -> None:
    cost = WarmupCost(warmup_seconds=10.0, eager_step_seconds=0.3, fast_step_seconds=0.1)
    assert not cost.pays_off(50)
    assert cost.pays_off(51)
    assert not WarmupCost(warmup_seconds=1.0, eager_step_seconds=0.1, fast_step_seconds=0.2).pays_off(10**6)


def test_measured_cost_is_used_by_later_runs(tmp_path: Path) -> None:
    model = ct.build("tiny-llama", seed=0)
    store = WarmupCostStore(model, 1, None)
    assert store.measured is None
    assert not store.estimate(10.0).pays_off(10**9)  # CPU compilation is never chosen without a measurement
    store.save(WarmupCost(0.2, 0.01, 0.002))
    again = WarmupCostStore(model, 1, None)
    assert again.estimate(0.01).pays_off(100)
    assert not again.estimate(0.01).pays_off(10)
    assert WarmupCostStore(model, 2, None).measured is None
    (tmp_path / "cache" / "warmup_costs.json").write_text("{invalid")
    assert WarmupCostStore(model, 1, None).measured is None


def test_policy_warms_up_once_after_timing_eager_steps() -> None:
    model = ct.build("tiny-llama", seed=0)
    store = WarmupCostStore(model, 1, None)
    store.save(WarmupCost(0.5, 0.1, 0.05))
    policy = WarmupPolicy(store)
    for _ in range(3):
        assert not policy.should_warm_up(1000)
        policy.record_step(0.1)
    assert not policy.should_warm_up(5)
    assert policy.should_warm_up(100)
    assert not policy.should_warm_up(100)
    assert [policy.record_step(seconds) for seconds in (0.9, 0.04, 0.04, 0.05, 0.04)] == [False] * 4 + [True]
    measured = WarmupCostStore(model, 1, None).measured
    assert measured is not None
    assert measured.warmup_seconds == pytest.approx(0.86)
    assert json.loads(measured_hardware_path().with_name("warmup_costs.json").read_text())


def test_short_generation_is_not_compiled() -> None:
    model = ct.build("tiny-llama", seed=0)
    engine = Engine(EngineConfig(model, max_model_len=64))
    engine.submit([1, 2], SamplingParams(max_new_tokens=20), seed=0)
    engine.run()
    assert engine.model_runner.compiled_decode_logits is None


def run_engine(model: Any, **options: Any) -> list[list[int]]:
    engine = Engine(EngineConfig(model, max_num_seqs=2, max_model_len=64, **options))
    requests = [engine.submit([1 + i, 2, 3], SamplingParams(max_new_tokens=24), seed=0) for i in range(3)]
    engine.run()
    return [request.result().tokens for request in requests]


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-moe", GPT, GEMMA, MLA])
def test_packed_weights_leave_the_model_unchanged(name: str) -> None:
    """Packing to 16 or 8 bits changes neither the model's weights nor its later output."""
    model: Any = ct.build(name, seed=0)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    eager = run_engine(model, compile=False)
    packed = run_engine(model, weight_bits=16, compile=False)
    eight = run_engine(model, weight_bits=8, compile=False)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert run_engine(model, compile=False) == eager
    for other in (packed, eight):
        assert [len(tokens) for tokens in other] == [24] * 3


@pytest.mark.parametrize("name", ["tiny-llama", GPT, GEMMA])
def test_compiled_decode_is_one_graph_and_equals_eager(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No graph breaks (fullgraph), one graph for all lengths, the same tokens."""
    model: Any = ct.build(name, dtype=torch.float64, seed=0)
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: compiled(f, backend="aot_eager", **options))
    torch._dynamo.reset()
    eager = Engine(EngineConfig(model, max_num_seqs=1, max_model_len=64, compile=False))
    fast = Engine(EngineConfig(model, max_num_seqs=1, max_model_len=64, compile=True))
    outputs = []
    for engine in (eager, fast):
        request = engine.submit([5, 2, 3], SamplingParams(max_new_tokens=40), seed=0)
        engine.run()
        outputs.append(request.result().tokens)
    assert outputs[0] == outputs[1]
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] >= 1
    graphs = counters["stats"]["unique_graphs"]
    for length in (1, 9, 20):
        fast.submit([5] * length, SamplingParams(max_new_tokens=20), seed=0)
        fast.run()
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]


def test_invalid_weight_bits_and_hooks() -> None:
    model: Any = ct.build("tiny-llama", seed=0)
    cache = EngineConfig(model, max_num_seqs=1, max_model_len=32).build_cache()
    for bits, compile in ((3, None), (4, True), ("8", None), (True, None)):
        with pytest.raises(InputError, match="weight_bits is"):
            ModelRunner(model, cache, weight_bits=bits, compile=compile)  # type: ignore[arg-type]
    seen = []
    handle = model.decoder.blocks[0].register_forward_hook(lambda *_: seen.append(1))
    with pytest.raises(InputError, match="hooks"):
        ModelRunner(model, cache, weight_bits=8)
    engine = Engine(EngineConfig(model, max_num_seqs=1, max_model_len=32, compile=True))
    engine.submit([1, 2], SamplingParams(max_new_tokens=4), seed=0)
    engine.run()
    assert len(seen) == 4  # one prefill chunk and three decode steps: hooks disable fast decode
    handle.remove()


def test_failing_compiler_falls_back_to_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing compiler is a warning; a KeyboardInterrupt inside it is raised."""
    model: Any = ct.build("tiny-llama", seed=0)
    eager = run_engine(model, compile=False)

    def broken(*_: Any, **__: Any) -> Any:
        def fail(*_: Any) -> Any:
            raise RuntimeError("no compiler") from cause

        return fail

    cause: BaseException | None = None
    monkeypatch.setattr(torch, "compile", broken)
    with pytest.warns(UserWarning, match="fast decode steps are disabled"):
        assert run_engine(model, compile=True) == eager
    cause = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run_engine(model, compile=True)
