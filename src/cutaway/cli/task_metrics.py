"""Metrics of a model with a task head on the records of data files, for `cutaway eval --data`."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutaway.cli.json_output import print_json
from cutaway.cli.reward_metrics import REWARD_FORMS, are_reward_data, evaluate_rewards, has_reward
from cutaway.errors import InputError

if TYPE_CHECKING:  # torch is imported when it is needed
    from cutaway.families.checkpoint import Checkpoint
    from cutaway.train.data.documents import SkippedDocuments

Results = dict[str, Any]
MAX_CLASSES_SHOWN = 20
TASKS = ("sequence-classification", "token-classification", "multiple-choice", "embedding")
"""Kinds of heads that are evaluated on labeled records."""
PERCENT_METRICS = {
    "accuracy": "accuracy",
    "accuracy_at_1": "accuracy at 1",
    "entity_f1": "entity F1",
    "macro_f1": "macro F1",
    "micro_f1": "micro F1",
}
NUMBER_METRICS = {
    "matthews_correlation": "Matthews correlation",
    "pearson": "Pearson",
    "spearman": "Spearman",
    "mean_reciprocal_rank": "mean reciprocal rank",
    "mean_squared_error": "mean squared error",
    "mean_absolute_error": "mean absolute error",
    "margin": "mean margin",
    "mean_reward": "mean reward",
}


def has_labeled_task(checkpoint: "Checkpoint", paths: Sequence[Path]) -> bool:
    """Whether a model is evaluated on labeled records. An encoder without such a head computes embeddings of pairs."""
    from cutaway.evaluate.exact_match import parse_example
    from cutaway.train.data.documents import SkippedDocuments
    from cutaway.train.data.records import read_records
    from cutaway.train.recipe.schema import SourceConfig

    if checkpoint.config.head.kind in TASKS or checkpoint.config.form != "encoder":
        return checkpoint.config.head.kind in TASKS
    skipped = SkippedDocuments()
    records = (record for path in paths for record in read_records(SourceConfig(path=str(path)), skipped))
    first = next(records, None)
    return first is not None and isinstance(parse_example(first.fields), str)  # a string says why it is no question


def evaluate_task(
    checkpoint: "Checkpoint",
    source: str,
    paths: Sequence[Path],
    *,
    text_column: str,
    target_column: str | None,
    batch_size: int | None,
    as_json: bool,
) -> None:
    """Evaluate the head of the model on the records of the files, and print the metrics."""
    from cutaway.cli.views.terminal import progress_bar
    from cutaway.train.data.documents import SkippedDocuments
    from cutaway.train.data.records import read_records
    from cutaway.train.recipe.schema import SourceConfig

    skipped = SkippedDocuments()
    records = [
        record
        for path in paths
        for record in read_records(
            SourceConfig(path=str(path), text_column=text_column, target_column=target_column), skipped
        )
    ]
    with progress_bar("evaluating", quiet=as_json) as progress:
        metrics = _evaluate(checkpoint, records, skipped, batch_size, progress)
    if metrics is None:
        advice = f"; a reward model needs {REWARD_FORMS}" if has_reward(checkpoint.config.head) else ""
        raise InputError(
            f"'{paths[0]}' has no valid records: {skipped or 'it is empty'}; name the columns with --text-column and"
            f" --target-column{advice}"
        )
    if as_json:
        kind: str = checkpoint.config.head.kind
        task = "reward" if "num_truncated" in metrics else kind if kind in TASKS else "embedding"
        print_json({"source": source, "task": task} | metrics | {"skipped": skipped.counts})
    else:
        _render(metrics, skipped)


def _evaluate(
    checkpoint: "Checkpoint",
    records: Sequence[Any],
    skipped: "SkippedDocuments",
    batch_size: int | None,
    progress: Callable[[int, int], None] | None,
) -> Results | None:
    """Metrics of the head. None if there is no valid record."""
    from cutaway.evaluate import task_evaluation as tasks
    from cutaway.train.data import task_records as forms
    from cutaway.train.data.task_data import parse_valid, read_labeled_texts, read_tagged_texts

    head = checkpoint.config.head
    options: dict[str, Any] = {"batch_size": batch_size, "progress": progress}
    match head.kind:
        case "sequence-classification" if has_reward(head) and are_reward_data(records):
            return evaluate_rewards(checkpoint, records, skipped, batch_size, progress)
        case "sequence-classification":
            label_set, labeled = read_labeled_texts(records, head, skipped)
            texts = [each.text if each.pair is None else (each.text, each.pair) for each in labeled]
            labels = [each.label for each in labeled]
            if not texts:
                return None
            result = tasks.evaluate_classification(checkpoint, texts, labels, label_set=label_set, **options)
            return result.to_dict()
        case "token-classification":
            tagged = read_tagged_texts(records, head, skipped)
            columns = [[getattr(each, name) for each in tagged] for name in ("text", "spans", "tags")]
            return tasks.evaluate_token_classification(checkpoint, *columns, **options) if tagged else None
        case "multiple-choice":
            questions = [each for _, each in parse_valid(records, forms.parse_choice_question, skipped)]
            pairs = [(each.question, each.choices) for each in questions]
            answers = [each.answer for each in questions]
            return tasks.evaluate_multiple_choice(checkpoint, pairs, answers, **options) if questions else None
        case _:
            similar = [each for _, each in parse_valid(records, forms.parse_text_pair, skipped)]
            scores = [each.score for each in similar if each.score is not None]
            if not similar:
                return None
            if scores and len(scores) < len(similar):
                raise InputError("some records have a score and others do not; evaluate them in separate files")
            pairs = [(each.texts[0], each.texts[1]) for each in similar]
            return tasks.evaluate_embeddings(checkpoint, pairs, scores or None, **options)


def _render(metrics: Results, skipped: "SkippedDocuments") -> None:
    """Print the metrics, with their intervals, and those of each class."""
    from rich.text import Text

    from cutaway.cli.views.terminal import borderless_table, escape_control_characters, print_without_wrapping

    table = borderless_table("lrl")
    for name, title in (PERCENT_METRICS | NUMBER_METRICS).items():
        if name not in metrics:
            continue
        is_percent = name in PERCENT_METRICS
        value = f"{metrics[name]:.1%}" if is_percent else f"{metrics[name]:.4f}"
        interval = metrics.get(f"{name}_interval")
        note = ""
        if interval is not None:
            low, high = (f"{bound:.1%}" if is_percent else f"{bound:.3f}" for bound in interval)
            note = f"95 % interval {low} to {high}"
        if name in ("accuracy", "accuracy_at_1", "pearson", "mean_reward"):
            note = f"{metrics['num_examples']:,} examples{', ' if note else ''}{note}"
        table.add_row(title, Text(value, "bold"), note)
    if "mean_reward" in metrics:
        for title, choose in (("highest", max), ("lowest", min)):
            row = choose(metrics["records"], key=lambda each: each["reward"])
            location = escape_control_characters(row["location"])
            table.add_row(title, f"{row['reward']:.4f}", location)
    print_without_wrapping(table)
    if "mean_reward" in metrics:
        sys.stderr.write("--json prints the reward of each record\n")
    if metrics.get("num_truncated"):
        sys.stderr.write(f"{metrics['num_truncated']:,} answers are longer than the context: truncated at the end\n")
    classes = metrics.get("per_entity_type") or metrics.get("per_class") or {}
    if 1 < len(classes) <= MAX_CLASSES_SHOWN or "per_entity_type" in metrics:
        per_class = borderless_table("lrrrr")
        per_class.add_row("", "precision", "recall", "F1", "examples")
        for name, scores in list(classes.items())[:MAX_CLASSES_SHOWN]:
            cells = (f"{scores[key]:.1%}" for key in ("precision", "recall", "f1"))
            per_class.add_row(escape_control_characters(name), *cells, f"{scores['support']:,}")
        print_without_wrapping(per_class)
    if skipped.total:
        sys.stderr.write(f"skipped: {escape_control_characters(str(skipped))}\n")
