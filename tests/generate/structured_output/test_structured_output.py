"""Structured output: completions match their schema, regex, choice or grammar in all ways of decoding."""

import json
import re
import sys
from typing import Any

import jsonschema
import pydantic
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.config_strategies import build_randomized_model
from support.generation import InMemoryCheckpoint, decoder_config, translator_config
from support.tokenizer_files import CORPUS
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from cutaway.errors import InputError
from cutaway.generate import RequestGroup, generate
from cutaway.generate.engine.engine import Engine
from cutaway.generate.generation_config import GenerationConfig
from cutaway.generate.sampling.sampling_params import SamplingParams, build_sampling_params
from cutaway.generate.structured_output.constraint import Constraint, bitmask_width
from cutaway.generate.structured_output.grammar import GrammarCompiler, get_grammar_compiler
from cutaway.tokenizer import Tokenizer, byte_tokenizer, train_bpe

TOKENIZER = train_bpe(CORPUS, 420)
assert TOKENIZER.eos_token_id is not None
SIZE = TOKENIZER.vocab_size + 9  # a padded vocabulary
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "é"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
REGEX = r"[a-c]{2,4}-\d+"
CHOICE = ["yes", "yesterday", "né", "😀"]
GRAMMAR = 'start: "[" item ("," item)? "]"\nitem: /[0-9]/ | start'
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.5, "top_k": 40, "seed": 3, "n": 3},
    "penalties": {"temperature": 1.0, "seed": 4, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    "beams": {"beams": 3, "n": 2},
    "ngram": {"draft_model": "ngram", "num_draft_tokens": 5},
    "ngram sampled": {"draft_model": "ngram", "num_draft_tokens": 3, "temperature": 1.0, "seed": 5, "n": 3},
    "paged": {"cache_implementation": "paged", "temperature": 1.0, "seed": 6},
}


def build_checkpoint(seed: int = 0) -> InMemoryCheckpoint:
    model = build_randomized_model(decoder_config(vocab_size=SIZE), torch.float32, seed)
    return InMemoryCheckpoint(model, {"eos_token_id": TOKENIZER.eos_token_id}, tokenizer=TOKENIZER)


CHECKPOINT = build_checkpoint()


def assert_matches(text: str, constraint: dict[str, Any]) -> None:
    match constraint:
        case {"schema": schema}:
            jsonschema.validate(json.loads(text), schema)
        case {"regex": pattern}:
            assert re.fullmatch(pattern, text)
        case {"choice": choices}:
            assert text in choices
        case {"grammar": _}:
            assert set(re.sub(r"\[\d(,\d)?\]", "5", re.sub(r"\[\d(,\d)?\]", "5", text))) <= set("0123456789[],")
            json.loads(text)
        case _:
            raise AssertionError(constraint)


@pytest.mark.sample(10)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("constraint", [{"schema": SCHEMA}, {"regex": REGEX}, {"choice": CHOICE}, {"grammar": GRAMMAR}])
def test_completions_match(way: str, constraint: dict[str, Any]) -> None:
    completions = generate(CHECKPOINT, ["One", "two two two"], max_new_tokens=120, **WAYS[way], **constraint)
    assert len(completions) == 2 * WAYS[way].get("n", 1)
    finished = [completion for completion in completions if completion.finish_reason == "stop"]
    assert finished or constraint in ({"grammar": GRAMMAR}, {"regex": REGEX})  # these allow endless completions
    for completion in finished:
        assert completion.text is not None
        assert_matches(completion.text, constraint)


