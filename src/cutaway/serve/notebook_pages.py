"""Pages of the theory notebooks: text and code as HTML. No code is run, and only notebooks of the package are read."""

from functools import cache
from html import escape

from fastapi import APIRouter, Response

from cutaway.errors import InputError
from cutaway.learn.notebooks import get_notebook, load_notebooks
from cutaway.learn.notebooks.cell_result import CellResult
from cutaway.serve.errors import APIError

_MEDIA_TYPE = "text/html; charset=utf-8"


def build_notebook_router() -> APIRouter:
    router = APIRouter()

    @router.get("/notebooks/{number}", include_in_schema=False)
    def notebook(number: int) -> Response:
        from cutaway.learn.notebooks.html_page import CONTENT_SECURITY_POLICY

        try:
            page = _render_notebook(number)
        except InputError as error:
            raise APIError(404, str(error)) from None
        policy = f"{CONTENT_SECURITY_POLICY}; frame-ancestors 'none'"
        return Response(page, media_type=_MEDIA_TYPE, headers={"content-security-policy": policy})

    return router


@cache
def _render_notebook(number: int) -> bytes:
    from cutaway.learn.notebooks.html_page import render_page

    notebook = get_notebook(number)
    cells = [CellResult(kind, source) for kind, source in notebook.cells]
    note = f"*Text and code. `cutaway learn notebook {number} --run` adds the outputs and figures.*"
    page = render_page(
        notebook, cells, link=lambda name: str(int(name[:2])), note=note, navigation=_render_navigation(number)
    )
    return page.encode()


def _render_navigation(number: int) -> str:
    """Links to the previous and the next notebook."""
    notebooks = {notebook.number: notebook for notebook in load_notebooks()}
    labels = {number - 1: "← {}. {}", number + 1: "{}. {} →"}
    links = [
        f'<a href="{other}">{label.format(other, escape(notebooks[other].title))}</a>'
        if other in notebooks
        else "<span></span>"
        for other, label in labels.items()
    ]
    return f"<nav>{''.join(links)}</nav>"
