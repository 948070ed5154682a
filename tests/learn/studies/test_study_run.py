"""Parts of a study: one after the other, in several processes, and continued after an interruption."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cutaway.errors import InputError
from cutaway.learn.studies import STUDIES, Estimate, Study
from cutaway.learn.studies.study_run import run_study

MODULE = """
from functools import partial
from pathlib import Path

from cutaway.learn.studies.study import Estimate, estimate

FOLDER = Path({folder!r})
TIMED_PARTS = ("c",)


def list_parts(device):
    return {{name: partial(measure, name) for name in "abc"}}


def measure(name):
    with open(FOLDER / "calls", "a") as file:
        file.write(name)
    if (FOLDER / f"fail-{{name}}").exists():
        raise RuntimeError("interrupted")
    return {{f"value/{{name}}": Estimate(1.0, 0.5, 1.5, 3), "raw": [1.0, 2.0]}}


def describe_settings(device):
    return {{"seeds": 3, "lrs": (1, 2)}}


def summarize(results):
    estimates = {{key: value for part in results.values() for key, value in part.items() if key != "raw"}}
    return estimates | {{"mean": estimate([x for part in results.values() for x in part["raw"]])}}
"""


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    (tmp_path / "small_study.py").write_text(MODULE.format(folder=str(tmp_path)))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "small_study", raising=False)
    return Study("small", "A small study", "small_study")


def ignore(done: int, total: int, description: str) -> None:
    pass


@pytest.mark.sample(1)
@pytest.mark.parametrize("jobs", [1, 2])
def test_parts_are_summarized_in_order(study: Study, jobs: int, tmp_path: Path) -> None:
    results = run_study(study, ignore, jobs=jobs)
    assert list(results.estimates) == ["value/a", "value/b", "value/c", "mean"]
    assert results.estimates["value/b"] == Estimate(1.0, 0.5, 1.5, 3)
    assert results.estimates["mean"].mean == 1.5
    assert results.estimates["mean"].count == 6
    assert sorted((tmp_path / "calls").read_text()) == ["a", "b", "c"]
    assert (tmp_path / "calls").read_text()[-1] == "c"  # measures time: after the others


@pytest.mark.parametrize("failing", ["b", "c"])
def test_interrupted_run_continues(study: Study, failing: str, tmp_path: Path) -> None:
    partial_file = tmp_path / "out.json.partial"
    (tmp_path / f"fail-{failing}").touch()
    with pytest.raises(RuntimeError, match="interrupted"):
        run_study(study, ignore, partial_file=partial_file)
    (tmp_path / f"fail-{failing}").unlink()
    continued = run_study(study, ignore, partial_file=partial_file)
    assert (tmp_path / "calls").read_text().count("a") == 1
    assert continued.estimates == run_study(study, ignore).estimates


def test_partial_results_of_other_settings_are_an_error(study: Study, tmp_path: Path) -> None:
    partial_file = tmp_path / "out.json.partial"
    run_study(study, ignore, partial_file=partial_file)
    data = json.loads(partial_file.read_text())
    data["settings"]["seeds"] = 4
    partial_file.write_text(json.dumps(data))
    with pytest.raises(InputError, match="delete it to start again"):
        run_study(study, ignore, partial_file=partial_file)


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_has_parts_and_settings(name: str) -> None:
    module = __import__(STUDIES[name].module, fromlist=["list_parts"])
    parts: dict[str, Callable[[], object]] = module.list_parts("cpu")
    assert all(callable(part) for part in parts.values())
    json.dumps(module.describe_settings("cpu"))
    assert not [part for part in getattr(module, "TIMED_PARTS", ()) if part not in parts and "cuda" not in part]