def test_without_constraint_rows_are_unchanged() -> None:
    """A batch with and without grammars ≡ each request alone, and streaming ≡ the completion."""
    from cutaway.generate.engine.config import build_engine_config

    config = build_engine_config(
        CHECKPOINT.model, GenerationConfig(eos_token_id=(TOKENIZER.eos_token_id,)), max_num_seqs=5, max_model_len=200
    )
    params = [
        build_sampling_params({"max_new_tokens": 60, "temperature": 1.0, **constraint})
        for constraint in ({}, {"schema": SCHEMA}, {"choice": CHOICE}, {"logprobs": 2}, {"regex": REGEX, "logprobs": 2})
    ]

    def run(indices: list[int], *, asynchronous: bool) -> list[Any]:
        engine = Engine(config, tokenizer=TOKENIZER)
        engine.async_scheduling = asynchronous  # as on a GPU: the previous step's tokens are pending
        requests = [engine.submit(TOKENIZER.encode("Hello"), params[i], seed=i) for i in indices]
        engine.run()
        for request in requests:
            assert "".join(chunk.text for chunk in request.stream()) == request.result().text
        return [request.result() for request in requests]

    alone = [run([i], asynchronous=False)[0] for i in range(5)]
    for asynchronous in (False, True):
        for together, single in zip(run([0, 1, 2, 3, 4], asynchronous=asynchronous), alone, strict=True):
            assert (together.tokens, together.text, together.finish_reason) == (
                single.tokens,
                single.text,
                single.finish_reason,
            )
            if single.logprobs is not None:
                assert together.logprobs == pytest.approx(single.logprobs, abs=1e-4)


@pytest.mark.parametrize("constraint", [{"schema": SCHEMA}, {"regex": REGEX}, {"choice": CHOICE}])
def test_speculation_and_one_beam_give_the_greedy_completion(constraint: dict[str, Any]) -> None:
    greedy = generate(CHECKPOINT, "abc abc abc", max_new_tokens=60, **constraint)
    draft = build_checkpoint(1)
    for way in ({"draft_model": "ngram"}, {"draft_model": draft, "num_draft_tokens": 4}, {"beams": 1}):
        other = generate(CHECKPOINT, "abc abc abc", max_new_tokens=60, **constraint, **way)  # type: ignore[arg-type]
        assert [(c.tokens, c.text, c.finish_reason) for c in other] == [
            (c.tokens, c.text, c.finish_reason) for c in greedy
        ]


