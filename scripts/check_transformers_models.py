"""Run `cutaway check` on transformers models of every supported family, and write a report.

    python scripts/check_transformers_models.py [--families llama,bert] [--seeds 3] [--jobs 2]
        [--write docs/transformers-check-report.md]

The models are small and have random weights. The family tests use the same models.
"""

import argparse
import sys
import time
import warnings
from collections import defaultdict
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import transformers

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from support.transformers_models import FAMILIES, build_transformers_model, find_peers  # noqa: E402

import cutaway as ct  # noqa: E402

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

Row = dict[str, Any]


def check_family(family: str, seeds: int) -> list[Row]:
    """Run all checks on each model of one family, with the eager and SDPA kernels, in fp32 and bf16."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    rows = []
    for seed in range(seeds):
        for peer in find_peers(family, seed):
            for kernel in ("eager", "sdpa"):
                for dtype, torch_dtype in DTYPES.items():
                    try:
                        model = build_transformers_model(peer, seed, kernel=kernel).to(torch_dtype)
                    except ValueError:  # the model does not support the kernel
                        continue
                    report = ct.check(model, seed=seed, budget=300)
                    rows.append({"seed": seed, "kernel": kernel, "dtype": dtype, "report": report})
    return rows


def render_page(rows_by_family: dict[str, list[Row]]) -> str:
    """Render the report as Markdown."""
    runs = [row for rows in rows_by_family.values() for row in rows]
    num_checks = sum(sum(row["report"].counts()[v] for v in ("fail", "warn", "pass")) for row in runs)
    lines = [
        "# Check results for transformers",
        "",
        f"transformers {transformers.__version__}, PyTorch {torch.__version__.split('+')[0]}: "
        f"{len(rows_by_family)} families, {len(runs)} small random models (fp32 and bf16, eager and SDPA), "
        f"{num_checks:,} checks run. "
        "`python scripts/check_transformers_models.py` writes this page.",
        "",
        "| family | models | passed | skipped | failed | warnings |",
        "|---|---|---|---|---|---|",
    ]
    for family, rows in rows_by_family.items():
        counts: dict[str, int] = defaultdict(int)
        for row in rows:
            for verdict, count in row["report"].counts().items():
                counts[verdict] += count
        checks = {v: format_checks(rows, v) for v in ("fail", "warn")}
        lines.append(
            f"| {family} | {len(rows)} | {counts['pass']} | {counts['skip']} | {checks['fail']} | {checks['warn']} |"
        )
    lines += [
        "",
        "Most defects need settings that few of these models have: ALiBi, a window of one, RoPE scaling. They are "
        "listed in [check results for other libraries](ecosystem.md#defects), with scripts that show them without "
        "cutaway.",
    ]
    return "\n".join(lines) + "\n"


def format_checks(rows: list[Row], verdict: str) -> str:
    """Return the names of the checks that have this verdict, each with the number of models: `causality (2)`."""
    counts: dict[str, int] = defaultdict(int)
    for row in rows:
        for finding in row["report"].findings:
            counts[finding.check] += finding.verdict == verdict
    return ", ".join(f"{name} ({n})" for name, n in counts.items() if n)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--write", type=Path)
    args = parser.parse_args()
    start, rows_by_family, families = time.monotonic(), {}, args.families.split(",")
    with get_context("spawn").Pool(args.jobs) as pool:
        for family, rows in zip(families, pool.imap(partial(check_family, seeds=args.seeds), families), strict=True):
            rows_by_family[family] = rows
            for row in rows:
                for finding in (*row["report"].failures, *row["report"].warnings):
                    sys.stdout.write(f"{family} seed {row['seed']} {row['kernel']} {row['dtype']}: {finding}\n")
            sys.stderr.write(f"{family}: {len(rows)} models, {time.monotonic() - start:.0f} s\n")
    page = render_page(rows_by_family)
    if args.write:
        args.write.write_text(page)
    else:
        sys.stdout.write(page)


if __name__ == "__main__":
    main()
