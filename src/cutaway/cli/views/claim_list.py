"""Terminal view of `cutaway learn claims`."""

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from cutaway.cli.views.terminal import build_console
from cutaway.learn.claims import ClaimRow, load_topics

_STYLES = {"holds": "green", "holds when": "yellow", "does not hold": "red", "available": "green"}


def render_claims(rows: Sequence[ClaimRow]) -> None:
    """Print claims by topic, and the number of claims by verdict."""
    out = build_console()
    for topic in load_topics():
        selected = [row for row in rows if row.topic == topic.slug]
        if selected:
            out.print(Text(topic.title, "bold"))
        for row in selected:
            _render_claim(out, row)
    counts = Counter(row.verdict for row in rows)
    out.print(
        Text(
            f"{len(rows)} claim{'s' * (len(rows) != 1)}: "
            + ", ".join(f"{n} {verdict}" for verdict, n in counts.most_common()),
            "dim",
        )
    )


def _render_claim(out: Console, row: ClaimRow) -> None:
    verdict = Text(row.verdict, _STYLES.get(row.verdict, "dim"))
    out.print(Text.assemble((f"{row.id}  ", "dim"), row.statement))
    lines = [Text.assemble(verdict, f": {row.explanation}" if row.explanation else "")]
    if row.figure:
        lines.append(Text(row.figure))
    lines += [Text(evidence, "dim") for evidence in row.evidence]
    for line in lines:
        out.print(Padding(line, (0, 0, 0, 6), expand=False))
