"""`generate` and `Engine`: completions equal a full forward pass without a cache, independent of the batch."""

import gc
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.config_strategies import SEEDS, SEQ_LEN, build_randomized_model, configs, random_tokens
from support.generation import InMemoryCheckpoint, build_translator, decoder_config, translator_config
from support.nightly import nightly_except

from cutaway import config as c
from cutaway.errors import InputError
from cutaway.generate import Completion, CompletionChunk, Engine, EngineConfig, SamplingParams, generate
from cutaway.generate.engine.kv_cache import CACHE_IMPLEMENTATIONS
from cutaway.model import Transformer, build
from cutaway.tokenizer import byte_tokenizer


def prompts_for(config: c.Config, seed: int, lengths: tuple[int, ...] = (1, 5, 3, 7)) -> list[list[int]]:
    which = "source" if config.form == "encoder-decoder" else "tokens"
    return [random_tokens(config, 1, n, seed + n, which)[0].tolist() for n in lengths]


@torch.no_grad()
def full_pass_logprobs(model: Any, prompt: list[int], completion: Completion) -> torch.Tensor:
    """Log-probabilities (tokens, vocab) at each position of the completion, in one forward pass without a cache."""
    tokens = torch.tensor([completion.tokens])
    if "encoder" in model.stacks:
        target = torch.cat((torch.zeros(1, 1, dtype=torch.long), tokens), 1)
        logits = model(torch.tensor([prompt]), target)[:, :-1]
    else:
        logits = model(torch.tensor([prompt + completion.tokens]))[:, len(prompt) - 1 : -1]
    return logits.float().log_softmax(-1)[0]


def check_logprobs(logprobs: torch.Tensor, completion: Completion, *, greedy: bool) -> None:
    """Reported log-probabilities equal those of the full pass; greedy tokens are its maxima."""
    sampled = logprobs.gather(-1, torch.tensor(completion.tokens)[:, None])[:, 0]
    assert completion.logprobs == pytest.approx(sampled.tolist(), abs=2e-5)
    if greedy:
        assert sampled.tolist() == pytest.approx(logprobs.amax(-1).tolist(), abs=2e-5)


def engine_for(model: Transformer, prompts: list[list[int]], **options: Any) -> Engine:
    longest = max(map(len, prompts))
    return Engine(
        EngineConfig(
            model, **{"max_model_len": 2 * SEQ_LEN, "decoder_start_token_id": 0, "max_source_len": longest, **options}
        )
    )


def run_engine(
    model: Transformer, prompts: list[list[int]], params: list[SamplingParams], **options: Any
) -> list[Completion]:
    """Complete each prompt with its index as seed."""
    engine = engine_for(model, prompts, **options)
    requests = [engine.submit(prompt, p, seed=i) for i, (prompt, p) in enumerate(zip(prompts, params, strict=True))]
    engine.run()
    assert not engine.has_unfinished_requests
    return [request.result() for request in requests]


@given(
    config=configs(("decoder", "encoder-decoder")),
    seed=SEEDS,
    kind=st.sampled_from(CACHE_IMPLEMENTATIONS),
    kernel=st.sampled_from(["auto", "explicit"]),
    chunk=st.integers(1, SEQ_LEN),
    rows=st.integers(1, 5),
    temperature=st.sampled_from([0.0, 1.0]),
)
@torch.no_grad()
def test_completions_equal_full_forward_pass(
    config: c.Config, seed: int, kind: str, kernel: str, chunk: int, rows: int, temperature: float
) -> None:
    """Prompts of different lengths, more requests than rows, any chunk size, past the wrap of ring buffers."""
    model = build_randomized_model(config, torch.float64, seed).use_kernel(kernel)
    prompts = prompts_for(config, seed)
    params = [
        SamplingParams(max_new_tokens=SEQ_LEN - i, temperature=temperature, logprobs=0) for i in range(len(prompts))
    ]
    completions = run_engine(
        model, prompts, params, max_num_seqs=rows, cache_implementation=kind, prefill_chunk_size=chunk
    )
    for prompt, completion, p in zip(prompts, completions, params, strict=True):
        assert len(completion.tokens) == p.max_new_tokens
        check_logprobs(full_pass_logprobs(model, prompt, completion), completion, greedy=temperature == 0)


