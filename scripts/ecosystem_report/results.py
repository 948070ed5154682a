"""docs/ecosystem.json: one row per library and configuration. docs/ecosystem.toml: what was concluded."""

import json
import tomllib
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ecosystem_report.libraries import ROOT

RESULTS_FILE, CONCLUSIONS_FILE = ROOT / "docs" / "ecosystem.json", ROOT / "docs" / "ecosystem.toml"
DEFECTS_DIR = ROOT / "docs" / "defects"
KINDS = ("defect", "by design", "false alarm", "not examined")
Row = dict[str, Any]


def load_results() -> list[Row]:
    rows: list[Row] = json.loads(RESULTS_FILE.read_text(encoding="utf-8")) if RESULTS_FILE.is_file() else []
    return rows


def write_results(library: str, own: list[Row]) -> None:
    """Replace the rows of a library. Rows are ordered by library; configurations keep their order."""
    others = [row for row in load_results() if row["library"] != library]
    rows = sorted([*others, *own], key=lambda row: row["library"])
    text = "[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n]\n"
    temporary = RESULTS_FILE.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(RESULTS_FILE)


@dataclass(frozen=True)
class Defect:
    """A defect of a library, with the script in docs/defects that shows it."""

    script: str
    library: str
    issue: str = ""
    """URL of the upstream issue; empty if none was found."""

    def summary(self) -> str:
        """The docstring of the script, which also says what found the defect."""
        docstring = (DEFECTS_DIR / self.script).read_text(encoding="utf-8").split('"""')[1]
        return " ".join(docstring.replace("-\n", "-").split())  # a line may end within `cache-decode`


@dataclass(frozen=True)
class Conclusion:
    """What was concluded for the findings of some checks on some configurations of a library."""

    library: str
    checks: tuple[str, ...]
    kind: str
    configurations: tuple[str, ...] = ("*",)
    """Patterns of fnmatch."""
    message: str = ""
    """Text that the message of the finding contains."""
    script: str = ""
    """Script of the defect."""
    reason: str = ""

    def matches(self, library: str, configuration: str, check: str, message: str) -> bool:
        return (
            self.library == library
            and check in self.checks
            and any(fnmatch(configuration, pattern) for pattern in self.configurations)
            and self.message in message
        )


@dataclass(frozen=True)
class Conclusions:
    defects: list[Defect] = field(default_factory=list)
    findings: list[Conclusion] = field(default_factory=list)

    def find(self, library: str, configuration: str, check: str, message: str) -> Conclusion | None:
        """The first conclusion for a finding; None if it was not examined."""
        matches = (each for each in self.findings if each.matches(library, configuration, check, message))
        return next(matches, None)


def load_conclusions(path: Path = CONCLUSIONS_FILE) -> Conclusions:
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    findings = []
    for entry in data.get("finding", []):
        lists = {name: tuple(entry.pop(name)) for name in ("checks", "configurations") if name in entry}
        conclusion = Conclusion(**entry, **lists)
        if conclusion.kind not in KINDS[:-1] or not (conclusion.script or conclusion.reason):
            raise ValueError(
                f"{path.name}: the finding of {conclusion.library} {conclusion.checks} has kind '{conclusion.kind}', "
                f"script '{conclusion.script}' and reason '{conclusion.reason}'; kind must be one of {KINDS[:-1]}, "
                "with the script of the defect or the reason"
            )
        findings.append(conclusion)
    return Conclusions([Defect(**entry) for entry in data.get("defect", [])], findings)
