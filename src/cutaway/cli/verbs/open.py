"""`cutaway open`: the inspector web page for a model."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlencode

from cutaway.cli import options as opt
from cutaway.cli.json_output import print_json
from cutaway.pretrained import DEFAULT_MODEL

if TYPE_CHECKING:  # torch is imported when it is needed
    from cutaway.families.checkpoint import Checkpoint
    from cutaway.model import Transformer
    from cutaway.serve.inspect.inspector import Inspector
    from cutaway.serve.inspect.model_catalog import ModelCatalog
    from cutaway.serve.inspect.open_run import OpenRun


def open_page(
    source: opt.ModelSource = DEFAULT_MODEL,
    text: Annotated[str | None, opt.argument("Initial input text.", metavar="TEXT")] = None,
    export: Annotated[Path | None, opt.option("Export the page for TEXT as one .html file.", metavar="FILE")] = None,
    host: opt.Host = "127.0.0.1",
    port: opt.Port = 0,
    api_key: Annotated[str | None, opt.api_key_option("API key that clients must send.")] = None,
    api_key_file: opt.ApiKeyFile = None,
    browser: Annotated[bool, opt.option("Open the page in a browser.", "--browser/--no-browser")] = True,
    adapter: opt.Adapter = None,
    device: opt.Device = None,
    dtype: Annotated[opt.DType | None, opt.option("Weight data type; default as stored, float32 on a CPU.")] = None,
    as_json: opt.ServerJsonFlag = False,
) -> None:
    """Open a web page that shows a model's activations, attention patterns and predictions for a text.

    Example: cutaway open

    Example: cutaway open ./gpt2 "The capital of Italy is"

    Example: cutaway open tiny-english --export page.html "The cat sat on the"
    """
    from cutaway.serve import static_files

    static_files.load_static_files()  # raise if the page was not built, before loading the model
    if export is not None:
        export_page(export, source, text, device, dtype, as_json=as_json, adapter=adapter)
        return
    from cutaway.cli.model_loading import is_config_source
    from cutaway.cli.verbs.serve import load_api_key
    from cutaway.serve.app import build_app
    from cutaway.serve.inspect import routes
    from cutaway.serve.inspect.exercise_access import build_exercise_access
    from cutaway.serve.limits import Limits
    from cutaway.serve.notebook_pages import build_notebook_router
    from cutaway.serve.server import bind_socket, build_access_policy, run_server, server_url

    limits, key = Limits(), load_api_key(api_key, api_key_file)
    access_policy, sock = build_access_policy(host, key), bind_socket(host, port)
    exercise_access = build_exercise_access(sock)
    catalog = load_catalog(source, text, device, dtype, quiet=as_json, adapter=adapter)
    executor = routes.QueryExecutor(catalog.current, exercise_access)
    routers = [routes.build_router(executor), build_notebook_router(), static_files.build_static_router()]
    app = build_app(routers, access_policy=access_policy, limits=limits, on_shutdown=[executor.close])
    url = f"{server_url(sock)}/"
    # The token is in the fragment, which a browser does not send: only this address allows the page to run exercises.
    fragment = "" if exercise_access.problem else f"#/model?exercise_token={exercise_access.token}"

    def on_ready() -> None:
        if as_json:
            print_json({"source": source, "url": url, "page": f"{url}{fragment}"}, indent=None)
            return
        weights = ", with random weights" if is_config_source(source) else ""
        sys.stdout.write(f"{source} is open at {url}{fragment}{weights}\nCtrl-C to stop.\n")
        sys.stdout.flush()
        if browser:
            import webbrowser

            webbrowser.open(f"{url}{'' if key is None else '?' + urlencode({'api_key': key})}{fragment}")

    run_server(app, sock, limits, on_ready)


def export_page(
    path: Path,
    source: str,
    text: str | None,
    device: str | None,
    dtype: opt.DType | None,
    *,
    as_json: bool,
    adapter: str | None = None,
) -> None:
    """Export the inspector page to an HTML file, which is written atomically."""
    from cutaway.cli.verbs.trace import check_output_file
    from cutaway.cli.views.terminal import progress_bar

    check_output_file(path, "--export", ".html")
    from cutaway.serve.inspect.export import export_html
    from cutaway.user_files import write_text_atomically

    inspector = load_inspector(source, text, device, dtype, quiet=as_json, adapter=adapter)
    with progress_bar("exporting", quiet=as_json) as progress:
        html, is_complete = export_html(inspector, progress)
    write_text_atomically(path, html)
    megabytes = len(html.encode()) / 1e6
    if as_json:
        data = {"source": source, "file": str(path), "megabytes": megabytes, "is_complete": is_complete}
        print_json(data, indent=None)
        return
    note = "" if is_complete else "; the text is long, so the activations of its first tokens are left out"
    sys.stdout.write(f"{path}: {megabytes:.1f} MB, opens in any browser without a server{note}\n")


def load_catalog(
    source: str,
    text: str | None,
    device: str | None,
    dtype: opt.DType | None,
    *,
    quiet: bool = False,
    adapter: str | None = None,
) -> "ModelCatalog":
    """Load a model and return the catalog of the models that the page can open instead of it."""
    from cutaway.serve.inspect.model_catalog import ModelCatalog

    inspector = load_inspector(source, text, device, dtype, quiet=quiet, adapter=adapter)
    run = inspector.run  # the function must not keep the inspector, so that its model can be released

    def reload() -> "Inspector":
        return load_inspector(source, text, device, dtype, quiet=True, run=run, adapter=adapter)

    return ModelCatalog(inspector, reload, text)


def load_inspector(
    source: str,
    text: str | None,
    device: str | None,
    dtype: opt.DType | None,
    *,
    quiet: bool = False,
    run: "OpenRun | None" = None,
    adapter: str | None = None,
) -> "Inspector":
    """Return an inspector of a checkpoint, of the newest weights of a training run, or of an untrained model.

    `run` is the run at `source`, if it is open already.
    """
    from cutaway.cli.model_loading import build_untrained_model
    from cutaway.config.serialization import path_satisfies
    from cutaway.families.load import RUN_FILE_NAME
    from cutaway.generate.fast.cpu_linear import should_upcast_on_cpu
    from cutaway.serve.inspect.inspector import build_inspector
    from cutaway.serve.inspect.open_run import OpenRun

    path = Path(source).expanduser()
    if run is None and path_satisfies(path / RUN_FILE_NAME, Path.is_file):
        run = OpenRun(path)
    run_step = None
    model: Transformer | Checkpoint | None = build_untrained_model(source, device, dtype, adapter)
    if model is None:
        checkpoint, run_step = _load_checkpoint_or_run(source, run, device, dtype, quiet=quiet, adapter=adapter)
        model = checkpoint
        if dtype is None and should_upcast_on_cpu(checkpoint.model):
            checkpoint.model.float()  # 16-bit rounding would hide errors that the consistency checks look for
    text = text if text is not None or run is None else run.default_text
    return build_inspector(model, text, name=source, run=run, run_step=run_step, adapter_source=adapter)


def _load_checkpoint_or_run(
    source: str,
    run: "OpenRun | None",
    device: str | None,
    dtype: opt.DType | None,
    *,
    quiet: bool,
    adapter: str | None = None,
) -> "tuple[Checkpoint, int | None]":
    """Load a checkpoint, or the newest weights of a run and their step."""
    if run is None or run.directory.model_directory.is_dir():
        from cutaway.cli.model_loading import load_checkpoint

        checkpoint = load_checkpoint(source, device, dtype, quiet=quiet, adapters=adapter)
        return checkpoint, None if run is None else run.max_steps
    from cutaway.cli.model_loading import check_no_adapter
    from cutaway.train.checkpoint.saved_models import load_newest_model

    check_no_adapter(source, adapter)
    checkpoint, step = load_newest_model(run.directory, device=device)
    if not quiet:
        sys.stderr.write(f"{source} is not finished: this is the model after {step:,} steps\n")
    return checkpoint, step
