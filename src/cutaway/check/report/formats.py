"""Output formats of a report, by the name of their option: `--junit FILE`, `--sarif FILE` …"""

from collections.abc import Callable, Mapping
from pathlib import Path

from cutaway.check.report.badge import format_badge
from cutaway.check.report.finding import Report
from cutaway.check.report.junit import format_junit
from cutaway.check.report.markdown import format_markdown
from cutaway.check.report.sarif import format_sarif
from cutaway.check.report.source_location import SourceLocator
from cutaway.check.report.text_file import write_atomically

FORMATS: dict[str, Callable[[Report, SourceLocator], str]] = {
    "junit": lambda report, _: format_junit(report),
    "sarif": format_sarif,
    "markdown": lambda report, locator: format_markdown(report, locator.source),
    "badge": lambda report, _: format_badge(report),
}


def write_outputs(report: Report, paths: Mapping[str, Path], locator: SourceLocator) -> None:
    """Write a report in several formats, {format: path}. All texts are formatted before the first file is written."""
    texts = {path: FORMATS[name](report, locator) for name, path in paths.items()}
    for path, text in texts.items():
        write_atomically(path, text)
