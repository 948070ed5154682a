"""Base classes of inspector queries. Parameters are pydantic fields, and `run` computes the result."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from cutaway.evaluate.confidence_interval import mean_confidence_interval
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.model_input import MAX_TOKENS, ModelInput
from cutaway.serve.inspect.protocol import QueryJob, QueryResult

__all__ = ["InputQuery", "Inspector", "Query", "QueryJob", "QueryResult", "TokenIndex", "interval_bounds"]

TokenIndex = Annotated[int, Field(strict=True, ge=0, lt=MAX_TOKENS)]
"""Index of a token, from 0."""


class Query(BaseModel, ABC):
    """A query of the web page about the inspected model. The fields are the query's parameters."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @abstractmethod
    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        """Return the result of the query. Raise a CutawayError if the parameters are invalid for this model."""


class InputQuery(Query):
    """Query about the forward pass of the model on one input (tokens, source and edits)."""

    input: ModelInput


def interval_bounds(values: Sequence[float]) -> dict[str, float]:
    """Mean of the values, and the bounds of its 95 % confidence interval."""
    interval = mean_confidence_interval(values)
    half_width = interval.half_width or 0.0
    return {"mean": interval.mean, "low": interval.mean - half_width, "high": interval.mean + half_width}
