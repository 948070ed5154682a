"""Runs the code of a page, and holds what the page says it prints.

python scripts/run_doc_blocks.py [--fill] docs/howto/size.md

How pages are written:

- ```python blocks run in order, in one namespace a page, in a folder of their own.
- ```bash blocks hold lines that begin with `cutaway`; they run in this process. A line that ends with & is a server,
  and lives as long as the page; its port 8000 is exchanged for a free one, here and in the page's Python.
- ```text after <!-- output --> is what the block before it printed. <!-- output: exit 1 --> says how its last command
  ended. Spaces count as one, … stands for anything, and a decimal may differ by 1 %.
- a block with title="mine.toml" is a file, and written. ```toml and ```json must be that.
- ```diff is applied to a copy of the sources; Python after it runs with that, each block in a process of its own.
- <!-- not run: why --> stands before a block that cannot run here, <!-- at night --> before one that takes long.

The folder has the models of doc_models.py: small ones, without training, under well-known names. `--fill` writes what
was printed into the page.
"""

import argparse
import json
import re
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

from doc_session import DocSession

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"(?sm)^(?P<indent> *)(?P<ticks>`{3,})(?P<info>[^`\n]*)\n(?P<body>.*?)^(?P=indent)(?P=ticks) *$")
MARKER = re.compile(r"<!-- (output|not run|at night)(?:: ((?:(?!-->).)*?))? -->\s*\Z", re.DOTALL)
NUMBER = re.compile(r"[-−+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
TEXT_LANGUAGES, DATA_LANGUAGES = ("text",), ("toml", "json", "jsonl")
UNRUN_LANGUAGES = ("console",)
"""Languages of blocks that are only shown: what they show is held elsewhere, or is no program."""


class PageError(Exception):
    """A page says what is not so."""


@dataclass(frozen=True)
class DocBlock:
    line: int
    language: str
    title: str
    body: str
    marker: str = ""
    """`output`, `not run`, `at night`, or nothing."""
    note: str = ""
    span: tuple[int, int] = (0, 0)
    """Where its body stands in the page."""


def parse_blocks(page: str) -> list[DocBlock]:
    found = []
    for fence in FENCE.finditer(page):
        language, _, rest = fence["info"].strip().partition(" ")
        title = re.search(r'title="([^"]+)"', rest)
        mark = MARKER.search(page[: fence.start()])
        body = re.sub(rf"^{fence['indent']}", "", fence["body"], flags=re.MULTILINE)
        line = page.count("\n", 0, fence.start()) + 1
        said = (mark[1], " ".join((mark[2] or "").split())) if mark else ("", "")
        found.append(DocBlock(line, language, title[1] if title else "", body, *said, fence.span("body")))
    return found


def run_page(path: Path, folder: Path, *, include_slow: bool = False) -> dict[DocBlock, str]:
    """Run a page in a folder; what was printed, by the block that shows it. At night, all of it."""
    page = path.read_text(encoding="utf-8")
    shown: dict[DocBlock, str] = {}
    with DocSession(folder) as session:
        said, code = "", 0
        passed_over = False
        for block in parse_blocks(page):
            try:
                if block.marker == "not run":
                    if not block.note:
                        raise PageError("is not run, and no reason is given")
                elif block.marker == "output":
                    if not passed_over:
                        shown[block] = said
                        check_exit_code(block, code)
                elif passed_over := block.marker == "at night" and not include_slow:
                    continue
                elif block.language == "python" and not block.title:
                    said, code = session.run_python(block.body, f"{path.name}:{block.line}"), 0
                elif block.language == "diff":
                    session.apply_patch(block.body)
                elif block.language == "bash":
                    said, code = session.run_bash(block.body)
                    if code and not shows_exit_code(page, block):
                        raise PageError(f"ended with {code}:\n{said}")
                else:
                    write_block(block, folder)
            except Exception as error:
                raise PageError(f"{path.name}, block of line {block.line}: {type(error).__name__}: {error}") from error
    return shown


def shows_exit_code(page: str, block: DocBlock) -> bool:
    """Whether the page shows how the block ended."""
    all_blocks = parse_blocks(page)
    after = all_blocks[all_blocks.index(block) + 1 :]
    return bool(after) and after[0].marker == "output" and after[0].note.startswith("exit")


def check_exit_code(block: DocBlock, code: int) -> None:
    meant = int(block.note.removeprefix("exit ")) if block.note else 0
    if meant != code:
        raise PageError(f"ended with {code}, and not with {meant}")


def write_block(block: DocBlock, folder: Path) -> None:
    if block.language == "toml":
        tomllib.loads(block.body)
    elif block.language == "json":
        json.loads(block.body)
    elif block.language == "jsonl":
        [json.loads(row) for row in block.body.splitlines()]
    if block.title:
        (folder / block.title).parent.mkdir(parents=True, exist_ok=True)
        (folder / block.title).write_text(block.body, encoding="utf-8")
    elif block.language not in (*TEXT_LANGUAGES, *DATA_LANGUAGES, *UNRUN_LANGUAGES):
        raise PageError(f"{block.language!r} is no language that can be run or shown")


def diff_output(actual: str, expected: str) -> str:
    """What is wrong with the output on a page, or nothing."""
    numbers: list[str] = []
    pattern = "".join(line_to_regex(row, numbers) for row in trim_lines(expected).splitlines())
    found = re.fullmatch(pattern, trim_lines(actual), re.DOTALL)
    if found is None:
        return f"the page says\n{expected}\nand the program\n{actual}"
    apart = [(page, now) for page, now in zip(numbers, found.groups(), strict=True) if not numbers_match(page, now)]
    return f"numbers of the page, and of the program: {apart}\n{actual}" if apart else ""


def trim_lines(text: str) -> str:
    """Without spaces at the ends of lines, nor empty lines around."""
    return "\n".join(row.rstrip() for row in text.splitlines()).strip("\n") + "\n"


def line_to_regex(line: str, numbers: list[str]) -> str:
    """A row of the page as a regular expression with a group for each number."""
    if line.strip() == "…":
        return r"(?:[^\n]*\n)*?"
    parts, at = [], 0
    for number in NUMBER.finditer(line):
        parts.append(text_to_regex(line[at : number.start()]))
        parts.append(f"({NUMBER.pattern})")
        numbers.append(number[0])
        at = number.end()
    return "".join([*parts, text_to_regex(line[at:]), r" *\n"])


def text_to_regex(text: str) -> str:
    pieces = [re.split(" +", piece) for piece in re.split(" *… *", text)]
    return r"[^\n]*?".join(" +".join(map(re.escape, piece)) for piece in pieces)


def numbers_match(expected: str, actual: str) -> bool:
    a, b = (float(text.replace(",", "").replace("−", "-")) for text in (expected, actual))
    if "." not in expected and "e" not in expected:
        return a == b
    digits = len(expected.partition("e")[0].partition(".")[2])
    last = 10.0**-digits * (10.0 ** int(expected.partition("e")[2]) if "e" in expected else 1)
    return abs(a - b) <= max(0.01 * abs(a), 2 * last)


def fill_outputs(page: str, outputs: dict[DocBlock, str]) -> str:
    """The page with what its blocks print, where that is not what stands there."""
    for block, said in sorted(outputs.items(), key=lambda item: -item[0].span[0]):
        if diff_output(said, block.body):
            start, end = block.span
            page = page[:start] + merge_output(said, block.body) + page[end:]
    return page


def merge_output(actual: str, expected: str) -> str:
    """What was printed, with `…` where the page had it."""
    printed, merged, at = trim_lines(actual).splitlines(), [], 0
    changed: list[str] = []  # lines of the page since the last one that matched
    for line in [*trim_lines(expected).splitlines(), None]:
        if line is None:
            found = len(printed)
        elif line.strip() == "…" or (found := find_line(line, printed, at)) is None:
            changed.append(line)
            continue
        gap = printed[at:found]
        if "…" in changed:  # as many lines before and after it as the page had there
            before, after = changed.index("…"), changed[::-1].index("…")
            gap = [*gap[:before], "…", *gap[len(gap) - after :]]
        merged += gap if line is None else [*gap, line if "…" in line else printed[found]]
        changed, at = [], found + 1
    return "\n".join(merged).strip("\n") + "\n"


def find_line(line: str, printed: list[str], start: int) -> int | None:
    """Where a line of the page was printed, from `start` on."""
    return next((n for n in range(start, len(printed)) if not diff_output(printed[n], line)), None)


def main() -> None:
    from doc_models import write_doc_models

    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("page", type=Path, nargs="+")
    asked.add_argument("--fill", action="store_true", help="write what was printed into the pages")
    given, wrong = asked.parse_args(), False
    for path in [path.resolve() for path in given.page]:
        try:
            with tempfile.TemporaryDirectory() as folder:
                write_doc_models(Path(folder))
                shown = run_page(path, Path(folder), include_slow=True)
        except PageError as error:
            sys.stderr.write(f"{error}\n")
            wrong = True
            continue
        if given.fill:
            path.write_text(fill_outputs(path.read_text(encoding="utf-8"), shown), encoding="utf-8")
            continue
        for block, said in shown.items():
            if apart := diff_output(said, block.body):
                sys.stderr.write(f"{path.name}, block of line {block.line}: {apart}\n")
                wrong = True
    sys.exit(wrong)


if __name__ == "__main__":
    main()
