"""docs/ecosystem.md, rendered from the results and the conclusions."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from ecosystem_report.libraries import ROOT, TORCH_REQUIREMENT, Library
from ecosystem_report.results import KINDS, Conclusion, Conclusions, Defect, Row

PAGE = ROOT / "docs" / "ecosystem.md"
VERDICTS = ("pass", "fail", "warn", "inconclusive", "skip")
HEADER = """# Check results for other libraries

<!-- written by scripts/check_ecosystem.py --write-page from ecosystem.json and ecosystem.toml -->

`ct.check` ran on small random models of {libraries} libraries, each at a pinned version in its own environment with
{torch}: {configurations} configurations, {checks:,} checks. {findings} findings: {kinds}.
Each defect has a script of at most 25 lines that shows it without cutaway.

Run it: `python scripts/check_ecosystem.py --only litgpt`. To add a library, see
[scripts/ecosystem](../scripts/ecosystem/README.md). The default configurations of 41 families of transformers are on
[a page of their own](transformers-check-report.md).
"""


def render_page(rows: list[Row], conclusions: Conclusions, libraries: Mapping[str, Library]) -> str:
    examined = [(row, finding, conclusion) for row in rows for finding, conclusion in examine(row, conclusions)]
    kinds = Counter(get_kind(conclusion) for _, _, conclusion in examined)
    header = HEADER.format(
        libraries=len({row["library"] for row in rows}),
        torch=TORCH_REQUIREMENT.replace("torch==", "PyTorch "),
        configurations=len(rows),
        checks=sum(count_run(row["counts"]) for row in rows),
        findings=len(examined),
        kinds=", ".join(f"{kinds[kind]} {label_kind(kind)}" for kind in KINDS),
    )
    homepages = {library.name: library.homepage for library in libraries.values()}
    parts = [header, *render_libraries(rows, conclusions, homepages), *render_defects(conclusions.defects)]
    for kind, title in (
        ("not examined", "Findings that were not examined"),
        ("by design", "By design"),
        ("false alarm", "False alarms of check"),
    ):
        selected = [(row, finding, conclusion) for row, finding, conclusion in examined if get_kind(conclusion) == kind]
        parts += render_findings(title, selected) if selected else []
    return "\n".join([*parts, *render_configurations(rows, conclusions)])


def examine(row: Row, conclusions: Conclusions) -> Iterator[tuple[dict[str, str], Conclusion | None]]:
    """The findings of a row with their conclusions; an error of the whole configuration counts as a finding."""
    findings = row["findings"] or (
        [{"check": "error", "verdict": "error", "message": row["error"]}] if row["error"] else []
    )
    for finding in findings:
        key = (row["library"], row["configuration"], finding["check"], finding["message"])
        yield finding, conclusions.find(*key)


def get_kind(conclusion: Conclusion | None) -> str:
    return "not examined" if conclusion is None else conclusion.kind


def label_kind(kind: str) -> str:
    return {"defect": "are symptoms of defects", "false alarm": "false alarms"}.get(kind, kind)


def count_run(counts: Mapping[str, int]) -> int:
    return sum(counts.get(verdict, 0) for verdict in VERDICTS if verdict != "skip")


def render_libraries(rows: list[Row], conclusions: Conclusions, homepages: Mapping[str, str]) -> list[str]:
    lines = [
        "## Libraries\n",
        "| library | version | configurations | passed | failed | warnings | inconclusive | skipped | defects |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(row["library"] for row in rows):
        own = [row for row in rows if row["library"] == name]
        counts = [sum(row["counts"].get(verdict, 0) for row in own) for verdict in VERDICTS]
        defects = sum(defect.library == name for defect in conclusions.defects)
        cells = [f"[{name}]({homepages.get(name, '')})", own[0]["version"], len(own), *counts, defects]
        lines.append(render_cells(cells))
    return [*lines, ""]


def render_defects(defects: list[Defect]) -> list[str]:
    lines = ["## Defects\n"]
    for name in dict.fromkeys(defect.library for defect in defects):
        lines += [f"### {name}\n", "| script | defect | upstream issue |", "|---|---|---|"]
        for defect in defects:
            if defect.library == name:
                issue = f"[{defect.issue.removeprefix('https://github.com/')}]({defect.issue})" if defect.issue else ""
                script = f"[`{defect.script}`](defects/{defect.script})"
                lines.append(render_cells([script, defect.summary(), issue or "none found"]))
        lines.append("")
    return lines


def render_findings(title: str, selected: list[tuple[Row, dict[str, str], Conclusion | None]]) -> list[str]:
    """One line per library, check and reason, with the configurations that have it."""
    groups: dict[tuple[str, str, str], list[tuple[str, str]]] = {}
    for row, finding, conclusion in selected:
        key = (row["library"], finding["check"], "" if conclusion is None else conclusion.reason)
        groups.setdefault(key, []).append((row["configuration"], finding["message"]))
    lines = [f"## {title}\n", "| library | check | configurations | first message | reason |", "|---|---|---|---|---|"]
    for (library, check, reason), found in groups.items():
        configurations = "; ".join(name for name, _ in found)
        lines.append(render_cells([library, f"`{check}`", configurations, found[0][1], reason or "not examined"]))
    return [*lines, ""]


def render_configurations(rows: list[Row], conclusions: Conclusions) -> list[str]:
    lines = ["## Configurations\n"]
    for name in dict.fromkeys(row["library"] for row in rows):
        lines += [f"### {name}: what ran\n", "| configuration | passed | skipped | findings |", "|---|---|---|---|"]
        for row in rows:
            if row["library"] == name:
                counts = row["counts"]
                findings = ", ".join(
                    f"{finding['check']} ({finding['verdict']}: {get_kind(conclusion)})"
                    for finding, conclusion in examine(row, conclusions)
                )
                lines.append(
                    render_cells([row["configuration"], counts.get("pass", 0), counts.get("skip", 0), findings])
                )
        lines.append("")
    return lines


def render_cells(cells: list[Any]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|").replace("<", "&lt;") for cell in cells) + " |"
