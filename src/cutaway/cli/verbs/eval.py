"""`cutaway eval`: loss, perplexity, bits per byte, accuracy and calibration on text; exact match of answers."""

import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cutaway.cli.exact_match import evaluate_answers
from cutaway.cli.json_output import print_json
from cutaway.cli.lm_eval_tasks import TaskOptions, evaluate_tasks
from cutaway.cli.options import Adapter, CheckpointSource, Device, JsonObjectFlag, WeightDType, argument, option
from cutaway.cli.task_metrics import TASKS, evaluate_task, has_labeled_task
from cutaway.errors import InputError

if TYPE_CHECKING:  # torch is imported when it is needed
    from cutaway.evaluate.results import EvalResult
    from cutaway.families.checkpoint import Checkpoint
    from cutaway.train.data.documents import Document, SkippedDocuments
    from cutaway.train.recipe.schema import SourceConfig

HARNESS = "lm-evaluation-harness"
"""Panel of the options of --tasks in the help."""
Results = dict[str, Any]
MAX_DOCUMENT_CHARACTERS = 1 << 24
"""Maximum number of characters of a document. Longer files are split at line ends, to limit memory."""
OPTIONS_BY_FORM = {
    "decoder": {"context", "stride"},
    "encoder": {"context", "seed"},
    "encoder-decoder": {"target_column"},
}
"""Form of the model → the options that it accepts in addition to those that all forms accept."""