@pytest.mark.unchecked
@pytest.mark.parametrize("kind", CACHE_IMPLEMENTATIONS)
@pytest.mark.parametrize("kernel", nightly_except(("sdpa", "explicit"), ("sdpa", "explicit", "flex")))
def test_all_attention_kernels_agree(kind: str, kernel: str) -> None:
    model = build_randomized_model(decoder_config(), torch.float32).use_kernel(kernel)
    prompts = prompts_for(model.config, 0, (1, 9, 4))
    params = [SamplingParams(max_new_tokens=9, logprobs=0)] * 3
    for prompt, completion in zip(
        prompts,
        run_engine(model, prompts, params, max_num_seqs=2, cache_implementation=kind, prefill_chunk_size=4),
        strict=True,
    ):
        check_logprobs(full_pass_logprobs(model, prompt, completion), completion, greedy=True)


@given(
    seed=SEEDS,
    kind=st.sampled_from(CACHE_IMPLEMENTATIONS),
    rows=st.integers(1, 6),
    chunk=st.integers(1, 9),
    data=st.data(),
)
@settings(max_examples=15)
def test_sampled_completion_is_independent_of_the_batch(seed: int, kind: str, rows: int, chunk: int, data: Any) -> None:
    model = build_randomized_model(decoder_config(), torch.float64, seed)
    prompts = prompts_for(model.config, seed, (1, 5, 3, 7, 2, 6))
    params = [
        SamplingParams(
            max_new_tokens=data.draw(st.integers(1, 10)),
            temperature=data.draw(st.sampled_from([0.0, 0.7, 1.5])),
            top_k=data.draw(st.sampled_from([None, 1, 9])),
            top_p=data.draw(st.sampled_from([None, 0.8])),
            min_p=data.draw(st.sampled_from([None, 0.05])),
            repetition_penalty=data.draw(st.sampled_from([1.0, 1.3])),
            frequency_penalty=data.draw(st.sampled_from([0.0, 0.5])),
            suppress_tokens=data.draw(st.sampled_from([(), (3, 4)])),
            stop_token_ids=data.draw(st.sampled_from([(), (1, 2, 8, 9)])),
            logprobs=data.draw(st.sampled_from([None, 2])),
        )
        for _ in prompts
    ]
    together = run_engine(
        model, prompts, params, max_num_seqs=rows, cache_implementation=kind, prefill_chunk_size=chunk
    )
    for i, completion in enumerate(together):
        engine = engine_for(model, prompts, max_num_seqs=1, cache_implementation="full", prefill_chunk_size=9)
        request = engine.submit(prompts[i], params[i], seed=i)
        engine.run()
        alone = request.result()
        assert (completion.tokens, completion.finish_reason, completion.stop_reason) == (
            alone.tokens,
            alone.finish_reason,
            alone.stop_reason,
        )
        assert completion.logprobs == pytest.approx(alone.logprobs, abs=1e-5)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["full", "paged"])
@pytest.mark.parametrize("chunk", [1, 3, 64])
@torch.no_grad()
def test_longrope_equals_full_forward_pass_across_its_switch_length(kind: str, chunk: int) -> None:
    """Prompts below, at and above the switch length, and completions that cross it."""
    scaling = c.LongRope(
        short_factors=(1.0, 1.2, 1.3, 1.5), long_factors=(3.0, 4.0, 5.0, 6.0), original_length=8, attention_factor=1.1
    )
    model = build_randomized_model(decoder_config(c.Rope(scaling=scaling)), torch.float64)
    prompts = prompts_for(model.config, 0, (1, 6, 7, 8, 9, 14))
    params = [SamplingParams(max_new_tokens=10, logprobs=0)] * len(prompts)
    for prompt, completion in zip(
        prompts,
        run_engine(model, prompts, params, max_num_seqs=4, cache_implementation=kind, prefill_chunk_size=chunk),
        strict=True,
    ):
        prefixes = [prompt + completion.tokens[:i] for i in range(10)]
        logprobs = torch.stack([model(torch.tensor([tokens]))[0, -1] for tokens in prefixes]).float().log_softmax(-1)
        check_logprobs(logprobs, completion, greedy=True)