def allowed_tokens(compiler: GrammarCompiler, constraint: Constraint, prefix: list[int]) -> set[int]:
    grammar = compiler.compile(constraint)
    for position, token in enumerate(prefix):
        grammar.accept(token, position)
    assert grammar.error is None
    bitmask = torch.zeros(bitmask_width(SIZE), dtype=torch.int32)
    grammar.fill_bitmask(bitmask)
    return {i for i in range(SIZE) if bitmask[i // 32].item() >> (i % 32) & 1}


@given(choices=st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=4), data=st.data())
def test_allowed_tokens_are_those_that_continue_a_choice(choices: list[str], data: st.DataObject) -> None:
    """The bitmask ≡ a search over all tokens by brute force, after any prefix of a choice."""
    compiler = get_grammar_compiler(TOKENIZER, SIZE, {TOKENIZER.eos_token_id or 0})
    targets = [choice.encode() for choice in choices]
    ids = TOKENIZER.encode(data.draw(st.sampled_from(choices)), add_special_tokens=False)
    prefix = ids[: data.draw(st.integers(0, len(ids) - 1))]
    done = b"".join(compiler.bytes_of_token[i] for i in prefix)
    expected = {
        i for i, token in compiler.bytes_of_token.items() if any(target.startswith(done + token) for target in targets)
    }
    expected |= {TOKENIZER.eos_token_id or 0} if done in targets else set()
    params = SamplingParams(choice=choices)
    assert params.constraint is not None
    allowed = allowed_tokens(compiler, params.constraint, prefix)
    if len({compiler.bytes_of_token.get(token, b"")[:1] for token in expected}) > 1:
        assert allowed == expected
    else:  # the next byte is certain, so the next token is that of the tokenizer
        assert allowed
        assert allowed <= expected


def test_draft_bitmasks_are_those_after_each_draft_token() -> None:
    compiler = get_grammar_compiler(TOKENIZER, SIZE, {TOKENIZER.eos_token_id or 0})
    constraint = Constraint("regex", r"ab\d\d")
    draft = TOKENIZER.encode("ab12", add_special_tokens=False)
    for tokens in (draft, [*draft[:1], 0, *draft[1:]]):
        grammar = compiler.compile(constraint)
        rows = torch.zeros(len(tokens) + 1, bitmask_width(SIZE), dtype=torch.int32)
        grammar.fill_draft_bitmasks(rows, tokens)
        assert not grammar.is_finished
        grammar.accept(draft[0], 0)  # the drafts left the position unchanged
        assert grammar.error is None
        reference = compiler.compile(constraint)
        for position, (row, token) in enumerate(zip(rows, tokens, strict=False)):
            expected = torch.zeros_like(row)
            reference.fill_bitmask(expected)
            assert torch.equal(row, expected)
            reference.accept(token, position)
            if reference.error is not None:
                break


def test_encoder_decoder_and_pydantic_model() -> None:
    class Answer(pydantic.BaseModel):
        ok: bool

    model = build_randomized_model(translator_config(vocab_size=SIZE), torch.float32)
    bos = min(TOKENIZER.all_special_ids - {TOKENIZER.eos_token_id or 0})  # a special token is not part of the text
    config = {"eos_token_id": TOKENIZER.eos_token_id, "decoder_start_token_id": 0, "forced_bos_token_id": bos}
    for way in ({}, {"beams": 2}):
        (completion,) = generate(
            InMemoryCheckpoint(model, config, tokenizer=TOKENIZER), "x", max_new_tokens=60, schema=Answer, **way
        )
        if completion.finish_reason == "stop":
            Answer.model_validate_json(completion.text or "")


def test_a_model_without_eos_token_stops_at_the_end_of_the_grammar() -> None:
    checkpoint = InMemoryCheckpoint(CHECKPOINT.model, tokenizer=train_bpe(CORPUS, 410, special_tokens=()))
    (completion,) = generate(checkpoint, "x", choice=["yes", "no"], max_new_tokens=20)
    assert (completion.text, completion.finish_reason) in {("yes", "stop"), ("no", "stop")}


def test_a_vocabulary_that_cannot_write_the_grammar_is_an_error() -> None:
    words = Backend(models.WordLevel({"a": 0, "b": 1, "<unk>": 2}, unk_token="<unk>"))
    words.decoder = decoders.Fuse()
    checkpoint = InMemoryCheckpoint(CHECKPOINT.model, tokenizer=Tokenizer(words))
    with pytest.raises(InputError, match=r"its grammar .no token of the vocabulary can come next"):
        generate(checkpoint, [[0]], regex="ab{3}c", max_new_tokens=20)


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        ({"schema": {"type": "nothing"}}, "schema cannot be used .*nothing"),
        ({"schema": {"allOf": [{"type": "string"}, {"type": "integer"}]}}, "schema cannot be used .*[Uu]nsatisf"),
        ({"schema": "{"}, "schema is not JSON"),
        ({"schema": [1]}, "schema is a list; pass a JSON schema"),
        ({"schema": {"enum": [float("nan")]}}, "schema cannot be written as JSON"),
        ({"schema": {"description": "x" * 300_000}}, "the limit is 256 Ki"),
        ({"schema": {"$ref": "#"}}, "schema cannot be used"),
        ({"schema": {"$ref": "http://example.com/x"}}, "schema cannot be used .*does not fetch"),
        ({"schema": {"type": "string", "pattern": "(?=a)b"}}, "schema cannot be used"),
        ({"schema": {"uniqueItems": True, "x-guidance": {"lenient": True}}}, "schema cannot be used .*uniqueItems"),
        ({"regex": "a("}, "regex cannot be used .unclosed group.; change it"),
        ({"regex": "(" * 5000 + "a" + ")" * 5000}, "regex cannot be used"),
        ({"regex": ""}, "regex is ''; pass a string that is not empty"),
        ({"choice": []}, "choice has 0 strings"),
        ({"choice": "yes"}, "choice is 'yes'; pass a list of strings"),
        ({"grammar": "start: other"}, "grammar cannot be used"),
        ({"regex": "a", "choice": ["a"]}, "regex and choice are both set"),
        ({"guided_json": {}}, "did you mean schema"),
    ],
)
def test_refusals(constraint: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        generate(CHECKPOINT, "x", max_new_tokens=4, **constraint)
    assert len(str(caught.value)) < 600
    assert "\n" not in str(caught.value)


def test_a_cyclic_schema_is_refused() -> None:
    schema: dict[str, Any] = {"type": "object"}
    schema["properties"] = {"a": schema}
    with pytest.raises(InputError, match="without cycles"):
        generate(CHECKPOINT, "x", schema=schema)


def test_without_tokenizer_or_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="there is no tokenizer"):
        generate(CHECKPOINT.model, [[1]], regex="a")
    monkeypatch.setitem(sys.modules, "llguidance", None)
    fresh = InMemoryCheckpoint(CHECKPOINT.model, tokenizer=train_bpe(CORPUS, 300))
    with pytest.raises(InputError, match=r"pip install 'cutaway\[structured\]'"):
        generate(fresh, "x", regex="a")


