"""Queries: list the models that the page can open, and open one of them."""

from dataclasses import asdict
from typing import Annotated

from pydantic import Field

from cutaway.errors import InputError
from cutaway.serve.inspect.queries.base import Inspector, Query, QueryJob, QueryResult


class ListModels(Query):
    """Models that `open_model` accepts, and the id of the open one. The list is empty if the model is fixed."""

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        catalog = inspector.catalog
        if catalog is None:
            return QueryResult({"models": [], "current": None})
        return QueryResult({"models": list(map(asdict, catalog.entries.values())), "current": catalog.current_id})


class OpenModel(Query):
    """Load a model of `list_models` and use it for the following queries. Running queries keep their model."""

    id: Annotated[str, Field(max_length=200)]

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        catalog = inspector.catalog
        if catalog is None:
            raise InputError("this page has one model, because it was not opened with `cutaway open`; open it there")
        opened = catalog.open(self.id, job)
        return QueryResult({"id": self.id, "name": opened.name, "generation": catalog.generation})
