"""`cutaway eval`: how well a model tells text."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cutaway.cli.model_loading import DType
from cutaway.errors import InputError

if TYPE_CHECKING:  # torch is imported when the work begins
    from cutaway.evaluate.results import EvalResult
    from cutaway.families.checkpoint import Checkpoint
    from cutaway.train.data.documents import Document, SkippedDocuments

Results = dict[str, Any]
OPTIONS_BY_FORM = {
    "decoder": {"context", "stride"},
    "encoder": {"context", "seed"},
    "encoder-decoder": {"target_column"},
}
"""The options that mean something for a model of each form, beside those for all."""


def evaluate(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A model's or run's directory, .gguf file, hub id.")],
    extra_files: Annotated[
        list[Path] | None, typer.Argument(metavar="FILE", help="More texts, as behind --text.", show_default=False)
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option("--text", metavar="FILE", help="Text, .jsonl or a directory of them; - is standard input."),
    ] = None,
    text_column: Annotated[str, typer.Option("--text-column", help="Of JSON lines: the field with the text.")] = "text",
    target_column: Annotated[
        str | None, typer.Option("--target-column", help="And that with the answer, for encoder-decoders.")
    ] = None,
    context: Annotated[
        int | None, typer.Option("--context", help="Tokens read at once; the model's own up to 4,096, unless given.")
    ] = None,
    stride: Annotated[
        int | None, typer.Option("--stride", help="How far windows slide, for decoders; half the context.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Which tokens are masked, for encoders.")] = None,
    batch_size: Annotated[int | None, typer.Option("--batch-size", help="Texts or windows read together.")] = None,
    device: Annotated[str | None, typer.Option("--device", help="cpu or cuda; the GPU if there is one.")] = None,
    dtype: Annotated[DType | None, typer.Option("--dtype", help="Of the weights; as stored, unless given.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines: one JSON object.")] = False,
) -> None:
    """Measure a model on text: loss, perplexity and bits per byte, or how often it is right; and its calibration.

    A decoder tells each token after those before it, an encoder masked tokens, an encoder-decoder answers to sources.

    Example: cutaway eval ./gpt2 --text book.txt --context 1024 --stride 512

    Example: cutaway eval runs/dates --text dates.jsonl --text-column date --target-column iso --json
    """
    paths = [*(text or []), *(extra_files or [])]
    if not paths:
        raise InputError("there is no text to measure the model on; give --text FILE")
    from cutaway.cli.eval_documents import iter_documents
    from cutaway.train.data.documents import SkippedDocuments

    troubles = SkippedDocuments()
    found = list(iter_documents(paths, text_column, target_column, troubles))
    if not found:
        why = str(troubles) or "it has no rows"
        raise InputError(f"nothing in {paths[0]} can be measured: {why}; give texts, or name their --text-column")
    from cutaway.cli.model_loading import load_checkpoint

    checkpoint = load_checkpoint(source, device, dtype, quiet=as_json)
    form = checkpoint.config.form
    given = {"context": context, "stride": stride, "seed": seed, "target_column": target_column}
    for name, value in given.items():
        if value is not None and name not in OPTIONS_BY_FORM[form]:
            raise InputError(
                f"--{name.replace('_', '-')} has no meaning for an {form}; leave it out".replace(
                    "an decoder", "a decoder"
                )
            )
    if form == "encoder-decoder" and target_column is None:
        raise InputError(
            "an encoder-decoder is measured on pairs; give JSON lines, and the answers' field as --target-column"
        )
    how = {name: value for name, value in given.items() if value is not None and name != "target_column"} | {
        "batch_size": batch_size
    }
    told: Results = {"source": source, "form": form} | _run_evaluation(checkpoint, found, how, quiet=as_json)
    if as_json:
        from cutaway.cli.views.terminal import json_safe

        told["skipped_documents"] = troubles.counts
        sys.stdout.write(json.dumps(json_safe(told), indent=2, allow_nan=False) + "\n")
    else:
        _render_results(told, troubles)


def _run_evaluation(checkpoint: "Checkpoint", documents: "list[Document]", options: Results, *, quiet: bool) -> Results:
    """What the model's form is measured by, means before sums."""
    from cutaway.cli.views.terminal import progress_bar
    from cutaway.evaluate import evaluate_causal_lm, evaluate_masked_lm, evaluate_seq2seq

    texts = [document.text for document in documents]
    with progress_bar("measuring", quiet=quiet) as progress:
        if checkpoint.config.form == "decoder":
            score = evaluate_causal_lm(checkpoint, texts, progress=progress, **options)
            means = {"loss": score.loss, "perplexity": score.perplexity, "bits_per_byte": score.bits_per_byte}
            return means | _counts_and_calibration(score)
        if checkpoint.config.form == "encoder":
            masks = evaluate_masked_lm(checkpoint, texts, progress=progress, **options)
            return {
                "accuracy": masks.accuracy,
                "loss": masks.loss,
                "perplexity": masks.perplexity,
            } | _counts_and_calibration(masks)
        pairs = [(document.text, document.target or "") for document in documents]
        answers = evaluate_seq2seq(checkpoint, pairs, progress=progress, **options)
        return {
            "accuracy": answers.accuracy,
            "loss": answers.loss,
            "perplexity": answers.perplexity,
        } | _counts_and_calibration(answers)


def _counts_and_calibration(score: "EvalResult") -> Results:
    """What was counted, and whether the model is right as often as it says."""
    from dataclasses import asdict

    return asdict(score) | {"calibration": score.calibration.to_dict()}


def _render_results(results: Results, skipped: "SkippedDocuments") -> None:
    """A table for people."""
    from rich.text import Text

    from cutaway.cli.views.terminal import borderless_table, escape_control_characters, print_without_wrapping

    table = borderless_table("lrl")
    if "accuracy" in results:
        share = (
            f"{results['num_correct']:,} of {results['num_tokens']:,} masked tokens" if "num_correct" in results else ""
        )
        share = share or f"{results['num_exact_matches']:,} of {results['num_pairs']:,} answers are the target"
        table.add_row("accuracy", Text(f"{results['accuracy']:.1%}", "bold"), share)
    table.add_row("loss", Text(f"{results['loss']:.4f}", "bold"), "nats a token")
    table.add_row("perplexity", Text(f"{results['perplexity']:,.4g}", "bold"), f"over {results['num_tokens']:,} tokens")
    if "bits_per_byte" in results:
        table.add_row(
            "bits per byte", Text(f"{results['bits_per_byte']:.4f}", "bold"), f"over {results['num_bytes']:,} bytes"
        )
    calibration = results["calibration"]
    sure = f"off the truth: {calibration['confidence']:.1%} sure of the likeliest, {calibration['accuracy']:.1%} right"
    table.add_row("calibration", Text(f"{calibration['ece']:.4f}", "bold"), sure)
    if "num_documents" in results:
        count = results["num_documents"]
        read = f"read up to {results['context']:,} tokens at once" + (
            f", {results['stride']:,} further each time" if "stride" in results else ""
        )
        table.add_row("texts", f"{count:,}", read)
    print_without_wrapping(table)
    if skipped.total:
        sys.stderr.write(f"passed over: {escape_control_characters(str(skipped))}\n")
