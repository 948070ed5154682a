"""The page as it was built: a few files, read once. A request names one of them, never a path."""

from functools import cache
from pathlib import Path

from fastapi import APIRouter, Response

from cutaway.errors import InputError
from cutaway.serve.refusal import Refused

HERE = Path(__file__).parent / "page"
KINDS = {
    "index.html": "text/html; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
}


@cache
def files() -> dict[str, bytes]:
    missing = [name for name in KINDS if not (HERE / name).is_file()]
    if missing:
        raise InputError(
            f"this installation has no page ({missing[0]} is missing): it was installed without building it; run "
            "`pip install .` in the project's folder, where the npm registry can be reached"
        )
    return {name: (HERE / name).read_bytes() for name in KINDS}


def router() -> APIRouter:
    made = APIRouter()
    held = files()

    @made.get("/", include_in_schema=False)
    async def index() -> Response:
        return Response(held["index.html"], media_type=KINDS["index.html"])

    @made.get("/{name}", include_in_schema=False)
    async def file(name: str) -> Response:
        if name not in held:
            raise Refused(404, "there is nothing at this address")
        return Response(held[name], media_type=KINDS[name], headers={"cache-control": "no-cache"})

    return made
