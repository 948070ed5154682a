"""Log-probabilities of prompt tokens equal those of a full forward pass, however the prompt is prefilled."""

from typing import Any

import pytest
import torch
from support.config_strategies import build_randomized_model
from support.generation import InMemoryCheckpoint, build_translator, decoder_config

from cutaway import config as c
from cutaway.errors import InputError
from cutaway.evaluate.loglikelihood import LoglikelihoodRequest, compute_loglikelihoods
from cutaway.generate import Completion, Engine, EngineConfig, SamplingParams, generate
from cutaway.generate.engine.kv_cache import PAGE_SIZE
from cutaway.generate.sampling import prompt_logprobs as module
from cutaway.model import DecoderOnly


def random_prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 53, (length,), generator=generator).tolist() for length in lengths]


def check(model: Any, prompt: list[int], completion: Completion, num_top: int) -> None:
    with torch.no_grad():
        expected = model(torch.tensor([prompt]))[0].float().log_softmax(-1)
    assert completion.prompt_logprobs is not None
    assert len(completion.prompt_logprobs) == len(prompt)
    assert completion.prompt_logprobs[0] is None
    for token, row, actual in zip(prompt[1:], expected, completion.prompt_logprobs[1:], strict=False):
        assert actual is not None
        assert actual.logprob == pytest.approx(float(row[token]), abs=1e-5)
        assert actual.rank == 1 + int((row > row[token]).sum())
        top = row.topk(num_top)
        assert list(actual.top_logprobs) == top.indices.tolist()
        assert list(actual.top_logprobs.values()) == pytest.approx(top.values.tolist(), abs=1e-5)


@pytest.mark.parametrize("cache", ["full", "paged", "ring"])
def test_equal_the_full_forward_pass(cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LOGITS_PER_CHUNK", 3 * 53)  # several chunks of logits per chunk of the prompt
    model = build_randomized_model(decoder_config())
    prompts = random_prompts(1, 2, 23, 9, 40)
    completions = generate(
        model, prompts, max_new_tokens=2, prompt_logprobs=3, prefill_chunk_size=8, cache_implementation=cache
    )
    for prompt, completion in zip(prompts, completions, strict=True):
        check(model, prompt, completion, 3)


def test_cached_prefixes_are_not_used() -> None:
    model = build_randomized_model(decoder_config())
    [prompt] = random_prompts(2 * PAGE_SIZE + 9)
    engine = Engine(EngineConfig(model, max_model_len=len(prompt) + 1, cache_implementation="paged"))
    for num_top in (None, 0, 2):  # the first request caches the pages of the prompt
        request = engine.submit(prompt, SamplingParams(max_new_tokens=1, prompt_logprobs=num_top), seed=0)
        engine.run()
        if num_top is None:
            assert request.result().prompt_logprobs is None
        else:
            check(model, prompt, request.result(), num_top)


def test_requests_with_a_common_prefix_do_not_wait_for_each_other() -> None:
    """Others wait for keys and values that a request in prefill computes; these compute their own."""
    model = build_randomized_model(decoder_config())
    [prompt] = random_prompts(2 * PAGE_SIZE + 9)
    options: Any = {"max_model_len": 6 * PAGE_SIZE, "max_num_seqs": 2, "cache_implementation": "paged"}
    for num_top, num_running in ((None, 1), (0, 2)):
        engine = Engine(EngineConfig(model, prefill_chunk_size=16, **options))
        for _ in range(2):
            engine.submit(prompt, SamplingParams(max_new_tokens=1, prompt_logprobs=num_top), seed=0)
        engine.step()
        assert len(engine.scheduler.running) == num_running
        engine.run()


@pytest.mark.parametrize(
    "scaling",
    [
        c.DynamicNTK(factor=4.0, original_length=8),
        c.LongRope(
            short_factors=(1.0, 1.2, 1.3, 1.5),
            long_factors=(3.0, 4.0, 5.0, 6.0),
            original_length=13,
            attention_factor=1.1,
        ),
    ],
)
def test_positions_that_depend_on_the_length(scaling: Any) -> None:
    model = build_randomized_model(decoder_config(c.Rope(scaling=scaling)))
    prompts = random_prompts(12, 14)
    for prompt, completion in zip(
        prompts, generate(model, prompts, max_new_tokens=6, prompt_logprobs=1, prefill_chunk_size=4), strict=True
    ):
        check(model, prompt, completion, 1)


def test_their_sum_is_the_loglikelihood_of_the_evaluation() -> None:
    model = build_randomized_model(decoder_config())
    assert isinstance(model, DecoderOnly)
    [prompt] = random_prompts(30)
    [completion] = generate(model, [prompt], max_new_tokens=1, prompt_logprobs=0)
    [expected] = compute_loglikelihoods(model, [LoglikelihoodRequest(prompt[:10], prompt[10:])], max_length=64)
    scored = [each.logprob for each in (completion.prompt_logprobs or [])[10:] if each is not None]
    assert sum(scored) == pytest.approx(-expected.nll, abs=1e-5)


def test_invalid_uses() -> None:
    with pytest.raises(InputError, match="prompt_logprobs needs a decoder"):
        generate(
            InMemoryCheckpoint(build_translator(), {"decoder_start_token_id": 0}),
            [[1, 2]],
            max_new_tokens=1,
            prompt_logprobs=0,
        )
    with pytest.raises(InputError, match="prompt_logprobs is 51"):
        generate(build_randomized_model(decoder_config()), [[1]], prompt_logprobs=51)
    with pytest.raises(InputError, match="prompt_logprobs"):
        generate(build_randomized_model(decoder_config()), [[1]], prompt_logprobs=1, beams=2, max_new_tokens=1)
