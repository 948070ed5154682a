"""Engine on a GPU: grammars, prompt log-probabilities and preemption equal the CPU's; two engines run in threads."""

import json
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.config_strategies import build_randomized_model

import cutaway as ct
from cutaway.generate import Completion, Engine, EngineConfig, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.unchecked]

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def run_requests(
    device: str, options: dict[str, Any], params: list[SamplingParams], num_pages: int | None = None
) -> list[Completion]:
    checkpoint = ct.load("tiny-python")
    assert checkpoint.tokenizer is not None
    config = EngineConfig(checkpoint.model.to(device, torch.float32), max_model_len=96, **options)
    if num_pages is not None:
        config = replace(config, kv_cache_memory_bytes=num_pages * config.bytes_for_slots(config.page_size))
    engine = Engine(config, tokenizer=checkpoint.tokenizer)
    prompt = checkpoint.tokenizer.encode("def f(x):\n    ")
    requests = [engine.submit(prompt[: 2 + i], each, seed=i) for i, each in enumerate(params)]
    engine.run()
    if num_pages is not None:
        assert engine.scheduler.stats.num_preemptions
    return [request.result() for request in requests]


@pytest.mark.parametrize("cache", ["full", "paged"])
def test_grammars_in_cuda_graphs_equal_the_cpu(cache: str) -> None:
    """Rows with and without a grammar in one batch, with two CUDA graphs per step, join and leave."""
    greedy: Any = {"temperature": 0, "max_new_tokens": 40}
    params = [
        SamplingParams(schema=SCHEMA, **greedy),
        SamplingParams(**greedy),
        SamplingParams(regex=r"[0-9]{3}-[a-f]{4}", **greedy),
        SamplingParams(choice=("yes", "no", "maybe"), **greedy),
        SamplingParams(schema=SCHEMA, logprobs=2, **greedy),
        SamplingParams(max_new_tokens=40, temperature=1.0, schema=SCHEMA),
    ]
    options: dict[str, Any] = {"max_num_seqs": 3, "cache_implementation": cache}
    expected = run_requests("cpu", options, params)
    completions = run_requests("cuda", {**options, "compile": True}, params)
    eager = run_requests("cuda", {**options, "compile": False}, params)
    for cpu, graph, without in zip(expected[:5], completions[:5], eager[:5], strict=True):
        assert cpu.tokens == graph.tokens == without.tokens
    for completion in (completions[0], completions[4], completions[5], eager[5]):
        if completion.finish_reason == "stop":
            assert json.loads(completion.text or "").keys() == {"name", "age"}
    assert completions[2].finish_reason == "stop"


def test_prompt_logprobs_equal_the_cpu() -> None:
    params = [SamplingParams(max_new_tokens=3, prompt_logprobs=2, temperature=0) for _ in range(4)]
    options: dict[str, Any] = {"max_num_seqs": 4, "cache_implementation": "paged", "prefill_chunk_size": 4}
    for cpu, gpu in zip(run_requests("cpu", options, params), run_requests("cuda", options, params), strict=True):
        a, b = (
            torch.tensor([each.logprob for each in completion.prompt_logprobs or [] if each is not None])
            for completion in (cpu, gpu)
        )
        assert len(a) > 0
        assert torch.allclose(a, b, atol=1e-3)


def test_preempted_requests_equal_others() -> None:
    """With too few pages for all rows, requests are preempted and recomputed, also with CUDA graphs."""
    params = [SamplingParams(max_new_tokens=64, temperature=0) for _ in range(6)]
    expected = run_requests("cuda", {"max_num_seqs": 6, "cache_implementation": "full", "compile": False}, params)
    options: dict[str, Any] = {"max_num_seqs": 6, "cache_implementation": "paged", "compile": True}
    completions = run_requests("cuda", options, params, num_pages=10)
    assert [c.tokens for c in completions] == [c.tokens for c in expected]


def test_two_engines_in_threads() -> None:
    """The engines of two models capture CUDA graphs and decode at the same time."""
    models: list[Any] = [ct.build("tiny-llama", device="cuda", seed=seed) for seed in (0, 1)]
    prompts = [[1 + i, 2, 3] for i in range(8)]
    params = SamplingParams(max_new_tokens=40, temperature=0)
    expected = [[c.tokens for c in ct.generate(m, prompts, max_new_tokens=40, compile=False)] for m in models]
    engines = [Engine(EngineConfig(model, max_num_seqs=4, max_model_len=64, compile=True)).start() for model in models]
    results: dict[int, list[list[int]]] = {}

    def submit(index: int) -> None:
        requests = [engines[index].submit(prompt, params, seed=0) for prompt in prompts]
        results[index] = [request.result().tokens for request in requests]

    threads = [threading.Thread(target=submit, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for engine in engines:
        engine.close()
    assert [results[0], results[1]] == expected


@pytest.mark.parametrize("bias", [(), ("q", "k", "v", "o"), ("q",)])
def test_changed_and_replaced_weights_are_used(bias: tuple[str, ...]) -> None:
    """The variant of a model with kernels is kept for the next call, in which weights and modules may be others."""
    config = ct.config("tiny-llama").replace({"decoder.block.attention.bias": bias})
    model, other = (build_randomized_model(config, seed=seed).cuda() for seed in (0, 1))
    first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    prompts = [[1, 2, 3, 4, 5]]

    def generate(model: Any) -> list[int]:
        return ct.generate(model, prompts, max_new_tokens=6, temperature=0)[0].tokens

    before, expected = generate(model), generate(other)
    assert before != expected
    assert generate(model) == before
    model.load_state_dict(other.state_dict())
    assert generate(model) == expected
    for name, parameter in model.named_parameters():
        parameter.data = first[name].clone()
    assert generate(model) == before
    for parameter, source in zip(model.parameters(), other.parameters(), strict=True):
        parameter.data.copy_(source)
    assert generate(model) == expected
    model.load_state_dict(first)
    assert generate(model) == before
    model.decoder.blocks = other.decoder.blocks
    model.decoder.final_norm, model.decoder.embed, model.head = (
        other.decoder.final_norm,
        other.decoder.embed,
        other.head,
    )
    assert generate(model) == expected