def test_beams_must_not_cross_the_longrope_switch_length() -> None:
    scaling = c.LongRope(
        short_factors=(1.0, 1.2, 1.3, 1.5), long_factors=(3.0, 4.0, 5.0, 6.0), original_length=8, attention_factor=1.1
    )
    model = build_randomized_model(decoder_config(c.Rope(scaling=scaling)), torch.float64)
    with pytest.raises(InputError, match=r"beam search may reach 9 tokens, but above 8 tokens .* at most 6"):
        generate(model, [1, 2, 3], max_new_tokens=7, beams=2)
    for prompt, max_new_tokens in (([1, 2, 3], 6), ([1] * 8, 1), ([1] * 9, 9)):
        assert len(generate(model, prompt, max_new_tokens=max_new_tokens, beams=2)[0].tokens) == max_new_tokens


@pytest.mark.parametrize("kind", ["full", "paged"])
@torch.no_grad()
def test_dynamic_ntk_uses_the_full_prompt_length(kind: str) -> None:
    """Independent of the prefill chunk size and the batch; later tokens use the frequencies of their step."""
    model = build_randomized_model(
        decoder_config(c.Rope(scaling=c.DynamicNTK(factor=4.0, original_length=8))), torch.float64
    )
    prompts = prompts_for(model.config, 0, (5, 14, 8, 9, 20))
    params = [SamplingParams(max_new_tokens=8, logprobs=0)] * len(prompts)
    options = {"cache_implementation": kind, "max_model_len": 32}
    together = run_engine(model, prompts, params, max_num_seqs=3, prefill_chunk_size=3, **options)
    for prompt, completion in zip(prompts, together, strict=True):
        (alone,) = run_engine(model, [prompt], params[:1], max_num_seqs=1, prefill_chunk_size=64, **options)
        assert completion.tokens == alone.tokens
        assert completion.logprobs == pytest.approx(alone.logprobs, abs=1e-6)
        cache = model.new_cache(1, 32)
        logits = [model(torch.tensor([prompt]), cache=cache)[0, -1]]
        logits += [model(torch.tensor([[token]]), cache=cache)[0, -1] for token in completion.tokens[:-1]]
        check_logprobs(torch.stack(logits).float().log_softmax(-1), completion, greedy=True)


def test_int8_cache_is_equal_in_all_implementations_and_close_to_full_precision() -> None:
    model = build_randomized_model(decoder_config(), torch.float64)
    prompts = prompts_for(model.config, 3, (1, 5, 11, 7))
    params = [SamplingParams(max_new_tokens=20, logprobs=0, temperature=1.0)] * 4
    options: dict[str, Any] = {
        "max_num_seqs": 2,
        "prefill_chunk_size": 4,
        "max_model_len": 80,
        "kv_cache_dtype": torch.int8,
    }
    first, *others = (
        run_engine(model, prompts, params, cache_implementation=kind, **options) for kind in CACHE_IMPLEMENTATIONS
    )
    for other in others:
        for a, b in zip(first, other, strict=True):
            assert a.tokens == b.tokens
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-9)
    for prompt, completion in zip(prompts, first, strict=True):
        logprobs = full_pass_logprobs(model, prompt, completion).gather(-1, torch.tensor(completion.tokens)[:, None])[
            :, 0
        ]
        assert (
            1e-4 < (logprobs - torch.tensor(completion.logprobs)).abs().mean() < 0.15
        )  # int8 has an effect, and a small one


@pytest.mark.parametrize("kind", CACHE_IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [None, torch.int8])
@pytest.mark.parametrize("form", ["decoder", "encoder-decoder"])
def test_cache_bytes_equals_allocated_bytes(kind: str, dtype: torch.dtype | None, form: str) -> None:
    config = decoder_config()
    if form == "encoder-decoder":
        stack = config.stacks["decoder"]
        blocks = tuple(
            c.CrossBlock(attention=b.attention, ffn=b.ffn, cross=c.Cross(heads=4, kv_heads=1)) for b in stack.blocks
        )
        cross_stack = c.CrossStack(layers=2, block=blocks)
        config = c.EncoderDecoder(vocab_size=53, d_model=32, encoder=stack, decoder=cross_stack)
    model = build(config, seed=0)
    for context in (20, 200):
        options: dict[str, Any] = {
            "cache_implementation": kind,
            "kv_cache_dtype": dtype,
            "max_model_len": context,
            "prefill_chunk_size": 7,
            "decoder_start_token_id": 0,
        }
        engine_config = EngineConfig(model, max_num_seqs=3, max_source_len=9, **options)
        assert engine_config.cache_bytes == engine_config.build_cache().num_bytes
        if kind == "paged":
            limited = EngineConfig(
                model,
                max_num_seqs=3,
                max_source_len=9,
                kv_cache_memory_bytes=engine_config.bytes_for_slots(context) * 2.5,
                **options,
            )
            assert limited.cache_bytes == limited.build_cache().num_bytes < engine_config.cache_bytes
            assert (
                limited.bytes_for_slots(limited.page_size) * (limited.num_pages() + 1) <= limited.kv_cache_memory_bytes
            )


