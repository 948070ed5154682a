"""Quiz questions: the text, an explanation of each answer, and a program that verifies the correct answer."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from cutaway.errors import CutawayError

Level = Literal["recall", "reason", "what-if"]
"""The question asks to recall a fact, to reason from facts, or to predict the effect of a change."""
Stage = Literal[
    "embed", "resid_pre", "attn.in", "attn.q", "attn.k", "attn.v", "attn.scores", "attn.pattern", "attn.z", "attn.out",
    "cross.pattern", "resid_mid", "ffn.in", "ffn.hidden", "ffn.out", "resid_post", "final_norm", "logits",
    "sampling", "cache", "loss", "gradients", "size", "checks",
]  # fmt: skip
"""Stage of the forward pass that a question is about: a site, or a use of the model outside the forward pass."""
PROOF_PREAMBLE = "import math\n\nimport torch\nimport torch.nn.functional as F\n\nimport cutaway as ct\n\n"
"""Imports at the start of every verification program."""
_MISTAKE_RTOL = 1e-3
"""Relative tolerance on the values of common mistakes. It does not depend on the tolerance of the answer."""
_NonBlankText = Annotated[str, Field(min_length=1, pattern=r"^\S(.*\S)?$")]


class _QuizModel(BaseModel):
    """Frozen pydantic model that rejects unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Choice(_QuizModel):
    """One of the choices of a question, and its explanation."""

    text: _NonBlankText
    explanation: _NonBlankText
    """Why the choice is correct, or which mistake leads to it."""
    correct: bool = False


class CommonMistake(_QuizModel):
    """A wrong answer to a number question, and the mistake that leads to it."""

    value: float
    mistake: _NonBlankText
    """Name of the mistake, such as 'GiB instead of GB'."""
    explanation: _NonBlankText


class QuestionBase(_QuizModel):
    """Fields that all questions share."""

    id: Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]
    section: str
    """Name of the section file, without its suffix."""
    topic: Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]
    level: Level
    question: _NonBlankText
    stage: Stage
    notebooks: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)]
    """Numbers of the notebooks that cover the topic of the question."""
    docs_page: str | None = None
    """Path of a documentation page, relative to docs/."""
    proof: str = ""
    """Python code that verifies the answer. For choices it sets `holds` to True if the answer is right. For numbers it
    sets `answer`, and `wrong` to the list of the values of the common mistakes, in order."""

    @property
    def program(self) -> str:
        """Runnable Python program that verifies the answer, or "" if there is none."""
        return PROOF_PREAMBLE + self.proof.strip() + "\n" if self.proof else ""

    def to_dict(self) -> dict[str, object]:
        """Return the question as a dict that can be written as JSON. Its `proof` is the complete program."""
        return self.model_dump(mode="json", exclude_none=True) | {"proof": self.program}


class ChoiceQuestion(QuestionBase):
    """A question with choices. One is correct; with `multiple`, several may be, and all of them must be selected."""

    kind: Literal["choice"] = "choice"
    choices: Annotated[tuple[Choice, ...], Field(min_length=3, max_length=5)]
    multiple: bool = False

    @model_validator(mode="after")
    def _check_correct_choices(self) -> "ChoiceQuestion":
        num_correct = sum(choice.correct for choice in self.choices)
        if num_correct < 1 or num_correct == len(self.choices) or (num_correct > 1 and not self.multiple):
            raise ValueError(f"{self.id}: {num_correct} of {len(self.choices)} choices are marked as correct")
        if len({choice.text for choice in self.choices}) != len(self.choices):
            raise ValueError(f"{self.id}: two choices are the same")
        return self

    @property
    def correct_choices(self) -> tuple[Choice, ...]:
        return tuple(choice for choice in self.choices if choice.correct)


class NumberQuestion(QuestionBase):
    """A question whose answer is a number."""

    kind: Literal["number"] = "number"
    answer: float
    tolerance: Annotated[float, Field(ge=0, lt=0.2)] = 0.01
    """Accepted relative error, or absolute error if the answer is 0."""
    unit: str = ""
    explanation: _NonBlankText
    common_mistakes: Annotated[tuple[CommonMistake, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _check_mistakes_rejected(self) -> "NumberQuestion":
        for mistake in self.common_mistakes:
            if self.accepts(mistake.value):
                raise ValueError(f"{self.id}: {mistake.value} ({mistake.mistake}) would count as correct")
        return self

    def accepts(self, value: float) -> bool:
        return self.is_close(value, self.answer)

    def is_close(self, value: float, expected: float) -> bool:
        return abs(value - expected) <= self.tolerance * (abs(expected) or 1) + 1e-12


Question = ChoiceQuestion | NumberQuestion
_QUESTION_ADAPTER: TypeAdapter[Question] = TypeAdapter(Annotated[Question, Field(discriminator="kind")])


def parse_question(table: dict[str, object], section: str) -> Question:
    """Build a question from a table of a section file, which has either `choices` or an `answer`."""
    kind = "choice" if "choices" in table else "number"
    return _QUESTION_ADAPTER.validate_python({**table, "section": section, "kind": kind})


class ProofError(CutawayError, AssertionError):
    """The verification program of a question does not compute the stored answer."""


def run_proof(question: Question) -> float | bool | None:
    """Run the verification program of a question; return the computed answer (True for choices).

    Raise ProofError if it differs from the stored answer. Return None if there is no program. This imports torch.
    """
    if not question.proof:
        return None
    namespace: dict[str, Any] = {"__name__": f"proof of {question.id}"}
    exec(compile(question.program, namespace["__name__"], "exec"), namespace)
    if isinstance(question, ChoiceQuestion):
        if not bool(namespace["holds"]):
            raise ProofError(f"{question.id}: the choice marked correct does not hold")
        return True
    answer = float(namespace["answer"])
    if not question.is_close(answer, question.answer):
        raise ProofError(f"{question.id}: the answer is {question.answer}, but its program computes {answer}")
    wrong = [float(value) for value in namespace["wrong"]]
    expected = [mistake.value for mistake in question.common_mistakes]
    same = all(abs(a - b) <= _MISTAKE_RTOL * abs(b) for a, b in zip(wrong, expected, strict=False))
    if len(wrong) != len(expected) or not (same or all(map(question.is_close, wrong, expected))):
        raise ProofError(f"{question.id}: the wrong values are {expected}, but its program computes {wrong}")
    return answer
