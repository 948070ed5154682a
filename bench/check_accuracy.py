"""Accuracy of `ct.check`: false alarms on correct models, seeded bugs found, and causes ranked first.

    python bench/check_accuracy.py [--only healthy|bugs] [--workers 2] [--seeds 3] [--json FILE]

Healthy models are distinct correct models: plain PyTorch (tests/support/healthy_models), random configurations of each
transformers family and of cutaway. A false alarm is a failure, a warning or an inconclusive check that is neither a
known defect of transformers nor a warning that the model's entry explains. Seeded bugs (tests/support/seeded_bugs) are
models with one bug each: the check of the bug must fail, and should be the first problem of the report.
"""

import argparse
import importlib
import multiprocessing
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from report import add_json_option, save_rows

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("tests", "scripts")]
BUDGET_SECONDS = 600.0
Job = tuple[str, str, Any]
"""Kind of model, name, and its seed or configuration."""


@dataclass
class CheckResult:
    """Result of the checks of one model."""

    kind: str
    name: str
    seconds: float
    problems: list[str]
    """Healthy models: false alarms. Seeded bugs: names of the checks with problems, in the order of the report."""
    expected: str = ""
    """Seeded bugs: the check of the bug."""


def list_jobs(only: str | None, seeds: int, num_random: int) -> Iterator[Job]:
    """All models, by kind."""
    if only != "bugs":
        yield from (("plain PyTorch", name, 0) for name in healthy_models())
        families = load("support.transformers_models").FAMILIES
        yield from (("transformers", family, seed) for seed in range(seeds) for family in families)
        random_configs = load("support.config_strategies").draw_distinct_configs(num_random)
        yield from (("cutaway", f"configuration {number}", config) for number, config in enumerate(random_configs))
    if only != "healthy":
        load("support.seeded_bugs.all_bugs")
        yield from (("seeded bug", name, 0) for name in load("support.seeded_bugs.registry").SEEDED_BUGS)


def load(module: str) -> Any:
    """Import a module of tests/, whose types are not checked together with bench/."""
    return importlib.import_module(module)


def healthy_models() -> dict[str, Any]:
    load("support.healthy_models.all_models")
    models: dict[str, Any] = load("support.healthy_models.registry").HEALTHY_MODELS
    return models


def run_job(job: Job) -> list[CheckResult]:
    """Build the models of a job and check them."""
    import torch

    warnings.filterwarnings("ignore")
    load("transformers").logging.set_verbosity_error()
    torch.set_num_threads(1)
    kind, name, seed_or_config = job
    if kind == "seeded bug":
        return [check_seeded_bug(name)]
    if kind == "plain PyTorch":
        return [check_plain_model(name)]
    if kind == "transformers":
        return list(check_transformers(name, seed_or_config))
    return [check_random_configuration(name, seed_or_config)]


def check_seeded_bug(name: str) -> CheckResult:
    load("support.seeded_bugs.all_bugs")
    registry = load("support.seeded_bugs.registry")
    bug, start = registry.SEEDED_BUGS[name], time.monotonic()
    report = registry.check_bug(bug, budget=BUDGET_SECONDS)
    found = [finding.check for finding in report.problems]
    return CheckResult("seeded bug", name, time.monotonic() - start, found, bug.caught_by)


def check_plain_model(name: str) -> CheckResult:
    import cutaway as ct

    healthy, start = healthy_models()[name], time.monotonic()
    report = ct.check(healthy.build(), budget=BUDGET_SECONDS)
    alarms = [str(finding) for finding in report.problems if finding.check not in healthy.warnings]
    return CheckResult("plain PyTorch", name, time.monotonic() - start, alarms)


def check_transformers(family: str, seed: int) -> Iterator[CheckResult]:
    """Check each reference model of a family's tests with the random configuration of a seed."""
    import cutaway as ct

    models, defects = load("support.transformers_models"), load("support.known_defects")
    for number, peer in enumerate(models.find_peers(family, seed)):
        start = time.monotonic()
        report = ct.check(models.build_transformers_model(peer, seed), seed=seed, budget=BUDGET_SECONDS)
        alarms = defects.unexpected_findings(report, family)
        yield CheckResult("transformers", f"{family}, model {number}, seed {seed}", time.monotonic() - start, alarms)


def check_random_configuration(name: str, config: Any) -> CheckResult:
    import cutaway as ct

    start = time.monotonic()
    report = ct.check(load("support.config_strategies").build_randomized_model(config), budget=BUDGET_SECONDS)
    alarms = load("support.known_defects").unexpected_findings(report)
    return CheckResult("cutaway", name, time.monotonic() - start, alarms)


def summarize(rows: list[CheckResult]) -> dict[str, Any]:
    healthy = [row for row in rows if row.kind != "seeded bug"]
    bugs = [row for row in rows if row.kind == "seeded bug"]
    return {
        "healthy_models": dict(Counter(row.kind for row in healthy)),
        "false_alarms": {row.name: row.problems for row in healthy if row.problems},
        "seeded_bugs": len(bugs),
        "not_found": {row.name: row.expected for row in bugs if row.expected not in row.problems},
        "another_check_first": {
            row.name: row.problems[0] for row in bugs if row.problems[:1] not in ([], [row.expected])
        },
        "first": sum(row.problems[:1] == [row.expected] for row in bugs),
    }


def format_summary(summary: dict[str, Any]) -> Iterator[str]:
    if kinds := summary["healthy_models"]:
        counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        yield f"healthy models: {sum(kinds.values())} ({counts}); with a false alarm: {len(summary['false_alarms'])}"
        for name, alarms in summary["false_alarms"].items():
            yield from (f"  {name}: {alarm}" for alarm in alarms)
    if bugs := summary["seeded_bugs"]:
        first = summary["first"]
        yield f"seeded bugs: {bugs}; found by their check: {bugs - len(summary['not_found'])}"
        yield from (f"  not found: {name}" for name in summary["not_found"])
        yield f"first problem of the report is that of the bug: {first} of {bugs} ({first / bugs:.1%})"
        yield from (f"  {name}: {other} is first" for name, other in summary["another_check_first"].items())


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("healthy", "bugs"))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3, help="random configurations of each transformers model")
    parser.add_argument("--random", type=int, default=180, help="random configurations of cutaway")
    add_json_option(parser)
    return parser


def main() -> int:
    args = build_parser().parse_args()
    jobs, rows = list(list_jobs(args.only, args.seeds, args.random)), list[CheckResult]()
    context = multiprocessing.get_context("spawn")
    with context.Pool(args.workers) as pool:
        for done, new in enumerate(pool.imap_unordered(run_job, jobs), start=1):
            rows += new
            if done % 20 == 0 or done == len(jobs):
                print(f"{done} of {len(jobs)} jobs", file=sys.stderr)
    rows.sort(key=lambda row: (row.kind, row.name))
    summary = summarize(rows)
    print("\n".join(format_summary(summary)))
    save_rows(args.json, [{"case": "summary", **summary}, *(asdict(row) for row in rows)], threads=1)
    return 1 if summary["false_alarms"] or summary["not_found"] else 0


if __name__ == "__main__":
    sys.exit(main())
