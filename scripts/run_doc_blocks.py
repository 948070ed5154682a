"""Run the code blocks of a documentation page and compare their output with the page.

python scripts/run_doc_blocks.py [--fill] docs/howto/size.md

Format of pages:

- ```python blocks run in order, in one namespace per page, in a temporary directory.
- ```bash blocks contain lines that begin with `cutaway`; they run in this process. A line that ends with & starts a
  server, which runs until the end of the page; port 8000 is replaced by a free port, also in the page's Python blocks.
- ```text after <!-- output --> is the expected output of the block before it. <!-- output: exit 1 --> also states the
  exit code of that block's last command. Any number of spaces matches any other, … matches anything, and decimals may
  differ by 1 %.
- a block with title="mine.toml" is written to that file. ```toml and ```json must be valid.
- ```diff is applied to a copy of the sources, which later Python blocks use, each in a separate process.
- <!-- not run: reason --> precedes a block that cannot run in the tests, <!-- at night --> a slow block.

The directory contains the models of doc_models.py: small and untrained, under well-known names. `--fill` writes the
actual output to the page.
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
"""Languages of blocks that are not run: tested elsewhere, or not code."""


class PageError(Exception):
    """A code block fails or its output differs from the page."""


@dataclass(frozen=True)
class DocBlock:
    line: int
    language: str
    title: str
    body: str
    marker: str = ""
    """`output`, `not run`, `at night`, or empty."""
    note: str = ""
    span: tuple[int, int] = (0, 0)
    """Start and end of the body in the page."""


def parse_blocks(page: str) -> list[DocBlock]:
    blocks = []
    for fence in FENCE.finditer(page):
        language, _, attributes = fence["info"].strip().partition(" ")
        title = re.search(r'title="([^"]+)"', attributes)
        marker = MARKER.search(page[: fence.start()])
        body = re.sub(rf"^{fence['indent']}", "", fence["body"], flags=re.MULTILINE)
        line = page.count("\n", 0, fence.start()) + 1
        note = (marker[1], " ".join((marker[2] or "").split())) if marker else ("", "")
        blocks.append(DocBlock(line, language, title[1] if title else "", body, *note, fence.span("body")))
    return blocks


def run_page(path: Path, folder: Path, *, include_slow: bool = False) -> dict[DocBlock, str]:
    """Run the blocks of a page in a directory, including slow ones if `include_slow`.

    Return the actual output for each block that shows an expected output.
    """
    page = path.read_text(encoding="utf-8")
    outputs: dict[DocBlock, str] = {}
    with DocSession(folder) as session:
        output, code = "", 0
        skipped = False
        for block in parse_blocks(page):
            try:
                if block.marker == "not run":
                    if not block.note:
                        raise PageError("is not run, but gives no reason")
                elif block.marker == "output":
                    if not skipped:
                        outputs[block] = output
                        check_exit_code(block, code)
                elif skipped := block.marker == "at night" and not include_slow:
                    continue
                elif block.language == "python" and not block.title:
                    output, code = session.run_python(block.body, f"{path.name}:{block.line}"), 0
                elif block.language == "diff":
                    session.apply_patch(block.body)
                elif block.language == "bash":
                    output, code = session.run_bash(block.body)
                    if code and not shows_exit_code(page, block):
                        raise PageError(f"exited with {code}:\n{output}")
                else:
                    write_block(block, folder)
            except Exception as error:
                raise PageError(f"{path.name}, block of line {block.line}: {type(error).__name__}: {error}") from error
    return outputs


def shows_exit_code(page: str, block: DocBlock) -> bool:
    """Whether the block after `block` is an output block with an exit code."""
    all_blocks = parse_blocks(page)
    following = all_blocks[all_blocks.index(block) + 1 :]
    return bool(following) and following[0].marker == "output" and following[0].note.startswith("exit")


def check_exit_code(block: DocBlock, code: int) -> None:
    expected = int(block.note.removeprefix("exit ")) if block.note else 0
    if expected != code:
        raise PageError(f"exited with {code}, expected {expected}")


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
        raise PageError(f"{block.language!r} is not a supported language")


def diff_output(actual: str, expected: str) -> str:
    """Describe the difference between the actual and the expected output. Empty if they match."""
    numbers: list[str] = []
    pattern = "".join(line_to_regex(row, numbers) for row in trim_lines(expected).splitlines())
    match = re.fullmatch(pattern, trim_lines(actual), re.DOTALL)
    if match is None:
        return f"expected\n{expected}\nactual\n{actual}"
    different = [
        (expected_number, actual_number)
        for expected_number, actual_number in zip(numbers, match.groups(), strict=True)
        if not numbers_match(expected_number, actual_number)
    ]
    return f"different numbers (expected, actual): {different}\n{actual}" if different else ""


def trim_lines(text: str) -> str:
    """Strip trailing spaces of lines, and leading and trailing empty lines."""
    return "\n".join(row.rstrip() for row in text.splitlines()).strip("\n") + "\n"


def line_to_regex(line: str, numbers: list[str]) -> str:
    """Convert a line to a regular expression with a group for each number."""
    if line.strip() == "…":
        return r"(?:[^\n]*\n)*?"
    parts, end = [], 0
    for number in NUMBER.finditer(line):
        parts.append(text_to_regex(line[end : number.start()]))
        parts.append(f"({NUMBER.pattern})")
        numbers.append(number[0])
        end = number.end()
    return "".join([*parts, text_to_regex(line[end:]), r" *\n"])


def text_to_regex(text: str) -> str:
    parts = [re.split(" +", part) for part in re.split(" *… *", text)]
    return r"[^\n]*?".join(" +".join(map(re.escape, part)) for part in parts)


def numbers_match(expected: str, actual: str) -> bool:
    a, b = (float(text.replace(",", "").replace("−", "-")) for text in (expected, actual))
    if "." not in expected and "e" not in expected:
        return a == b
    digits = len(expected.partition("e")[0].partition(".")[2])
    last_digit = 10.0**-digits * (10.0 ** int(expected.partition("e")[2]) if "e" in expected else 1)
    return abs(a - b) <= max(0.01 * abs(a), 2 * last_digit)


def fill_outputs(page: str, outputs: dict[DocBlock, str]) -> str:
    """Return the page with the actual output in place of each output block that differs from it."""
    for block, output in sorted(outputs.items(), key=lambda item: -item[0].span[0]):
        if diff_output(output, block.body):
            start, end = block.span
            page = page[:start] + merge_output(output, block.body) + page[end:]
    return page


def merge_output(actual: str, expected: str) -> str:
    """Return the actual output, shortened with `…` where the expected output on the page has `…`."""
    lines, merged, position = trim_lines(actual).splitlines(), [], 0
    unmatched: list[str] = []  # lines of the page since the last match
    for line in [*trim_lines(expected).splitlines(), None]:
        if line is None:
            index = len(lines)
        elif line.strip() == "…" or (index := find_line(line, lines, position)) is None:
            unmatched.append(line)
            continue
        new_lines = lines[position:index]
        if "…" in unmatched:  # keep as many lines before and after it as the page has
            before, after = unmatched.index("…"), unmatched[::-1].index("…")
            new_lines = [*new_lines[:before], "…", *new_lines[len(new_lines) - after :]]
        merged += new_lines if line is None else [*new_lines, line if "…" in line else lines[index]]
        unmatched, position = [], index + 1
    return "\n".join(merged).strip("\n") + "\n"


def find_line(line: str, lines: list[str], start: int) -> int | None:
    """Return the index of the first of `lines`, from `start` on, that matches `line` of the page. None if none does."""
    return next((n for n in range(start, len(lines)) if not diff_output(lines[n], line)), None)


def main() -> None:
    from doc_models import write_doc_models

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path, nargs="+")
    parser.add_argument("--fill", action="store_true", help="write the actual outputs to the pages")
    args, failed = parser.parse_args(), False
    for path in [path.resolve() for path in args.page]:
        try:
            with tempfile.TemporaryDirectory() as folder:
                write_doc_models(Path(folder))
                outputs = run_page(path, Path(folder), include_slow=True)
        except PageError as error:
            sys.stderr.write(f"{error}\n")
            failed = True
            continue
        if args.fill:
            path.write_text(fill_outputs(path.read_text(encoding="utf-8"), outputs), encoding="utf-8")
            continue
        for block, output in outputs.items():
            if difference := diff_output(output, block.body):
                sys.stderr.write(f"{path.name}, block of line {block.line}: {difference}\n")
                failed = True
    sys.exit(failed)


if __name__ == "__main__":
    main()
