"""Forms of the records of task heads, detected by their keys: texts and labels, words and tags, choices, text pairs."""

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cutaway.evaluate.label_set import as_number
from cutaway.tokenizer.text_encoder import Span, join_words
from cutaway.train.data.records import InvalidRecordError, Record

Fields = Mapping[str, Any]

TEXT_KEYS = (
    "text",
    "sentence",
    "review",
    "content",
    "message",
    "comment",
    "tweet",
    "body",
    "document",
    "v2",
    "sms",
    "question",
    "query",
    "utterance",
    "title",
)
"""Keys of a text, in the order in which they are tried."""
PAIR_KEYS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("text1", "text2"),
    ("text", "text_pair"),
    ("query", "passage"),
    ("question", "sentence"),
    ("question", "answer"),
    ("question", "passage"),
)
"""Keys of a pair of texts."""
LABEL_KEYS = ("label", "labels", "class", "category", "sentiment", "target", "score", "rating", "stars", "intent", "v1")
"""Keys of a label."""
WORD_KEYS = ("tokens", "words")
TAG_KEYS = ("tags", "ner_tags", "labels", "pos_tags", "chunk_tags", "upos")
CONTEXT_KEYS = ("question", "context", "prompt", "sent1", "ctx", "text")
CHOICE_KEYS = ("choices", "options", "endings", "answers")
ANSWER_KEYS = ("label", "answer", "answerKey", "answer_key", "gold")
ANCHOR_KEYS = (("anchor", "positive"), ("query", "positive"), ("query", "answer"), ("question", "answer"))
"""Keys of a text and a similar one."""
SCORE_KEYS = ("score", "similarity", "similarity_score", "label")


@dataclass(frozen=True)
class LabeledText:
    """A text, or a pair of texts, and its label as it is in the file."""

    text: str
    pair: str | None
    label: Any


@dataclass(frozen=True)
class TaggedText:
    """A text, the characters of each of its words, and the tags of the words."""

    text: str
    spans: list[Span]
    tags: list[str]


@dataclass(frozen=True)
class ChoiceQuestion:
    """A question with its context, the choices, and the index of the right one."""

    question: str
    choices: list[str]
    answer: int


@dataclass(frozen=True)
class TextPair:
    """Two texts that are similar, and texts that are not; or two texts and their similarity."""

    texts: tuple[str, ...]
    """Anchor, positive and negatives; or the two texts of a score."""
    score: float | None


def parse_labeled_text(record: Record) -> LabeledText:
    """Text, or pair of texts, and label. Raises InvalidRecordError if one of them is missing or empty."""
    fields, source = _present(record), record.source
    label_key = source.target_column if source is not None and source.target_column is not None else None
    if label_key is None:
        label_key = _find_key(fields, LABEL_KEYS, "label")
    elif label_key not in fields:
        raise InvalidRecordError("no label", f"it has no value for '{label_key}'")
    label = _parse_json_list(fields[label_key])
    if isinstance(label, str) and not label.strip():
        raise InvalidRecordError("no label", f"{label_key} is empty")
    text, pair = read_texts(record, exclude=label_key)
    return LabeledText(text, pair, label)


def read_texts(record: Record, exclude: str | None = None) -> tuple[str, str | None]:
    """The text of a record, or its pair of texts. `exclude` is the key of the label."""
    fields, source = _present(record), record.source
    column = "text" if source is None else source.text_column
    if column != "text":
        if column not in fields:
            raise InvalidRecordError("no text", f"it has no value for '{column}'")
        return _read_text(fields, column), None
    for first, second in PAIR_KEYS:
        if {first, second} <= fields.keys() - {exclude}:
            return _read_text(fields, first), _read_text(fields, second)
    return _read_text(fields, _find_key(fields, TEXT_KEYS, "text")), None


