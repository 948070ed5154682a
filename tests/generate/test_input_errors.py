"""Invalid arguments of `generate` and `EngineConfig`: one-line errors, raised before any forward pass."""

from typing import Any

import numpy as np
import pytest
import torch
from support.config_strategies import build_randomized_model
from support.generation import InMemoryCheckpoint, build_translator, decoder_config

from cutaway import config as c
from cutaway.errors import CutawayError, InputError
from cutaway.generate import Engine, EngineConfig, EngineError, SamplingParams, generate
from cutaway.model import build
from cutaway.tokenizer import byte_tokenizer

pytestmark = pytest.mark.unchecked
TOKENIZER = byte_tokenizer()
MODEL = build_randomized_model(decoder_config(vocab_size=TOKENIZER.vocab_size), torch.float32)
WITH_TEXT = InMemoryCheckpoint(MODEL, tokenizer=TOKENIZER)
LEARNED = build(
    decoder_config(c.NoPosition()).replace(
        decoder=c.Stack(
            layers=1,
            embedding=c.Embedding(position=c.LearnedPosition(length=16)),
            block=c.Block(attention=c.MultiHead(heads=2, position=c.NoPosition()), ffn=c.Mlp()),
        )
    ),
    seed=0,
)
ENCODER = build(
    c.Encoder(
        vocab_size=9, d_model=8, encoder=c.Stack(layers=1, block=c.Block(attention=c.MultiHead(heads=2), ffn=c.Mlp()))
    ),
    seed=0,
)


