"""What an engine answers is what the model says: token by token equal to the full pass, whoever else is there."""

import gc
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.config_strategies import SEEDS, SEQ_LEN, build_randomized_model, configs, random_tokens
from support.generation import InMemoryCheckpoint, build_translator, decoder_config, translator_config

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
def said_by_full_pass(model: Any, prompt: list[int], answer: Completion) -> torch.Tensor:
    """Log-probabilities of all tokens at each place of the answer, in one pass over everything without a cache."""
    tokens = torch.tensor([answer.tokens])
    if "encoder" in model.stacks:
        target = torch.cat((torch.zeros(1, 1, dtype=torch.long), tokens), 1)
        logits = model(torch.tensor([prompt]), target)[:, :-1]
    else:
        logits = model(torch.tensor([prompt + answer.tokens]))[:, len(prompt) - 1 : -1]
    return logits.float().log_softmax(-1)[0]


def check_against(said: torch.Tensor, answer: Completion, *, greedy: bool) -> None:
    """The log-probabilities told are those of the full pass; a greedy choice is its best."""
    chosen = said.gather(-1, torch.tensor(answer.tokens)[:, None])[:, 0]
    assert answer.logprobs == pytest.approx(chosen.tolist(), abs=2e-5)
    if greedy:
        assert chosen.tolist() == pytest.approx(said.amax(-1).tolist(), abs=2e-5)


def engine_for(model: Transformer, prompts: list[list[int]], **how: Any) -> Engine:
    longest = max(map(len, prompts))
    return Engine(
        EngineConfig(
            model, **{"max_model_len": 2 * SEQ_LEN, "decoder_start_token_id": 0, "max_source_len": longest, **how}
        )
    )


def answers_of(
    model: Transformer, prompts: list[list[int]], asked: list[SamplingParams], **how: Any
) -> list[Completion]:
    """Each request with its number as seed."""
    engine = engine_for(model, prompts, **how)
    tickets = [engine.submit(prompt, own, seed=i) for i, (prompt, own) in enumerate(zip(prompts, asked, strict=True))]
    engine.run()
    assert not engine.has_unfinished_requests
    return [ticket.result() for ticket in tickets]


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
def test_answers_are_the_full_pass(
    config: c.Config, seed: int, kind: str, kernel: str, chunk: int, rows: int, temperature: float
) -> None:
    """Ragged prompts, more requests than rows, prompts in pieces of any size, past the windows' wrap."""
    model = build_randomized_model(config, torch.float64, seed).use_kernel(kernel)
    prompts = prompts_for(config, seed)
    asked = [
        SamplingParams(max_new_tokens=SEQ_LEN - i, temperature=temperature, logprobs=0) for i in range(len(prompts))
    ]
    answers = answers_of(model, prompts, asked, max_num_seqs=rows, cache_implementation=kind, prefill_chunk_size=chunk)
    for prompt, answer, own in zip(prompts, answers, asked, strict=True):
        assert len(answer.tokens) == own.max_new_tokens
        check_against(said_by_full_pass(model, prompt, answer), answer, greedy=temperature == 0)


@pytest.mark.unchecked
@pytest.mark.parametrize("kind", CACHE_IMPLEMENTATIONS)
@pytest.mark.parametrize("kernel", ["sdpa", "explicit", "flex"])
def test_every_kernel_answers_alike(kind: str, kernel: str) -> None:
    model = build_randomized_model(decoder_config(), torch.float32).use_kernel(kernel)
    prompts = prompts_for(model.config, 0, (1, 9, 4))
    asked = [SamplingParams(max_new_tokens=9, logprobs=0)] * 3
    for prompt, answer in zip(
        prompts,
        answers_of(model, prompts, asked, max_num_seqs=2, cache_implementation=kind, prefill_chunk_size=4),
        strict=True,
    ):
        check_against(said_by_full_pass(model, prompt, answer), answer, greedy=True)


