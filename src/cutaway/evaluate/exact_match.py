"""Exact match: generated answers compared with reference answers, after the normalization of SQuAD.

A record has one of these forms:
    {"messages": [..., {"role": "assistant", "content": "Paris"}]}    the last message is the reference
    {"prompt": "The capital of France is", "completion": " Paris"}    the prompt is a text to continue, or messages
    {"question": "What is the capital of France?", "answer": "Paris"}   `answers` has several accepted answers
"""

import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cutaway.errors import InputError
from cutaway.evaluate.confidence_interval import proportion_confidence_interval
from cutaway.evaluate.token_loss import ProgressFn, require_tokenizer
from cutaway.generate.api import generate
from cutaway.generate.generation_config import CheckpointLike, unpack_checkpoint
from cutaway.generate.prompts import Prompt
from cutaway.model import EncoderOnly

DEFAULT_MAX_NEW_TOKENS = 64
DEFAULT_BATCH_SIZE = 32
REFERENCE_KEYS = {"prompt": ("completion", "response", "answer", "answers"), "question": ("answer", "answers")}
"""Key of the input → keys of which one has the reference answers."""
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class Example:
    """Input of a model and the accepted answers."""

    prompt: str | tuple[Mapping[str, object], ...]
    """A text, or the messages of a chat."""
    references: tuple[str, ...]
    is_question: bool = False
    """Whether the prompt is a question, which is the user's message of a chat model."""


@dataclass(frozen=True)
class AnswerResult:
    """Generated answer to an example."""

    example: Example
    output: str
    is_exact: bool
    """Whether the normalized output equals a normalized reference."""
    contains: bool
    """Whether the normalized output contains a normalized reference, as whole words."""

    def to_dict(self) -> dict[str, object]:
        prompt = self.example.prompt if isinstance(self.example.prompt, str) else list(self.example.prompt)
        result = {"output": self.output, "exact_match": self.is_exact, "contains": self.contains}
        return {"prompt": prompt, "references": list(self.example.references), **result}


@dataclass(frozen=True)
class ExactMatchResult:
    """Answers of a model to all examples."""

    answers: tuple[AnswerResult, ...]

    @property
    def num_exact_matches(self) -> int:
        return sum(each.is_exact for each in self.answers)

    @property
    def num_contains(self) -> int:
        return sum(each.contains for each in self.answers)

    def to_dict(self) -> dict[str, object]:
        """Fractions with 95 % confidence intervals, and the answers, as JSON values."""
        count = len(self.answers)
        counts = {"exact_match": self.num_exact_matches, "contains": self.num_contains}
        data: dict[str, object] = {"num_records": count}
        for name, number in counts.items():
            data |= {name: number / count, f"{name}_interval": list(proportion_confidence_interval(number, count))}
        return data | {"records": [each.to_dict() for each in self.answers]}


def normalize_answer(text: str) -> str:
    """Normalize as SQuAD's evaluation does: lower case, without punctuation, articles and repeated whitespace."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def parse_example(fields: Mapping[str, Any]) -> Example | str:
    """The example of a record, or a description of the problem as a string."""
    if "messages" in fields:
        return _parse_messages(fields["messages"])
    key = next((key for key in REFERENCE_KEYS if key in fields), None)
    if key is None:
        return "none of the keys messages, prompt and question"
    reference_key = next((name for name in REFERENCE_KEYS[key] if name in fields), None)
    if reference_key is None:
        return f"none of the keys {', '.join(REFERENCE_KEYS[key])} beside {key}"
    references = _parse_references(fields[reference_key])
    if not references:
        return f"{reference_key} is not a text or a list of texts"
    prompt = fields[key]
    if isinstance(prompt, str) and prompt.strip():
        return Example(prompt, references, is_question=key == "question")
    if _are_messages(prompt):
        return Example(tuple(prompt), references)
    return f"{key} is neither a text nor a list of messages"


def evaluate_exact_match(
    checkpoint: CheckpointLike,
    examples: Sequence[Example],
    *,
    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
    batch_size: int | None = None,
    progress: ProgressFn | None = None,
) -> ExactMatchResult:
    """Generate an answer to each example with greedy decoding, and compare it with the references.

    Messages are rendered with the chat template of the tokenizer. So is a question, as the user's message; without a
    chat template, the prompt is 'Question: …', 'Answer:'. A plain text is continued up to the end of the line, unless a
    reference has several lines.
    """
    model, tokenizer, _ = unpack_checkpoint(checkpoint)
    if isinstance(model, EncoderOnly):
        raise InputError("this model is an encoder, which does not generate text; pass a decoder or an encoder-decoder")
    if not examples:
        raise InputError("there are no examples to evaluate on; pass at least one")
    has_template = require_tokenizer(tokenizer).chat_template is not None
    if not has_template and any(not isinstance(example.prompt, str) for example in examples):
        raise InputError(
            "the data has messages, but the tokenizer has no chat template; pass records with prompt and completion, or"
            " a chat model"
        )
    is_decoder = len(model.stacks) == 1
    prompts = [_build_prompt(example, has_template=has_template and is_decoder) for example in examples]
    answers: list[AnswerResult] = []
    size = batch_size or DEFAULT_BATCH_SIZE
    for low in range(0, len(examples), size):
        batch = examples[low : low + size]
        stops_at_line_end = all(
            isinstance(prompt, str) and not any("\n" in each.strip() for each in example.references)
            for prompt, example in zip(prompts[low : low + size], batch, strict=True)
        )
        completions = generate(
            checkpoint,
            prompts[low : low + size],
            beams=None if is_decoder else 1,
            temperature=0.0,
            max_new_tokens=max_new_tokens,
            max_num_seqs=size,
            stop=("\n",) if stops_at_line_end and is_decoder else (),
        )
        answers += [score_answer(each, out.text or "") for each, out in zip(batch, completions, strict=True)]
        if progress is not None:
            progress(len(answers), len(examples))
    return ExactMatchResult(tuple(answers))


def score_answer(example: Example, output: str) -> AnswerResult:
    """Compare a generated answer with the references."""
    normalized = normalize_answer(output)
    references = [normalize_answer(reference) for reference in example.references]
    contains = any(reference and f" {reference} " in f" {normalized} " for reference in references)
    return AnswerResult(example, output.strip(), normalized in references, contains or normalized in references)


def _build_prompt(example: Example, *, has_template: bool) -> Prompt:
    if not isinstance(example.prompt, str):
        return list(example.prompt)
    if not example.is_question:
        return example.prompt
    if has_template:
        return [{"role": "user", "content": example.prompt}]
    return f"Question: {example.prompt}\nAnswer:"


def _parse_messages(messages: object) -> Example | str:
    if not _are_messages(messages):
        return "messages is not a list of objects with role and content"
    assert isinstance(messages, list)
    *prompt, last = messages
    if last["role"] != "assistant" or not isinstance(last["content"], str) or not prompt:
        return "the last of several messages must be the assistant's"
    return Example(tuple(prompt), (last["content"],))


def _are_messages(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in value)
    )


def _parse_references(value: object) -> tuple[str, ...]:
    """Accepted answers: a text, a list of texts, or SQuAD's {"text": [...]}. Empty if the value is something else."""
    if isinstance(value, dict):
        value = value.get("text")
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) and item.strip() for item in items):
        return ()
    return tuple(items)
