"""`cutaway check`: correctness checks of a Transformer model."""

import math
import re
import sys
from contextlib import nullcontext, redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cutaway.cli.json_output import print_json
from cutaway.cli.options import (
    Adapter,
    Device,
    DType,
    JsonObjectFlag,
    WeightDType,
    check_output_path,
    option,
    source_argument,
)
from cutaway.errors import InputError

if TYPE_CHECKING:  # torch is imported when it is needed
    import torch

    from cutaway.check.model_sources import ModelAndOverrides
    from cutaway.check.report.source_location import SourceLocator
    from cutaway.model import Transformer

MAX_FILES_SHOWN = 3
"""Maximum number of changed files that are named."""
MAX_PARAMETERS = 500_000_000
"""Maximum number of parameters of a preset that is built at full size. Larger ones would exceed the time budget."""


Library = Literal["cutaway", "transformers"]
EXIT_CODES = {"passed": 0, "failed": 1, "inconclusive": 3}
"""Exit code by status of the report; 2 is for invalid arguments."""


ci_option = partial(option, panel="Continuous integration")


def check(
    source: Annotated[
        str | None,
        source_argument(
            "Model directory, run directory, .gguf file, hub id or preset name; or module.path:factory, a "
            "function that returns the model. Only this last form runs Python code."
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        option("Run only these checks, given by name, prefix (cache) or pattern (causality*).", metavar="A,B"),
    ] = None,
    skip: Annotated[list[str] | None, option("Skip these checks.", metavar="A,B")] = None,
    preflight: Annotated[
        bool, option("Run only the quick checks that training runs before its first step.", "--preflight")
    ] = False,
    budget: Annotated[str, option("Time budget, after which remaining checks are skipped.", metavar="TIME")] = "30s",
    seed: Annotated[int, option("Random seed of the inputs and of a preset's weights.", min=0)] = 0,
    library: Annotated[Library, option("Library that loads the model: cutaway or transformers.")] = "cutaway",
    adapter: Adapter = None,
    device: Device = None,
    dtype: WeightDType = None,
    junit: Annotated[Path | None, ci_option("Also write the report as JUnit XML.", metavar="FILE")] = None,
    sarif: Annotated[Path | None, ci_option("Also write the problems as SARIF 2.1.0.", metavar="FILE")] = None,
    markdown: Annotated[Path | None, ci_option("Also write the report as Markdown.", metavar="FILE")] = None,
    badge: Annotated[Path | None, ci_option("Also write an SVG badge.", metavar="FILE")] = None,
    baseline: Annotated[
        Path | None,
        ci_option("File of accepted findings, which do not change the exit code.", metavar="FILE"),
    ] = None,
    write_baseline: Annotated[
        bool, ci_option("Accept all current problems: write them to --baseline.", "--write-baseline")
    ] = False,
    changed: Annotated[
        bool,
        ci_option(
            "Only run if the factory's module or a module that it imports has changed since the last commit; in CI, "
            "since the target branch.",
            "--changed",
        ),
    ] = False,
    changed_since: Annotated[
        str | None, ci_option("As --changed, since the merge base with a branch or commit.", metavar="REF")
    ] = None,
    explain: Annotated[str | None, option("Print what a check catches and how to fix it.", metavar="NAME")] = None,
    list_checks: Annotated[bool, option("List all checks.", "--list")] = False,
    verbose: Annotated[bool, option("Print all cases with their measurements.", "--verbose", "-v")] = False,
    as_json: JsonObjectFlag = False,
) -> None:
    """Check a Transformer for common bugs: causality, padding, KV cache, positions, loss, gradients.

    The exit code is 1 if a check fails, and 3 if none fails but one is inconclusive, because the rounding noise of the
    model is too large. Checks that do not apply are reported as skipped, not as passed.

    Example: cutaway check ./my-model --junit report.xml

    Example: cutaway check ./my-model --library transformers --only causality,cache

    Example: cutaway check models.gpt:make --budget 2m

    Example: cutaway check models.gpt:make --baseline cutaway-baseline.json --sarif cutaway.sarif

    Example: cutaway check --explain left-padding
    """
    if explain is not None or list_checks:
        _print_check_docs(explain, as_json=as_json)
        return
    if source is None:
        raise InputError("SOURCE is missing; pass a model, or --list to list the checks")
    seconds = parse_duration(budget)
    only_names, skip_names = _split_names(only), _split_names(skip)
    paths = {"junit": junit, "sarif": sarif, "markdown": markdown, "badge": badge}
    outputs = {name: path for name, path in paths.items() if path is not None}
    _check_output_paths(outputs, baseline, write_baseline=write_baseline)
    if write_baseline and baseline is None:
        raise InputError("--write-baseline needs the file to write; pass it with --baseline FILE")
    notes: list[str] = []
    if (changed or changed_since is not None) and not _has_changed(source, changed_since, baseline, notes):
        _print_unchanged(source, notes, as_json=as_json)
        return
    from cutaway.check.registry import select_checks
    from cutaway.check.report.baseline import Baseline, load_baseline

    select_checks(only_names, skip_names)  # raise for unknown names before loading the model
    is_new_baseline = baseline is None or (write_baseline and not baseline.exists())
    accepted = Baseline() if baseline is None or is_new_baseline else load_baseline(baseline)
    with redirect_stdout(sys.stderr) if as_json else nullcontext():  # standard output has only JSON
        model, overrides = _load_checked_model(
            source, library, device, dtype, seed, notes, quiet=as_json, adapter=adapter
        )
        from cutaway.check import check as run_checks
        from cutaway.cli.views.terminal import progress_bar

        with progress_bar("checking", quiet=as_json) as progress:
            report = run_checks(
                model,
                only=only_names,
                skip=skip_names,
                seed=seed,
                budget=seconds,
                preflight=preflight,
                progress=lambda done, total, _: progress(done, total),
                **overrides,
            )
    if baseline is not None:
        if write_baseline:
            accepted = accepted.update(report, source)
            accepted.write(baseline)
        report = accepted.apply(report, source)
    if outputs:
        from cutaway.check.report.formats import write_outputs

        write_outputs(report, outputs, _build_locator(source, model, overrides))
    if as_json:
        data = {"source": source, "library": library, "notes": notes} | report.to_dict()
        print_json(data, default=str)
    else:
        from cutaway.cli.views import check_report

        check_report.render_report(report, source, notes, verbose=verbose)
    if not report.ok:
        raise typer.Exit(EXIT_CODES[report.status])


def _check_output_paths(outputs: dict[str, Path], baseline: Path | None, *, write_baseline: bool) -> None:
    """Raise if an output file cannot be written, or if two options name the same file."""
    names: dict[Path, str] = {}
    for name, path in (outputs | ({} if baseline is None else {"baseline": baseline})).items():
        if name != "baseline" or write_baseline:
            check_output_path(path)
        other = names.setdefault(path.resolve(), name)
        if other != name:
            raise InputError(f"--{other} and --{name} both name '{path}'; pass two different files")


def _has_changed(source: str, since: str | None, baseline: Path | None, notes: list[str]) -> bool:
    """Whether the checks must run because a file of the model or the baseline has changed.

    If git cannot tell, the checks run. The reason, or the changed files, are appended to `notes`.
    """
    from cutaway.cli.changed_files import UnknownChangesError, find_changed_imports

    try:
        files, base = find_changed_imports(source, since, [] if baseline is None else [baseline], Path.cwd())
    except UnknownChangesError as error:
        notes.append(f"the changed files are unknown, so the checks run: {error}")
        return True
    shown = ", ".join(files[:MAX_FILES_SHOWN]) + (" …" if len(files) > MAX_FILES_SHOWN else "")
    notes.append(f"changed since {base}: {shown or 'no file that the model imports'}")
    return bool(files)


def _print_unchanged(source: str, notes: list[str], *, as_json: bool) -> None:
    """Print that the checks did not run. No output file is written: an empty one would say that nothing was found."""
    if as_json:
        print_json({"source": source, "notes": notes, "ok": True, "status": "unchanged"})
    else:
        typer.echo(f"{source}: not checked, {notes[0]}")


def _build_locator(source: str, model: object, overrides: "dict[str, Any]") -> "SourceLocator":
    from cutaway.check.model_sources import import_factory, is_factory_spec
    from cutaway.check.report.source_location import SourceLocator

    factory = import_factory(source) if is_factory_spec(source) else None  # imported before, so this is a lookup
    return SourceLocator(source, model, overrides, factory)


def _print_check_docs(explain: str | None, *, as_json: bool) -> None:
    """Print the documentation of one check, or the list of all checks."""
    from cutaway.check.registry import get_checks
    from cutaway.check.report.explain import explain_check
    from cutaway.cli.views import check_report

    if explain is not None:
        text = explain_check(explain)
        if as_json:
            print_json({"check": explain, "page": text})
        else:
            check_report.render_check_docs(text)
    elif as_json:
        print_json([{"name": check.name, "catches": check.catches} for check in get_checks().values()])
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
    adapter: str | None = None,
) -> "ModelAndOverrides":
    """Return the model to check, and arguments of `check` that its factory sets.

    Notes about the model, such as "random weights", are appended to `notes`.
    """
    from cutaway.check import model_sources
    from cutaway.cli.model_loading import (
        check_no_adapter,
        default_device,
        is_config_source,
        load_checkpoint,
        to_torch_dtype,
    )

    target_device, torch_dtype = default_device(device), to_torch_dtype(dtype)
    is_transformers = library == "transformers"
    if model_sources.is_factory_spec(source):
        options = {
            "library transformers": is_transformers,
            "device": device,
            "dtype": dtype,
            "adapter": adapter,
        }
        for name in (name for name, value in options.items() if value):
            raise InputError(f"--{name} is for checkpoints, but '{source}' is checked unchanged; leave it out")
        return model_sources.build_from_factory(source, model_sources.import_factory(source), seed=seed)
    if is_config_source(source):
        check_no_adapter(source, adapter)
        if is_transformers:
            raise InputError(f"'{source}' is a preset; --library transformers needs a model directory or hub id")
        return _build_untrained_model(source, target_device, torch_dtype, seed, notes), {}
    if is_transformers:
        if adapter is not None:
            raise InputError("--adapter is for --library cutaway; merge the adapter first, with cutaway convert")
        return model_sources.load_transformers_model(source, device=target_device, dtype=torch_dtype), {}
    return load_checkpoint(source, device, dtype, quiet=quiet, keep_dtype=True, adapters=adapter), {}


