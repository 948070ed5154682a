"""`cutaway open`: the page where one follows a token."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cutaway.cli.convert import DType

if TYPE_CHECKING:  # torch is imported when the work begins
    from cutaway.model import Transformer
    from cutaway.serve.inspect.inspector import Inspector

WIDENED = 1 << 30
"""Parameters up to which narrow numbers are read as fp32 on a CPU."""


def open_page(
    source: Annotated[
        str,
        typer.Argument(metavar="SOURCE", help="A model's or run's directory, .gguf file, hub id, or a preset's name."),
    ] = "tiny-python",
    text: Annotated[str | None, typer.Argument(metavar="TEXT", help="What it reads when the page opens.")] = None,
    port: Annotated[int, typer.Option("--port", help="0: any that is free.")] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Show the page in a browser.")] = True,
    device: Annotated[str | None, typer.Option("--device", help="cpu or cuda; the GPU if there is one.")] = None,
    dtype: Annotated[DType | None, typer.Option("--dtype", help="Of the weights; as stored, unless given.")] = None,
) -> None:
    """Open a page on this machine that shows what happens to a word on its way through a model.

    Example: cutaway open tiny-python

    Example: cutaway open ./gpt2 "The capital of Italy is"
    """
    from cutaway.serve import built

    built.files()  # an installation without a page is told at once
    from cutaway.serve.app import make_app
    from cutaway.serve.inspect import routes
    from cutaway.serve.limits import Limits
    from cutaway.serve.server import address, listen, make_door, serve

    host, limits = "127.0.0.1", Limits()
    listening = listen(host, port)
    desk = routes.Desk(inspector(source, text, device, dtype))
    app = make_app(
        [routes.router(desk), built.router()], door=make_door(host, None), limits=limits, closing=[desk.close]
    )
    where = f"{address(listening)}/"

    def ready() -> None:
        sys.stdout.write(f"{source} is open at {where}\nCtrl-C ends it.\n")
        sys.stdout.flush()
        if browser:
            import webbrowser

            webbrowser.open(where)

    serve(app, listening, limits, ready)


def inspector(source: str, text: str | None, device: str | None, dtype: Any) -> "Inspector":
    """The model and its words."""
    from cutaway.cli import reading
    from cutaway.serve.inspect.inspector import Inspector
    from cutaway.serve.inspect.words import CODE, PROSE, Words

    run = run_at(source)
    model, tokenizer, start, begin = reading.fresh(source, device, dtype), None, None, None
    if model is None:
        from cutaway.generate.texts import opened

        model, tokenizer, begin = opened(checkpoint(source, run, device, dtype))
        start = begin.decoder_start
        if dtype is None and is_small(model):
            model.float()  # 16 bits are slow on many CPUs, and round away what the proofs show
    two = len(model.stacks) > 1
    usual = CODE if source == "tiny-python" else PROSE
    words = Words(
        model.config.vocab_size,
        tokenizer,
        (start or 0) if two else None,
        "" if two else text or usual,
        (text or PROSE) if two else None,
        begin,
    )
    return Inspector(model, words, name=source if run is None else run.resolve().name, run=run)


def is_small(model: "Transformer") -> bool:
    """On a CPU that holds it in 32 bits easily."""
    return model.device.type == "cpu" and sum(each.numel() for each in model.parameters()) <= WIDENED


def run_at(source: str) -> Path | None:
    """The directory, if it is a run's."""
    from cutaway.config.source import stands
    from cutaway.families.load import RUN

    path = Path(source).expanduser()
    return path if stands(path / RUN, Path.is_file) else None


def checkpoint(source: str, run: Path | None, device: str | None, dtype: Any) -> Any:
    """A trained model; of a run that is not done, what it has come to."""
    if run is None or (run / "model").is_dir():
        from cutaway.cli import generate

        return generate.opened(source, device, dtype, quiet=False)
    from cutaway.train.halfway import halfway

    found, step = halfway(run, device=device)
    sys.stderr.write(f"{source} is not done yet: this is its model after {step:,} steps\n")
    return found
