"""`cutaway open`: the page where one follows a token."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlencode

import typer

from cutaway.cli.convert import DType

if TYPE_CHECKING:  # torch is imported when the work begins
    from cutaway.serve.inspect.inspector import Inspector


def open_page(
    source: Annotated[
        str,
        typer.Argument(metavar="SOURCE", help="A model's or run's directory, .gguf file, hub id, or a preset's name."),
    ] = "tiny-python",
    text: Annotated[str | None, typer.Argument(metavar="TEXT", help="What it reads when the page opens.")] = None,
    export: Annotated[
        Path | None, typer.Option("--export", metavar="FILE", help="Write the page about TEXT as one .html file.")
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Where to listen; other machines need a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="0 takes one that is free.")] = 0,
    key: Annotated[
        str | None,
        typer.Option("--key", envvar="CUTAWAY_KEY", show_envvar=True, help="What other machines must give."),
    ] = None,
    key_file: Annotated[
        Path | None, typer.Option("--key-file", metavar="FILE", help="A file that holds the key.")
    ] = None,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Show the page in a browser.")] = True,
    device: Annotated[str | None, typer.Option("--device", help="cpu or cuda; the GPU if there is one.")] = None,
    dtype: Annotated[
        DType | None, typer.Option("--dtype", help="Of the weights; fp32 on a CPU that holds them so.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines: one JSON object when it is ready.")] = False,
) -> None:
    """Open a page on this machine that shows what happens to a word on its way through a model.

    Example: cutaway open

    Example: cutaway open ./gpt2 "The capital of Italy is"

    Example: cutaway open tiny-python --export page.html "for name in sorted(os."
    """
    from cutaway.serve import built

    built.files()  # an installation without a page is told at once
    if export is not None:
        write(export, source, text, device, dtype, as_json=as_json)
        return
    from cutaway.cli.serve import read_key
    from cutaway.serve.app import make_app
    from cutaway.serve.inspect import routes
    from cutaway.serve.limits import Limits
    from cutaway.serve.server import address, listen, make_door, serve

    limits, secret = Limits(), read_key(key, key_file)
    door, listening = make_door(host, secret), listen(host, port)
    desk = routes.Desk(inspector(source, text, device, dtype, quiet=as_json))
    routers = [routes.router(desk), built.router()]
    app = make_app(routers, door=door, limits=limits, closing=[desk.close])
    where = f"{address(listening)}/"

    def ready() -> None:
        if as_json:
            sys.stdout.write(json.dumps({"source": source, "address": where}) + "\n")
        else:
            sys.stdout.write(f"{source} is open at {where}\nCtrl-C ends it.\n")
        sys.stdout.flush()
        if browser and not as_json:
            import webbrowser

            webbrowser.open(where if secret is None else f"{where}?{urlencode({'key': secret})}")

    serve(app, listening, limits, ready)


def write(path: Path, source: str, text: str | None, device: str | None, dtype: Any, *, as_json: bool) -> None:
    """The page as a file: whole, or not there."""
    from cutaway.cli.convert import bar
    from cutaway.cli.trace import check_file

    check_file(path, "--export", ".html")
    from cutaway.serve.inspect.frozen import as_file

    of = inspector(source, text, device, dtype, quiet=as_json)
    with bar("asking", quiet=as_json) as progress:
        made, whole = as_file(of, progress)
    aside = path.with_name(f".{path.name}-{id(made)}")
    try:
        aside.write_text(made, encoding="utf-8")
        aside.rename(path)
    finally:
        aside.unlink(missing_ok=True)
    size = len(made.encode()) / 1e6
    if as_json:
        sys.stdout.write(json.dumps({"source": source, "file": str(path), "megabytes": size, "whole": whole}) + "\n")
        return
    rest = "" if whole else "; the text is long, so the first tokens' stages are left out"
    sys.stdout.write(f"{path}: {size:.1f} MB, for any browser, without a server{rest}\n")


def inspector(source: str, text: str | None, device: str | None, dtype: Any, *, quiet: bool = False) -> "Inspector":
    """The model and its words."""
    from cutaway.cli import reading
    from cutaway.generate.fast.cpu import is_narrow
    from cutaway.serve.inspect.opening import looked_into

    run = run_at(source)
    found = reading.fresh(source, device, dtype)
    if found is None:
        found = checkpoint(source, run, device, dtype, quiet=quiet)
        if dtype is None and is_narrow(found.model):
            found.model.float()  # 16 bits round away what the proofs show
    return looked_into(found, text, name=source, run=run)


def run_at(source: str) -> Path | None:
    """The directory, if it is a run's."""
    from cutaway.config.source import stands
    from cutaway.families.load import RUN

    path = Path(source).expanduser()
    return path if stands(path / RUN, Path.is_file) else None


def checkpoint(source: str, run: Path | None, device: str | None, dtype: Any, *, quiet: bool) -> Any:
    """A trained model; of a run that is not done, what it has come to."""
    if run is None or (run / "model").is_dir():
        from cutaway.cli import generate

        return generate.opened(source, device, dtype, quiet=quiet)
    from cutaway.train.halfway import halfway

    found, step = halfway(run, device=device)
    sys.stderr.write(f"{source} is not done yet: this is its model after {step:,} steps\n")
    return found