def _build_untrained_model(
    source: str, device: "torch.device", dtype: "torch.dtype | None", seed: int, notes: list[str]
) -> "Transformer":
    """Build the model of a preset or config file with random weights, and append notes about it to `notes`.

    If the model has more than MAX_PARAMETERS parameters or does not fit in the free memory, its config is reduced.
    """
    import torch

    from cutaway.check.model_sources import shrink_config
    from cutaway.config import config
    from cutaway.device import free_memory
    from cutaway.model import build
    from cutaway.size.parameters import count_parameters
    from cutaway.size.units import format_count

    model_config = config(source)  # an unknown name raises an error that suggests a preset
    torch_dtype = torch.float32 if dtype is None else dtype
    num_parameters = count_parameters(model_config).total
    free_bytes = free_memory(device) or math.inf
    notes.append("random weights")
    if num_parameters > MAX_PARAMETERS or 2 * num_parameters * torch_dtype.itemsize > free_bytes:
        model_config = shrink_config(model_config)
        layers = " + ".join(str(stack.layers) for stack in model_config.stacks.values())
        notes.append(
            f"reduced config of the same structure, {layers} layers of d_model {model_config.d_model}: {source} itself "
            f"has {format_count(num_parameters)} parameters"
        )
    return build(model_config, device=device, dtype=torch_dtype, seed=seed)


def _split_names(names: list[str] | None) -> list[str] | None:
    """Split the values of `--only a,b --only c` into one list of names."""
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
