"""`cutaway open`: the page where one follows a token."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlencode

import typer

from cutaway.cli.model_loading import DType

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
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", envvar="CUTAWAY_API_KEY", show_envvar=True, help="What other machines must give."),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", metavar="FILE", help="A file that holds the key.")
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
    from cutaway.serve import static_files

    static_files.load_static_files()  # an installation without a page is told at once
    if export is not None:
        export_page(export, source, text, device, dtype, as_json=as_json)
        return
    from cutaway.cli.verbs.serve import load_api_key
    from cutaway.serve.app import build_app
    from cutaway.serve.inspect import routes
    from cutaway.serve.limits import Limits
    from cutaway.serve.server import bind_socket, build_access_policy, run_server, server_url

    limits, secret = Limits(), load_api_key(api_key, api_key_file)
    door, listening = build_access_policy(host, secret), bind_socket(host, port)
    desk = routes.QueryExecutor(load_inspector(source, text, device, dtype, quiet=as_json))
    routers = [routes.build_router(desk), static_files.build_static_router()]
    app = build_app(routers, access_policy=door, limits=limits, on_shutdown=[desk.close])
    where = f"{server_url(listening)}/"

    def ready() -> None:
        if as_json:
            sys.stdout.write(json.dumps({"source": source, "url": where}) + "\n")
        else:
            sys.stdout.write(f"{source} is open at {where}\nCtrl-C ends it.\n")
        sys.stdout.flush()
        if browser and not as_json:
            import webbrowser

            webbrowser.open(where if secret is None else f"{where}?{urlencode({'api_key': secret})}")

    run_server(app, listening, limits, ready)


def export_page(path: Path, source: str, text: str | None, device: str | None, dtype: Any, *, as_json: bool) -> None:
    """The page as a file: whole, or not there."""
    from cutaway.cli.verbs.trace import check_output_file
    from cutaway.cli.views.terminal import progress_bar

    check_output_file(path, "--export", ".html")
    from cutaway.serve.inspect.export import export_html

    of = load_inspector(source, text, device, dtype, quiet=as_json)
    with progress_bar("asking", quiet=as_json) as progress:
        made, whole = export_html(of, progress)
    aside = path.with_name(f".{path.name}-{id(made)}")
    try:
        aside.write_text(made, encoding="utf-8")
        aside.rename(path)
    finally:
        aside.unlink(missing_ok=True)
    size = len(made.encode()) / 1e6
    if as_json:
        sys.stdout.write(
            json.dumps({"source": source, "file": str(path), "megabytes": size, "is_complete": whole}) + "\n"
        )
        return
    rest = "" if whole else "; the text is long, so the first tokens' stages are left out"
    sys.stdout.write(f"{path}: {size:.1f} MB, for any browser, without a server{rest}\n")


def load_inspector(
    source: str, text: str | None, device: str | None, dtype: Any, *, quiet: bool = False
) -> "Inspector":
    """The model and its words."""
    from cutaway.cli.model_loading import build_untrained_model
    from cutaway.generate.fast.cpu_linear import should_upcast_on_cpu
    from cutaway.serve.inspect.inspector import build_inspector

    run = _find_run_directory(source)
    found = build_untrained_model(source, device, dtype)
    if found is None:
        found = _load_checkpoint_or_snapshot(source, run, device, dtype, quiet=quiet)
        if dtype is None and should_upcast_on_cpu(found.model):
            found.model.float()  # 16 bits round away what the proofs show
    return build_inspector(found, text, name=source, run_directory=run)


def _find_run_directory(source: str) -> Path | None:
    """The directory, if it is a run's."""
    from cutaway.config.serialization import path_satisfies
    from cutaway.families.load import RUN_FILE_NAME

    path = Path(source).expanduser()
    return path if path_satisfies(path / RUN_FILE_NAME, Path.is_file) else None


def _load_checkpoint_or_snapshot(
    source: str, run_directory: Path | None, device: str | None, dtype: Any, *, quiet: bool
) -> Any:
    """A trained model; of a run that is not done, what it has come to."""
    if run_directory is None or (run_directory / "model").is_dir():
        from cutaway.cli.model_loading import load_checkpoint

        return load_checkpoint(source, device, dtype, quiet=quiet)
    from cutaway.train.checkpoint.run_directory import load_snapshot

    found, step = load_snapshot(run_directory, device=device)
    sys.stderr.write(f"{source} is not done yet: this is its model after {step:,} steps\n")
    return found
