"""Every notebook runs from top to bottom, its claims hold, and it opens in Jupyter."""

from pathlib import Path

import build_docs
import jupytext
import pytest
import torch
from run_notebook import run_notebook

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.py"))


def test_there_are_eleven() -> None:
    assert [int(path.name[:2]) for path in NOTEBOOKS] == list(range(1, 12))


SLOW_NOTEBOOKS = [pytest.param(path, marks=pytest.mark.nightly) for path in NOTEBOOKS[1:]]


@pytest.mark.unchecked
@pytest.mark.parametrize("path", [NOTEBOOKS[0], *SLOW_NOTEBOOKS], ids=lambda path: path.stem)
def test_a_notebook_runs_and_its_claims_hold(path: Path) -> None:
    """Outputs and figures are stored in .pages/, from which the documentation is built."""
    result = build_docs.run_notebook_if_changed(path)
    assert len(result["claims"]) >= 3
    assert len(result["figures"]) >= 2
    for figure in result["figures"]:
        assert (build_docs.NOTEBOOK_DIR / figure).stat().st_size < 200_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_goes_to_jupyter_and_back(path: Path, tmp_path: Path) -> None:
    book = jupytext.read(path)
    kinds = [cell.cell_type for cell in book.cells]
    assert kinds[0] == "markdown"
    assert kinds.count("code") >= 4
    jupytext.write(book, tmp_path / "there.ipynb")
    again = jupytext.read(tmp_path / "there.ipynb")
    assert [cell.source for cell in again.cells] == [cell.source for cell in book.cells]


def test_what_a_notebook_sets_for_gradients_ends_with_it(tmp_path: Path) -> None:
    path = tmp_path / "first.py"
    path.write_text("# %%\nimport torch\ntorch.set_grad_enabled(False)\ntorch.is_grad_enabled()\n")
    assert "False" in run_notebook(path, tmp_path).page
    assert torch.is_grad_enabled()
