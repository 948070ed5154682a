"""An interview question: the text, a model answer, the key points of an answer, and a program that verifies it."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from cutaway.learn.quiz.question import PROOF_PREAMBLE, ProofError

InterviewLevel = Literal["easy", "medium", "hard"]
"""Difficulty of a question."""
InterviewType = Literal["derivation", "trade-off", "recall"]
"""What a question asks for: to derive a formula or number, to compare and give conditions, or to explain."""
_Name = Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]
_Line = Annotated[str, Field(min_length=1, pattern=r"^\S(.*\S)?$")]


class InterviewQuestion(BaseModel):
    """An open question. The learner compares an answer with the model answer and its key points."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: _Name
    level: InterviewLevel
    type: InterviewType
    topic: _Name
    claims: tuple[Annotated[str, Field(pattern=r"^C\d{3}$")], ...] = ()
    """Ids of the claims that the question is about."""
    question: _Line
    answer: Annotated[str, Field(min_length=1)]
    """The model answer, in paragraphs that are separated by an empty line."""
    key_points: Annotated[tuple[_Line, ...], Field(min_length=3, max_length=6)]
    notebooks: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)]
    """Numbers of the notebooks that cover the topic."""
    docs_page: str | None = None
    """Path of a documentation page, relative to docs/."""
    exercise: int | None = None
    """Number of an exercise about the topic."""
    proof: str = ""
    """Python code that verifies the figures and equations of the answer. It sets `holds`."""

    @property
    def paragraphs(self) -> list[str]:
        return [" ".join(paragraph.split()) for paragraph in self.answer.strip().split("\n\n")]


def verify_answer(question: InterviewQuestion) -> bool | None:
    """Run the program of a question; raise ProofError if the answer does not hold. Return None if it has no program.

    This imports torch.
    """
    if not question.proof:
        return None
    namespace: dict[str, Any] = {"__name__": f"proof of {question.id}"}
    exec(compile(PROOF_PREAMBLE + question.proof, namespace["__name__"], "exec"), namespace)
    if not bool(namespace["holds"]):
        raise ProofError(f"{question.id}: the model answer does not hold")
    return True
