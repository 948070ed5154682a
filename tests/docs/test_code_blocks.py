"""The code blocks of the documentation print the documented output, and the links point to existing files."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
from build_docs import gather_pages
from doc_links import find_links
from doc_models import write_doc_models
from run_doc_blocks import PageError, diff_output, merge_output, parse_blocks, run_page
from support.nightly import nightly_except
from typer import Context
from typer.core import TyperGroup
from typer.main import get_command

from cutaway.cli import app

ROOT = Path(__file__).parents[2]

TESTED_ELSEWHERE = {
    "docs/gallery.md": "tests/docs/test_gallery.py",
    "docs/checks/README.md": "tests/check/test_explain.py",
}
"""Pages whose code is run by another test."""
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES_WITH_CODE = [
    path
    for path in PAGES
    if path.relative_to(ROOT).as_posix() not in TESTED_ELSEWHERE
    and any(block.language != "console" for block in parse_blocks(path.read_text(encoding="utf-8")))
]
SLOW_PAGES = {
    ROOT / "docs" / "howto" / f"{name}.md"
    for name in (
        *("align", "classify", "deploy", "embed", "fine-tune-chat", "fine-tune-lora", "fine-tune-memory"),
        *("serve", "size", "train"),
    )
}
"""Pages that run only nightly."""
PAGES_WITH_SLOW_CODE = [path for path in PAGES_WITH_CODE if "<!-- at night -->" in path.read_text()]


def page_name(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").as_posix().removeprefix("docs/")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("doc_models")
    write_doc_models(directory)
    return directory


@pytest.mark.unchecked
@pytest.mark.parametrize("path", nightly_except(set(PAGES_WITH_CODE) - SLOW_PAGES, PAGES_WITH_CODE), ids=page_name)
def test_code_blocks_print_documented_output(path: Path, models: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(models, tmp_path / "page")
    diffs = [diff_output(output, block.body) for block, output in run_page(path, directory).items()]
    assert not any(diffs), "\n".join(diffs)


@pytest.mark.nightly
@pytest.mark.unchecked
@pytest.mark.parametrize("path", PAGES_WITH_SLOW_CODE, ids=page_name)
def test_slow_code_blocks_print_documented_output(path: Path, models: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(models, tmp_path / "page")
    outputs = run_page(path, directory, include_slow=True)
    diffs = [diff_output(output, block.body) for block, output in outputs.items()]
    assert not any(diffs), "\n".join(diffs)


def test_console_commands_have_valid_options() -> None:
    """Commands in ```console blocks, which are not run: the verb and its options exist."""
    lines = [line for path in PAGES for block in parse_blocks(path.read_text()) for line in block.body.splitlines()]
    commands = [shlex.split(line[2:], comments=True) for line in lines if line.startswith("$ cutaway ")]
    assert len(commands) > 60
    verbs = get_command(app)
    assert isinstance(verbs, TyperGroup)
    for _, verb, *arguments in commands:
        command = verbs.get_command(Context(verbs), verb)
        assert command is not None, verb
        command.make_context(verb, arguments)


def test_at_most_a_tenth_of_the_blocks_is_not_run() -> None:
    blocks = [
        block for path in PAGES for block in parse_blocks(path.read_text(encoding="utf-8")) if block.language != "text"
    ]
    not_run = [block for block in blocks if block.marker == "not run"]
    assert all(len(block.note.split()) >= 2 for block in not_run), "a block that is not run needs a reason"
    assert len(not_run) <= 0.1 * len(blocks), [block.body for block in not_run]


def test_linked_files_exist() -> None:
    for path in [*PAGES, *ROOT.glob("*.md"), ROOT / "notebooks" / "README.md"]:
        for link in find_links(path.read_text(encoding="utf-8")):
            if not re.match(r"[a-z]+:|#", link):
                assert (path.parent / link.partition("#")[0]).exists(), f"{page_name(path)}: {link}"


@pytest.mark.parametrize(
    ("expected", "output", "equal"),
    [
        ("loss 2.218\n", "loss   2.219\n", True),
        ("loss 2.218\n", "loss 2.318\n", False),
        ("8,030,261,248 parameters\n", "8,030,261,249 parameters\n", False),
        ("a … c\n", "a b c\n", True),
        ("first\n…\nlast\n", "first\n1\n2\nlast\n", True),
        ("first\n…\nlast\n", "first\n1\n2\n", False),
        ("−0.5\n", "0.5\n", False),
        ("1.2e-07\n", "1.21e-07\n", True),
        ("one\n", "one\ntwo\n", False),
    ],
)
def test_diff_output(expected: str, output: str, equal: bool) -> None:
    assert (diff_output(output, expected) == "") is equal


@pytest.mark.parametrize(
    ("expected", "output", "merged"),
    [
        ("one\n", "two\n", "two\n"),
        ("a\nold\n…\nz\n", "a\nnew\n1\n2\nz\n", "a\nnew\n…\nz\n"),
        ("…\nlast 1\n", "first\nsecond\nlast 2\n", "…\nlast 2\n"),
        ("took … s\nold\n", "took 3 s\nnew\n", "took … s\nnew\n"),
    ],
)
def test_merge_output_keeps_ellipses(expected: str, output: str, merged: str) -> None:
    assert merge_output(output, expected) == merged


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```python\n1 / 0\n```\n", "ZeroDivisionError"),
        ("```bash\ncutaway size no-such-model\n```\n", "exited with 2"),
        ("```bash\nrm -r everything\n```\n", "lines must begin with cutaway"),
        ("```toml\na = \n```\n", "TOMLDecodeError"),
        ("```cobol\nSTOP RUN\n```\n", "not a supported language"),
        ("<!-- not run -->\n```python\n1 / 0\n```\n", "no reason"),
    ],
)
def test_invalid_pages_are_errors(text: str, message: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(PageError, match=message):
        run_page(page, tmp_path)


def test_links_of_gathered_pages_exist(tmp_path: Path) -> None:
    """`make docs` builds the site from these pages and verifies anchors and navigation."""
    gather_pages(tmp_path)
    for page in tmp_path.rglob("*.md"):
        for link in find_links(page.read_text(encoding="utf-8")):
            if not re.match(r"[a-z]+:|#", link):
                assert (page.parent / link.partition("#")[0]).is_file(), f"{page.relative_to(tmp_path)}: {link}"