@given(
    seed=SEEDS,
    kind=st.sampled_from(CACHE_IMPLEMENTATIONS),
    rows=st.integers(1, 6),
    chunk=st.integers(1, 9),
    data=st.data(),
)
@settings(max_examples=15)
def test_a_drawn_answer_does_not_depend_on_company(seed: int, kind: str, rows: int, chunk: int, data: Any) -> None:
    model = build_randomized_model(decoder_config(), torch.float64, seed)
    prompts = prompts_for(model.config, seed, (1, 5, 3, 7, 2, 6))
    asked = [
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
    together = answers_of(model, prompts, asked, max_num_seqs=rows, cache_implementation=kind, prefill_chunk_size=chunk)
    for number, answer in enumerate(together):
        engine = engine_for(model, prompts, max_num_seqs=1, cache_implementation="full", prefill_chunk_size=9)
        ticket = engine.submit(prompts[number], asked[number], seed=number)
        engine.run()
        alone = ticket.result()
        assert (answer.tokens, answer.finish_reason, answer.stop_reason) == (
            alone.tokens,
            alone.finish_reason,
            alone.stop_reason,
        )
        assert answer.logprobs == pytest.approx(alone.logprobs, abs=1e-5)


@pytest.mark.parametrize("kind", ["full", "paged"])
@pytest.mark.parametrize("chunk", [1, 3, 64])
@torch.no_grad()
def test_longrope_is_the_full_pass_across_its_turn(kind: str, chunk: int) -> None:
    """Before, at and past the turn, and from one side to the other: each token is that of a pass over all before it."""
    scaling = c.LongRope(
        short_factors=(1.0, 1.2, 1.3, 1.5), long_factors=(3.0, 4.0, 5.0, 6.0), original_length=8, attention_factor=1.1
    )
    model = build_randomized_model(decoder_config(c.Rope(scaling=scaling)), torch.float64)
    prompts = prompts_for(model.config, 0, (1, 6, 7, 8, 9, 14))
    asked = [SamplingParams(max_new_tokens=10, logprobs=0)] * len(prompts)
    for prompt, answer in zip(
        prompts,
        answers_of(model, prompts, asked, max_num_seqs=4, cache_implementation=kind, prefill_chunk_size=chunk),
        strict=True,
    ):
        texts = [prompt + answer.tokens[:i] for i in range(10)]
        said = torch.stack([model(torch.tensor([text]))[0, -1] for text in texts]).float().log_softmax(-1)
        check_against(said, answer, greedy=True)


def test_beams_stay_on_one_side_of_longropes_turn() -> None:
    scaling = c.LongRope(
        short_factors=(1.0, 1.2, 1.3, 1.5), long_factors=(3.0, 4.0, 5.0, 6.0), original_length=8, attention_factor=1.1
    )
    model = build_randomized_model(decoder_config(c.Rope(scaling=scaling)), torch.float64)
    with pytest.raises(InputError, match=r"beams of up to 9 tokens would grow past 8, .*; ask for 6 tokens at most"):
        generate(model, [1, 2, 3], max_new_tokens=7, beams=2)
    for prompt, most in (([1, 2, 3], 6), ([1] * 8, 1), ([1] * 9, 9)):
        assert len(generate(model, prompt, max_new_tokens=most, beams=2)[0].tokens) == most


@pytest.mark.parametrize("kind", ["full", "paged"])
@torch.no_grad()
def test_dynamic_scaling_goes_by_the_whole_prompt(kind: str) -> None:
    """However it is cut and whoever reads beside it; later tokens are turned as they come."""
    model = build_randomized_model(
        decoder_config(c.Rope(scaling=c.DynamicNTK(factor=4.0, original_length=8))), torch.float64
    )
    prompts = prompts_for(model.config, 0, (5, 14, 8, 9, 20))
    asked = [SamplingParams(max_new_tokens=8, logprobs=0)] * len(prompts)
    how = {"cache_implementation": kind, "max_model_len": 32}
    together = answers_of(model, prompts, asked, max_num_seqs=3, prefill_chunk_size=3, **how)
    for prompt, answer in zip(prompts, together, strict=True):
        (alone,) = answers_of(model, [prompt], asked[:1], max_num_seqs=1, prefill_chunk_size=64, **how)
        assert answer.tokens == alone.tokens
        assert answer.logprobs == pytest.approx(alone.logprobs, abs=1e-6)
        cache = model.new_cache(1, 32)
        logits = [model(torch.tensor([prompt]), cache=cache)[0, -1]]
        logits += [model(torch.tensor([[token]]), cache=cache)[0, -1] for token in answer.tokens[:-1]]
        check_against(torch.stack(logits).float().log_softmax(-1), answer, greedy=True)


def test_int8_is_the_same_in_every_kind_and_near_the_full_precision() -> None:
    model = build_randomized_model(decoder_config(), torch.float64)
    prompts = prompts_for(model.config, 3, (1, 5, 11, 7))
    asked = [SamplingParams(max_new_tokens=20, logprobs=0, temperature=1.0)] * 4
    how: dict[str, Any] = {
        "max_num_seqs": 2,
        "prefill_chunk_size": 4,
        "max_model_len": 80,
        "kv_cache_dtype": torch.int8,
    }
    first, *others = (
        answers_of(model, prompts, asked, cache_implementation=kind, **how) for kind in CACHE_IMPLEMENTATIONS
    )
    for other in others:
        for a, b in zip(first, other, strict=True):
            assert a.tokens == b.tokens
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-9)
    for prompt, answer in zip(prompts, first, strict=True):
        said = said_by_full_pass(model, prompt, answer).gather(-1, torch.tensor(answer.tokens)[:, None])[:, 0]
        assert 1e-4 < (said - torch.tensor(answer.logprobs)).abs().mean() < 0.15  # int8 is there, and is close


