"""A question is its own form: what must be given, and how it is answered."""

from abc import ABC, abstractmethod
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.job import Job
from cutaway.serve.inspect.look import MOST_TOKENS, Look
from cutaway.serve.inspect.wire import Answer

Place = Annotated[int, Field(strict=True, ge=0, lt=MOST_TOKENS)]
"""A token's, from 0."""


class Question(BaseModel, ABC):
    model_config = ConfigDict(frozen=True, extra="forbid")

    @abstractmethod
    def answer(self, of: Inspector, job: Job) -> Answer:
        """All that was asked, or what stands against it as an error."""


class OfText(Question):
    """One about a text."""

    look: Look
