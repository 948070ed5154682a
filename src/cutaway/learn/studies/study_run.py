"""Run the parts of a study, in several processes if requested, and continue an interrupted run."""

import importlib
import json
import platform
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from cutaway.errors import InputError
from cutaway.learn.studies.study import Estimate, PartResults, ProgressFn, Study, StudyResults


@dataclass(frozen=True)
class FinishedPart:
    """Results of a part of a study, and the seconds that it took."""

    results: PartResults
    seconds: float


def run_study(study: Study, progress: ProgressFn, *, partial_file: Path | None = None, jobs: int = 1) -> StudyResults:
    """Repeat the measurements of a study, on a GPU if there is one.

    Finished parts are stored in `partial_file`, from which an interrupted run continues. `jobs` is the number of
    processes; parts that measure time run alone.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    module: Any = importlib.import_module(study.module)
    settings = module.describe_settings(device)
    names = list(module.list_parts(device))
    finished = {} if partial_file is None else _read_partial(partial_file, study, settings)
    pending = [name for name in names if name not in finished]

    def store(name: str, part: FinishedPart) -> None:
        finished[name] = part
        if partial_file is not None:
            _write_partial(partial_file, study, settings, finished)

    timed = [name for name in pending if name in getattr(module, "TIMED_PARTS", ())]
    if jobs > 1:
        in_parallel = [name for name in pending if name not in timed]
        with ProcessPoolExecutor(
            jobs, mp_context=get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
        ) as pool:
            futures = {pool.submit(_run_part, study.module, device, name): name for name in in_parallel}
            for future in as_completed(futures):
                progress(len(finished), len(names), f"finished: {futures[future]}")
                store(futures[future], future.result())
    for name in pending if jobs == 1 else timed:
        progress(len(finished), len(names), name)
        store(name, _run_part(study.module, device, name))
    results = {name: finished[name].results for name in names}
    seconds = sum(part.seconds for part in finished.values())
    environment = f"torch {version('torch')}, {platform.machine()}"
    if device == "cuda":
        environment += f"; {torch.cuda.get_device_name()}"
    summarize = getattr(module, "summarize", _merge)
    return StudyResults(study.name, study.command, settings, environment, seconds, summarize(results))


def _run_part(module: str, device: str, name: str) -> FinishedPart:
    start = time.perf_counter()
    results = importlib.import_module(module).list_parts(device)[name]()
    return FinishedPart(results, time.perf_counter() - start)


def _merge(results: Mapping[str, PartResults]) -> dict[str, Estimate]:
    """Estimates of all parts."""
    return {key: value for part in results.values() for key, value in part.items() if isinstance(value, Estimate)}


def _write_partial(path: Path, study: Study, settings: Mapping[str, Any], finished: Mapping[str, FinishedPart]) -> None:
    parts = {
        name: {"seconds": part.seconds, "results": {key: _encode(value) for key, value in part.results.items()}}
        for name, part in finished.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({"name": study.name, "settings": settings, "parts": parts}), encoding="utf-8")
    temporary.replace(path)


def _read_partial(path: Path, study: Study, settings: Mapping[str, Any]) -> dict[str, FinishedPart]:
    if not path.exists():
        return {}
    data = json.loads(path.read_text(encoding="utf-8"))
    if data["name"] != study.name or data["settings"] != json.loads(json.dumps(settings)):
        raise InputError(f"'{path}' has results of another study or of other settings; delete it to start again")
    return {
        name: FinishedPart({key: _decode(value) for key, value in part["results"].items()}, part["seconds"])
        for name, part in data["parts"].items()
    }


def _encode(value: Estimate | Sequence[float]) -> Any:
    return (
        {"estimate": [value.mean, value.low, value.high, value.count]} if isinstance(value, Estimate) else list(value)
    )


def _decode(value: Any) -> Estimate | Sequence[float]:
    return Estimate(*value["estimate"]) if isinstance(value, dict) else value
