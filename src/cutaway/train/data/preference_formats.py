"""Forms of preference data: prompt with chosen and rejected answer, conversations, answers with a label."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cutaway.train.data.chat_formats import (
    Conversation,
    Fields,
    PlainText,
    as_messages,
    build_conversation,
    parse_messages_text,
    plain_text,
)
from cutaway.train.data.records import InvalidRecordError, Record

Answer = Conversation | PlainText
"""An answer with its prompt. Only the answer is a target."""
PAIR_FORMS = "prompt, chosen and rejected (texts or messages); chosen and rejected (conversations with the same start)"
LABELED_FORMS = f"prompt, completion and label; messages and label; {PAIR_FORMS}"
LABELS: dict[object, bool] = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}


@dataclass(frozen=True)
class Pair:
    """A chosen and a rejected answer to the same prompt."""

    chosen: Answer
    rejected: Answer


@dataclass(frozen=True)
class LabeledAnswer:
    """An answer that is desirable or undesirable."""

    answer: Answer
    is_desirable: bool


def parse_pair(record: Record) -> Pair:
    """Parse a record in one of PAIR_FORMS. Raises InvalidRecordError if it is invalid."""
    fields = _read_fields(record)
    if "chosen" not in fields or "rejected" not in fields:
        advice = "; answers with a label are data of objective kto" if "label" in fields else ""
        raise _unknown_form(record, f"this objective needs: {PAIR_FORMS}{advice}")
    prompt, chosen, rejected = (fields.get(key) for key in ("prompt", "chosen", "rejected"))
    if chosen == rejected:
        raise InvalidRecordError("chosen and rejected are equal", "there is nothing to prefer")
    if isinstance(chosen, str) and isinstance(rejected, str) and (prompt is None or isinstance(prompt, str)):
        if prompt is None:
            raise InvalidRecordError("no prompt", "chosen and rejected are texts; add the prompt, also as a text")
        return Pair(plain_text(prompt, chosen, fields), plain_text(prompt, rejected, fields))
    before = [] if prompt is None else as_messages(prompt, "user", "prompt")
    answers = [as_messages(fields[key], "assistant", key) for key in ("chosen", "rejected")]
    start = len(before)
    if all(_has_prompt(answer, prompt, before) for answer in answers):
        before, start = [], _common_length(*answers) if prompt is None or isinstance(prompt, str) else start
    chosen_messages, rejected_messages = (before + answer for answer in answers)
    return Pair(_conversation(chosen_messages, start, fields), _conversation(rejected_messages, start, fields))


def parse_labeled(record: Record) -> LabeledAnswer:
    """Parse a record in one of LABELED_FORMS. Of a pair, the label says which answer is meant; see `split_pairs`."""
    fields = _read_fields(record)
    if "label" not in fields:
        raise _unknown_form(record, f"objective kto needs: {LABELED_FORMS}")
    is_desirable = _read_label(fields["label"])
    if "chosen" in fields:
        pair = parse_pair(record)
        return LabeledAnswer(pair.chosen if is_desirable else pair.rejected, is_desirable)
    prompt, completion = fields.get("prompt"), fields.get("completion")
    if "messages" in fields:
        messages = as_messages(fields["messages"], "user", "messages")
        last = max((i for i, each in enumerate(messages) if _role(each) == "assistant"), default=0)
        return LabeledAnswer(_conversation(messages, last, fields), is_desirable)
    if prompt is None or completion is None:
        raise _unknown_form(record, f"objective kto needs: {LABELED_FORMS}")
    if isinstance(prompt, str) and isinstance(completion, str):
        return LabeledAnswer(plain_text(prompt, completion, fields), is_desirable)
    before = as_messages(prompt, "user", "prompt")
    messages = before + as_messages(completion, "assistant", "completion")
    return LabeledAnswer(_conversation(messages, len(before), fields), is_desirable)


def split_pairs(records: list[Record]) -> list[Record]:
    """Replace each record with a chosen and a rejected answer by two records with a label."""
    return [
        each
        for record in records
        for each in (
            [replace(record, fields=record.fields | {"label": label}) for label in (True, False)]
            if record.fields.get("chosen") is not None and record.fields.get("label") is None
            else [record]
        )
    ]


def _read_fields(record: Record) -> dict[str, Any]:
    """Values of a record without empty ones. JSON text of messages, as in CSV files, is parsed."""
    return {key: parse_messages_text(value) for key, value in record.fields.items() if value is not None}


def _has_prompt(answer: list[Any], prompt: object, before: list[Any]) -> bool:
    """Whether an answer is a conversation that includes the prompt."""
    if prompt is None or isinstance(prompt, str):
        return _role(answer[0]) != "assistant"
    return answer[: len(before)] == before


def _common_length(chosen: list[Any], rejected: list[Any]) -> int:
    """Number of messages at the start of both conversations that are the same."""
    pairs = zip(chosen, rejected, strict=False)
    return next((i for i, (one, two) in enumerate(pairs) if one != two), min(len(chosen), len(rejected)))


def _conversation(messages: list[Any], start: int, fields: Fields) -> Conversation:
    """Conversation in which the messages of the assistant from index `start` are targets."""
    if not any(_role(message) == "assistant" for message in messages[start:]):
        raise InvalidRecordError("no answer", "there is no message of the assistant that differs from the prompt")
    if start == 0:
        raise InvalidRecordError("no prompt", "the conversation starts with the answer; add the prompt")
    conversation = build_conversation(messages, fields)
    first = start + len(conversation.messages) - len(messages)  # a system message may have been added
    return replace(conversation, train_on=[flag and i >= first for i, flag in enumerate(conversation.train_on)])


def _role(message: object) -> object:
    return message.get("role") if isinstance(message, Mapping) else None


def _read_label(value: object) -> bool:
    label = LABELS.get(str(value).strip().lower())
    if label is None:
        raise InvalidRecordError("invalid label", f"label is {value!r:.20}; it must be true or false")
    return label


def _unknown_form(record: Record, advice: str) -> InvalidRecordError:
    return InvalidRecordError("unknown form of data", f"its keys are {', '.join(record.fields) or 'none'}; {advice}")