def evaluate(
    source: CheckpointSource,
    extra_files: Annotated[
        list[Path] | None, argument("Further files, in the formats of --text.", metavar="FILE", show_default=False)
    ] = None,
    text: Annotated[
        list[Path] | None, option("Text file, .jsonl or directory; - is standard input; repeatable.", metavar="FILE")
    ] = None,
    data: Annotated[
        list[Path] | None,
        option(
            "Records in a .jsonl, .json, .csv or .parquet file; repeatable. For a model with a task head: texts with"
            " labels, words with tags, choices, or pairs of texts. For a model that generates text, answers for exact"
            " match: question and answer, prompt and completion, or messages.",
            metavar="FILE",
        ),
    ] = None,
    max_new_tokens: Annotated[int | None, option("With --data: maximum length of an answer; default 64.")] = None,
    tasks: Annotated[
        list[str] | None,
        option("Tasks of lm-evaluation-harness, as in hellaswag,arc_easy; repeatable.", metavar="NAMES", panel=HARNESS),
    ] = None,
    num_fewshot: Annotated[int | None, option("Number of examples in the prompt.", min=0, panel=HARNESS)] = None,
    limit: Annotated[int | None, option("Number of samples per task; default all.", min=1, panel=HARNESS)] = None,
    include_path: Annotated[
        Path | None, option("Directory with own tasks (YAML files).", metavar="DIR", panel=HARNESS)
    ] = None,
    apply_chat_template: Annotated[
        bool, option("Render the prompts with the chat template.", "--apply-chat-template", panel=HARNESS)
    ] = False,
    text_column: Annotated[str, option("Key of the text in a row.")] = "text",
    target_column: Annotated[
        str | None, option("Key of the target in a row for encoder-decoders, or of the label for a classifier.")
    ] = None,
    context: Annotated[int | None, option("Context length; default the model's, but at most 4,096.")] = None,
    stride: Annotated[int | None, option("Stride of sliding windows, for decoders; default half the context.")] = None,
    seed: Annotated[int | None, option("Random seed for masking, for encoders.")] = None,
    batch_size: Annotated[int | None, option("Number of texts or windows per batch.")] = None,
    adapter: Adapter = None,
    device: Device = None,
    dtype: WeightDType = None,
    as_json: JsonObjectFlag = False,
) -> None:
    """Evaluate a model on text: loss, perplexity, bits per byte or accuracy, and calibration. Or score its answers.

    Decoders are evaluated on next tokens, encoders on masked tokens, encoder-decoders on targets given sources. With
    --data, classifiers and sentence embeddings are evaluated on labeled records: accuracy, F1 or correlation.

    Example: cutaway eval ./gpt2 --text book.txt --context 1024 --stride 512

    Example: cutaway eval tiny-dates --text dates.jsonl --target-column iso --json

    Example: cutaway eval runs/sft --data questions.jsonl

    Example: cutaway eval runs/classify --data held-out.csv --json

    Example: cutaway eval ./gpt2 --tasks arc_easy,hellaswag --limit 200
    """
    paths = [*(text or []), *(extra_files or [])]
    task_options = TaskOptions(num_fewshot, limit, include_path, apply_chat_template)
    if tasks:
        if paths or data:
            raise InputError("--tasks runs tasks that have their own data; leave out --text and --data")
        evaluate_tasks(source, tasks, task_options, batch_size, device, dtype, as_json=as_json, adapter=adapter)
        return
    if task_options != TaskOptions(None, None, None, False):
        raise InputError("--num-fewshot, --limit, --include-path and --apply-chat-template apply to --tasks only")
    if data:
        unused = {
            "--text": paths,
            "--context": context,
            "--stride": stride,
            "--seed": seed,
        }
        if given := [name for name, value in unused.items() if value]:
            raise InputError(f"{given[0]} does not apply to --data, which has labels or answers; leave one of them out")
        columns = {"text_column": text_column, "target_column": target_column}
        _evaluate_records(
            source, data, columns, max_new_tokens, batch_size, device, dtype, as_json=as_json, adapter=adapter
        )
        return
    if max_new_tokens is not None:
        raise InputError("--max-new-tokens applies to --data only; leave it out, or pass --data FILE")
    if not paths:
        raise InputError(
            "there is no text to evaluate on; pass --text FILE, --data FILE to compare answers, or --tasks"
        )
    from cutaway.train.data.documents import SkippedDocuments
    from cutaway.train.recipe.schema import SourceConfig

    skipped = SkippedDocuments()
    sources = [SourceConfig(path=str(path), text_column=text_column, target_column=target_column) for path in paths]
    documents = [document for text_source in sources for document in _read_documents(text_source, skipped)]
    if not documents:
        reason = str(skipped) or "it has no rows"
        raise InputError(f"{paths[0]} has no documents: {reason}; pass text files, or set --text-column")
    from cutaway.cli.model_loading import load_checkpoint

    checkpoint = load_checkpoint(source, device, dtype, quiet=as_json, adapters=adapter)
    form, head_kind = checkpoint.config.form, checkpoint.config.head.kind
    if head_kind in TASKS:
        raise InputError(
            f"this model has a head for {head_kind}, so it predicts no tokens of a text; evaluate it on records with"
            f" --data, as in: cutaway eval {source} --data FILE"
        )
    form_options = {"context": context, "stride": stride, "seed": seed, "target_column": target_column}
    for name, value in form_options.items():
        if value is not None and name not in OPTIONS_BY_FORM[form]:
            article = "a" if form == "decoder" else "an"
            raise InputError(f"--{name.replace('_', '-')} does not apply to {article} {form}; leave it out")
    if form == "encoder-decoder" and target_column is None:
        raise InputError("an encoder-decoder needs source and target pairs; pass .jsonl files and --target-column")
    del form_options["target_column"]
    options = {name: value for name, value in form_options.items() if value is not None} | {"batch_size": batch_size}
    results: Results = {"source": source, "form": form} | _run_evaluation(checkpoint, documents, options, quiet=as_json)
    if as_json:
        print_json(results | {"skipped_documents": skipped.counts})
    else:
        _render_results(results, skipped)


def _evaluate_records(
    source: str,
    paths: list[Path],
    columns: dict[str, Any],
    max_new_tokens: int | None,
    batch_size: int | None,
    device: str | None,
    dtype: WeightDType,
    *,
    as_json: bool,
    adapter: Adapter,
) -> None:
    """Evaluate a task head on labeled records, or compare the answers of a model with references."""
    from cutaway.argument_checks import check_positive_int
    from cutaway.cli.model_loading import load_checkpoint

    for name, value in (("max_new_tokens", max_new_tokens), ("batch_size", batch_size)):
        if value is not None:
            check_positive_int(name, value)
    for path in paths:
        if not path.exists():
            raise InputError(f"'{path}' does not exist; pass a file with records")
    checkpoint = load_checkpoint(source, device, dtype, quiet=as_json, adapters=adapter)
    if has_labeled_task(checkpoint, paths):
        if max_new_tokens is not None:
            raise InputError("--max-new-tokens does not apply to a model with a task head; leave it out")
        evaluate_task(checkpoint, source, paths, batch_size=batch_size, as_json=as_json, **columns)
        return
    if columns["target_column"] is not None:
        raise InputError("--target-column does not apply to --data, which compares answers; leave one of the two out")
    evaluate_answers(checkpoint, source, paths, max_new_tokens, batch_size, as_json=as_json)


