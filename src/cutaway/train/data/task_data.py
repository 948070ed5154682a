"""Data of the objectives that train task heads: the head that the labels of the records require, and the encoder."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cutaway.config import Config
from cutaway.config.head import EmbeddingHead, OutputHead, SequenceClassificationHead, TokenClassificationHead
from cutaway.errors import InputError
from cutaway.evaluate.label_set import LabelError, LabelSet, are_multi_hot, label_set_of
from cutaway.families.checkpoint import Checkpoint
from cutaway.families.replace_head import replace_head
from cutaway.tokenizer import Tokenizer
from cutaway.train.data.documents import SkippedDocuments
from cutaway.train.data.label_discovery import class_names, discover_labels
from cutaway.train.data.records import InvalidRecordError, Record, read_records
from cutaway.train.data.task_encoders import (
    ClassificationEncoder,
    EmbeddingEncoder,
    MultipleChoiceEncoder,
    TaskEncoder,
    TokenClassificationEncoder,
)
from cutaway.train.data.task_records import (
    LabeledText,
    TaggedText,
    parse_labeled_text,
    parse_tagged_text,
    parse_text_pair,
)
from cutaway.train.recipe.schema import DataConfig
from cutaway.train.recipe.task_objectives import (
    ClassificationConfig,
    EmbeddingConfig,
    MultipleChoiceConfig,
    RewardConfig,
    TaskConfig,
    TokenClassificationConfig,
)

TASK_OBJECTIVES: dict[str, str] = {
    "classification": "sequence-classification",
    "token-classification": "token-classification",
    "multiple-choice": "multiple-choice",
    "embedding": "embedding",
    "reward": "sequence-classification",
}
"""Kind of an objective → kind of the head that it trains."""


def add_task_head(
    checkpoint: Checkpoint, objective: TaskConfig, data: DataConfig, seed: int, log: Callable[[str], None]
) -> Checkpoint:
    """Give the checkpoint the head that the objective trains, with the labels of the data.

    If the checkpoint has such a head, with the labels of the data, the head is trained further.
    """
    head = checkpoint.config.head
    kind = TASK_OBJECTIVES[objective.kind]
    match objective:
        case RewardConfig():
            options: dict[str, Any] = {"num_labels": 1, "problem_type": "regression"}
            fits = isinstance(head, SequenceClassificationHead) and head.num_labels == 1
        case EmbeddingConfig():
            options = {} if objective.pooling is None else {"pooling": objective.pooling}
            fits = isinstance(head, EmbeddingHead) and objective.pooling in (None, head.pooling)
        case ClassificationConfig() | TokenClassificationConfig():
            labels = find_labels(objective, data)
            options = {"num_labels": labels.num_labels, "labels": labels.names}
            if isinstance(objective, ClassificationConfig):
                options["problem_type"] = labels.problem_type
            fits = has_labels(head, kind, labels)
        case _:
            options, fits = {}, head.kind == kind
    if fits:
        log(f"the {kind} head of the checkpoint is trained further{_describe_labels(head)}")
        return checkpoint
    changed = replace_head(checkpoint, kind, seed=seed, **options)
    log(f"new {kind} head{_describe_labels(changed.config.head)}")
    return changed


def find_labels(objective: TaskConfig, data: DataConfig) -> LabelSet:
    """Labels of all records of the data. Records without a label are left out when they are encoded."""
    skipped = SkippedDocuments()
    if isinstance(objective, TokenClassificationConfig):
        tagged = parse_valid(read_all(data, skipped), parse_tagged_text, skipped)
        tags = [tag for _, each in tagged for tag in each.tags]
        if not tags:
            raise InputError(f"no record has words and tags: {skipped or 'the files have no rows'}; {_KEYS_HINT}")
        names = class_names(tags)
        return LabelSet("single_label_classification", names, len(names))
    assert isinstance(objective, ClassificationConfig)
    parsed = parse_valid(read_all(data, skipped), parse_labeled_text, skipped)
    labeled = [(record.location, each.label) for record, each in parsed]
    if not labeled:
        raise InputError(f"no record has a text and a label: {skipped or 'the files have no rows'}; {_KEYS_HINT}")
    return discover_labels(labeled, objective.problem_type)


_KEYS_HINT = "name the columns with data.sources[].text_column and data.sources[].target_column"


def has_labels(head: OutputHead, kind: str, labels: LabelSet) -> bool:
    """Whether a head has the labels of the data: by name, or by number if the names in the data are numbers."""
    if head.kind != kind or not isinstance(head, SequenceClassificationHead | TokenClassificationHead):
        return False
    own = label_set_of(head)
    if own.problem_type != labels.problem_type:
        return False
    if own.problem_type == "regression":
        return own.num_labels == labels.num_labels
    if set(labels.names) <= set(own.names):
        return True
    numbers = {str(index) for index in range(own.num_labels)}
    return not own.has_number_names and set(labels.names) <= numbers and kind == "sequence-classification"


def build_task_encoder(
    objective: TaskConfig, tokenizer: Tokenizer, max_len: int, config: Config, records: Sequence[Record]
) -> TaskEncoder:
    """Build the encoder of the records of an objective, for a model with its head."""
    head = config.head
    match objective:
        case ClassificationConfig():
            assert isinstance(head, SequenceClassificationHead)
            parsed = parse_valid(records, parse_labeled_text, SkippedDocuments())
            is_multi_hot = are_multi_hot([each.label for _, each in parsed])
            return ClassificationEncoder(tokenizer, max_len, config, label_set_of(head, is_multi_hot=is_multi_hot))
        case TokenClassificationConfig():
            assert isinstance(head, TokenClassificationHead)
            return TokenClassificationEncoder(tokenizer, max_len, config, head.label_names)
        case MultipleChoiceConfig():
            return MultipleChoiceEncoder(tokenizer, max_len, config)
        case EmbeddingConfig():
            has_scores = have_scores(records)
            _check_embedding_loss(objective, has_scores=has_scores)
            return EmbeddingEncoder(tokenizer, max_len, config, has_scores=has_scores)
    raise InputError(f"objective {objective.kind} does not train a task head")


def _check_embedding_loss(objective: EmbeddingConfig, *, has_scores: bool) -> None:
    if objective.loss is None or (objective.loss == "multiple-negatives-ranking") != has_scores:
        return
    if has_scores:
        raise InputError(
            "objective.loss multiple-negatives-ranking needs pairs of similar texts, but the records have scores; use"
            " objective.loss = 'cosent', or remove the scores and the pairs that are not similar"
        )
    raise InputError(
        f"objective.loss {objective.loss} needs records with sentence1, sentence2 and score, but the records have no"
        " score; use objective.loss = 'multiple-negatives-ranking'"
    )


def read_labeled_texts(
    records: Sequence[Record], head: SequenceClassificationHead, skipped: SkippedDocuments
) -> tuple[LabelSet, list[LabeledText]]:
    """Records with a label of the head, and the labels of the head. Other records are added to `skipped`."""
    parsed = list(parse_valid(records, parse_labeled_text, skipped))
    label_set = label_set_of(head, is_multi_hot=are_multi_hot([each.label for _, each in parsed]))
    valid = []
    for record, each in parsed:
        try:
            label_set.encode(each.label)
            valid.append(each)
        except LabelError as error:
            skipped.add(error.reason, f"{record.location}: {error.detail}")
    return label_set, valid


def read_tagged_texts(
    records: Sequence[Record], head: TokenClassificationHead, skipped: SkippedDocuments
) -> list[TaggedText]:
    """Records whose tags are all labels of the head. Other records are added to `skipped`."""
    valid = []
    for record, each in parse_valid(records, parse_tagged_text, skipped):
        if unknown := sorted(set(each.tags) - set(head.label_names)):
            skipped.add("unknown tag", f"{record.location}: {unknown[0]}")
        else:
            valid.append(each)
    return valid


def have_scores(records: Sequence[Record]) -> bool:
    """Whether the first valid record is a pair of texts with a score."""
    for _, pair in parse_valid(records, parse_text_pair, SkippedDocuments()):
        return pair.score is not None
    return False


def read_all(data: DataConfig, skipped: SkippedDocuments) -> Iterator[Record]:
    for source in data.sources:
        yield from read_records(source, skipped)


def parse_valid(
    records: Any, parse: Callable[[Record], Any], skipped: SkippedDocuments
) -> Iterator[tuple[Record, Any]]:
    """Parse records. Invalid ones are added to `skipped`."""
    for record in records:
        try:
            yield record, parse(record)
        except InvalidRecordError as error:
            skipped.add(error.reason, f"{record.location}: {error.detail}")


def _describe_labels(head: OutputHead) -> str:
    if isinstance(head, SequenceClassificationHead) and head.problem_type == "regression":
        return f" for regression with {head.num_labels} output{'s' * (head.num_labels > 1)}"
    if not isinstance(head, SequenceClassificationHead | TokenClassificationHead):
        return ""
    names = head.label_names
    return f" for {len(names):,} labels: {', '.join(names[:10])}{', …' if len(names) > 10 else ''}"
