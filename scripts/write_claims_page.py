"""Write docs/claims.md from src/cutaway/learn/claims/claims.toml, and the figures of studies into the other pages.

    python scripts/write_claims_page.py

In a page, a figure of a study is between <!-- figure: STUDY:KEY --> and <!-- end -->. The script replaces the text
between the two comments with the stored estimate.
"""

import re
from collections import Counter
from pathlib import Path

from cutaway.learn.claims import KINDS, VERDICTS, ClaimRow, fill_figures, load_claims, load_topics
from cutaway.learn.claims.claim_table import load_surprising_ids
from cutaway.learn.studies import load_results

ROOT = Path(__file__).parents[1]
CLAIMS_PAGE = ROOT / "docs" / "claims.md"
FIGURE_MARK = re.compile(r"(<!-- figure: ([\w-]+:[^>]+?) -->).*?(<!-- end -->)", re.DOTALL)
HEADER = """# Claims about Transformers, measured

<!-- written by scripts/write_claims_page.py from src/cutaway/learn/claims/claims.toml -->

Statements of books, papers and courses on Transformers, each with a verdict, the measured figure, and the test,
notebook, study or command that shows it. Intervals are 95 % confidence intervals over seeds. On the command line:
`cutaway learn claims`; for one claim, `cutaway learn claims C051`; the studies: `cutaway learn study`.
"""


def render_page() -> str:
    rows = load_claims()
    parts = [HEADER, render_counts(rows), render_surprising(rows)]
    for topic in load_topics():
        parts.append(f"## {topic.title}\n")
        parts.append("| | statement | verdict | figure | shown by |\n|---|---|---|---|---|")
        parts += [render_row(row) for row in rows if row.topic == topic.slug]
        parts.append("")
    return "\n".join(parts)


def render_counts(rows: tuple[ClaimRow, ...]) -> str:
    counts = Counter((row.kind, row.verdict) for row in rows)
    verdicts = [verdict for verdict in VERDICTS if any(row.verdict == verdict for row in rows)]
    lines = [f"| {len(rows)} claims | {' | '.join(verdicts)} | all |", "|---" * (len(verdicts) + 2) + "|"]
    for kind, description in KINDS.items():
        cells = [str(counts[kind, verdict] or "") for verdict in verdicts]
        lines.append(f"| {kind}: {description} | {' | '.join(cells)} | {sum(row.kind == kind for row in rows)} |")
    return "\n".join(lines) + "\n"


def render_surprising(rows: tuple[ClaimRow, ...]) -> str:
    by_id = {row.id: row for row in rows}
    lines = ["## The most surprising results\n"]
    for claim_id in load_surprising_ids():
        row = by_id[claim_id]
        texts = [f"**{escape(row.statement)}** *{row.verdict}*: {escape(row.explanation)}"]
        texts.append(f"Measured: {escape(row.figure)}." if row.figure else "")
        lines.append(f"- {' '.join(text for text in texts if text)} ([{claim_id}](#{claim_id}))")
    return "\n".join(lines) + "\n"


def render_row(row: ClaimRow) -> str:
    verdict = f"**{row.verdict}**" + (f": {escape(row.explanation)}" if row.explanation else "")
    evidence = "<br>".join(render_evidence(item) for item in row.evidence)
    anchor = f'<span id="{row.id}">{row.id}</span>'
    return f"| {anchor} | {escape(row.statement)} | {verdict} | {escape(row.figure)} | {evidence} |"


def escape(text: str) -> str:
    """Escape characters that Markdown would interpret inside a table cell, and link the notebooks."""
    parts = text.split("`")  # the odd ones are code
    if len(parts) % 2 == 0:
        raise ValueError(f"unbalanced backticks: {text}")
    parts = [part if n % 2 else re.sub(r"([|*_<])", r"\\\1", part) for n, part in enumerate(parts)]
    escaped = "`".join(parts)
    return re.sub(r"\b[Nn]otebook (\d+)", lambda match: f"[{match[0]}]({notebook_path(match[1])})", escaped)


def notebook_path(number: str) -> str:
    path = next((ROOT / "notebooks").glob(f"{int(number):02}_*.py"))
    return f"../notebooks/{path.name}"


def render_evidence(item: str) -> str:
    kind, _, target = item.partition(": ")
    match kind:
        case "test":
            file, _, name = target.partition("::")
            return f"[{name}](../tests/{file})"
        case "notebook":
            number, _, section = target.partition(", ")
            return f"[notebook {number}]({notebook_path(number)})" + (f", {section}" if section else "")
        case "study":
            return f"`cutaway learn study {target}`"
        case "command":
            return f"`{target}`"
        case "docs":
            return f"[{target}]({target})"
        case "exercise":
            return f"exercise {target}: `cutaway learn start {target}`"
        case "quiz" | "interview":
            return f"{kind} question `{target}`"
        case "page":
            return f"[page](page/README.md), {target}"
        case _:
            return f"<{target}>"


def refresh_figures(text: str) -> str:
    """Replace the figures of studies in a page with the stored estimates."""
    return FIGURE_MARK.sub(lambda match: f"{match[1]}{fill_figures('${' + match[2] + '}')}{match[3]}", text)


def pages_with_figures() -> list[Path]:
    return [path for path in sorted((ROOT / "docs").rglob("*.md")) if FIGURE_MARK.search(path.read_text("utf-8"))]


if __name__ == "__main__":
    load_results.cache_clear()
    CLAIMS_PAGE.write_text(render_page(), encoding="utf-8")
    for path in pages_with_figures():
        path.write_text(refresh_figures(path.read_text("utf-8")), encoding="utf-8")
