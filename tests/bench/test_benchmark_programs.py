"""The programs in bench/: documented commands, results, and the table of README.md that is written from them."""

import importlib
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.benchmarks import BENCH_DIR, benchmarks_on_path

ROOT = Path(__file__).parents[2]
RESULTS = sorted((BENCH_DIR / "results").glob("*.json"))
PROGRAMS = sorted(path.stem for path in BENCH_DIR.glob("*.py") if path.stem not in ("report", "update_readme"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile", *sorted((ROOT / "docs").rglob("*.md"))]
ROW = {"implementation": "cutaway", "step_ms": 2.5}


def documented_commands() -> list[str]:
    """Commands of benchmarks in the documentation. "…" stands for further arguments."""
    pages = (path.read_text(encoding="utf-8") for path in PAGES)
    found = {command for page in pages for command in re.findall(r"python (bench/\w+\.py[^`\n]*)", page)}
    return sorted(command.replace("…", "").strip() for command in found)


@pytest.fixture(scope="module")
def _programs_on_path() -> Iterator[None]:
    with benchmarks_on_path():
        yield


pytestmark = [pytest.mark.unchecked, pytest.mark.usefixtures("_programs_on_path")]


def program(name: str) -> ModuleType:
    return importlib.import_module(name)


def parse_command(command: str) -> Any:
    """Arguments of a command, as parsed by its program, which exits if it does not know one of them."""
    path, *arguments = shlex.split(command, comments=True)
    assert (ROOT / path).is_file()
    return program(Path(path).stem).build_parser().parse_args(arguments)


@pytest.mark.parametrize("command", documented_commands())
def test_documented_command_is_accepted(command: str) -> None:
    parse_command(command)


def test_unknown_option_is_not_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_command("bench/decode_gpu.py --unknown")
    assert "--unknown" in capsys.readouterr().err


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_writes_results_and_is_documented(name: str) -> None:
    module = program(name)
    assert any("--json" in action.option_strings for action in module.build_parser()._actions)
    assert f"python bench/{name}.py" in module.__doc__
    assert module.save_rows is program("report").save_rows


def test_pages_name_existing_programs() -> None:
    names = {name for page in PAGES for name in re.findall(r"bench/(\w+)\.py", page.read_text(encoding="utf-8"))}
    assert {"decode_gpu", "train_cpu"} <= names <= {"report", "update_readme", *PROGRAMS}


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_committed_results_are_valid(path: Path) -> None:
    results = program("report").load_results(path)
    assert results.bench in PROGRAMS
    assert path.stem.startswith(results.bench)
    assert results.command.split()[1] == f"bench/{results.bench}.py"
    parse_command(results.command.removeprefix("python "))


def test_readme_table_is_up_to_date() -> None:
    module = program("update_readme")
    readme = module.README.read_text(encoding="utf-8")
    table = module.render_table(module.TABLE, module.load_all_results())
    assert module.replace_table(readme, table) == readme, "run python bench/update_readme.py"


def test_commands_of_the_table_are_accepted() -> None:
    for row in program("update_readme").TABLE:
        parse_command(row.command.removeprefix("python "))


def test_table_shows_the_results_of_its_benchmarks() -> None:
    module = program("update_readme")
    shown = {results.bench for _, results in module.table_lines(module.TABLE, module.load_all_results())}
    for bench in {results.bench for results in module.load_all_results()}:
        assert bench in shown or not any(f"bench/{bench}.py" in row.command for row in module.TABLE)


def test_saved_results_can_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, path = program("report"), tmp_path / "new" / "decode_cpu.json"
    monkeypatch.setattr(sys, "argv", ["/work/bench/decode_cpu.py", "--peer", "/home/me/peer", "--json", str(path)])
    report.save_rows(path, [ROW], threads=3)
    results = report.load_results(path)
    assert results.bench == "decode_cpu"
    assert results.command == "python bench/decode_cpu.py --peer peer --json decode_cpu.json"
    assert (results.device, results.threads, results.rows) == ("cpu", 3, [ROW])
    assert results.cpu
    assert str(results.date) == json.loads(path.read_text())["date"]
    report.save_rows(None, [ROW])  # without --json nothing is written


@pytest.mark.parametrize(
    "change", [{"rows": []}, {"rows": [{"step ms": 1}]}, {"threads": None}, {"seconds": 1}, {"date": "yesterday"}]
)
def test_invalid_results_are_rejected(change: dict[str, Any], tmp_path: Path) -> None:
    report, path = program("report"), tmp_path / "decode_cpu.json"
    report.save_rows(path, [ROW])
    assert report.load_results(path).rows == [ROW]
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=next(iter(change))):
        report.load_results(path)


def build_results(*rows: dict[str, Any], bench: str = "decode_cpu") -> Any:
    conditions = {"date": None, "torch": "2.9", "device": "cpu", "cpu": "Model 1", "threads": 2, "commit": None}
    return program("report").Results(bench=bench, command=f"python bench/{bench}.py", rows=list(rows), **conditions)


def example_table() -> tuple[Any, ...]:
    module = program("update_readme")
    others = (module.other("peer", "{step_ms:.0f} ms"), module.other("absent", "{step_ms:.0f} ms"))
    ours = (module.cutaway("{step_ms:.1f} ms"), module.cutaway("{step_ms:.0f} ms", weights="4 bits"))
    command = "python bench/decode_cpu.py"
    return (
        module.TableRow("decode", command, {"batch_size": 1}, ours[:1], others),
        module.TableRow("without results", command, {"batch_size": 7}, ours),
    )


def test_table_has_the_rows_with_results() -> None:
    peer = {"implementation": "peer", "batch_size": 1, "step_ms": 4.2}
    results = build_results(ROW | {"batch_size": 1}, ROW | {"batch_size": 2}, peer)
    lines = program("update_readme").render_table(example_table(), [results]).splitlines()
    assert lines[2:] == [
        "| decode | 2.5 ms | peer 4 ms | `python bench/decode_cpu.py` |",
        "",
        "Measured on: Model 1, 2 threads, PyTorch 2.9.",
    ]


def test_values_of_a_row_come_from_one_run() -> None:
    other_run = build_results({"implementation": "peer", "batch_size": 1, "step_ms": 4.2})
    other_bench = build_results(ROW | {"batch_size": 1}, bench="decode_gpu")
    module = program("update_readme")
    table = module.render_table(example_table(), [build_results(ROW | {"batch_size": 1}), other_run, other_bench])
    assert table.splitlines()[2] == "| decode | 2.5 ms |  | `python bench/decode_cpu.py` |"
    with pytest.raises(ValueError, match="several files"):
        module.render_table(example_table(), [build_results(ROW | {"batch_size": 1})] * 2)
    with pytest.raises(ValueError, match="2 rows of one file"):
        module.render_table(example_table(), [build_results(*[ROW | {"batch_size": 1}] * 2)])


def test_table_replaces_the_text_between_the_comments() -> None:
    module = program("update_readme")
    readme = f"before\n{module.BEGIN}\nold\n{module.END}\nafter\n"
    assert module.replace_table(readme, "new") == f"before\n{module.BEGIN}\nnew\n{module.END}\nafter\n"
    with pytest.raises(ValueError, match="lacks the comments"):
        module.replace_table("before", "new")
