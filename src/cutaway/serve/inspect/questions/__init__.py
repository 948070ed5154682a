"""Every question by its name."""

from typing import TYPE_CHECKING

from cutaway.serve.inspect.questions.about import About, Tokens
from cutaway.serve.inspect.questions.attention import Attentions, Head, Row, Wall
from cutaway.serve.inspect.questions.breaking import Broken, Trained
from cutaway.serve.inspect.questions.credit import Credit, Kinds
from cutaway.serve.inspect.questions.follow import Lane, Stream
from cutaway.serve.inspect.questions.gradients import Placements, Slope
from cutaway.serve.inspect.questions.learning import Exercised, Walk
from cutaway.serve.inspect.questions.next import Next
from cutaway.serve.inspect.questions.proof import Glance, Proof
from cutaway.serve.inspect.questions.runs import RunLog
from cutaway.serve.inspect.questions.sizes import Choices, Fits, Sizes
from cutaway.serve.inspect.questions.stage import Stage
from cutaway.serve.inspect.questions.writing import Fill, Write

if TYPE_CHECKING:
    from cutaway.serve.inspect.question import Question

QUESTIONS: dict[str, "type[Question]"] = {
    "about": About,
    "tokens": Tokens,
    "stream": Stream,
    "lane": Lane,
    "attentions": Attentions,
    "wall": Wall,
    "head": Head,
    "row": Row,
    "credit": Credit,
    "kinds": Kinds,
    "write": Write,
    "fill": Fill,
    "stage": Stage,
    "next": Next,
    "glance": Glance,
    "proof": Proof,
    "broken": Broken,
    "trained": Trained,
    "placements": Placements,
    "slope": Slope,
    "run": RunLog,
    "choices": Choices,
    "sizes": Sizes,
    "fits": Fits,
    "walk": Walk,
    "exercised": Exercised,
}
