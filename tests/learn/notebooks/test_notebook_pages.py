"""Notebooks as data and as pages: cells, titles, links, formulas as MathML, HTML without scripts."""

import base64
import hashlib
import re
from pathlib import Path
from xml.etree import ElementTree

import jupytext
import pytest

from cutaway.errors import InputError
from cutaway.learn.notebooks import Notebook, get_notebook, load_notebooks
from cutaway.learn.notebooks.cell_result import CellResult, SvgFigure
from cutaway.learn.notebooks.html_page import CONTENT_SECURITY_POLICY, render_markdown, render_page
from cutaway.learn.notebooks.mathml import UnsupportedTexError, tex_to_mathml

ROOT = Path(__file__).parents[3]
ALL_NOTEBOOKS = pytest.mark.parametrize("notebook", load_notebooks(), ids=lambda notebook: notebook.name)
MENTION = re.compile(r"\bnotebooks?\s+(?:#\s+)?\d+", re.IGNORECASE)
LINK = re.compile(r"\[[^\]]*\]\([^)]*\)")


def plain_cells(notebook: Notebook) -> list[CellResult]:
    return [CellResult(kind, source) for kind, source in notebook.cells]


def test_notebooks_of_the_repository_are_loaded_in_order() -> None:
    files = sorted((ROOT / "notebooks").glob("*.py"))
    assert [notebook.path for notebook in load_notebooks()] == files
    assert [notebook.number for notebook in load_notebooks()] == list(range(1, len(files) + 1))
    with pytest.raises(InputError, match=f"there is no notebook 99; notebooks are numbered 1 to {len(files)}"):
        get_notebook(99)


@ALL_NOTEBOOKS
def test_cells_equal_those_of_jupytext(notebook: Notebook) -> None:
    expected = [(cell.cell_type, cell.source.strip("\n")) for cell in jupytext.read(notebook.path).cells]
    assert notebook.cells == expected


@ALL_NOTEBOOKS
def test_title_and_description_are_plain_text(notebook: Notebook) -> None:
    assert notebook.cells[0][1].startswith(f"# {notebook.number}. {notebook.title}\n")
    assert 40 < len(notebook.about) < 800
    assert not re.search(r"[\\$\n]|\]\(", notebook.about)


@ALL_NOTEBOOKS
def test_every_mention_of_a_notebook_is_a_link_to_it(notebook: Notebook) -> None:
    text = "\n".join(source for kind, source in notebook.cells if kind == "markdown")
    assert not MENTION.findall(LINK.sub("", text))
    for label, target in re.findall(r"\[([^\]]*)\]\((\d\d_\w+\.py)\)", text):
        assert (ROOT / "notebooks" / target).is_file(), target
        assert int(re.findall(r"\d+", label)[0]) == int(target[:2]), (label, target)


def test_mentions_of_notebooks_in_the_documentation_are_links() -> None:
    for path in [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]:
        text = re.sub(r"```.*?```|`[^`]*`", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert not MENTION.findall(LINK.sub("", text)), path


@ALL_NOTEBOOKS
def test_every_formula_is_rendered_as_mathml(notebook: Notebook) -> None:
    text = "\n\n".join(source for kind, source in notebook.cells if kind == "markdown")
    html = render_markdown(text, lambda name: name)
    assert "$" not in re.sub(r"<code.*?</code>", "", html, flags=re.DOTALL)
    assert not re.findall(r"<code>[^<]*\\[a-z]+\{", html), "a formula was not converted"
    for formula in re.findall(r"<math.*?</math>", html, re.DOTALL):
        ElementTree.fromstring(formula)


@pytest.mark.parametrize(
    ("tex", "expected"),
    [
        ("x^2", "<msup><mi>x</mi><mn>2</mn></msup>"),
        (r"\frac12", "<mfrac><mn>1</mn><mn>2</mn></mfrac>"),
        (r"10^{-4.9}", "<msup><mn>10</mn><mrow><mo>−</mo><mn>4.9</mn></mrow></msup>"),
        (r"W_\text{up}", "<msub><mi>W</mi><mtext>up</mtext></msub>"),
        (r"\sqrt[3]{x}", "<mroot><mi>x</mi><mn>3</mn></mroot>"),
        (r"\mathbb{R}", "<mi>ℝ</mi>"),
        (r"\mathbf x", "<mi>𝐱</mi>"),
        (r"\left.x\right|", "<mrow><mo></mo><mi>x</mi><mo>|</mo></mrow>"),
        ("f'", "<msup><mi>f</mi><mo>′</mo></msup>"),
        ("a<b", "<mrow><mi>a</mi><mo>&lt;</mo><mi>b</mi></mrow>"),
        (
            r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
            "<mrow><mo>(</mo><mtable><mtr><mtd><mn>1</mn></mtd><mtd><mn>2</mn></mtd></mtr>"
            "<mtr><mtd><mn>3</mn></mtd><mtd><mn>4</mn></mtd></mtr></mtable><mo>)</mo></mrow>",
        ),
    ],
)
def test_formula_as_mathml(tex: str, expected: str) -> None:
    assert tex_to_mathml(tex) == f"<math>{expected}</math>"


def test_limits_are_below_a_sum_in_display_style() -> None:
    assert "<munderover><mo>∑</mo>" in tex_to_mathml(r"\sum_{i=0}^n x_i", display=True)
    assert "<msubsup><mo>∑</mo>" in tex_to_mathml(r"\sum_{i=0}^n x_i")


@pytest.mark.parametrize("tex", [r"\unknown{x}", "{x", "x}", r"\left(x", r"\begin{pmatrix}1", r"\begin{tikz}1"])
def test_unsupported_formula_is_an_error(tex: str) -> None:
    with pytest.raises(UnsupportedTexError, match="the formula"):
        tex_to_mathml(tex)


def test_markdown_escapes_html_and_keeps_dollars_in_code() -> None:
    html = render_markdown(
        "<script>alert(1)</script> costs `$5` and $x_1$, see [notebook 2](02_attention.py)", lambda n: f"/{n}"
    )
    assert "<script>" not in html
    assert "<code>$5</code>" in html
    assert "<msub><mi>x</mi><mn>1</mn></msub>" in html
    assert '<a href="/02_attention">notebook 2</a>' in html
    assert render_markdown(r"$\unknown{x}$", str) == "<p><code>\\unknown{x}</code></p>\n"


@ALL_NOTEBOOKS
def test_page_has_text_and_code_and_no_script(notebook: Notebook) -> None:
    page = render_page(notebook, plain_cells(notebook), link=lambda name: f"{name}.html", note="*A note.*")
    assert f"<title>{notebook.number}. " in page
    assert page.count("<pre><code>") >= sum(kind == "code" for kind, _ in notebook.cells)
    assert "<em>A note.</em>" in page
    assert not re.search(r"<script|javascript:|\son\w+=|src=\"http", page)
    style = re.search(r"<style>(.*?)</style>", page, re.DOTALL)
    assert style is not None
    digest = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    assert f"style-src 'sha256-{digest}'" in CONTENT_SECURITY_POLICY


def test_page_has_outputs_and_figures() -> None:
    cell = CellResult("code", "x = 1", "✓ <x> is 1", (SvgFigure('a "title"', "<svg></svg>"),))
    page = render_page(load_notebooks()[0], [cell], link=str)
    assert '<pre class="output">✓ &lt;x&gt; is 1</pre>' in page
    source = base64.b64encode(b"<svg></svg>").decode()
    assert f'<img alt="a &quot;title&quot;" src="data:image/svg+xml;base64,{source}">' in page