def _read_documents(source: "SourceConfig", skipped: "SkippedDocuments") -> "Iterator[Document]":
    """Yield the documents of standard input (-), of a file, or of the files in a directory in the order of names."""
    from cutaway.train.data.documents import read_file, read_jsonl, read_text
    from cutaway.train.data.sources import list_source_files

    if str(source.path) != "-":
        for file in list_source_files(source):
            yield from read_file(file, source, skipped, MAX_DOCUMENT_CHARACTERS)
    elif sys.stdin is None or sys.stdin.isatty():
        raise InputError("- reads standard input, but nothing is piped in; pipe a text in or name a file")
    elif source.target_column is not None:
        yield from read_jsonl("standard input", sys.stdin.buffer, source, skipped)
    else:
        yield from read_text("standard input", sys.stdin.buffer, skipped, MAX_DOCUMENT_CHARACTERS)


def _run_evaluation(checkpoint: "Checkpoint", documents: "list[Document]", options: Results, *, quiet: bool) -> Results:
    """Run the evaluation for the form of the model: decoder, encoder or encoder-decoder."""
    from cutaway.cli.views.terminal import progress_bar
    from cutaway.evaluate import evaluate_causal_lm, evaluate_masked_lm, evaluate_seq2seq

    texts = [document.text for document in documents]
    with progress_bar("evaluating", quiet=quiet) as progress:
        if checkpoint.config.form == "decoder":
            return _result_to_dict(evaluate_causal_lm(checkpoint, texts, progress=progress, **options))
        if checkpoint.config.form == "encoder":
            return _result_to_dict(evaluate_masked_lm(checkpoint, texts, progress=progress, **options))
        pairs = [(document.text, document.target or "") for document in documents]
        return _result_to_dict(evaluate_seq2seq(checkpoint, pairs, progress=progress, **options))


def _result_to_dict(result: "EvalResult") -> Results:
    """Return the results of an evaluation as JSON values: means, then counts, then calibration."""
    names = [name for name in ("accuracy", "loss", "perplexity", "bits_per_byte") if hasattr(result, name)]
    means = {name: getattr(result, name) for name in names}
    return means | asdict(result) | {"calibration": result.calibration.to_dict()}


def _render_results(results: Results, skipped: "SkippedDocuments") -> None:
    """Print the evaluation results as a table, and a note about skipped documents to standard error."""
    from rich.text import Text

    from cutaway.cli.views.terminal import borderless_table, escape_control_characters, print_without_wrapping

    table = borderless_table("lrl")
    if "accuracy" in results:
        if "num_correct" in results:
            fraction = f"{results['num_correct']:,} of {results['num_tokens']:,} masked tokens"
        else:
            fraction = f"{results['num_exact_matches']:,} of {results['num_pairs']:,} outputs match the target exactly"
        table.add_row("accuracy", Text(f"{results['accuracy']:.1%}", "bold"), fraction)
    table.add_row("loss", Text(f"{results['loss']:.4f}", "bold"), "nats per token")
    table.add_row("perplexity", Text(f"{results['perplexity']:,.4g}", "bold"), f"over {results['num_tokens']:,} tokens")
    if "bits_per_byte" in results:
        bits = Text(f"{results['bits_per_byte']:.4f}", "bold")
        table.add_row("bits per byte", bits, f"over {results['num_bytes']:,} bytes")
    calibration = results["calibration"]
    confidence_note = f"ECE: mean confidence {calibration['confidence']:.1%}, accuracy {calibration['accuracy']:.1%}"
    table.add_row("calibration", Text(f"{calibration['ece']:.4f}", "bold"), confidence_note)
    if "num_documents" in results:
        stride = f", stride {results['stride']:,}" if "stride" in results else ""
        window_note = f"context of up to {results['context']:,} tokens{stride}"
        table.add_row("texts", f"{results['num_documents']:,}", window_note)
    print_without_wrapping(table)
    if skipped.total:
        sys.stderr.write(f"skipped: {escape_control_characters(str(skipped))}\n")
