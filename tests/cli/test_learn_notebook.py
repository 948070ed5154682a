"""`cutaway learn notebook`: list, copy, run; changed copies are not overwritten."""

import json
from pathlib import Path

import nbformat
import pytest
from support.cli_runner import CliRunner

from cutaway.learn import notebooks
from cutaway.learn.notebooks import Notebook, load_notebooks, notebook_copy

pytestmark = pytest.mark.unchecked
TEXT = """# %% [markdown]
# # 5. A title
#
# A description, see [notebook 2](02_attention.py).

# %%
import matplotlib.pyplot as plt

from cutaway.learn import claim

plt.figure()
claim("one", VALUE, predicted=1)
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(notebook_copy, "find_jupyter", lambda: None)
    return tmp_path


@pytest.fixture
def short_notebook(monkeypatch: pytest.MonkeyPatch) -> Notebook:
    """Notebook 5 is replaced by one that runs in no time."""
    book = Notebook(Path("05_gradients.py"), TEXT.replace("VALUE", "1"))
    monkeypatch.setattr(notebooks, "get_notebook", lambda number: book)
    return book


def test_list(run_cli: CliRunner) -> None:
    output = run_cli("learn", "notebook")
    for notebook in load_notebooks():
        assert notebook.title in output
    rows = json.loads(run_cli("learn", "notebook", "--json"))
    assert [row["number"] for row in rows] == [notebook.number for notebook in load_notebooks()]
    assert rows[1]["title"] == "Attention, masks and heads"
    assert rows[1]["about"].startswith("Attention is the only operation")


def test_html_copy_without_jupyter(run_cli: CliRunner, home: Path) -> None:
    output = run_cli("learn", "notebook", 5)
    assert "Written to 'learn/05_gradients.html'. Open it in a browser" in output
    assert "`cutaway learn notebook --all`" in output
    page = (home / "learn" / "05_gradients.html").read_text()
    assert "<math" in page
    assert "The code was not run" in page
    assert "Unchanged: 'learn/05_gradients.html'" in run_cli("learn", "notebook", 5)


def test_jupyter_copy(run_cli: CliRunner, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook_copy, "find_jupyter", lambda: ["jupyter", "lab"])
    assert "`jupyter lab learn/05_gradients.ipynb`" in run_cli("learn", "notebook", 5)
    document = nbformat.read(home / "learn" / "05_gradients.ipynb", as_version=4)
    nbformat.validate(document)
    assert "](02_attention.ipynb)" in document.cells[0].source
    assert "02_attention.py" not in document.cells[0].source


def test_changed_copy_is_not_overwritten(run_cli: CliRunner, home: Path) -> None:
    for suffix in ("html", "ipynb"):
        path = home / "learn" / f"05_gradients.{suffix}"
        options = ("learn", "notebook", 5, "--format", suffix)
        run_cli(*options)
        changed = path.read_text().replace("Jacobian of a norm", "My notes")
        path.write_text(changed)
        message = run_cli(*options, code=2)
        assert f"'learn/05_gradients.{suffix}' was changed since it was written" in message
        assert path.read_text() == changed
        data = json.loads(run_cli(*options, "--restart", "--json"))
        assert Path(data["previous_file"]).read_text() == changed
        assert "Jacobian of a norm" in path.read_text()


def test_run_adds_outputs_and_figures(run_cli: CliRunner, home: Path, short_notebook: Notebook) -> None:
    run_cli("learn", "notebook", 5)
    output = run_cli("learn", "notebook", 5, "--run")  # replaces the copy, which was not changed
    assert "✓ one\n    predicted 1 ± 1 %   measured 1" in output
    assert "1 claims hold, 1 figures" in output
    page = (home / "learn" / "05_gradients.html").read_text()
    assert "data:image/svg+xml;base64," in page
    assert "✓ one" in page
    data = json.loads(run_cli("learn", "notebook", 5, "--run", "--format", "ipynb", "--json"))
    assert data["claims"] == [{"statement": "one", "result": "predicted 1 ± 1 %   measured 1"}]
    document = nbformat.read(home / "learn" / "05_gradients.ipynb", as_version=4)
    nbformat.validate(document)
    assert [output.output_type for output in document.cells[1].outputs] == ["stream", "display_data"]


def test_claim_that_does_not_hold_is_exit_code_1(
    run_cli: CliRunner, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = Notebook(Path("05_gradients.py"), TEXT.replace("VALUE", "2"))
    monkeypatch.setattr(notebooks, "get_notebook", lambda number: book)
    output = run_cli("learn", "notebook", 5, "--run", code=1)
    assert "✗ notebook 5: 'one' does not hold: predicted 1 ± 1 %, measured 2" in output
    assert not (home / "learn").exists()


def test_open_keeps_an_existing_copy(run_cli: CliRunner, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    run_cli("learn", "notebook", 5, "--open")
    path = home / "learn" / "05_gradients.html"
    path.write_text("mine")
    run_cli("learn", "notebook", 5, "--open")
    assert opened == [path.as_uri()] * 2
    assert path.read_text() == "mine"


def test_copies_of_all_notebooks_link_to_each_other(run_cli: CliRunner, home: Path) -> None:
    assert "links to" not in run_cli("learn", "notebook", "--all").splitlines()[-1]
    names = sorted(path.stem for path in (home / "learn").iterdir())
    assert names == [notebook.name for notebook in load_notebooks()]
    assert 'href="02_attention.html"' in (home / "learn" / "05_gradients.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([99], "there is no notebook 99"),
        ([5, "--dir", "notes.txt"], "which is a file"),
        (["--all", "--open"], "--open opens one notebook"),
        ([5, "--format", "ipynb", "--open"], "Jupyter is not installed"),
    ],
)
def test_errors_have_one_message(run_cli: CliRunner, home: Path, arguments: list[object], message: str) -> None:
    (home / "notes.txt").write_text("")
    assert message in run_cli("learn", "notebook", *arguments, code=2)
