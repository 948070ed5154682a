"""Records of task heads: recognized keys, labels and problem types, hostile data."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cutaway.errors import InputError
from cutaway.evaluate.label_set import LabelError, LabelSet
from cutaway.train.data.documents import SkippedDocuments
from cutaway.train.data.label_discovery import discover_labels
from cutaway.train.data.records import InvalidRecordError, Record, read_records
from cutaway.train.data.task_data import find_labels
from cutaway.train.data.task_records import (
    ChoiceQuestion,
    TextPair,
    parse_choice_question,
    parse_labeled_text,
    parse_tagged_text,
    parse_text_pair,
)
from cutaway.train.recipe.schema import DataConfig, SourceConfig
from cutaway.train.recipe.task_objectives import ClassificationConfig, TokenClassificationConfig


def record(**fields: Any) -> Record:
    return Record(fields, "file line 1")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"text": "a", "label": "x"}, ("a", None, "x")),
        ({"review": "a", "sentiment": "pos"}, ("a", None, "pos")),
        ({"v1": "ham", "v2": "a"}, ("a", None, "ham")),
        ({"sentence1": "a", "sentence2": "b", "label": 1}, ("a", "b", 1)),
        ({"premise": "a", "hypothesis": "b", "label": None, "class": 2}, ("a", "b", 2)),
        ({"question": "a", "answer": "b", "label": 0}, ("a", "b", 0)),
        ({"question": "a", "label": "LOC"}, ("a", None, "LOC")),
        ({"text": "a", "labels": '["x", "y"]'}, ("a", None, ["x", "y"])),
        ({"sentence": "a", "score": 0.5}, ("a", None, 0.5)),
    ],
)
def test_labeled_texts(fields: dict[str, Any], expected: tuple[Any, ...]) -> None:
    parsed = parse_labeled_text(record(**fields))
    assert (parsed.text, parsed.pair, parsed.label) == expected


def test_columns_of_the_source() -> None:
    source = SourceConfig(path="x", text_column="Name", target_column="Survived")
    parsed = parse_labeled_text(Record({"Name": "a", "Survived": "1", "text": "b", "label": "2"}, "l", source))
    assert (parsed.text, parsed.label) == ("a", "1")
    with pytest.raises(InvalidRecordError, match="'Survived'"):
        parse_labeled_text(Record({"Name": "a"}, "l", source))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"text": "a"}, "no label"),
        ({"text": "a", "label": None}, "no label"),
        ({"text": "a", "label": " "}, "no label"),
        ({"text": " ", "label": "x"}, "empty text"),
        ({"text": 3, "label": "x"}, "invalid text"),
        ({"foo": "a", "label": "x"}, "no text"),
    ],
)
def test_invalid_labeled_texts(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRecordError) as error:
        parse_labeled_text(record(**fields))
    assert error.value.reason == reason


def test_words_with_tags() -> None:
    for tags in (["O", "B-X"], '["O", "B-X"]', "O B-X"):
        parsed = parse_tagged_text(record(tokens=["in", "Rome"], ner_tags=tags))
        assert (parsed.text, parsed.spans, parsed.tags) == ("in Rome", [(0, 2), (3, 7)], ["O", "B-X"])
    assert parse_tagged_text(record(words=["a", "b"], tags=[0, 3])).tags == ["0", "3"]


def test_entities_as_characters() -> None:
    entities = [{"start": 3, "end": 11, "label": "LOC"}, {"start": 16, "end": 19, "label": "PER"}]
    parsed = parse_tagged_text(record(text="In New York, so Bob!", entities=entities))
    words = ["In", "New", "York", ",", "so", "Bob", "!"]
    assert [parsed.text[start:end] for start, end in parsed.spans] == words
    assert parsed.tags == ["O", "B-LOC", "I-LOC", "O", "O", "B-PER", "O"]
    assert parse_tagged_text(record(text="Rome", label=[[0, 4, "LOC"]])).tags == ["B-LOC"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tokens": ["a", "b"], "tags": ["O"]}, "words and tags differ in number"),
        ({"tokens": ["a"], "tags": [["O"]]}, "invalid tags"),
        ({"tokens": [], "tags": []}, "empty text"),
        ({"text": "a", "entities": [[0, 5, "X"]]}, "invalid entity"),
        ({"tokens": ["a"]}, "no tags"),
    ],
)
def test_invalid_words_with_tags(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRecordError) as error:
        parse_tagged_text(record(**fields))
    assert error.value.reason == reason


@pytest.mark.parametrize(
    "fields",
    [
        {"question": "q", "choices": ["a", "b"], "label": 1},
        {"question": "q", "choices": '["a", "b"]', "answer": "B"},
        {"question": "q", "options": ["a", "b"], "answer": "b"},
        {"question": "q", "choices": {"text": ["a", "b"], "label": ["1", "2"]}, "answerKey": "2"},
        {"question": "q", "choices": {"text": ["a", "b"], "label": 5}, "answerKey": "B"},
    ],
)
def test_choices(fields: dict[str, Any]) -> None:
    assert parse_choice_question(record(**fields)) == ChoiceQuestion("q", ["a", "b"], 1)


def test_choices_of_swag() -> None:
    fields = {"sent1": "He sat.", "sent2": "She", "ending0": "ran", "ending1": "slept", "label": 0}
    assert parse_choice_question(record(**fields)) == ChoiceQuestion("He sat.", ["She ran", "She slept"], 0)


@pytest.mark.parametrize("answer", [2, -1, "C", "c", 0.5, None])
def test_invalid_answers(answer: object) -> None:
    with pytest.raises(InvalidRecordError):
        parse_choice_question(record(question="q", choices=["a", "b"], answer=answer))


def test_text_pairs() -> None:
    assert parse_text_pair(record(anchor="a", positive="b")) == TextPair(("a", "b"), None)
    assert parse_text_pair(record(anchor="a", positive="b", negative="c")) == TextPair(("a", "b", "c"), None)
    assert parse_text_pair(record(query="a", positive="b", negatives=["c", "d"])).texts == ("a", "b", "c", "d")
    assert parse_text_pair(record(sentence1="a", sentence2="b", score="0.5")) == TextPair(("a", "b"), 0.5)
    assert parse_text_pair(record(sentence1="a", sentence2="b")) == TextPair(("a", "b"), None)
    with pytest.raises(InvalidRecordError, match="invalid score"):
        parse_text_pair(record(sentence1="a", sentence2="b", score="high"))


def discover(*labels: Any, problem_type: Any = None) -> LabelSet:
    return discover_labels([(f"line {i}", label) for i, label in enumerate(labels)], problem_type)


@pytest.mark.parametrize(
    ("labels", "problem_type", "names"),
    [
        (["spam", "ham", "spam"], "single_label_classification", ("ham", "spam")),
        ([2, 10, 1], "single_label_classification", ("1", "2", "10")),
        (["2", "10", 1.0], "single_label_classification", ("1", "2", "10")),
        ([True, False], "single_label_classification", ("false", "true")),
        ([0.5, 1, 2.5], "regression", ()),
        (["0.5", "1"], "regression", ()),
        ([["a"], ["b", "a"], []], "multi_label_classification", ("a", "b")),
        ([[0, 2], [1]], "multi_label_classification", ("0", "1", "2")),
        ([[1, 0, 1], [0, 0, 1]], "multi_label_classification", ("0", "1", "2")),
    ],
)
def test_problem_type_follows_from_the_labels(labels: list[Any], problem_type: str, names: tuple[str, ...]) -> None:
    found = discover(*labels)
    assert (found.problem_type, found.names) == (problem_type, names)


def test_problem_type_can_be_set() -> None:
    assert discover(1, 2, 5, problem_type="regression") == LabelSet("regression", (), 1)
    assert discover([0.5, 1], [1, 2], problem_type="regression") == LabelSet("regression", (), 2)
    assert discover(0.5, 1.5, problem_type="single_label_classification").names == ("0.5", "1.5")


@pytest.mark.parametrize(
    ("labels", "problem_type", "message"),
    [
        ([], None, "no record has a label"),
        (["a", "a"], None, "all 2 labels are 'a'.*at least two classes"),
        (["a", 0.5], None, "different types: 'a' .line 0. and 0.5 .line 1."),
        (["a", ["a"]], None, "different types"),
        ([{"a": 1}], None, "line 0: the label is {'a': 1}"),
        ([[0.5], [1.5]], None, "set objective.problem_type = 'regression'"),
        (["a", "b"], "regression", "line 0: the label 'a' is not a number"),
        (["a", "b"], "multi_label_classification", "as a list"),
        ([["a"], ["b"]], "single_label_classification", "is a list"),
        ([[1, 2], [1]], "regression", "has 1 numbers, but the first one has 2"),
    ],
)
def test_hostile_labels(labels: list[Any], problem_type: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        discover(*labels, problem_type=problem_type)


def test_labels_are_encoded_as_numbers() -> None:
    classes = LabelSet("single_label_classification", ("ham", "spam"), 2)
    assert [int(classes.encode(label)[0]) for label in ("spam", "ham", 1, "0")] == [1, 0, 1, 0]
    ratings = LabelSet("single_label_classification", ("1", "2", "3"), 3)
    assert [int(ratings.encode(label)[0]) for label in (1, "3", 2.0)] == [0, 2, 1]
    several = LabelSet("multi_label_classification", ("a", "b", "c"), 3)
    np.testing.assert_array_equal(several.encode(["c", "a"]), [1, 0, 1])
    np.testing.assert_array_equal(several.encode([]), [0, 0, 0])
    hot = LabelSet("multi_label_classification", ("0", "1"), 2, is_multi_hot=True)
    np.testing.assert_array_equal(hot.encode([0, 1]), [0, 1])


@pytest.mark.parametrize(
    ("label_set", "label", "reason"),
    [
        (LabelSet("single_label_classification", ("a", "b"), 2), "c", "unknown label"),
        (LabelSet("single_label_classification", ("a", "b"), 2), 2, "unknown label"),
        (LabelSet("single_label_classification", ("1", "2"), 2), 0, "unknown label"),
        (LabelSet("single_label_classification", ("a", "b"), 2), float("nan"), "unknown label"),
        (LabelSet("single_label_classification", ("a", "b"), 2), 10**400, "unknown label"),
        (LabelSet("single_label_classification", ("a", "b"), 2), ["a"], "invalid label"),
        (LabelSet("multi_label_classification", ("a", "b"), 2, is_multi_hot=True), [[1], [0]], "invalid label"),
        (LabelSet("multi_label_classification", ("a", "b"), 2), "a", "invalid label"),
        (LabelSet("regression", (), 1), "many", "invalid label"),
        (LabelSet("regression", (), 2), 1.5, "invalid label"),
    ],
)
def test_labels_that_the_head_does_not_have(label_set: LabelSet, label: Any, reason: str) -> None:
    with pytest.raises(LabelError) as error:
        label_set.encode(label)
    assert error.value.reason == reason


def test_endings_are_in_the_order_of_their_numbers() -> None:
    fields = {f"ending{number}": f"choice {number}" for number in range(12)} | {"sent1": "He sat.", "label": 2}
    assert parse_choice_question(record(**fields)).choices == [f"choice {number}" for number in range(12)]


def test_csv_file_that_is_not_utf8_is_an_error(tmp_path: Path) -> None:
    """Its rows before the first other character are valid, and would be the only ones that are used."""
    rows = ["text,label", *(f"{'a' * 100} {i},{i % 2}" for i in range(1000)), "\xa35,1", "b,0"]
    path = tmp_path / "spam.csv"
    path.write_text("\n".join(rows), encoding="latin-1")
    with pytest.raises(InputError, match=r"is not UTF-8 .*0xa3.* iconv -f latin1 -t utf-8 spam\.csv"):
        list(read_records(SourceConfig(path=str(path)), SkippedDocuments()))


def test_csv_file_with_a_long_text(tmp_path: Path) -> None:
    path = tmp_path / "long.csv"
    path.write_text(f"text,label\n{'a ' * 200_000},1\nb,0\n")
    skipped = SkippedDocuments()
    records = list(read_records(SourceConfig(path=str(path)), skipped))
    assert [len(record.fields["text"]) for record in records] == [400_000, 1]
    assert not skipped.total


@pytest.mark.parametrize("objective", [ClassificationConfig(), TokenClassificationConfig()])
def test_files_without_records_are_named(objective: Any, tmp_path: Path) -> None:
    (tmp_path / "train.conll").write_text("EU B-ORG\n")
    data = DataConfig(sources=(SourceConfig(path=str(tmp_path)),))
    with pytest.raises(InputError, match=r"no record has .*: 1 × not a file with records .*train\.conll"):
        find_labels(objective, data)
