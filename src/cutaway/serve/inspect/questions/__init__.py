"""Every question by its name."""

from typing import TYPE_CHECKING

from cutaway.serve.inspect.questions.about import About, Tokens
from cutaway.serve.inspect.questions.breaking import Broken, Trained
from cutaway.serve.inspect.questions.follow import Lane, Stream

if TYPE_CHECKING:
    from cutaway.serve.inspect.question import Question

QUESTIONS: dict[str, "type[Question]"] = {
    "about": About,
    "tokens": Tokens,
    "stream": Stream,
    "lane": Lane,
    "broken": Broken,
    "trained": Trained,
}