# Through `generate`


def test_length_limits_and_eos_come_from_the_generation_config() -> None:
    model = build_randomized_model(decoder_config(), torch.float32)
    prompt = [5, 6, 7, 8]
    assert (
        len(generate(InMemoryCheckpoint(model, {"max_length": 10}), prompt)[0].tokens) == 6
    )  # max_length includes the prompt
    assert len(generate(InMemoryCheckpoint(model, {"max_length": 10, "max_new_tokens": 3}), prompt)[0].tokens) == 3
    assert len(generate(InMemoryCheckpoint(model, {"max_length": 10}), prompt, max_new_tokens=8)[0].tokens) == 8
    assert len(generate(model, prompt)[0].tokens) == 256
    assert (
        len(generate(model, prompt, min_new_tokens=260)[0].tokens) == 260
    )  # the default limit is raised to min_new_tokens
    (free,) = generate(model, prompt, max_new_tokens=12)
    (ended,) = generate(InMemoryCheckpoint(model, {"eos_token_id": [free.tokens[4], 999]}), prompt)
    assert ended.tokens == free.tokens[: free.tokens.index(free.tokens[4]) + 1]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", free.tokens[4])
    (on,) = generate(
        InMemoryCheckpoint(model, {"eos_token_id": [free.tokens[4], 999], "max_length": 16, "min_length": 16}), prompt
    )
    assert len(on.tokens) == 12
    assert free.tokens[4] not in on.tokens[:-1]
    assert len(generate(model, prompt, max_model_len=9)[0].tokens) == 5  # max_model_len includes the prompt


def test_forced_bos_and_eos_tokens() -> None:
    model = build_translator()
    files = {"decoder_start_token_id": 2, "forced_bos_token_id": 9, "forced_eos_token_id": 3, "eos_token_id": 3}
    (completion,) = generate(InMemoryCheckpoint(model, files), [4, 5], max_new_tokens=6, logprobs=1, ignore_eos=True)
    assert (completion.tokens[0], completion.tokens[-1], len(completion.tokens)) == (9, 3, 6)
    assert completion.finish_reason == "length"
    assert len(completion.logprobs or []) == len(completion.top_logprobs or []) == 6
    (short,) = generate(InMemoryCheckpoint(model, files), [4, 5], max_new_tokens=1)
    assert (short.tokens, short.finish_reason) == ([9], "length")
    (ended,) = generate(InMemoryCheckpoint(model, files | {"eos_token_id": 9}), [4, 5])
    assert (ended.tokens, ended.finish_reason) == ([9], "stop")


def test_sequence_rules_use_one_beam() -> None:
    """A rule that never applies gives the greedy completion; one that applies prevents repeated bigrams."""
    model = build_translator()
    prompts = [[4, 5, 6], [7], [8, 9, 10, 11, 12]]
    files = {"decoder_start_token_id": 2, "eos_token_id": 3, "length_penalty": -2.0}
    greedy = generate(InMemoryCheckpoint(model, files), prompts, max_new_tokens=20)
    ruled = generate(InMemoryCheckpoint(model, files | {"no_repeat_ngram_size": 30}), prompts, max_new_tokens=20)
    assert [completion.tokens for completion in ruled] == [completion.tokens for completion in greedy]
    assert [completion.finish_reason for completion in ruled] == [completion.finish_reason for completion in greedy]
    assert [
        completion.tokens
        for completion in generate(InMemoryCheckpoint(model, files), prompts, max_new_tokens=20, beams=1)
    ] == [completion.tokens for completion in greedy]
    for completion in generate(
        InMemoryCheckpoint(model, files | {"no_repeat_ngram_size": 2}), prompts, max_new_tokens=20
    ):
        pairs = list(zip(completion.tokens, completion.tokens[1:], strict=False))
        assert len(pairs) == len({*pairs})


