"""`cutaway check`: is this Transformer right?"""

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

if TYPE_CHECKING:  # torch is imported when the work begins
    from cutaway.check.model_sources import ModelAndOverrides

MAX_PARAMETERS = 500_000_000
"""Parameters of a preset that is built whole: of a larger one, the budget ends before the checks do."""


class Library(StrEnum):
    cutaway = "cutaway"
    transformers = "transformers"


def check(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="SOURCE",
            help="A model's or run's directory, .gguf file, hub id or preset's name; or module.path:factory, a "
            "function of your own that makes the model. Only this last form runs Python code that it names.",
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="A,B", help="Only these checks, or all that begin so (cache); causality* too."),
    ] = None,
    skip: Annotated[list[str] | None, typer.Option("--skip", metavar="A,B", help="All but these.")] = None,
    budget: Annotated[
        str, typer.Option("--budget", metavar="TIME", help="Then stop; what is left is skipped.")
    ] = "30s",
    seed: Annotated[int, typer.Option("--seed", help="Of the texts, and of a preset's weights.", min=0)] = 0,
    library: Annotated[
        Library, typer.Option("--library", help="Whose model is checked: that of cutaway, or of transformers.")
    ] = Library.cutaway,
    device: Annotated[str | None, typer.Option("--device", help="cpu or cuda; the GPU if there is one.")] = None,
    dtype: Annotated[DType | None, typer.Option("--dtype", help="Of the weights; as stored, unless given.")] = None,
    junit: Annotated[
        Path | None, typer.Option("--junit", metavar="FILE", help="Write the report as JUnit's XML too, for CI.")
    ] = None,
    explain: Annotated[
        str | None, typer.Option("--explain", metavar="NAME", help="What a check catches, and how to fix it.")
    ] = None,
    list_checks: Annotated[bool, typer.Option("--list", help="All checks, and what each catches.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="All that was tried, with its figures.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For machines: one JSON object.")] = False,
) -> None:
    """Ask a Transformer what goes wrong in Transformers: leaks, padding, caches, positions, loss, gradients and more.

    The exit code is 1 where a check fails. What cannot be tried is skipped, and never called passed.

    Example: cutaway check ./my-model --junit report.xml

    Example: cutaway check ./my-model --library transformers --only causality,cache

    Example: cutaway check models.gpt:make --budget 2m

    Example: cutaway check --explain left-padding
    """
    if explain is not None or list_checks:
        _print_check_docs(explain, as_json=as_json)
        return
    if source is None:
        raise InputError("there is nothing to check; give a SOURCE, or --list to see what can be asked")
    time = parse_duration(budget)
    names, without = _split_names(only), _split_names(skip)
    if junit is not None:
        _check_output_path(junit)
    from cutaway.check.registry import select_checks

    select_checks(names, without)  # a misspelt name is told before anything is read
    with redirect_stdout(sys.stderr) if as_json else nullcontext():  # what someone's code prints is no JSON
        notes: list[str] = []
        target, offers = _load_checked_model(source, library, device, dtype, seed, notes, quiet=as_json)
        from cutaway.check import check as run_checks
        from cutaway.cli.views.terminal import progress_bar

        with progress_bar("checking", quiet=as_json) as progress:
            report = run_checks(
                target,
                only=names,
                skip=without,
                seed=seed,
                budget=time,
                progress=lambda done, total, _: progress(done, total),
                **offers,
            )
    if junit is not None:
        from cutaway.check.report.junit import write_junit

        write_junit(report, junit)
    if as_json:
        from cutaway.cli.views.terminal import json_safe

        told = {"source": source, "library": str(library), "notes": notes} | report.to_dict()
        sys.stdout.write(json.dumps(json_safe(told), indent=2, allow_nan=False, default=str) + "\n")
    else:
        from cutaway.cli.views import check_report

        check_report.render_report(report, source, notes, verbose=verbose)
    if not report.ok:
        raise typer.Exit(1)


def _print_check_docs(explain: str | None, *, as_json: bool) -> None:
    """One check's page, or all checks by name."""
    from cutaway.check.registry import get_checks
    from cutaway.check.report.explain import explain_check
    from cutaway.cli.views import check_report

    if explain is not None:
        text = explain_check(explain)
        told: Any = {"check": explain, "page": text}
    else:
        told = [{"name": each.name, "catches": each.catches} for each in get_checks().values()]
    if as_json:
        sys.stdout.write(json.dumps(told, indent=2) + "\n")
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
    """What is to be checked, and what it offers beside what is found; `notes` are what a reader must know of it."""
    import torch

    from cutaway.check import model_sources
    from cutaway.model.inputs import resolve_device

    here = resolve_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    numbers = None if dtype is None else getattr(torch, dtype)
    if model_sources.is_factory_spec(source):
        for name, value in (
            ("library transformers", library is Library.transformers),
            ("device", device),
            ("dtype", dtype),
        ):
            if value:
                raise InputError(f"--{name} is for checkpoints; what '{source}' makes is checked as it is made")
        return model_sources.build_from_factory(source, model_sources.import_factory(source), seed=seed)
    from cutaway.cli.model_loading import is_config_source

    if is_config_source(source):
        if library is Library.transformers:
            raise InputError(f"'{source}' is a preset of cutaway's; --library transformers needs a directory or hub id")
        return _build_untrained_model(source, here, numbers, seed, notes), {}
    if library is Library.transformers:
        from cutaway.check.model_sources import load_transformers_model

        return load_transformers_model(source, device=here, dtype=numbers), {}
    from cutaway.cli.model_loading import load_checkpoint as loaded

    return loaded(source, device, dtype, quiet=quiet, keep_dtype=True), {}


def _build_untrained_model(source: str, device: Any, dtype: Any, seed: int, notes: list[str]) -> Any:
    """What a preset or a file of settings describes, with random weights; a smaller one where it is too large."""
    import torch

    from cutaway.check.model_sources import shrink_config
    from cutaway.config import config
    from cutaway.model import build
    from cutaway.model.device import free_memory
    from cutaway.size.parameters import count_parameters
    from cutaway.size.units import format_count

    described = config(source)  # a misspelt name is told its nearest
    numbers = torch.float32 if dtype is None else dtype
    total = count_parameters(described).total
    room = free_memory(device)
    notes.append("its weights are random")
    if total > MAX_PARAMETERS or (room is not None and 2 * total * numbers.itemsize > room):
        described = shrink_config(described)
        layers = " + ".join(str(stack.layers) for stack in described.stacks.values())
        notes.append(
            f"it is a smaller one of the same structure, {layers} layers of width {described.d_model}: {source} itself "
            f"has {format_count(total)} parameters"
        )
    return build(described, device=device, dtype=numbers, seed=seed)


def _split_names(names: list[str] | None) -> list[str] | None:
    """`--only a,b --only c` as one list."""
    if names is None:
        return None
    return [name.strip() for each in names for name in each.split(",") if name.strip()]


def parse_duration(text: str) -> float:
    """A time such as 30s, 2m or 45."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(s|m|min)?", text.strip(), re.ASCII)
    value = float(found[1]) * (60 if found[2] in ("m", "min") else 1) if found else 0.0
    if not 0 < value < 1e6:
        raise InputError(f"--budget is '{text}'; give a time, such as 30s or 2m")
    return value


def _check_output_path(path: Path) -> None:
    """What can be told before anything is read."""
    if path.is_dir():
        raise InputError(f"--junit is '{path}', which is a directory; name a file, such as report.xml")
    if not path.parent.is_dir():
        raise InputError(f"'{path.parent}' is no directory, so nothing can be written there; make it, or name another")
