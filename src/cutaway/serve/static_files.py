"""The page as it was built: a few files, read once. A request names one of them, never a path."""

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
            f"this installation has no page ({missing[0]} is missing): it was installed without building it; run "
            "`pip install .` in the project's folder, where the npm registry can be reached"
        )
    return {name: (STATIC_DIR / name).read_bytes() for name in MEDIA_TYPES}


def build_static_router() -> APIRouter:
    made = APIRouter()
    held = load_static_files()

    @made.get("/", include_in_schema=False)
    async def index() -> Response:
        return Response(held["index.html"], media_type=MEDIA_TYPES["index.html"])

    @made.get("/{name}", include_in_schema=False)
    async def file(name: str) -> Response:
        if name not in held:
            raise APIError(404, "there is nothing at this address")
        return Response(held[name], media_type=MEDIA_TYPES[name], headers={"cache-control": "no-cache"})

    return made