@pytest.mark.parametrize("kind", CACHE_IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [None, torch.int8])
@pytest.mark.parametrize("form", ["decoder", "encoder-decoder"])
def test_a_plan_knows_what_its_cache_takes(kind: str, dtype: torch.dtype | None, form: str) -> None:
    config = decoder_config()
    if form == "encoder-decoder":
        stack = config.stacks["decoder"]
        blocks = tuple(
            c.CrossBlock(attention=b.attention, ffn=b.ffn, cross=c.Cross(heads=4, kv_heads=1)) for b in stack.blocks
        )
        kin = c.CrossStack(layers=2, block=blocks)
        config = c.EncoderDecoder(vocab_size=53, d_model=32, encoder=stack, decoder=kin)
    model = build(config, seed=0)
    for context in (20, 200):
        how: dict[str, Any] = {
            "cache_implementation": kind,
            "kv_cache_dtype": dtype,
            "max_model_len": context,
            "prefill_chunk_size": 7,
            "decoder_start_token_id": 0,
        }
        plan = EngineConfig(model, max_num_seqs=3, max_source_len=9, **how)
        assert plan.cache_bytes == plan.build_cache().num_bytes
        if kind == "paged":
            some = EngineConfig(
                model,
                max_num_seqs=3,
                max_source_len=9,
                kv_cache_memory_bytes=plan.bytes_for_slots(context) * 2.5,
                **how,
            )
            assert some.cache_bytes == some.build_cache().num_bytes < plan.cache_bytes
            assert some.bytes_for_slots(some.page_size) * (some.num_pages() + 1) <= some.kv_cache_memory_bytes


# Through `generate`


