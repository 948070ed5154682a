"""Every block of the documentation runs and prints what its page says; every link leads somewhere."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
from build_docs import gather_pages
from doc_links import find_links
from doc_models import write_doc_models
from run_doc_blocks import PageError, diff_output, merge_output, parse_blocks, run_page
from typer import Context
from typer.core import TyperGroup
from typer.main import get_command

from cutaway.cli import app

ROOT = Path(__file__).parents[2]

ELSEWHERE = {"docs/gallery.md": "tests/docs/test_gallery.py", "docs/checks/README.md": "tests/check/test_explain.py"}
"""Pages whose Python has a test of its own."""
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WITH_CODE = [
    path
    for path in PAGES
    if path.relative_to(ROOT).as_posix() not in ELSEWHERE
    and any(block.language != "console" for block in parse_blocks(path.read_text(encoding="utf-8")))
]


def name(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").as_posix().removeprefix("docs/")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("doc_models")
    write_doc_models(folder)
    return folder


@pytest.mark.unchecked
@pytest.mark.parametrize("path", WITH_CODE, ids=name)
def test_a_page_runs_and_prints_what_it_says(path: Path, models: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(models, tmp_path / "here")
    wrong = [diff_output(said, block.body) for block, said in run_page(path, folder).items()]
    assert not any(wrong), "\n".join(wrong)


@pytest.mark.nightly
@pytest.mark.unchecked
@pytest.mark.parametrize("path", [path for path in WITH_CODE if "<!-- at night -->" in path.read_text()], ids=name)
def test_a_page_runs_at_night(path: Path, models: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(models, tmp_path / "here")
    wrong = [diff_output(said, block.body) for block, said in run_page(path, folder, include_slow=True).items()]
    assert not any(wrong), "\n".join(wrong)


def test_commands_that_are_only_shown_are_well_formed() -> None:
    """Those of ```console blocks: the verb is there, and so are its options."""
    shown = [line for path in PAGES for block in parse_blocks(path.read_text()) for line in block.body.splitlines()]
    commands = [shlex.split(line[2:], comments=True) for line in shown if line.startswith("$ cutaway ")]
    assert len(commands) > 60
    verbs = get_command(app)
    assert isinstance(verbs, TyperGroup)
    for _, verb, *words in commands:
        known = verbs.get_command(Context(verbs), verb)
        assert known is not None, verb
        known.make_context(verb, words)


def test_few_blocks_are_not_run() -> None:
    every = [
        block for path in PAGES for block in parse_blocks(path.read_text(encoding="utf-8")) if block.language != "text"
    ]
    not_run = [block for block in every if block.marker == "not run"]
    assert all(len(block.note.split()) >= 2 for block in not_run), "each says why"
    assert len(not_run) <= 0.1 * len(every), [block.body for block in not_run]


def test_files_that_pages_link_to_are_there() -> None:
    for path in [*PAGES, *ROOT.glob("*.md"), ROOT / "notebooks" / "README.md"]:
        for link in find_links(path.read_text(encoding="utf-8")):
            if not re.match(r"[a-z]+:|#", link):
                assert (path.parent / link.partition("#")[0]).exists(), f"{name(path)}: {link}"


@pytest.mark.parametrize(
    ("page", "program", "same"),
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
def test_outputs_are_compared_with_care(page: str, program: str, same: bool) -> None:
    assert (diff_output(program, page) == "") is same


@pytest.mark.parametrize(
    ("page", "program", "filled"),
    [
        ("one\n", "two\n", "two\n"),
        ("a\nold\n…\nz\n", "a\nnew\n1\n2\nz\n", "a\nnew\n…\nz\n"),
        ("…\nlast 1\n", "first\nsecond\nlast 2\n", "…\nlast 2\n"),
        ("took … s\nold\n", "took 3 s\nnew\n", "took … s\nnew\n"),
    ],
)
def test_filling_an_output_keeps_what_is_left_out(page: str, program: str, filled: str) -> None:
    assert merge_output(program, page) == filled


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("```python\n1 / 0\n```\n", "ZeroDivisionError"),
        ("```bash\ncutaway size no-such-model\n```\n", "exited with 2"),
        ("```bash\nrm -r everything\n```\n", "lines must begin with cutaway"),
        ("```toml\na = \n```\n", "TOMLDecodeError"),
        ("```cobol\nSTOP RUN\n```\n", "not a supported language"),
        ("<!-- not run -->\n```python\n1 / 0\n```\n", "no reason"),
    ],
)
def test_a_page_that_is_wrong_is_told_so(text: str, complaint: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(PageError, match=complaint):
        run_page(page, tmp_path)


def test_pages_are_gathered_with_links_that_hold_in_the_site(tmp_path: Path) -> None:
    """`make docs`, which is a part of `make test`, builds the site of them, and holds anchors and the navigation."""
    gather_pages(tmp_path)
    for page in tmp_path.rglob("*.md"):
        for link in find_links(page.read_text(encoding="utf-8")):
            if not re.match(r"[a-z]+:|#", link):
                assert (page.parent / link.partition("#")[0]).is_file(), f"{page.relative_to(tmp_path)}: {link}"
