"""Tasks of lm-evaluation-harness on a decoder, for `cutaway eval --tasks`."""

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cutaway.cli.json_output import print_json
from cutaway.cli.options import DType
from cutaway.errors import InputError

if TYPE_CHECKING:
    from cutaway.families.checkpoint import Checkpoint

STDERR_SUFFIX = "_stderr"


class TaskOptions(NamedTuple):
    """Arguments of `lm_eval.simple_evaluate`."""

    num_fewshot: int | None
    limit: int | None
    include_path: Path | None
    apply_chat_template: bool


def evaluate_tasks(
    source: str,
    tasks: Sequence[str],
    options: TaskOptions,
    batch_size: int | None,
    device: str | None,
    dtype: DType | None,
    *,
    as_json: bool,
    adapter: str | None = None,
) -> None:
    """Run tasks of lm-evaluation-harness, and print each metric with its standard error."""
    if importlib.util.find_spec("lm_eval") is None:
        raise InputError(
            "--tasks needs lm-evaluation-harness, which is not installed; install it with: pip install 'cutaway[eval]'"
        )
    from cutaway.cli.model_loading import load_checkpoint

    names = [name.strip() for entry in tasks for name in entry.split(",") if name.strip()]
    checkpoint = load_checkpoint(source, device, dtype, quiet=as_json, adapters=adapter)
    results = run_tasks(checkpoint, names, options, batch_size)
    if as_json:
        print_json({"source": source, "tasks": results["results"], "num_samples": results.get("n-samples", {})})
    else:
        _render(results)


def run_tasks(
    checkpoint: "Checkpoint", names: Sequence[str], options: TaskOptions, batch_size: int | None
) -> dict[str, Any]:
    """Results of `lm_eval.simple_evaluate`. Raises InputError for unknown tasks and tasks whose data is not there."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    from cutaway.evaluate.lm_eval import CutawayLM

    include_path = None if options.include_path is None else str(options.include_path)
    manager = TaskManager(include_path=include_path)
    known = set(manager.all_tasks)
    if unknown := [name for name in names if name not in known]:
        import difflib

        near = difflib.get_close_matches(unknown[0], known, n=3)
        hint = f"did you mean {', '.join(near)}?" if near else "`lm-eval ls tasks` lists the tasks"
        raise InputError(f"lm-evaluation-harness has no task '{unknown[0]}'; {hint} --include-path DIR adds own tasks")
    model = CutawayLM(checkpoint, batch_size=batch_size)
    try:
        results = lm_eval.simple_evaluate(
            model,
            tasks=list(names),
            num_fewshot=options.num_fewshot,
            limit=options.limit,
            apply_chat_template=options.apply_chat_template,
            task_manager=manager,
            log_samples=False,
        )
    except (ConnectionError, FileNotFoundError) as error:  # the data sets are downloaded from the Hub
        raise InputError(
            f"the data of the tasks cannot be loaded: {str(error).splitlines()[0]}; check the network and the Hub's"
            " cache, or define a task on a local file and pass its directory with --include-path"
        ) from None
    return results or {"results": {}}


def _render(results: Mapping[str, Any]) -> None:
    """Print one row per task and metric: value, standard error, number of samples."""
    from rich.text import Text

    from cutaway.cli.views.terminal import borderless_table, print_without_wrapping

    table = borderless_table("llrl")
    for task, metrics in results["results"].items():
        samples = results.get("n-samples", {}).get(task, {}).get("effective")
        for key, value in metrics.items():
            metric, _, filter_name = key.partition(",")
            if not isinstance(value, float) or metric.endswith(STDERR_SUFFIX):
                continue
            error = metrics.get(f"{metric}{STDERR_SUFFIX},{filter_name}")
            note = f"± {error:.4f}" if isinstance(error, float) else ""
            count = f" over {samples:,} samples" if samples is not None else ""
            name = metric if filter_name in ("", "none") else f"{metric} ({filter_name})"
            table.add_row(task, name, Text(f"{value:.4f}", "bold"), note + count)
    print_without_wrapping(table)
    if not results["results"]:
        sys.stderr.write("the tasks have no results\n")
