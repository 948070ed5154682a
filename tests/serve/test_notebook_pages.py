"""Pages of the notebooks on the server: HTML with formulas, a policy without scripts, 404 for unknown numbers."""

from collections.abc import Iterator
from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest
from support.server import serve_in_thread

from cutaway.learn.notebooks import load_notebooks
from cutaway.serve.app import build_app
from cutaway.serve.middleware import AccessPolicy
from cutaway.serve.notebook_pages import build_notebook_router
from cutaway.serve.server import bind_socket

pytestmark = pytest.mark.unchecked


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    app = build_app([build_notebook_router()], access_policy=AccessPolicy())
    with serve_in_thread(app, bind_socket("127.0.0.1", 0)) as url:
        yield urlsplit(url).port or 0


def get(port: int, path: str) -> tuple[int, dict[str, str], str]:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, {name.lower(): text for name, text in response.getheaders()}, response.read().decode()
    finally:
        connection.close()


def test_every_notebook_has_a_page(port: int) -> None:
    for notebook in load_notebooks():
        status, headers, page = get(port, f"/notebooks/{notebook.number}")
        assert status == 200
        assert headers["content-type"] == "text/html; charset=utf-8"
        assert "script-src" not in headers["content-security-policy"]
        assert "default-src 'none'" in headers["content-security-policy"]
        assert f"{notebook.number}. " in page
        assert f"cutaway learn notebook {notebook.number} --run" in page


def test_notebooks_link_to_each_other(port: int) -> None:
    page = get(port, "/notebooks/2")[2]
    assert '<a href="1">← 1. The forward pass' in page
    assert '<a href="3">3. Position encodings' in page
    assert '<a href="1">notebook 1</a>' in page


@pytest.mark.parametrize("number", ["0", "99", "-1", "999999999999999999999"])
def test_unknown_number_is_not_found(port: int, number: str) -> None:
    status, _, body = get(port, f"/notebooks/{number}")
    assert status == 404
    assert "there is no notebook" in body


@pytest.mark.parametrize("name", ["x", "..%2f..%2fetc%2fpasswd", "05_gradients.py"])
def test_other_names_are_rejected(port: int, name: str) -> None:
    assert get(port, f"/notebooks/{name}")[0] in (400, 404)
