"""Every question by its name."""

from typing import TYPE_CHECKING

from cutaway.serve.inspect.questions.about import About, Tokens
from cutaway.serve.inspect.questions.breaking import Broken, Trained
from cutaway.serve.inspect.questions.follow import Lane, Stream
from cutaway.serve.inspect.questions.gradients import Placements, Slope
from cutaway.serve.inspect.questions.runs import RunLog
from cutaway.serve.inspect.questions.sizes import Choices, Fits, Sizes

if TYPE_CHECKING:
    from cutaway.serve.inspect.question import Question

QUESTIONS: dict[str, "type[Question]"] = {
    "about": About,
    "tokens": Tokens,
    "stream": Stream,
    "lane": Lane,
    "broken": Broken,
    "trained": Trained,
    "placements": Placements,
    "slope": Slope,
    "run": RunLog,
    "choices": Choices,
    "sizes": Sizes,
    "fits": Fits,
}