def test_answers_end_where_the_files_say() -> None:
    model = build_randomized_model(decoder_config(), torch.float32)
    prompt = [5, 6, 7, 8]
    assert len(generate(InMemoryCheckpoint(model, {"max_length": 10}), prompt)[0].tokens) == 6  # with the prompt
    assert len(generate(InMemoryCheckpoint(model, {"max_length": 10, "max_new_tokens": 3}), prompt)[0].tokens) == 3
    assert len(generate(InMemoryCheckpoint(model, {"max_length": 10}), prompt, max_new_tokens=8)[0].tokens) == 8
    assert len(generate(model, prompt)[0].tokens) == 256
    assert len(generate(model, prompt, min_new_tokens=260)[0].tokens) == 260  # no limit that nobody asked for is below
    (free,) = generate(model, prompt, max_new_tokens=12)
    (ended,) = generate(InMemoryCheckpoint(model, {"eos_token_id": [free.tokens[4], 999]}), prompt)
    assert ended.tokens == free.tokens[: free.tokens.index(free.tokens[4]) + 1]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", free.tokens[4])
    (on,) = generate(
        InMemoryCheckpoint(model, {"eos_token_id": [free.tokens[4], 999], "max_length": 16, "min_length": 16}), prompt
    )
    assert len(on.tokens) == 12
    assert free.tokens[4] not in on.tokens[:-1]
    assert len(generate(model, prompt, max_model_len=9)[0].tokens) == 5  # the context is of prompt and answer


def test_a_first_and_a_last_token_are_the_files() -> None:
    model = build_translator()
    files = {"decoder_start_token_id": 2, "forced_bos_token_id": 9, "forced_eos_token_id": 3, "eos_token_id": 3}
    (answer,) = generate(InMemoryCheckpoint(model, files), [4, 5], max_new_tokens=6, logprobs=1, ignore_eos=True)
    assert (answer.tokens[0], answer.tokens[-1], len(answer.tokens)) == (9, 3, 6)
    assert answer.finish_reason == "length"
    assert len(answer.logprobs or []) == len(answer.top_logprobs or []) == 6
    (short,) = generate(InMemoryCheckpoint(model, files), [4, 5], max_new_tokens=1)
    assert (short.tokens, short.finish_reason) == ([9], "length")
    (ended,) = generate(InMemoryCheckpoint(model, files | {"eos_token_id": 9}), [4, 5])
    assert (ended.tokens, ended.finish_reason) == ([9], "stop")


def test_rules_about_sequences_are_greedy_with_one_beam() -> None:
    """With rules that never bite, the answer is the greedy one; with rules that do, no sequence comes twice."""
    model = build_translator()
    prompts = [[4, 5, 6], [7], [8, 9, 10, 11, 12]]
    files = {"decoder_start_token_id": 2, "eos_token_id": 3, "length_penalty": -2.0}
    greedy = generate(InMemoryCheckpoint(model, files), prompts, max_new_tokens=20)
    ruled = generate(InMemoryCheckpoint(model, files | {"no_repeat_ngram_size": 30}), prompts, max_new_tokens=20)
    assert [answer.tokens for answer in ruled] == [answer.tokens for answer in greedy]
    assert [answer.finish_reason for answer in ruled] == [answer.finish_reason for answer in greedy]
    assert [
        answer.tokens for answer in generate(InMemoryCheckpoint(model, files), prompts, max_new_tokens=20, beams=1)
    ] == [answer.tokens for answer in greedy]
    for answer in generate(InMemoryCheckpoint(model, files | {"no_repeat_ngram_size": 2}), prompts, max_new_tokens=20):
        pairs = list(zip(answer.tokens, answer.tokens[1:], strict=False))
        assert len(pairs) == len({*pairs})


@pytest.mark.parametrize("n", [1, 3])
def test_prompts_searched_together_are_searched_alone(n: int) -> None:
    model = build_randomized_model(decoder_config(), torch.float64)
    prompts = prompts_for(model.config, 0, (3, 9, 1, 5, 5, 2))
    files = {"max_length": 16, "eos_token_id": 7}  # the limit goes by the prompt's length
    together = generate(InMemoryCheckpoint(model, files), prompts, beams=3, n=n)
    alone = [
        answer for prompt in prompts for answer in generate(InMemoryCheckpoint(model, files), prompt, beams=3, n=n)
    ]
    assert [answer.tokens for answer in together] == [answer.tokens for answer in alone]
    assert [answer.score for answer in together] == pytest.approx([answer.score for answer in alone])
    assert [answer.prompt_tokens for answer in together] == [len(prompt) for prompt in prompts for _ in range(n)]