class Unreadable(list[int]):
    """A list with a very long repr."""

    def __repr__(self) -> str:
        return "[…]" * 10_000


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([1], {"temperature": -1}, "temperature is -1; pass a number 0 .* or more"),
        ([1], {"temperature": float("nan")}, "temperature is nan"),
        ([1], {"temperature": "hot"}, "temperature is 'hot'"),
        ([1], {"temperature": None}, "temperature is None"),
        ([1], {"top_p": 0}, "top_p is 0; pass a number above 0"),
        ([1], {"top_p": 1.5}, "top_p is 1.5"),
        ([1], {"top_k": 0}, "top_k is 0"),
        ([1], {"top_k": 2.5}, "top_k is 2.5"),
        ([1], {"min_p": -0.1}, "min_p is -0.1"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens is 0; pass an integer, 1 or more"),
        ([1], {"max_new_tokens": "9"}, "max_new_tokens is '9'"),
        ([1], {"max_new_tokens": 4, "min_new_tokens": 5}, "min_new_tokens is 5, but max_new_tokens is"),
        ([1], {"seed": -1}, "seed is -1"),
        ([1], {"n": 0}, "n is 0"),
        ([1], {"n": True}, "n is True"),
        ([1], {"logprobs": 500}, "logprobs is 500"),
        ([1], {"suppress_tokens": [999]}, "suppress_tokens contains token 999; the vocabulary has ids 0 to"),
        ([1], {"stop_token_ids": [-1]}, "stop_token_ids contains -1"),
        ([1], {"stop_token_ids": "x"}, "stop_token_ids is 'x'"),
        ([1], {"logit_bias": [1]}, "logit_bias is"),
        ([1], {"stop": ["a"] * 100_000}, "stop has 100000 strings; pass at most"),
        ([1], {"stop": [""]}, "empty string"),
        ([1], {"stop": 5}, "stop is 5"),
        ([1], {"stop_token_ids": [1] * 100_000}, "stop_token_ids has 100000 entries"),
        ([1], {"temprature": 1}, "'temprature' is not a sampling parameter; did you mean temperature"),
        ([1], {"max_tokens": 1}, "did you mean max_new_tokens"),
        ([1], {"num_beams": 1}, "did you mean beams"),
        ([1], {"eos_token_id": 1}, "did you mean stop_token_ids"),
        ([1], {"xyzzy": 1}, "'xyzzy' is not a sampling parameter; use one of max_new_tokens, "),
        ([1], {"max_num_seqs": 0}, "max_num_seqs is 0; pass an integer, 1 or more"),
        ([1], {"max_num_seqs": 1.5}, "max_num_seqs is 1.5"),
        ([1], {"prefill_chunk_size": 0}, "prefill_chunk_size is 0"),
        ([1], {"max_model_len": 1}, "max_model_len is 1; pass an integer, 2 or more"),
        ([1], {"max_model_len": "all"}, "max_model_len is 'all'"),
        ([1], {"cache_implementation": "pages"}, "cache_implementation is 'pages'; use auto, full, ring, paged"),
        ([1], {"cache_implementation": None}, "cache_implementation is None"),
        ([1], {"kv_cache_dtype": torch.int32}, "kv_cache_dtype is torch.int32"),
        ([1], {"kv_cache_dtype": "int8"}, "kv_cache_dtype is 'int8'"),
        (
            [1],
            {"max_num_seqs": 10**6, "max_new_tokens": 10**9},
            "takes .* GiB, but only .* GiB are free; lower max_num_seqs or max_model_len",
        ),
        ([1], {"on_chunk": 5}, "on_chunk is a int"),
        ([1], {"beams": 0}, "beams is 0; pass an integer, 1 or more"),
        ([1], {"beams": "4"}, "beams is '4'"),
        ([1], {"beams": 2, "temperature": 1.0}, "temperature applies to sampling"),
        ([1], {"beams": 2, "presence_penalty": 1.2}, "presence_penalty applies to sampling"),
        ([1], {"beams": 2, "n": 3}, "n is 3, but num_beams is 2"),
        ([1], {"beams": 2, "cache_implementation": "ring"}, "beam search does not support cache_implementation"),
        ([1], {"beams": 2, "weight_bits": 8}, "beam search does not support weight_bits; leave it out"),
        ([1], {"beams": 2, "compile": True}, "beam search does not support compile"),
        (
            [1],
            {"beams": 2, "max_new_tokens": 10**9},
            "2 beams of 1000000001 tokens take .* GiB, but only .* are free; use",
        ),
        ([1], {"draft_model": "ngram", "weight_bits": 8}, "speculative decoding does not support weight_bits"),
        ([1], {"beams": 2, "length_penalty": "x"}, "length_penalty is 'x'"),
        ([1], {"length_penalty": 1.0}, "beams is not set; pass beams=4"),
        ([], {"temperature": -1}, "temperature is -1"),
        ([[]], {}, "the prompt is empty; pass at least one token"),
        ("", {}, "the prompt is empty"),
        ([[1], []], {}, "prompt 1: the prompt is empty"),
        ([[1], []], {"beams": 2}, "prompt 1: the prompt is empty"),
        ([[1], [2, 999]], {}, "prompt 1: the prompt holds the id 999; the vocabulary has ids 0 to"),
        ([-1], {}, "holds the id -1"),
        ([1, 2.5], {}, "holds the id 2.5"),
        ([1, True], {}, "holds the id True"),
        ([1, None], {}, "holds the id None"),
        ([1, "a"], {}, "holds the id 'a'"),
        ([[1], 3], {}, "prompt 1: the prompt is a int; pass a text, a list of token ids"),
        ([[1], None], {}, "prompt 1: the prompt is a NoneType"),
        ([[[1]]], {}, "holds the id \\[1\\]"),
        ([Unreadable([10**30])], {}, "holds the id 1000000"),
        (None, {}, "prompts is a NoneType"),
        (5, {}, "prompts is a int"),
        (b"abc", {}, "prompts is a bytes"),
        ({"role": "user"}, {}, "prompts is a dict"),
        (
            torch.ones(2, 3, dtype=torch.long),
            {},
            "a tensor with 2 dimensions; pass lists of token ids, without padding",
        ),
        (np.ones((2, 3), dtype=int), {}, "an? array with 2 dimensions"),
        (torch.tensor(3), {}, "prompts is a Tensor|the prompt"),
        (torch.tensor([0.5]), {}, "holds the id 0.5|prompts|the prompt"),
        (
            [1] * 50,
            {"max_model_len": 50},
            r"the prompt has 50 tokens, but .* together may have at most 50 \(max_model_len\); shorten the prompt",
        ),
        ([{"role": "user", "content": "hi"}], {}, "no chat template"),
        ([{"role": "user", "content": "hi"}, 3], {}, "no chat template|message"),
        (["fine", "half \ud800"], {}, "prompt 1: the text has an unpaired surrogate"),
    ],
)
def test_invalid_arguments_raise_one_line_errors(
    prompt: Any, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(MODEL), "hidden_states", None)  # arguments must be validated before any forward pass
    with pytest.raises(InputError, match=message) as raised:
        generate(WITH_TEXT, prompt, **options)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize(
    ("checkpoint", "prompt", "options", "message"),
    [
        (MODEL, "text", {}, "no tokenizer, so text cannot be encoded; pass lists of token ids"),
        (MODEL, [[1], "text"], {}, "prompt 1: this model has no tokenizer"),
        (MODEL, [1], {"stop": "x"}, "there is no tokenizer; pass stop_token_ids"),
        (MODEL, [1], {"stop": "x", "beams": 2}, "there is no tokenizer; pass stop_token_ids"),
        (ENCODER, [1], {}, "encoder-only, so it cannot generate; use fill_mask"),
        (ENCODER, [1], {"beams": 2}, "encoder-only, so it cannot generate"),
        (build(decoder_config(), device="meta"), [1], {}, "on the meta device"),
        (LEARNED, [1], {"max_model_len": 17}, "has 16 positions; lower max_model_len"),
        (LEARNED, [1] * 16, {}, "the prompt has 16 tokens, but .* at most 16 .max_model_len.; shorten"),
        (LEARNED, [1] * 99, {"beams": 2}, "the prompt has 99 tokens, but .* at most 16 .max_model_len.; shorten"),
        (
            InMemoryCheckpoint(build_translator(), {"decoder_start_token_id": 0, "num_beams": 3}),
            [1],
            {"draft_model": "ngram"},
            "beam search does not support draft_model; leave it out .*generation_config.num_beams .* is 3",
        ),
        ("gpt2", [1], {}, "checkpoint is a str; pass the result of ct.load"),
        (None, [1], {}, "checkpoint is a NoneType"),
        (build_translator(), [1], {}, "pass decoder_start_token_id"),
        (
            InMemoryCheckpoint(build_translator(), {"decoder_start_token_id": 99}),
            [1],
            {},
            "decoder_start_token_id is 99",
        ),
        (InMemoryCheckpoint(MODEL, {"eos_token_id": "x"}), [1], {}, "eos_token_id"),
    ],
)
def test_model_specific_errors(checkpoint: Any, prompt: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        generate(checkpoint, prompt, **options)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (WITH_TEXT, {}, "model is a InMemoryCheckpoint; pass a model, such as a checkpoint's .model"),
        (MODEL, {"eos_token_ids": 2}, "eos_token_ids is 2; pass a list of token ids"),
        (MODEL, {"eos_token_ids": [None]}, "eos_token_ids contains None; token ids are integers"),
    ],
)
def test_invalid_engine_config(model: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        EngineConfig(model, **options)


@pytest.mark.parametrize("seed", [-1, 2**63, 1.5, None, True])
def test_submit_validates_the_seed(seed: Any) -> None:
    with pytest.raises(InputError, match=r"seed is .*; pass an integer from 0"):
        Engine(EngineConfig(MODEL)).submit([1], SamplingParams(), seed=seed)


def test_token_ids_of_any_integer_type() -> None:
    expected = generate(MODEL, [5, 6, 7], max_new_tokens=4, seed=1)
    for prompt in (
        (5, 6, 7),
        range(5, 8),
        np.array([5, 6, 7]),
        np.array([5, 6, 7], dtype=np.uint8),
        [np.int64(5), np.int32(6), np.uint16(7)],
        torch.tensor([5, 6, 7]),
        [torch.tensor(5), 6, 7],
        [[5, 6, 7]],
        [np.array([5, 6, 7])],
        [torch.tensor([5, 6, 7], dtype=torch.int32)],
    ):
        completions = generate(MODEL, prompt, max_new_tokens=np.int64(4), seed=1, max_num_seqs=np.int64(2))
        assert completions == expected
        assert all(type(token) is int for token in completions[0].tokens)
    assert generate(MODEL, []) == []
    assert generate(MODEL, [], beams=2) == []
    from_text_and_ids = generate(WITH_TEXT, ["\x05\x06\x07", [5, 6, 7]], max_new_tokens=4, seed=1)
    assert [completion.tokens for completion in from_text_and_ids] == [expected[0].tokens] * 2


@pytest.mark.parametrize("beams", [None, 2])
def test_generation_config_tokens_outside_the_vocabulary_are_ignored(beams: int | None) -> None:
    (free,) = generate(MODEL, [1], max_new_tokens=3, beams=beams)
    generation_config = {
        "eos_token_id": [10**6],
        "suppress_tokens": [10**6, free.tokens[0]],
        "bad_words_ids": [[10**6], [1, 10**6]],
    }
    generation_config |= {"begin_suppress_tokens": [10**6]}
    (completion,) = generate(
        InMemoryCheckpoint(MODEL, generation_config), [1], max_new_tokens=3, min_new_tokens=2, beams=beams
    )
    assert len(completion.tokens) == 3
    assert free.tokens[0] not in completion.tokens


def test_nan_weights_raise_an_error_with_the_prompt_index() -> None:
    model = build_randomized_model(decoder_config(), torch.float32)
    with torch.no_grad():
        model.stacks["decoder"].embed.token.weight[7] = float("nan")
    with pytest.raises(EngineError, match="prompt 1: the logits for token 0 of the completion contain NaN"):
        generate(model, [[1], [7], [2]], max_new_tokens=3)
    with pytest.raises(CutawayError, match="contain NaN"):
        generate(model, [7], max_new_tokens=3, beams=2)


def test_num_seqs_is_reduced_to_fit_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    bytes_per_seq = EngineConfig(MODEL, max_num_seqs=1, max_model_len=20).cache_bytes
    expected = generate(MODEL, [[i] for i in range(9)], max_new_tokens=19, seed=1)
    monkeypatch.setattr("cutaway.generate.engine.config.free_memory", lambda device: 2.5 * bytes_per_seq)
    assert generate(MODEL, [[i] for i in range(9)], max_new_tokens=19, seed=1) == expected
    with pytest.raises(InputError, match="a full cache of 9 sequences of 20 tokens takes"):
        generate(MODEL, [[i] for i in range(9)], max_new_tokens=19, max_num_seqs=9, cache_implementation="full")


def test_kv_cache_memory_bytes_is_validated() -> None:
    with pytest.raises(InputError, match="too small for a sequence of 100 tokens; pass"):
        EngineConfig(MODEL, max_model_len=100, cache_implementation="paged", kv_cache_memory_bytes=1000)
    for memory in (0, -1, float("nan"), "1G", float("inf")):
        with pytest.raises(InputError, match="kv_cache_memory_bytes is"):
            EngineConfig(MODEL, cache_implementation="paged", kv_cache_memory_bytes=memory)  # type: ignore[arg-type]


def test_ring_cache_does_not_support_dynamic_rope() -> None:
    scaling = c.LongRope(short_factors=(1.0,) * 4, long_factors=(2.0,) * 4, original_length=8, attention_factor=1.0)
    model = build(decoder_config(c.Rope(scaling=scaling)), seed=0)
    with pytest.raises(InputError, match=r"needs all keys of a sequence over 8 tokens; .* or max_model_len=8"):
        generate(model, [1], max_new_tokens=9, cache_implementation="ring")
    assert len(generate(model, [1], max_new_tokens=7, cache_implementation="ring")[0].tokens) == 7
    assert EngineConfig(model, max_model_len=9).cache_implementation == "full"
    assert EngineConfig(model, max_model_len=8).cache_implementation == "ring"
