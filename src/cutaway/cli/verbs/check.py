"""`cutaway check`: correctness checks of a Transformer model."""

import json
import re
import sys
from contextlib import nullcontext, redirect_stdout
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cutaway.cli.model_loading import DType
from cutaway.errors import InputError

if TYPE_CHECKING:  # torch is imported when it is needed
    from cutaway.check.model_sources import ModelAndOverrides

MAX_PARAMETERS = 500_000_000
"""Maximum parameters of a preset that is built at full size; larger ones would exceed the time budget."""


class Library(StrEnum):
    cutaway = "cutaway"
    transformers = "transformers"


def check(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="SOURCE",
            help="Model directory, run directory, .gguf file, hub id or preset name; or module.path:factory, a "
            "function that returns the model. Only this last form runs Python code.",
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only", metavar="A,B", help="Run only these checks; prefixes (cache) and patterns (causality*) match."
        ),
    ] = None,
    skip: Annotated[list[str] | None, typer.Option("--skip", metavar="A,B", help="Skip these checks.")] = None,
    budget: Annotated[
        str, typer.Option("--budget", metavar="TIME", help="Time budget; remaining checks are skipped.")
    ] = "30s",
    seed: Annotated[
        int, typer.Option("--seed", help="Random seed of the inputs and of a preset's weights.", min=0)
    ] = 0,
    library: Annotated[
        Library, typer.Option("--library", help="Library that loads the model: cutaway or transformers.")
    ] = Library.cutaway,
    device: Annotated[
        str | None, typer.Option("--device", help="Device: cpu or cuda; default cuda if available.")
    ] = None,
    dtype: Annotated[DType | None, typer.Option("--dtype", help="Data type of the weights; default as stored.")] = None,
    junit: Annotated[
        Path | None, typer.Option("--junit", metavar="FILE", help="Also write the report as JUnit XML.")
    ] = None,
    explain: Annotated[
        str | None, typer.Option("--explain", metavar="NAME", help="Print what a check catches and how to fix it.")
    ] = None,
    list_checks: Annotated[bool, typer.Option("--list", help="List all checks.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print all cases with their measurements.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check a Transformer for common bugs: causality, padding, KV cache, positions, loss, gradients.

    The exit code is 1 if a check fails. Checks that do not apply are reported as skipped, not as passed.

    Example: cutaway check ./my-model --junit report.xml

    Example: cutaway check ./my-model --library transformers --only causality,cache

    Example: cutaway check models.gpt:make --budget 2m

    Example: cutaway check --explain left-padding
    """
    if explain is not None or list_checks:
        _print_check_docs(explain, as_json=as_json)
        return
    if source is None:
        raise InputError("SOURCE is missing; pass a model, or --list to list the checks")
    seconds = parse_duration(budget)
    only_names, skip_names = _split_names(only), _split_names(skip)
    if junit is not None:
        _check_output_path(junit)
    from cutaway.check.registry import select_checks

    select_checks(only_names, skip_names)  # raise for unknown names before loading the model
    with redirect_stdout(sys.stderr) if as_json else nullcontext():  # output of the user's code is not JSON
        notes: list[str] = []
        model, overrides = _load_checked_model(source, library, device, dtype, seed, notes, quiet=as_json)
        from cutaway.check import check as run_checks
        from cutaway.cli.views.terminal import progress_bar

        with progress_bar("checking", quiet=as_json) as progress:
            report = run_checks(
                model,
                only=only_names,
                skip=skip_names,
                seed=seed,
                budget=seconds,
                progress=lambda done, total, _: progress(done, total),
                **overrides,
            )
    if junit is not None:
        from cutaway.check.report.junit import write_junit

        write_junit(report, junit)
    if as_json:
        from cutaway.cli.views.terminal import json_safe

        data = {"source": source, "library": str(library), "notes": notes} | report.to_dict()
        sys.stdout.write(json.dumps(json_safe(data), indent=2, allow_nan=False, default=str) + "\n")
    else:
        from cutaway.cli.views import check_report

        check_report.render_report(report, source, notes, verbose=verbose)
    if not report.ok:
        raise typer.Exit(1)


def _print_check_docs(explain: str | None, *, as_json: bool) -> None:
    """Print the documentation of one check, or the list of all checks."""
    from cutaway.check.registry import get_checks
    from cutaway.check.report.explain import explain_check
    from cutaway.cli.views import check_report

    if explain is not None:
        text = explain_check(explain)
        data: Any = {"check": explain, "page": text}
    else:
        data = [{"name": check.name, "catches": check.catches} for check in get_checks().values()]
    if as_json:
        sys.stdout.write(json.dumps(data, indent=2) + "\n")
    elif explain is not None:
        check_report.render_check_docs(text)
    else:
        check_report.render_check_list(get_checks())


def _load_checked_model(
    source: str,
    library: Library,
    device: str | None,
    dtype: DType | None,
    seed: int,
    notes: list[str],
    *,
    quiet: bool,
) -> "ModelAndOverrides":
    """Load the model and its adapter overrides; remarks about the model are appended to `notes`."""
    import torch

    from cutaway.arguments import resolve_device
    from cutaway.check import model_sources

    target_device = resolve_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch_dtype = None if dtype is None else getattr(torch, dtype)
    if model_sources.is_factory_spec(source):
        for name, value in (
            ("library transformers", library is Library.transformers),
            ("device", device),
            ("dtype", dtype),
        ):
            if value:
                raise InputError(
                    f"--{name} is for checkpoints; the model of '{source}' is checked unchanged, so leave it out"
                )
        return model_sources.build_from_factory(source, model_sources.import_factory(source), seed=seed)
    from cutaway.cli.model_loading import is_config_source

    if is_config_source(source):
        if library is Library.transformers:
            raise InputError(
                f"'{source}' is a cutaway preset; --library transformers requires a model directory or hub id"
            )
        return _build_untrained_model(source, target_device, torch_dtype, seed, notes), {}
    if library is Library.transformers:
        from cutaway.check.model_sources import load_transformers_model

        return load_transformers_model(source, device=target_device, dtype=torch_dtype), {}
    from cutaway.cli.model_loading import load_checkpoint

    return load_checkpoint(source, device, dtype, quiet=quiet, keep_dtype=True), {}


def _build_untrained_model(source: str, device: Any, dtype: Any, seed: int, notes: list[str]) -> Any:
    """Build a preset or config file with random weights; a reduced config if it is too large."""
    import torch

    from cutaway.check.model_sources import shrink_config
    from cutaway.config import config
    from cutaway.device import free_memory
    from cutaway.model import build
    from cutaway.size.parameters import count_parameters
    from cutaway.size.units import format_count

    model_config = config(source)  # an unknown name raises with the nearest preset
    torch_dtype = torch.float32 if dtype is None else dtype
    num_parameters = count_parameters(model_config).total
    free_bytes = free_memory(device)
    notes.append("random weights")
    if num_parameters > MAX_PARAMETERS or (
        free_bytes is not None and 2 * num_parameters * torch_dtype.itemsize > free_bytes
    ):
        model_config = shrink_config(model_config)
        layers = " + ".join(str(stack.layers) for stack in model_config.stacks.values())
        notes.append(
            f"reduced config of the same structure, {layers} layers of d_model {model_config.d_model}: {source} itself "
            f"has {format_count(num_parameters)} parameters"
        )
    return build(model_config, device=device, dtype=torch_dtype, seed=seed)


def _split_names(names: list[str] | None) -> list[str] | None:
    """Split `--only a,b --only c` to one list."""
    if names is None:
        return None
    return [name.strip() for entry in names for name in entry.split(",") if name.strip()]


def parse_duration(text: str) -> float:
    """Parse a duration such as 30s, 2m or 45 to seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(s|m|min)?", text.strip(), re.ASCII)
    seconds = float(match[1]) * (60 if match[2] in ("m", "min") else 1) if match else 0.0
    if not 0 < seconds < 1e6:
        raise InputError(f"--budget is '{text}'; use a duration, such as 30s or 2m")
    return seconds


def _check_output_path(path: Path) -> None:
    """Raise if the report cannot be written, before loading the model."""
    if path.is_dir():
        raise InputError(f"--junit is '{path}', which is a directory; name a file, such as report.xml")
    if not path.parent.is_dir():
        raise InputError(
            f"'{path.parent}' is not a directory, so the file cannot be written; create it, or name another"
        )
