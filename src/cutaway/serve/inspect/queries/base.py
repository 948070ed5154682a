"""A question is its own form: what must be given, and how it is answered."""

from abc import ABC, abstractmethod
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.model_input import MAX_TOKENS, ModelInput
from cutaway.serve.inspect.protocol import QueryJob, QueryResult

TokenIndex = Annotated[int, Field(strict=True, ge=0, lt=MAX_TOKENS)]
"""A token's, from 0."""


class Query(BaseModel, ABC):
    model_config = ConfigDict(frozen=True, extra="forbid")

    @abstractmethod
    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        """All that was asked, or what stands against it as an error."""


class InputQuery(Query):
    """One about a text."""

    input: ModelInput
