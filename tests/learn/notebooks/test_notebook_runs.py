"""Notebooks are executed cell by cell or as a script: claims, outputs and figures."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from matplotlib import pyplot

from cutaway.learn.claim import ClaimError
from cutaway.learn.exercises.exercise_file import parse_cells
from cutaway.learn.notebooks.execution import run_cells

NOTEBOOK = """# %% [markdown]
# # 1. A notebook

# %%
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from cutaway.learn import claim

for n in (1, 2):
    print(claim(f"printed {n}", n, predicted=n))
claim("shown", 3, predicted=3, id="C051")

# %%
plt.figure().suptitle("first")
saved = claim("assigned", 4, above=3)

# %%
def check():
    return claim(
        "from a function",
        5,
        predicted=5,
    )


check()

# %%
figure = Figure()
figure.suptitle("second")
figure
"""
CLAIMS = ["printed 1", "printed 2", "shown (C051)", "assigned", "from a function"]


def test_script_prints_every_claim_once_and_saves_every_figure(tmp_path: Path) -> None:
    (tmp_path / "01_book.py").write_text(NOTEBOOK)
    run = subprocess.run([sys.executable, "01_book.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert [line.removeprefix("✓ ") for line in run.stdout.splitlines() if line.startswith("✓ ")] == CLAIMS
    assert run.stdout.splitlines()[-2:] == ["figure: learn/01_book-1.svg", "figure: learn/01_book-2.svg"]
    assert [path.name for path in sorted((tmp_path / "learn").iterdir())] == ["01_book-1.svg", "01_book-2.svg"]
    assert "second" in (tmp_path / "learn" / "01_book-2.svg").read_text()


def test_other_scripts_print_and_save_nothing(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(NOTEBOOK.replace("# %%", "#"))
    run = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert run.stdout.count("✓") == 2
    assert not (tmp_path / "learn").exists()


def test_cells_have_outputs_and_figures() -> None:
    result = run_cells(parse_cells(NOTEBOOK), "book.py")
    assert result.claims == ["printed 1", "printed 2", "shown (C051)", "from a function"]  # as Jupyter shows them
    assert result.claim_results[2] == ("shown (C051)", "predicted 3 ± 1 %   measured 3")
    assert [[figure.title for figure in cell.figures] for cell in result.cells] == [[], [], ["first"], [], ["second"]]
    assert all("<svg" in figure.svg for figure in result.figures)


def test_failed_claim_stops_the_run_and_state_is_restored() -> None:
    code = "import torch\nimport matplotlib.pyplot as plt\ntorch.set_grad_enabled(False)\nplt.figure()\n"
    code += "from cutaway.learn import claim\nclaim('a', 1, above=2)"
    with pytest.raises(ClaimError, match="'a' does not hold: predicted above 2, measured 1"):
        run_cells([("code", code)], "book.py")
    assert torch.is_grad_enabled()
    assert not pyplot.get_fignums()
