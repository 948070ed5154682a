"""Runs the code of a page, and holds what the page says it prints.

python scripts/blocks.py [--fill] docs/howto/size.md

How pages are written:

- ```python blocks run in order, in one namespace a page, in a folder of their own.
- ```bash blocks hold lines that begin with `cutaway`; they run in this process. A line that ends with & is a server,
  and lives as long as the page; its port 8000 is exchanged for a free one, here and in the page's Python.
- ```text after <!-- output --> is what the block before it printed. <!-- output: exit 1 --> says how its last command
  ended. Spaces count as one, … stands for anything, and a decimal may differ by 1 %.
- a block with title="mine.toml" is a file, and written. ```toml and ```json must be that.
- ```diff is applied to a copy of the sources; Python after it runs with that, each block in a process of its own.
- <!-- not run: why --> stands before a block that cannot run here, <!-- at night --> before one that takes long.

The folder has the models of stand_ins.py: small ones, without training, under well-known names. `--fill` writes what
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

from commands import Session

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"(?sm)^(?P<indent> *)(?P<ticks>`{3,})(?P<info>[^`\n]*)\n(?P<body>.*?)^(?P=indent)(?P=ticks) *$")
MARK = re.compile(r"<!-- (output|not run|at night)(?:: ((?:(?!-->).)*?))? -->\s*\Z", re.DOTALL)
NUMBER = re.compile(r"[-−+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
TOLD, DATA = ("text",), ("toml", "json", "jsonl")
SHOWN = ("console",)
"""Languages of blocks that are only shown: what they show is held elsewhere, or is no program."""


class PageError(Exception):
    """A page says what is not so."""


@dataclass(frozen=True)
class Block:
    line: int
    language: str
    title: str
    body: str
    mark: str = ""
    """`output`, `not run`, `at night`, or nothing."""
    note: str = ""
    place: tuple[int, int] = (0, 0)
    """Where its body stands in the page."""


def blocks(page: str) -> list[Block]:
    found = []
    for fence in FENCE.finditer(page):
        language, _, rest = fence["info"].strip().partition(" ")
        title = re.search(r'title="([^"]+)"', rest)
        mark = MARK.search(page[: fence.start()])
        body = re.sub(rf"^{fence['indent']}", "", fence["body"], flags=re.MULTILINE)
        line = page.count("\n", 0, fence.start()) + 1
        said = (mark[1], " ".join((mark[2] or "").split())) if mark else ("", "")
        found.append(Block(line, language, title[1] if title else "", body, *said, fence.span("body")))
    return found


def run(path: Path, folder: Path, *, night: bool = False) -> dict[Block, str]:
    """Run a page in a folder; what was printed, by the block that shows it. At night, all of it."""
    page = path.read_text(encoding="utf-8")
    shown: dict[Block, str] = {}
    with Session(folder) as session:
        said, code = "", 0
        passed_over = False
        for block in blocks(page):
            try:
                if block.mark == "not run":
                    if not block.note:
                        raise PageError("is not run, and no reason is given")
                elif block.mark == "output":
                    if not passed_over:
                        shown[block] = said
                        expect_exit(block, code)
                elif passed_over := block.mark == "at night" and not night:
                    continue
                elif block.language == "python" and not block.title:
                    said, code = session.python(block.body, f"{path.name}:{block.line}"), 0
                elif block.language == "diff":
                    session.patch(block.body)
                elif block.language == "bash":
                    said, code = session.bash(block.body)
                    if code and not answered(page, block):
                        raise PageError(f"ended with {code}:\n{said}")
                else:
                    write(block, folder)
            except Exception as error:
                raise PageError(f"{path.name}, block of line {block.line}: {type(error).__name__}: {error}") from error
    return shown


def answered(page: str, block: Block) -> bool:
    """Whether the page shows how the block ended."""
    all_blocks = blocks(page)
    after = all_blocks[all_blocks.index(block) + 1 :]
    return bool(after) and after[0].mark == "output" and after[0].note.startswith("exit")


def expect_exit(block: Block, code: int) -> None:
    meant = int(block.note.removeprefix("exit ")) if block.note else 0
    if meant != code:
        raise PageError(f"ended with {code}, and not with {meant}")


def write(block: Block, folder: Path) -> None:
    if block.language == "toml":
        tomllib.loads(block.body)
    elif block.language == "json":
        json.loads(block.body)
    elif block.language == "jsonl":
        [json.loads(row) for row in block.body.splitlines()]
    if block.title:
        (folder / block.title).parent.mkdir(parents=True, exist_ok=True)
        (folder / block.title).write_text(block.body, encoding="utf-8")
    elif block.language not in (*TOLD, *DATA, *SHOWN):
        raise PageError(f"{block.language!r} is no language that can be run or shown")


def difference(said: str, meant: str) -> str:
    """What is wrong with the output on a page, or nothing."""
    numbers: list[str] = []
    pattern = "".join(as_pattern(row, numbers) for row in trimmed(meant).splitlines())
    found = re.fullmatch(pattern, trimmed(said), re.DOTALL)
    if found is None:
        return f"the page says\n{meant}\nand the program\n{said}"
    apart = [(page, now) for page, now in zip(numbers, found.groups(), strict=True) if not near(page, now)]
    return f"numbers of the page, and of the program: {apart}\n{said}" if apart else ""


def trimmed(text: str) -> str:
    """Without spaces at the ends of lines, nor empty lines around."""
    return "\n".join(row.rstrip() for row in text.splitlines()).strip("\n") + "\n"


def as_pattern(row: str, numbers: list[str]) -> str:
    """A row of the page as a regular expression with a group for each number."""
    if row.strip() == "…":
        return r"(?:[^\n]*\n)*?"
    parts, at = [], 0
    for number in NUMBER.finditer(row):
        parts.append(words(row[at : number.start()]))
        parts.append(f"({NUMBER.pattern})")
        numbers.append(number[0])
        at = number.end()
    return "".join([*parts, words(row[at:]), r" *\n"])


def words(text: str) -> str:
    pieces = [re.split(" +", piece) for piece in re.split(" *… *", text)]
    return r"[^\n]*?".join(" +".join(map(re.escape, piece)) for piece in pieces)


def near(page: str, now: str) -> bool:
    a, b = (float(text.replace(",", "").replace("−", "-")) for text in (page, now))
    if "." not in page and "e" not in page:
        return a == b
    digits = len(page.partition("e")[0].partition(".")[2])
    last = 10.0**-digits * (10.0 ** int(page.partition("e")[2]) if "e" in page else 1)
    return abs(a - b) <= max(0.01 * abs(a), 2 * last)


def filled(page: str, shown: dict[Block, str]) -> str:
    """The page with what its blocks print, where that is not what stands there."""
    for block, said in sorted(shown.items(), key=lambda item: -item[0].place[0]):
        if difference(said, block.body):
            start, end = block.place
            page = page[:start] + trimmed(said) + page[end:]
    return page


def main() -> None:
    from stand_ins import stand_ins

    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("page", type=Path, nargs="+")
    asked.add_argument("--fill", action="store_true", help="write what was printed into the pages")
    given, wrong = asked.parse_args(), False
    for path in [path.resolve() for path in given.page]:
        try:
            with tempfile.TemporaryDirectory() as folder:
                stand_ins(Path(folder))
                shown = run(path, Path(folder), night=True)
        except PageError as error:
            sys.stderr.write(f"{error}\n")
            wrong = True
            continue
        if given.fill:
            path.write_text(filled(path.read_text(encoding="utf-8"), shown), encoding="utf-8")
            continue
        for block, said in shown.items():
            if apart := difference(said, block.body):
                sys.stderr.write(f"{path.name}, block of line {block.line}: {apart}\n")
                wrong = True
    sys.exit(wrong)


if __name__ == "__main__":
    main()