def parse_tagged_text(record: Record) -> TaggedText:
    """Words and their tags, or a text and its entities as {"start", "end", "label"} or [start, end, label]."""
    fields = _present(record)
    if "text" in fields and (spans := _first_key(fields, ("entities", "spans", "label"))) is not None:
        return _parse_entities(_read_text(fields, "text"), _parse_json_list(fields[spans]), spans)
    words = _read_items(fields, _find_key(fields, WORD_KEYS, "words"))
    tag_key = record.source.target_column if record.source is not None else None
    tags = _read_items(fields, _find_key(fields, TAG_KEYS if tag_key is None else (tag_key,), "tags"))
    if len(words) != len(tags):
        raise InvalidRecordError("words and tags differ in number", f"{len(words)} words, {len(tags)} tags")
    if not all(isinstance(word, str) for word in words):
        raise InvalidRecordError("invalid words", "each word must be a string")
    if not all(isinstance(tag, str | int) and not isinstance(tag, bool) for tag in tags):
        raise InvalidRecordError("invalid tags", "each tag must be a string or an integer")
    kept = [(word, str(tag)) for word, tag in zip(words, tags, strict=True) if word.strip()]
    if not kept:
        raise InvalidRecordError("empty text", "it has no words")
    return TaggedText(*join_words([word for word, _ in kept]), [tag for _, tag in kept])


def parse_choice_question(record: Record) -> ChoiceQuestion:
    """Question, choices and the index of the answer, which may also be a letter or the text of a choice."""
    fields = _present(record)
    endings = sorted(
        (key for key in fields if key.startswith("ending") and key[6:].isdecimal()), key=lambda key: int(key[6:])
    )  # SWAG
    letters: Sequence[str] = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    if endings:
        choices: list[Any] = [fields[key] for key in endings]
    else:
        value = _parse_json(fields[_find_key(fields, CHOICE_KEYS, "choices")])
        if isinstance(value, Mapping):  # ARC: {"text": [...], "label": ["A", ...]}
            given, value = value.get("label"), value.get("text")
            letters = [str(each) for each in given] if isinstance(given, list) else letters
        choices = list(value) if isinstance(value, list | tuple) else []
    if len(choices) < 2 or not all(isinstance(choice, str) for choice in choices):
        raise InvalidRecordError("invalid choices", "choices must be a list of two or more strings")
    answer_key = record.source.target_column if record.source is not None else None
    answer = fields[_find_key(fields, ANSWER_KEYS if answer_key is None else (answer_key,), "answer")]
    parts = [_read_text(fields, key) for key in ("context", "question") if key in fields]
    if not parts:
        parts = [_read_text(fields, _find_key(fields, CONTEXT_KEYS, "question"))]
        if isinstance(start := fields.get("sent2"), str):  # SWAG: the choices continue this sentence
            choices = [f"{start} {choice}" for choice in choices]
    return ChoiceQuestion("\n".join(parts), choices, _find_answer(answer, choices, letters))


def parse_text_pair(record: Record) -> TextPair:
    """Anchor, positive and negatives; or two texts and their similarity."""
    fields = _present(record)
    for first, second in ANCHOR_KEYS:
        if first in fields and second in fields:
            negatives = _parse_json(fields.get("negatives", fields.get("negative", [])))
            items = [negatives] if isinstance(negatives, str) else negatives
            if not isinstance(items, list) or not all(isinstance(item, str) and item.strip() for item in items):
                raise InvalidRecordError("invalid negative", "negative must be a string, or a list of strings")
            return TextPair((_read_text(fields, first), _read_text(fields, second), *items), None)
    for first, second in PAIR_KEYS:
        if first in fields and second in fields:
            texts = _read_text(fields, first), _read_text(fields, second)
            target = record.source.target_column if record.source is not None else None
            key = target if target is not None else _first_key(fields, SCORE_KEYS)
            if key is None or key not in fields:
                return TextPair(texts, None)
            score = as_number(fields[key])
            if score is None:
                raise InvalidRecordError("invalid score", f"{key} is {fields[key]!r:.40}; it must be a number")
            return TextPair(texts, score)
    raise _unknown_form(record, "anchor and positive (and negative), or sentence1, sentence2 and score")


