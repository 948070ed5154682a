"""A checkpoint's API as an application."""

from typing import Any

from fastapi import FastAPI

from cutaway.generate.texts import Source
from cutaway.serve.app import make_app
from cutaway.serve.door import Door
from cutaway.serve.limits import Limits
from cutaway.serve.openai.host import Host
from cutaway.serve.openai.routes import make_router


def make_api(
    checkpoint: Source, name: str, *, door: Door | None = None, limits: Limits | None = None, **how: Any
) -> tuple[FastAPI, Host]:
    """The application, and what works behind it; it ends with the server. `how`: of a `Host`."""
    limits = limits or Limits()
    host = Host(checkpoint, name, limits, **how)
    watch = host.metrics.answered
    return make_app([make_router(host)], door=door, limits=limits, closing=[host.close], watch=watch), host