def test_a_grammar_that_grows_too_large_is_an_error() -> None:
    byte_checkpoint = InMemoryCheckpoint(CHECKPOINT.model, tokenizer=byte_tokenizer(special_tokens=()))
    with pytest.raises(InputError, match=r"cannot follow its grammar .*too many expressions.*simplify it"):
        generate(byte_checkpoint, "x", regex="((a{1,1000}){1,1000}){1,1000}", max_new_tokens=100)


def test_character_classes_are_ascii() -> None:
    patterns = {r"^[\d.]+\\d\d[^\w]\[\w\]$": r"^[0-9.]+\\d[0-9][^A-Za-z0-9_]\[[A-Za-z0-9_]\]$"}
    for pattern, expected in patterns.items():
        assert json.loads(str(SamplingParams(schema={"pattern": pattern}).schema)) == {"pattern": expected}
        assert SamplingParams(regex=pattern).regex == expected


def test_annotations_are_not_constraints() -> None:
    """An unknown format is an annotation, and 2.0 is an integer; names of properties and constants are kept."""
    schema = {
        "type": "array",
        "items": {"const": {"format": "x", "maxItems": 2.5}},
        "minItems": 1.0,
        "maxItems": 1.0,
        "format": "made-up",
        "$defs": {"format": {"format": "uuid"}},
    }
    normalized = json.loads(str(SamplingParams(schema=schema).schema))
    assert normalized == {
        "type": "array",
        "items": {"const": {"format": "x", "maxItems": 2.5}},
        "minItems": 1,
        "maxItems": 1,
        "$defs": {"format": {"format": "uuid"}},
    }
    assert type(normalized["minItems"]) is int
    (completion,) = generate(CHECKPOINT, "x", schema=schema, max_new_tokens=100)
    assert json.loads(completion.text or "") == [{"format": "x", "maxItems": 2.5}]


def test_required_text_has_the_tokens_of_the_tokenizer() -> None:
    """A text that the grammar requires is not spelled in single bytes."""
    text = "".join(CORPUS[0].split("\n")[:1])[:40]
    (completion,) = generate(CHECKPOINT, "x", choice=[text], max_new_tokens=100)
    assert completion.text == text
    assert completion.tokens == TOKENIZER.encode(text, add_special_tokens=False)


def test_rows_of_a_paused_group_keep_their_grammars() -> None:
    """Requests of a group with most of the rows skip steps, in which only the other rows have bitmasks."""
    from cutaway.generate.engine.config import build_engine_config

    generation_config = GenerationConfig(eos_token_id=(TOKENIZER.eos_token_id,))
    config = build_engine_config(CHECKPOINT.model, generation_config, max_num_seqs=11, max_model_len=200)
    constraints: list[dict[str, Any]] = [{"schema": SCHEMA}, {"regex": REGEX}, {"choice": CHOICE}, {}]

    def run(indices: range) -> list[Any]:
        engine, groups = Engine(config, tokenizer=TOKENIZER), [RequestGroup("a"), RequestGroup("b")]
        requests = [
            engine.submit(
                TOKENIZER.encode("Hello"),
                build_sampling_params({"max_new_tokens": 40, "temperature": 1.0, **constraints[i % 4]}),
                seed=i,
                group=groups[i >= 9],
            )
            for i in indices
        ]
        engine.run()
        return [request.result().tokens for request in requests]

    assert run(range(11)) == [tokens for i in range(11) for tokens in run(range(i, i + 1))]
