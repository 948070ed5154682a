"""Static files of the built web page. They are read once and looked up by name. A request cannot read other files."""

from functools import cache
from pathlib import Path

from fastapi import APIRouter, Response

from cutaway.errors import InputError
from cutaway.serve.errors import APIError

STATIC_DIR = Path(__file__).parent / "static"
MEDIA_TYPES = {
    "index.html": "text/html; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
}


@cache
def load_static_files() -> dict[str, bytes]:
    missing = [name for name in MEDIA_TYPES if not (STATIC_DIR / name).is_file()]
    if missing:
        raise InputError(
            f"the web page is not built ({missing[0]} is missing): the package was installed without building it;"
            " run `pip install .` in the project directory with access to the npm registry"
        )
    return {name: (STATIC_DIR / name).read_bytes() for name in MEDIA_TYPES}


def build_static_router() -> APIRouter:
    router = APIRouter()
    files = load_static_files()

    @router.get("/", include_in_schema=False)
    async def index() -> Response:
        return Response(files["index.html"], media_type=MEDIA_TYPES["index.html"])

    @router.get("/{name}", include_in_schema=False)
    async def file(name: str) -> Response:
        if name not in files:
            raise APIError(404, "there is no such path on this server; check the URL")
        return Response(files[name], media_type=MEDIA_TYPES[name], headers={"cache-control": "no-cache"})

    return router