@pytest.mark.parametrize("ends", [{}, {"eos_token_id": 257, "forced_eos_token_id": 257}])
def test_a_beam_that_is_cut_has_the_text_of_all_its_tokens(ends: dict[str, int]) -> None:
    tokenizer = byte_tokenizer()
    for model in (
        build_randomized_model(decoder_config(vocab_size=tokenizer.vocab_size)),
        build_randomized_model(translator_config(tokenizer.vocab_size)),
    ):
        source = InMemoryCheckpoint(model, {"decoder_start_token_id": 256} | ends, tokenizer=tokenizer)
        for answer in generate(source, "ab", beams=3, n=3, max_new_tokens=5, suppress_tokens=range(128, 256)):
            assert answer.finish_reason == "length" or answer.tokens[-1] == 257
            assert answer.text == tokenizer.decode(answer.tokens)


@pytest.mark.parametrize("beams", [None, 2])
def test_pieces_are_the_answers(beams: int | None) -> None:
    tokenizer = byte_tokenizer()
    model = build_randomized_model(decoder_config(vocab_size=tokenizer.vocab_size), torch.float64)
    source = InMemoryCheckpoint(model, tokenizer=tokenizer)
    heard: dict[int, list[CompletionChunk]] = {}
    drawn: dict[str, Any] = {"n": 2, "temperature": 1.0, "seed": 5} if beams is None else {"beams": beams}
    answers = generate(
        source,
        ["one", "three"],
        max_new_tokens=9,
        on_chunk=lambda i, piece: heard.setdefault(i, []).append(piece),
        **drawn,
    )
    assert [[t for piece in heard[i] for t in piece.tokens] for i in range(len(answers))] == [a.tokens for a in answers]
    assert ["".join(piece.text for piece in heard[i]) for i in range(len(answers))] == [a.text for a in answers]
    assert answers == generate(source, ["one", "three"], max_new_tokens=9, **drawn)
    if beams is None:
        assert len(heard[0]) == 9

        def enough(number: int, piece: CompletionChunk) -> None:
            raise KeyError("enough")

        with pytest.raises(KeyError, match="enough"):
            generate(source, "one", on_chunk=enough)


def test_a_beam_that_is_cut_keeps_its_last_word() -> None:
    tokenizer = byte_tokenizer()
    source = InMemoryCheckpoint(
        build_randomized_model(decoder_config(vocab_size=tokenizer.vocab_size), torch.float64), tokenizer=tokenizer
    )
    how: Any = {"max_new_tokens": 9, "beams": 2, "suppress_tokens": range(128, 259)}
    (answer,) = generate(source, "one", **how)
    assert (answer.text, answer.finish_reason) == (tokenizer.decode(answer.tokens), "length")
    end = str(answer.text)[-3:]
    (ended,) = generate(source, "one", stop=end, **how)
    assert (ended.text, ended.finish_reason, ended.stop_reason) == (str(answer.text)[:-3], "stop", end)


def test_a_model_in_training_answers_without_dropout() -> None:
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
        answers_of(model, [[1, 2, 3]], [SamplingParams(max_new_tokens=20)], max_model_len=23)[0].tokens
        == expected[0].tokens
    )
    assert model.training
    assert not model.stacks["decoder"].final_norm.training


