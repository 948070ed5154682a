"""A question of the quiz: what is asked, what each answer means, and the program that proves the right one."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from cutaway.errors import CutawayError

Level = Literal["recall", "reason", "what-if"]
"""What one knows; what follows from it; what happens when something is changed."""
Stage = Literal[
    "embed", "resid_pre", "attn.in", "attn.q", "attn.k", "attn.v", "attn.scores", "attn.pattern", "attn.z", "attn.out",
    "cross.pattern", "resid_mid", "ffn.in", "ffn.hidden", "ffn.out", "resid_post", "final_norm", "logits",
    "sampling", "cache", "loss", "gradients", "size", "checks",
]  # fmt: skip
"""Where on a token's way a question belongs: a site, or what is done with the model beside the forward pass."""
PROOF_PREAMBLE = "import math\n\nimport torch\nimport torch.nn.functional as F\n\nimport cutaway as ct\n\n"
"""What every proof begins with."""
MISTAKE_RTOL = 1e-3
"""Wrong values are written with so many digits, however exact the right one must be."""
NonBlankText = Annotated[str, Field(min_length=1, pattern=r"^\S(.*\S)?$")]


class _QuizModel(BaseModel):
    """Frozen, and refusing keys that it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Choice(_QuizModel):
    """One of the offered answers."""

    text: NonBlankText
    explanation: NonBlankText
    """Why it is right, or which mistake leads to it."""
    correct: bool = False


class CommonMistake(_QuizModel):
    """A wrong number that has a reason."""

    value: float
    mistake: NonBlankText
    """Its name: 'GiB instead of GB'."""
    explanation: NonBlankText


class QuestionBase(_QuizModel):
    """What all questions have."""

    id: Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]
    section: str
    """The file it stands in, without its ending."""
    topic: Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]
    level: Level
    question: NonBlankText
    stage: Stage
    notebooks: Annotated[tuple[Annotated[int, Field(ge=1, le=11)], ...], Field(min_length=1)]
    """Numbers of the notebooks that show it."""
    docs_page: str | None = None
    """A page of the documentation, from its folder."""
    proof: str = ""
    """Python that sets `holds` (of choices), or `answer` and `wrong`, the common mistakes in order (of numbers)."""

    @property
    def program(self) -> str:
        """The proof as it can be pasted and run."""
        return PROOF_PREAMBLE + self.proof.strip() + "\n" if self.proof else ""

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data, for the page and for JSON."""
        return self.model_dump(mode="json", exclude_none=True) | {"proof": self.program}


class ChoiceQuestion(QuestionBase):
    """Pick one of several; or, if `multiple`, all that are right."""

    kind: Literal["choice"] = "choice"
    choices: Annotated[tuple[Choice, ...], Field(min_length=3, max_length=5)]
    multiple: bool = False

    @model_validator(mode="after")
    def _check_correct_choices(self) -> "ChoiceQuestion":
        right = sum(choice.correct for choice in self.choices)
        if right < 1 or right == len(self.choices) or (right > 1 and not self.multiple):
            raise ValueError(f"{self.id}: {right} of {len(self.choices)} choices are right")
        if len({choice.text for choice in self.choices}) != len(self.choices):
            raise ValueError(f"{self.id}: two choices are the same")
        return self

    @property
    def correct_choices(self) -> tuple[Choice, ...]:
        return tuple(choice for choice in self.choices if choice.correct)


class NumberQuestion(QuestionBase):
    """Give a number."""

    kind: Literal["number"] = "number"
    answer: float
    tolerance: Annotated[float, Field(ge=0, lt=0.2)] = 0.01
    """How far off still counts, as a share of the answer; of 0, as it is."""
    unit: str = ""
    explanation: NonBlankText
    common_mistakes: Annotated[tuple[CommonMistake, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _check_mistakes_rejected(self) -> "NumberQuestion":
        for each in self.common_mistakes:
            if self.accepts(each.value):
                raise ValueError(f"{self.id}: {each.value} ({each.mistake}) would count as right")
        return self

    def accepts(self, value: float) -> bool:
        return self.is_close(value, self.answer)

    def is_close(self, value: float, expected: float) -> bool:
        return abs(value - expected) <= self.tolerance * (abs(expected) or 1) + 1e-12


_TaggedQuestion = Annotated[ChoiceQuestion | NumberQuestion, Field(discriminator="kind")]
_QUESTION_ADAPTER: TypeAdapter[ChoiceQuestion | NumberQuestion] = TypeAdapter(_TaggedQuestion)


def parse_question(table: dict[str, Any], section: str) -> ChoiceQuestion | NumberQuestion:
    """A table of a section's file as a question; it has choices, or an answer."""
    kind = "choice" if "choices" in table else "number"
    return _QUESTION_ADAPTER.validate_python({**table, "section": section, "kind": kind})


class ProofError(CutawayError, AssertionError):
    """A program that does not give the answer it is the proof of."""


def run_proof(question: ChoiceQuestion | NumberQuestion) -> float | bool | None:
    """What the question's proof gives, held against its answer; None where there is none. It needs torch."""
    if not question.proof:
        return None
    names: dict[str, Any] = {"__name__": f"proof of {question.id}"}
    exec(compile(question.program, names["__name__"], "exec"), names)
    if isinstance(question, ChoiceQuestion):
        if not bool(names["holds"]):
            raise ProofError(f"{question.id}: what is called right does not hold")
        return True
    found = float(names["answer"])
    if not question.is_close(found, question.answer):
        raise ProofError(f"{question.id}: the answer is given as {question.answer}, and its proof finds {found}")
    wrong = [float(value) for value in names["wrong"]]
    told = [each.value for each in question.common_mistakes]
    same = all(abs(one - other) <= MISTAKE_RTOL * abs(other) for one, other in zip(wrong, told, strict=False))
    if len(wrong) != len(told) or not (same or all(map(question.is_close, wrong, told))):
        raise ProofError(f"{question.id}: the wrong values are given as {told}, and the proof finds {wrong}")
    return found