@pytest.mark.parametrize("n", [1, 3])
def test_batched_beam_search_equals_single_prompts(n: int) -> None:
    model = build_randomized_model(decoder_config(), torch.float64)
    prompts = prompts_for(model.config, 0, (3, 9, 1, 5, 5, 2))
    files = {"max_length": 16, "eos_token_id": 7}  # the limit depends on the prompt length
    together = generate(InMemoryCheckpoint(model, files), prompts, beams=3, n=n)
    alone = [
        completion
        for prompt in prompts
        for completion in generate(InMemoryCheckpoint(model, files), prompt, beams=3, n=n)
    ]
    assert [completion.tokens for completion in together] == [completion.tokens for completion in alone]
    assert [completion.score for completion in together] == pytest.approx([completion.score for completion in alone])
    assert [completion.prompt_tokens for completion in together] == [
        len(prompt) for prompt in prompts for _ in range(n)
    ]


@pytest.mark.parametrize("ends", [{}, {"eos_token_id": 257, "forced_eos_token_id": 257}])
def test_truncated_beam_decodes_all_its_tokens(ends: dict[str, int]) -> None:
    tokenizer = byte_tokenizer()
    for model in (
        build_randomized_model(decoder_config(vocab_size=tokenizer.vocab_size)),
        build_randomized_model(translator_config(tokenizer.vocab_size)),
    ):
        source = InMemoryCheckpoint(model, {"decoder_start_token_id": 256} | ends, tokenizer=tokenizer)
        for completion in generate(source, "ab", beams=3, n=3, max_new_tokens=5, suppress_tokens=range(128, 256)):
            assert completion.finish_reason == "length" or completion.tokens[-1] == 257
            assert completion.text == tokenizer.decode(completion.tokens)


@pytest.mark.parametrize("beams", [None, 2])
def test_chunks_concatenate_to_the_completion(beams: int | None) -> None:
    tokenizer = byte_tokenizer()
    model = build_randomized_model(decoder_config(vocab_size=tokenizer.vocab_size), torch.float64)
    source = InMemoryCheckpoint(model, tokenizer=tokenizer)
    chunks: dict[int, list[CompletionChunk]] = {}
    sampling: dict[str, Any] = {"n": 2, "temperature": 1.0, "seed": 5} if beams is None else {"beams": beams}
    completions = generate(
        source,
        ["one", "three"],
        max_new_tokens=9,
        on_chunk=lambda i, chunk: chunks.setdefault(i, []).append(chunk),
        **sampling,
    )
    assert [[t for chunk in chunks[i] for t in chunk.tokens] for i in range(len(completions))] == [
        a.tokens for a in completions
    ]
    assert ["".join(chunk.text for chunk in chunks[i]) for i in range(len(completions))] == [
        a.text for a in completions
    ]
    assert completions == generate(source, ["one", "three"], max_new_tokens=9, **sampling)
    if beams is None:
        assert len(chunks[0]) == 9

        def stop(index: int, chunk: CompletionChunk) -> None:
            raise KeyError("stop")

        with pytest.raises(KeyError, match="stop"):
            generate(source, "one", on_chunk=stop)


def test_truncated_beam_keeps_its_last_token() -> None:
    tokenizer = byte_tokenizer()
    source = InMemoryCheckpoint(
        build_randomized_model(decoder_config(vocab_size=tokenizer.vocab_size), torch.float64), tokenizer=tokenizer
    )
    options: Any = {"max_new_tokens": 9, "beams": 2, "suppress_tokens": range(128, 259)}
    (completion,) = generate(source, "one", **options)
    assert (completion.text, completion.finish_reason) == (tokenizer.decode(completion.tokens), "length")
    end = str(completion.text)[-3:]
    (ended,) = generate(source, "one", stop=end, **options)
    assert (ended.text, ended.finish_reason, ended.stop_reason) == (str(completion.text)[:-3], "stop", end)


def test_training_mode_model_generates_without_dropout() -> None:
    config = decoder_config()
    stack = config.stacks["decoder"]
    blocks = tuple(block.replace(attention=block.attention.replace(dropout=0.5)) for block in stack.blocks)
    model = build_randomized_model(
        config.replace(decoder=stack.replace(block=blocks, final_dropout=0.5)), torch.float64
    )
    expected = generate(model, [1, 2, 3], max_new_tokens=20, seed=1)
    model.train()
    model.stacks["decoder"].final_norm.eval()
    assert generate(model, [1, 2, 3], max_new_tokens=20, seed=1) == expected
    assert generate(model, [1, 2, 3], max_new_tokens=20, seed=1, draft_model=model) == expected
    assert (
        run_engine(model, [[1, 2, 3]], [SamplingParams(max_new_tokens=20)], max_model_len=23)[0].tokens
        == expected[0].tokens
    )
    assert model.training
    assert not model.stacks["decoder"].final_norm.training


