"""Prefill on a GPU: chunks of several prompts without padding equal one full forward pass of the plain model."""

from typing import Any

import pytest
import torch
from support.config_strategies import build_randomized_model

import cutaway as ct
from cutaway.generate import Engine, EngineConfig, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.unchecked]

WIDE = {"heads": 4, "kv_heads": 2, "d_head": 128}
ROPE = {"kind": "rope", "theta": 10000.0, "rotary_dim": None, "layout": "half", "scaling": {"kind": "none"}}
ATTENTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "d_head 128": WIDE,
    "d_head 80, biases, MHA": {"heads": 2, "kv_heads": 2, "d_head": 80, "bias": ("q", "k", "v", "o")},
    "d_head 256": {"heads": 2, "kv_heads": 1, "d_head": 256},
    "window": {**WIDE, "window": 40},
    "softcap": {**WIDE, "softcap": 20.0},
    "sink": {**WIDE, "sink": True},
    "sink, window": {**WIDE, "sink": True, "window": 100},
    "ALiBi": {**WIDE, "position": {"kind": "alibi"}},
    "interleaved, partial RoPE": {**WIDE, "position": {**ROPE, "rotary_dim": 32, "layout": "interleaved"}},
    "QK-norm": {**WIDE, "qk_norm": {"norm": {"kind": "rmsnorm", "eps": 1e-6, "unit_offset": True}}},
    "scale": {**WIDE, "scale": 0.2},
}
PROMPT_LENGTHS = (1, 2, 63, 64, 65, 127, 130, 300, 5, 700)


def build_model(attention: dict[str, Any], dtype: torch.dtype) -> Any:
    config = ct.config("tiny-llama").model_dump()
    config["context"] = 1024
    config["decoder"]["layers"] = 2
    config["decoder"]["block"][0]["attention"] |= attention
    return build_randomized_model(ct.config(config), dtype).cuda()


def check_completions(model: Any, max_error: float, **options: Any) -> None:
    """Check the log-probabilities of prompts and completions against one full forward pass of each sequence."""
    prompts = [[(7 * i + 3 * j * j) % 256 for j in range(n)] for i, n in enumerate(PROMPT_LENGTHS)]
    engine = Engine(EngineConfig(model, max_model_len=768, **options))
    assert engine.model_runner.packed_prefill is not None
    params = SamplingParams(max_new_tokens=4, temperature=0, logprobs=0, prompt_logprobs=0)
    requests = [engine.submit(prompt, params, seed=0) for prompt in prompts]
    engine.run()
    for prompt, request in zip(prompts, requests, strict=True):
        completion = request.result()
        tokens = torch.tensor([prompt + completion.tokens], device="cuda")
        expected = model(tokens)[0, :-1].float().log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
        assert completion.prompt_logprobs is not None
        assert completion.logprobs is not None
        known = [
            next(iter(each.values())) if isinstance(each, dict) else each for each in completion.prompt_logprobs[1:]
        ]
        actual = torch.tensor([each.logprob for each in known] + completion.logprobs, device="cuda")  # type: ignore[union-attr]
        assert len(actual) == len(expected)
        assert (actual - expected).abs().max() <= max_error, len(prompt)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ATTENTIONS)
@torch.no_grad()
def test_attention_equals_full_forward_pass(name: str, dtype: torch.dtype) -> None:
    model = build_model(ATTENTIONS[name], dtype)
    max_error = 1e-3 if dtype == torch.float32 else 0.15
    for options in ({"cache_implementation": "paged"}, {"prefill_chunk_size": 96}, {"max_num_seqs": 3}):
        check_completions(model, max_error, **options)


PLACEMENTS: dict[str, dict[str, Any]] = {
    "parallel": {"kind": "parallel", "norms": "one"},
    "parallel, two norms": {"kind": "parallel", "norms": "two"},
    "sandwich": {"kind": "sandwich"},
    "post": {"kind": "post"},
}


CASES = [(name, placement) for name in ("tiny-gpt", "tiny-gemma") for placement in (None, *PLACEMENTS)]


@pytest.mark.parametrize(("name", "placement"), [*CASES, ("tiny-moe", None), ("tiny-moe", "sandwich")])
@torch.no_grad()
def test_architectures_equal_full_forward_pass(name: str, placement: str | None) -> None:
    config = ct.config(name).model_dump()
    config["context"] = 1024
    if placement is not None:
        config["decoder"]["placement"] = PLACEMENTS[placement]
    position = config["decoder"]["embedding"]["position"]
    if "length" in position:
        position["length"] = 1024
    model = build_randomized_model(ct.config(config), torch.float32).cuda()
    for options in ({"cache_implementation": "paged"}, {"prefill_chunk_size": 96}):
        check_completions(model, 1e-3, **options)


@torch.no_grad()
def test_int8_cache_is_close() -> None:
    check_completions(build_model(WIDE, torch.float32), 0.3, cache_implementation="paged", kv_cache_dtype=torch.int8)


@torch.no_grad()
def test_shared_prefixes() -> None:
    """Prompts that start with the same tokens continue from pages of the first one."""
    model = build_model(WIDE, torch.float32)
    engine = Engine(EngineConfig(model, max_model_len=768, cache_implementation="paged", prefill_chunk_size=128))
    shared = [(5 * j) % 256 for j in range(300)]
    prompts = [shared + [i] * (1 + 37 * i) for i in range(5)]
    for prompt in prompts:
        request = engine.submit(prompt, SamplingParams(max_new_tokens=6, temperature=0), seed=0)
        engine.run()
        tokens = list(prompt)
        for token in request.result().tokens:
            assert int(model(torch.tensor([tokens], device="cuda"))[0, -1].argmax()) == token
            tokens.append(token)
    assert engine.scheduler.stats.prefix_cache_hits > 0


@torch.no_grad()
def test_cuda_graphs_of_short_prompts() -> None:
    """Steps of few tokens are captured when their size occurs again. Also beside decode steps, which read the pages."""
    model = build_model({**WIDE, "window": 40}, torch.float32)
    engine = Engine(EngineConfig(model, max_model_len=768, cache_implementation="paged", max_num_seqs=6))
    for round_index in range(4):
        prompts = [[(7 * i + 3 * j * j + round_index) % 256 for j in range(n)] for i, n in enumerate((3, 17, 40, 90))]
        prompts.append([(11 * j + round_index) % 256 for j in range(9)])
        params = SamplingParams(max_new_tokens=8, temperature=0)
        requests = [engine.submit(prompt, params, seed=0) for prompt in prompts[:4]]
        engine.step()
        requests.append(engine.submit(prompts[4], params, seed=0))
        engine.run()
        for prompt, request in zip(prompts, requests, strict=True):
            tokens = list(prompt)
            for token in request.result().tokens:
                assert int(model(torch.tensor([tokens], device="cuda"))[0, -1].argmax()) == token
                tokens.append(token)
    assert engine.model_runner.packed_prefill is not None
    assert engine.model_runner.packed_prefill.graphs is not None
    assert set(engine.model_runner.packed_prefill.graphs.steps) == {16, 256}