def _parse_entities(text: str, entities: object, key: str) -> TaggedText:
    """Words of a text and their tags in the IOB2 scheme, from the characters of entities."""
    entities_found = []
    for entity in entities if isinstance(entities, list) else [None]:
        is_mapping = isinstance(entity, Mapping)
        parts = [entity.get(name) for name in ("start", "end", "label")] if is_mapping else entity  # type: ignore[union-attr]
        if not isinstance(parts, list | tuple) or len(parts) != 3 or not all(isinstance(n, int) for n in parts[:2]):
            raise InvalidRecordError("invalid entity", f"each of {key} must be an object with start, end and label")
        start, end, label = parts
        if not 0 <= start < end <= len(text) or not isinstance(label, str):
            raise InvalidRecordError(
                "invalid entity", f"characters {start} to {end} of {len(text)}, label {label!r:.40}"
            )
        entities_found.append((start, end, label))
    borders = {0, len(text)} | {border for start, end, _ in entities_found for border in (start, end)}
    spans, tags = [], []
    for low, high in itertools.pairwise(sorted(borders)):  # a word ends where an entity starts or ends
        for match in re.finditer(r"\S+", text[low:high]):
            first = low + match.start()
            inside = [(start, label) for start, end, label in entities_found if start <= first < end]
            spans.append((first, low + match.end()))
            tags.append("O" if not inside else f"{'B' if first == inside[0][0] else 'I'}-{inside[0][1]}")
    return TaggedText(text, spans, tags)


def _find_answer(answer: object, choices: Sequence[str], letters: Sequence[str]) -> int:
    if isinstance(answer, str) and answer in choices:
        return choices.index(answer)
    if isinstance(answer, str) and answer.strip() in list(letters)[: len(choices)]:
        return list(letters).index(answer.strip())
    number = as_number(answer)
    if number is None or number != int(number) or not 0 <= number < len(choices):
        raise InvalidRecordError(
            "invalid answer",
            f"{answer!r:.40} is not a choice, its letter, or its number from 0 to {len(choices) - 1}",
        )
    return int(number)


def _present(record: Record) -> dict[str, Any]:
    return {key: value for key, value in record.fields.items() if value is not None}


def _first_key(fields: Fields, keys: Sequence[str]) -> str | None:
    return next((key for key in keys if key in fields), None)


def _find_key(fields: Fields, keys: Sequence[str], name: str) -> str:
    key = _first_key(fields, keys)
    if key is None:
        raise InvalidRecordError(
            f"no {name}",
            f"its keys are {', '.join(fields) or 'none'}; the key of the {name} is one of {', '.join(keys)}, or that of"
            f" {'--text-column' if name == 'text' else '--target-column'}",
        )
    return key


def _unknown_form(record: Record, forms: str) -> InvalidRecordError:
    keys = ", ".join(record.fields) or "none"
    return InvalidRecordError("unknown form of data", f"its keys are {keys}; a record needs {forms}")


def _read_text(fields: Fields, key: str) -> str:
    value = fields[key]
    if not isinstance(value, str):
        raise InvalidRecordError("invalid text", f"{key} is a {type(value).__name__}; it must be a string")
    if not value.strip():
        raise InvalidRecordError("empty text", f"{key} is empty")
    return value


def _read_items(fields: Fields, key: str) -> list[Any]:
    """A list, JSON text of a list as in CSV files, or items separated by spaces."""
    value = _parse_json(fields[key])
    if isinstance(value, str):
        value = value.split()
    if not isinstance(value, list):
        raise InvalidRecordError("not a list", f"{key} is a {type(value).__name__}; it must be a list")
    return value


def _parse_json(value: object) -> object:
    """The value of a JSON list or object in a string, as in CSV files; other values as they are."""
    if not isinstance(value, str) or not value.strip().startswith(("[", "{")):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _parse_json_list(value: object) -> object:
    parsed = _parse_json(value)
    return parsed if isinstance(parsed, list) else value
