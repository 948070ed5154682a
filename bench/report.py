"""Results of the benchmarks: one line per row while they run, and one JSON file with the conditions and all rows.

A row says what was measured (`case`, `implementation`, `batch_size`, …) and holds the measured values. The name of a
value ends in its unit (`step_ms`, `memory_gb`, `tokens_per_second`), unless it is a count or a ratio.
"""

import argparse
import platform
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Results:
    """Results of one run of a benchmark, and its conditions."""

    bench: str
    """Name of the program without suffix."""
    command: str
    date: date
    torch: str
    """Version of PyTorch."""
    device: str
    """Name of the GPU, or "cpu"."""
    cpu: str
    """Model of the CPU."""
    threads: int
    """Number of threads of PyTorch on the CPU."""
    commit: str | None
    """Commit of cutaway, with "-dirty" if files were changed. None: unknown, because there was no git repository."""
    rows: list[Row]

    __pydantic_config__ = {"extra": "forbid"}  # read by TypeAdapter

    def __post_init__(self) -> None:
        if not self.rows:
            raise ValueError("rows is empty; a benchmark writes at least one row")
        names = {name for row in self.rows for name in row if not re.fullmatch(r"[a-z][a-z0-9_]*", name)}
        if names:
            raise ValueError(f"the names {sorted(names)} are not in lower case with underscores; rename them")


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results and their conditions to this file")


def print_row(row: Row) -> Row:
    """Print a row of results, and return it. Texts are printed without their names."""
    fields = (value if isinstance(value, str) else f"{name} {_format(value)}" for name, value in row.items())
    print("  ".join(fields), flush=True)
    return row


def _format(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, list | tuple):
        return "–".join(_format(each) for each in value)
    if isinstance(value, dict):
        return ", ".join(f"{name} {_format(each)}" for name, each in value.items()) or "none"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def save_rows(path: Path | None, rows: list[Row], *, device: str = "cpu", threads: int | None = None) -> None:
    """Write the rows and the conditions of this run as JSON, if there is a path.

    `device`: "cpu" or "cuda". `threads`: number of threads of PyTorch, if it is not that of this process.
    """
    if path is None:
        return
    import torch

    name = torch.cuda.get_device_name() if torch.device(device).type == "cuda" else "cpu"
    results = Results(
        bench=Path(sys.argv[0]).stem,
        command=_command(sys.argv),
        date=datetime.now(UTC).date(),
        torch=torch.__version__,
        device=name,
        cpu=_cpu_model(),
        threads=threads or torch.get_num_threads(),
        commit=_commit(),
        rows=rows,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_adapter().dump_json(results, indent=1) + b"\n")


def load_results(path: Path) -> Results:
    """Read a file that `save_rows` has written. Raise ValueError if it does not have this form."""
    return _adapter().validate_json(path.read_bytes(), strict=True)


def _adapter() -> Any:
    from pydantic import TypeAdapter  # a measurement of memory imports this module and must not count pydantic

    return TypeAdapter(Results)


def _command(argv: list[str]) -> str:
    """The command of this process. Of absolute paths, which differ between machines, only the last part is kept."""
    arguments = [re.sub(r"(?:^|(?<==))/\S*/(?=[^/]+$)", "", argument) for argument in argv[1:]]
    return shlex.join(["python", f"bench/{Path(argv[0]).name}", *arguments])


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


def _commit() -> str | None:
    if shutil.which("git") is None:
        return None
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() or None
