"""Every notebook runs, its claims hold, and Jupyter can open it."""

import ast
from itertools import product
from pathlib import Path

import build_docs
import jupytext
import pytest
import torch
from run_notebook import run_notebook

from cutaway.learn.claims import load_claims
from cutaway.learn.studies.norm_placement import Setting, describe_gradient

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.py"))


def test_notebooks_are_numbered_consecutively_from_1() -> None:
    assert [int(path.name[:2]) for path in NOTEBOOKS] == list(range(1, len(NOTEBOOKS) + 1))


SLOW_NOTEBOOKS = [pytest.param(path, marks=pytest.mark.nightly) for path in NOTEBOOKS[1:]]


@pytest.mark.unchecked
@pytest.mark.parametrize("path", [NOTEBOOKS[0], *SLOW_NOTEBOOKS], ids=lambda path: path.stem)
def test_notebook_runs_and_claims_hold(path: Path) -> None:
    """Outputs and figures are stored in .pages/, from which the documentation is built."""
    result = build_docs.run_notebook_if_changed(path)
    assert len(result["claims"]) >= 3
    assert len(result["figures"]) >= 2
    for figure in result["figures"]:
        assert (build_docs.NOTEBOOK_DIR / figure).stat().st_size < 200_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_round_trips_through_ipynb(path: Path, tmp_path: Path) -> None:
    book = jupytext.read(path)
    kinds = [cell.cell_type for cell in book.cells]
    assert kinds[0] == "markdown"
    assert kinds.count("code") >= 4
    jupytext.write(book, tmp_path / "book.ipynb")
    reloaded = jupytext.read(tmp_path / "book.ipynb")
    assert [cell.source for cell in reloaded.cells] == [cell.source for cell in book.cells]


def claim_ids(source: str) -> list[str]:
    """Return the ids passed to `claim` in a notebook. An id is a string literal."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    claims = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "claim"]
    return [ast.literal_eval(keyword.value) for call in claims for keyword in call.keywords if keyword.arg == "id"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_claims_of_notebooks_have_ids_of_the_table(path: Path) -> None:
    ids = set(claim_ids(path.read_text()))
    assert ids <= {row.id for row in load_claims()}
    assert len(ids) >= 5


def test_grad_mode_is_restored_after_a_notebook(tmp_path: Path) -> None:
    path = tmp_path / "first.py"
    path.write_text("# %%\nimport torch\ntorch.set_grad_enabled(False)\ntorch.is_grad_enabled()\n")
    assert "False" in run_notebook(path, tmp_path).page
    assert torch.is_grad_enabled()


@pytest.mark.unchecked
@pytest.mark.nightly
def test_gradients_notebook_states_the_sentences_of_the_page() -> None:
    """Notebook 5 and the Gradients screen state the same figures for every setting that both have."""
    build_docs.run_notebook_if_changed(ROOT / "notebooks" / "05_gradients.py")
    text = (build_docs.NOTEBOOK_DIR / "05_gradients.md").read_text()
    for form, activation, init in product(("decoder", "encoder"), ("relu", "gelu"), ("xavier", "gpt2")):
        for placement in ("pre", "post", "sandwich"):
            assert describe_gradient(Setting(placement, form, activation, init), 24) in text
