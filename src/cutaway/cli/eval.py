"""`cutaway eval`: how well a model tells text."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cutaway.cli.convert import DType
from cutaway.errors import InputError

if TYPE_CHECKING:  # torch is imported when the work begins
    from cutaway.families.checkpoint import Checkpoint
    from cutaway.measure import score as measured_by
    from cutaway.train.data.documents import Document, Troubles

Told = dict[str, Any]
FOR = {
    "decoder": {"context", "stride"},
    "encoder": {"context", "seed"},
    "encoder-decoder": {"target"},
}
"""The options that mean something for a model of each form, beside those for all."""


def evaluate(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A model's or run's directory, .gguf file, hub id.")],
    more: Annotated[
        list[Path] | None, typer.Argument(metavar="FILE", help="More texts, as behind --text.", show_default=False)
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option("--text", metavar="FILE", help="Text, .jsonl or a directory of them; - is standard input."),
    ] = None,
    column: Annotated[str, typer.Option("--field", help="Of JSON lines: the field with the text.")] = "text",
    target: Annotated[
        str | None, typer.Option("--target", help="And that with the answer, for encoder-decoders.")
    ] = None,
    context: Annotated[
        int | None, typer.Option("--context", help="Tokens read at once; the model's own up to 4,096, unless given.")
    ] = None,
    stride: Annotated[
        int | None, typer.Option("--stride", help="How far windows slide, for decoders; half the context.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Which tokens are masked, for encoders.")] = None,
    batch: Annotated[int | None, typer.Option("--batch", help="Texts or windows read together.")] = None,
    device: Annotated[str | None, typer.Option("--device", help="cpu or cuda; the GPU if there is one.")] = None,
    dtype: Annotated[DType | None, typer.Option("--dtype", help="Of the weights; as stored, unless given.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines: one JSON object.")] = False,
) -> None:
    """Measure a model on text: loss, perplexity and bits per byte, or how often it is right; and its calibration.

    A decoder tells each token after those before it, an encoder masked tokens, an encoder-decoder answers to sources.

    Example: cutaway eval ./gpt2 --text book.txt --context 1024 --stride 512

    Example: cutaway eval runs/dates --text dates.jsonl --field date --target iso --json
    """
    paths = [*(text or []), *(more or [])]
    if not paths:
        raise InputError("there is no text to measure the model on; give --text FILE")
    from cutaway.cli.texts import documents
    from cutaway.train.data.documents import Troubles

    troubles = Troubles()
    found = list(documents(paths, column, target, troubles))
    if not found:
        why = str(troubles) or "it has no rows"
        raise InputError(f"nothing in {paths[0]} can be measured: {why}; give texts, or name their --field")
    from cutaway.cli.generate import opened

    checkpoint = opened(source, device, dtype, quiet=as_json)
    form = checkpoint.config.form
    given = {"context": context, "stride": stride, "seed": seed, "target": target}
    for name, value in given.items():
        if value is not None and name not in FOR[form]:
            raise InputError(f"--{name} has no meaning for an {form}; leave it out".replace("an decoder", "a decoder"))
    if form == "encoder-decoder" and target is None:
        raise InputError("an encoder-decoder is measured on pairs; give JSON lines, and the answers' field as --target")
    how = {name: value for name, value in given.items() if value is not None and name != "target"} | {"batch": batch}
    told: Told = {"source": source, "form": form} | measured(checkpoint, found, how, quiet=as_json)
    if as_json:
        from cutaway.cli.convert import plain

        told["passed_over"] = troubles.counts
        sys.stdout.write(json.dumps(plain(told), indent=2, allow_nan=False) + "\n")
    else:
        show(told, troubles)


def measured(checkpoint: "Checkpoint", documents: "list[Document]", how: Told, *, quiet: bool) -> Told:
    """What the model's form is measured by, means before sums."""
    from cutaway.cli.convert import bar
    from cutaway.measure import measure, measure_masked, measure_pairs

    texts = [document.text for document in documents]
    with bar("measuring", quiet=quiet) as progress:
        if checkpoint.config.form == "decoder":
            score = measure(checkpoint, texts, progress=progress, **how)
            means = {"loss": score.loss, "perplexity": score.perplexity, "bits_per_byte": score.bits_per_byte}
            return means | sums(score)
        if checkpoint.config.form == "encoder":
            masks = measure_masked(checkpoint, texts, progress=progress, **how)
            return {"accuracy": masks.accuracy, "loss": masks.loss, "perplexity": masks.perplexity} | sums(masks)
        pairs = [(document.text, document.target or "") for document in documents]
        answers = measure_pairs(checkpoint, pairs, progress=progress, **how)
        return {"accuracy": answers.accuracy, "loss": answers.loss, "perplexity": answers.perplexity} | sums(answers)


def sums(score: "measured_by.Told") -> Told:
    """What was counted, and whether the model is right as often as it says."""
    from dataclasses import asdict

    return asdict(score) | {"calibration": score.calibration.to_dict()}


def show(told: Told, troubles: "Troubles") -> None:
    """A table for people."""
    from rich.text import Text

    from cutaway.cli.answers import lay_out
    from cutaway.cli.screen import visible
    from cutaway.cli.size_view import grid

    table = grid("lrl")
    if "accuracy" in told:
        share = f"{told['right']:,} of {told['tokens']:,} masked tokens" if "right" in told else ""
        share = share or f"{told['exact']:,} of {told['pairs']:,} answers are the target"
        table.add_row("accuracy", Text(f"{told['accuracy']:.1%}", "bold"), share)
    table.add_row("loss", Text(f"{told['loss']:.4f}", "bold"), "nats a token")
    table.add_row("perplexity", Text(f"{told['perplexity']:,.4g}", "bold"), f"over {told['tokens']:,} tokens")
    if "bits_per_byte" in told:
        table.add_row("bits per byte", Text(f"{told['bits_per_byte']:.4f}", "bold"), f"over {told['bytes']:,} bytes")
    calibration = told["calibration"]
    sure = f"off the truth: {calibration['confidence']:.1%} sure of the likeliest, {calibration['accuracy']:.1%} right"
    table.add_row("calibration", Text(f"{calibration['error']:.4f}", "bold"), sure)
    if "documents" in told:
        count = told["documents"]
        read = f"read up to {told['context']:,} tokens at once" + (
            f", {told['stride']:,} further each time" if "stride" in told else ""
        )
        table.add_row("texts", f"{count:,}", read)
    lay_out(table)
    if troubles.total:
        sys.stderr.write(f"passed over: {visible(str(troubles))}\n")