@pytest.mark.unchecked
@pytest.mark.parametrize("options", [{}, {"draft_model": "ngram"}, {"weight_bits": 8}])
def test_kv_cache_is_freed_after_generate(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache may be most of the device memory, so it must not wait for the garbage collector."""
    caches = []
    build_cache = EngineConfig.build_cache

    def record_cache(engine_config: EngineConfig) -> Any:
        cache = build_cache(engine_config)
        caches.append(weakref.ref(cache))
        return cache

    monkeypatch.setattr(EngineConfig, "build_cache", record_cache)
    model = build_randomized_model(decoder_config(), torch.float32)
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):  # PyTorch keeps a reference from the first use of an operator
            caches.clear()
            generate(model, [1, 2, 3], max_new_tokens=3, **options)
        assert [cache_ref() for cache_ref in caches] == [None]
    finally:
        gc.enable()


def test_engine_built_in_inference_mode_works_outside_it() -> None:
    model = build_randomized_model(decoder_config(), torch.float64)
    params = SamplingParams(max_new_tokens=5, repetition_penalty=1.1, suppress_tokens=[3])
    (expected,) = run_engine(model, [[1, 2, 3]], [params])
    with torch.inference_mode():
        engine = engine_for(model, [[1, 2, 3]])
        first = engine.submit([1, 2, 3], params, seed=0)
        engine.run()
    with engine.start():
        assert engine.submit([1, 2, 3], params, seed=0).result(60).tokens == expected.tokens
    assert first.result().tokens == expected.tokens


def test_seeds_and_stop_strings() -> None:
    tokenizer = byte_tokenizer()
    model = build_randomized_model(decoder_config(vocab_size=tokenizer.vocab_size), torch.float64)
    source = InMemoryCheckpoint(model, tokenizer=tokenizer)
    free = generate(source, ["ab", "cd"], max_new_tokens=30, temperature=1.0, seed=3, n=3)
    assert len({tuple(completion.tokens) for completion in free}) == 6
    assert generate(source, "cd", max_new_tokens=30, temperature=1.0, seed=3) == [free[3]]
    again = generate(source, "cd", max_new_tokens=30, temperature=1.0, seed=free[5].seed)
    assert again == [free[5]]
    reference = next(a for a in free if a.text and len(a.text) > 4)
    word = (reference.text or "")[2:4]
    prompt_index = free.index(reference) // 3
    (stopped,) = generate(
        source, ["ab", "cd"][prompt_index], max_new_tokens=30, temperature=1.0, seed=reference.seed, stop=[word]
    )
    assert stopped.stop_reason == word
    assert stopped.finish_reason == "stop"
    assert stopped.text == (reference.text or "")[: (reference.text or "").index(word)]
    assert len(stopped.tokens) <= len(reference.tokens)


def test_filters_without_temperature_sample_at_temperature_1() -> None:
    """temperature=0.0 stays greedy."""
    model = build_randomized_model(decoder_config(c.NoPosition()), torch.float32)
    sampled = generate(model, [[1, 2]], max_new_tokens=20, top_k=5, seed=1)[0].tokens
    assert sampled == generate(model, [[1, 2]], max_new_tokens=20, top_k=5, seed=1, temperature=1.0)[0].tokens
    greedy = generate(model, [[1, 2]], max_new_tokens=20)[0].tokens
    assert greedy == generate(model, [[1, 2]], max_new_tokens=20, top_k=5, temperature=0.0)[0].tokens
    assert greedy != sampled


@pytest.mark.parametrize("bits", [16, 8])
def test_packed_weights_of_training_mode_model_have_no_dropout(bits: int) -> None:
    config = decoder_config()
    stack = config.decoder
    blocks = tuple(block.replace(attention=block.attention.replace(dropout=0.5)) for block in stack.blocks)
    model = build_randomized_model(
        config.replace(decoder=stack.replace(block=blocks, final_dropout=0.5)), torch.float32
    )
    expected = generate(model.eval(), [[1, 2, 3]], max_new_tokens=12, weight_bits=bits)[0].tokens
    assert generate(model.train(), [[1, 2, 3]], max_new_tokens=12, weight_bits=bits)[0].tokens == expected
    assert model.training
