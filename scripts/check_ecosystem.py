"""Run `ct.check` on other libraries, each in its own environment at pinned versions, and write docs/ecosystem.md.

    python scripts/check_ecosystem.py [--only litgpt,torchtune] [--again]
    python scripts/check_ecosystem.py --list
    python scripts/check_ecosystem.py --write-page

Results are written to docs/ecosystem.json after each configuration; finished configurations are skipped unless
`--again` is given. `--write-page` renders docs/ecosystem.md from the results and from docs/ecosystem.toml, which says
for each finding whether it is a defect, by design, or a false alarm. scripts/ecosystem/README.md says how to add a
library.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from ecosystem_report.environments import prepare_environment, prepare_source
from ecosystem_report.libraries import Library, load_libraries
from ecosystem_report.page import PAGE, render_page
from ecosystem_report.results import load_conclusions, load_results, write_results
from ecosystem_report.worker_process import run_library


def check_library(library: Library, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the configurations of a library that have no result for its version, and return all of its rows."""
    rows = load_results()
    finished = (
        {}
        if args.again
        else {
            row["configuration"]: row
            for row in rows
            if (row["library"], row["version"]) == (library.name, library.version)
            and not row["error"]
            and (args.configuration is None or row["configuration"] not in args.configuration)
        }
    )
    say(f"{library.name} {library.version}: environment")
    python = prepare_environment(library, args.environments)
    source = prepare_source(library, args.environments, args.source.get(library.path.stem))
    log = args.environments / f"{library.path.stem}.log"
    names: list[str] = []
    start = time.monotonic()
    for message in run_library(python, library.path, source, set(finished), args.timeout, log):
        names = message.get("configurations", names)
        if "started" in message:
            start = time.monotonic()
        if "finished" in message:
            row = {"library": library.name, "version": library.version, "configuration": message.pop("finished")}
            finished[row["configuration"]] = row | message
            write_results(library.name, [finished[name] for name in names if name in finished])
            say(f"{library.name}: {row['configuration']}: {summarize(message)}, {time.monotonic() - start:.0f} s")
    kept = [finished[name] for name in names if name in finished]
    write_results(library.name, kept)
    return kept


def summarize(row: dict[str, Any]) -> str:
    if row["error"]:
        return f"error: {row['error']}"
    counts = ", ".join(f"{count} {verdict}" for verdict, count in row["counts"].items() if count)
    return counts + "".join(f"\n    {each['verdict']} {each['check']}: {each['message']}" for each in row["findings"])


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def parse_source(text: str) -> tuple[str, Path]:
    name, separator, path = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"'{text}' has no '='; write LIBRARY=DIRECTORY")
    return name, Path(path).expanduser().resolve()


def main() -> int:
    libraries = load_libraries()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of library files, separated by commas")
    parser.add_argument("--list", action="store_true", help="print the libraries and their versions")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--again", action="store_true", help="also run configurations that have a result")
    parser.add_argument("--configuration", action="append", help="run this configuration again")
    parser.add_argument(
        "--source",
        action="append",
        type=parse_source,
        default=[],
        metavar="LIBRARY=DIRECTORY",
        help="clone a library that is not on PyPI from this repository",
    )
    parser.add_argument("--environments", type=Path, default=Path.home() / ".cache" / "cutaway" / "ecosystem")
    parser.add_argument("--timeout", type=float, default=900, help="seconds per configuration")
    parser.add_argument("--write-page", action="store_true", help="only write docs/ecosystem.md")
    args = parser.parse_args()
    args.source = dict(args.source)
    selected = args.only.split(",") if args.only else list(libraries)
    if unknown := [name for name in selected if name not in libraries]:
        parser.error(f"--only names {', '.join(unknown)}, but scripts/ecosystem has {', '.join(libraries)}")
    if args.list:
        for name in selected:
            sys.stdout.write(f"{name:<20} {libraries[name].version:<12} {libraries[name].homepage}\n")
        return 0
    if args.write_page:
        PAGE.write_text(render_page(load_results(), load_conclusions(), libraries), encoding="utf-8")
        return 0
    failed, rows = [], []
    args.environments.mkdir(parents=True, exist_ok=True)
    for name in selected:
        try:
            rows += check_library(libraries[name], args)
        except RuntimeError as error:  # an environment cannot be made, or the library cannot be imported
            say(f"{name}: {error}")
            failed.append(name)
    if args.json:
        sys.stdout.write(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
