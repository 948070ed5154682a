"""Output shared by the benchmarks: one line per row while they run, and one JSON file with all rows."""

import json
import sys
from pathlib import Path
from typing import Any


def print_row(row: dict[str, Any]) -> dict[str, Any]:
    """Print a row of results, and return it."""
    sys.stdout.write("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()) + "\n")
    sys.stdout.flush()
    return row


def save_rows(path: str | Path | None, rows: list[dict[str, Any]], **machine: object) -> None:
    """Write the rows and facts of the machine as JSON, if there is a path."""
    if path is not None:
        Path(path).write_text(json.dumps({**machine, "rows": rows}, indent=1) + "\n", encoding="utf-8")