@pytest.mark.unchecked
@pytest.mark.parametrize("how", [{}, {"draft_model": "ngram"}, {"weight_bits": 8}])
def test_a_cache_goes_with_the_call_that_made_it(how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be most of a device's memory, which the next call counts on."""
    made = []
    plain = EngineConfig.build_cache

    def watched(plan: EngineConfig) -> Any:
        cache = plain(plan)
        made.append(weakref.ref(cache))
        return cache

    monkeypatch.setattr(EngineConfig, "build_cache", watched)
    model = build_randomized_model(decoder_config(), torch.float32)
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):  # PyTorch holds on to the first who uses an operator
            made.clear()
            generate(model, [1, 2, 3], max_new_tokens=3, **how)
        assert [each() for each in made] == [None]
    finally:
        gc.enable()


def test_an_engine_made_in_inference_mode_works_outside_of_it() -> None:
    model = build_randomized_model(decoder_config(), torch.float64)
    asked = SamplingParams(max_new_tokens=5, repetition_penalty=1.1, suppress_tokens=[3])
    (expected,) = answers_of(model, [[1, 2, 3]], [asked])
    with torch.inference_mode():
        engine = engine_for(model, [[1, 2, 3]])
        first = engine.submit([1, 2, 3], asked, seed=0)
        engine.run()
    with engine.start():
        assert engine.submit([1, 2, 3], asked, seed=0).result(60).tokens == expected.tokens
    assert first.result().tokens == expected.tokens


def test_seeds_and_stops() -> None:
    tokenizer = byte_tokenizer()
    model = build_randomized_model(decoder_config(vocab_size=tokenizer.vocab_size), torch.float64)
    source = InMemoryCheckpoint(model, tokenizer=tokenizer)
    free = generate(source, ["ab", "cd"], max_new_tokens=30, temperature=1.0, seed=3, n=3)
    assert len({tuple(answer.tokens) for answer in free}) == 6
    assert generate(source, "cd", max_new_tokens=30, temperature=1.0, seed=3) == [free[3]]
    again = generate(source, "cd", max_new_tokens=30, temperature=1.0, seed=free[5].seed)
    assert again == [free[5]]
    text = next(a for a in free if a.text and len(a.text) > 4)
    word = (text.text or "")[2:4]
    which = free.index(text) // 3
    (cut,) = generate(source, ["ab", "cd"][which], max_new_tokens=30, temperature=1.0, seed=text.seed, stop=[word])
    assert cut.stop_reason == word
    assert cut.finish_reason == "stop"
    assert cut.text == (text.text or "")[: (text.text or "").index(word)]
    assert len(cut.tokens) <= len(text.tokens)


def test_filters_without_a_temperature_draw() -> None:
    """Which they had nothing to do with otherwise; who says 0 means the likeliest token."""
    model = build_randomized_model(decoder_config(c.NoPosition()), torch.float32)
    drawn = generate(model, [[1, 2]], max_new_tokens=20, top_k=5, seed=1)[0].tokens
    assert drawn == generate(model, [[1, 2]], max_new_tokens=20, top_k=5, seed=1, temperature=1.0)[0].tokens
    likeliest = generate(model, [[1, 2]], max_new_tokens=20)[0].tokens
    assert likeliest == generate(model, [[1, 2]], max_new_tokens=20, top_k=5, temperature=0.0)[0].tokens
    assert likeliest != drawn


@pytest.mark.parametrize("bits", [16, 8])
def test_packed_steps_of_a_model_in_training_have_no_dropout(bits: int) -> None:
    config = decoder_config()
    stack = config.decoder
    blocks = tuple(block.replace(attention=block.attention.replace(dropout=0.5)) for block in stack.blocks)
    model = build_randomized_model(
        config.replace(decoder=stack.replace(block=blocks, final_dropout=0.5)), torch.float32
    )
    expected = generate(model.eval(), [[1, 2, 3]], max_new_tokens=12, weight_bits=bits)[0].tokens
    assert generate(model.train(), [[1, 2, 3]], max_new_tokens=12, weight_bits=bits)[0].tokens == expected
    assert model.training
