"""A notebook as one HTML page without scripts: text with formulas, code, outputs and figures."""

import base64
import hashlib
import re
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from cutaway.learn.notebooks import Notebook
from cutaway.learn.notebooks.cell_result import CellResult
from cutaway.learn.notebooks.mathml import UnsupportedTexError, tex_to_mathml

_CODE = re.compile(r"(```.*?```|`[^`]+`)", re.DOTALL)
_FORMULA = re.compile(r"\$\$(.+?)\$\$|\$(?!\s)([^$]+?)(?<!\s)\$(?!\d)", re.DOTALL)
_PLACEHOLDER = re.compile("\ue000(\\d+)\ue001")
_NOTEBOOK_LINK = re.compile(r"(\d\d_\w+)\.py(#.*)?")
_FORMATTER = HtmlFormatter(nowrap=True)
_STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
CONTENT_SECURITY_POLICY = (
    f"default-src 'none'; style-src 'sha256-{base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()}';"
    " img-src data:; base-uri 'none'; form-action 'none'"
)
"""The page has no script, and loads nothing."""


def render_page(
    notebook: Notebook, cells: Sequence[CellResult], *, link: Callable[[str], str], note: str = "", navigation: str = ""
) -> str:
    """Return a notebook as HTML.

    `link` returns the address of a notebook's page by its name, such as `02_attention`. `note` is Markdown below
    the title, and `navigation` is HTML above it.
    """
    body = "\n".join(_render_cell(cell, link) for cell in cells)
    if note:
        head, end, rest = body.partition("</h1>\n")
        body = f"{head}{end}{render_markdown(note, link)}{rest}"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{CONTENT_SECURITY_POLICY}">
<title>{notebook.number}. {escape(notebook.title)} · cutaway</title>
<style>{_STYLE}</style>
</head>
<body>
{navigation}
{body}
</body>
</html>
"""


def _render_cell(cell: CellResult, link: Callable[[str], str]) -> str:
    if cell.kind == "markdown":
        return render_markdown(cell.source, link)
    parts = [f"<pre><code>{highlight(cell.source, PythonLexer(), _FORMATTER).rstrip()}</code></pre>"]
    if cell.output:
        parts.append(f'<pre class="output">{escape(cell.output)}</pre>')
    for figure in cell.figures:
        data = base64.b64encode(figure.svg.encode()).decode()
        source = f"data:image/svg+xml;base64,{data}"
        parts.append(f'<figure><img alt="{escape(figure.title)}" src="{source}"></figure>')
    return "\n".join(parts)


def render_markdown(text: str, link: Callable[[str], str]) -> str:
    """Return Markdown with TeX formulas as HTML. HTML in the text is escaped."""
    formulas: list[str] = []

    def extract(match: re.Match[str]) -> str:
        formulas.append(_render_formula(match[1] or match[2], display=match[1] is not None))
        return f"\ue000{len(formulas) - 1}\ue001"

    parts = _CODE.split(text)
    parts[::2] = [_FORMULA.sub(extract, part) for part in parts[::2]]
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = markdown.parse("".join(parts))
    _rewrite_links(tokens, link)
    html = str(markdown.renderer.render(tokens, markdown.options, {}))
    return _PLACEHOLDER.sub(lambda match: formulas[int(match[1])], html)


def _render_formula(tex: str, *, display: bool) -> str:
    try:
        return tex_to_mathml(tex, display=display)
    except UnsupportedTexError:  # the TeX source is readable too
        return f"<code>{escape(tex)}</code>"


def _rewrite_links(tokens: Sequence[Token], link: Callable[[str], str]) -> None:
    """Replace links to notebook files by links to their pages."""
    for token in tokens:
        match = _NOTEBOOK_LINK.fullmatch(str(token.attrs.get("href", "")))
        if token.type == "link_open" and match:
            token.attrs["href"] = link(match[1]) + (match[2] or "")
        _rewrite_links(token.children or (), link)
