"""A question of the quiz: what is asked, what each answer means, and the program that proves the right one."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

Level = Literal["recall", "reason", "what-if"]
"""What one knows; what follows from it; what happens when something is changed."""

Stage = Literal[
    "embed", "resid_pre", "attn.in", "attn.q", "attn.k", "attn.v", "attn.scores", "attn.pattern", "attn.z", "attn.out",
    "cross.pattern", "resid_mid", "ffn.in", "ffn.hidden", "ffn.out", "resid_post", "final_norm", "logits",
    "sampling", "cache", "loss", "gradients", "size", "checks",
]  # fmt: skip
"""Where on a token's way a question belongs: a site, or what is done with the model beside the forward pass."""

PREAMBLE = "import math\n\nimport torch\nimport torch.nn.functional as F\n\nimport cutaway as ct\n\n"
"""What every proof begins with."""

Text = Annotated[str, Field(min_length=1, pattern=r"^\S(.*\S)?$")]


class Piece(BaseModel):
    """Frozen, and refusing keys that it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Choice(Piece):
    """One of the offered answers."""

    text: Text
    why: Text
    """Why it is right, or which mistake leads to it."""
    right: bool = False


class Near(Piece):
    """A wrong number that has a reason."""

    value: float
    mistake: Text
    """Its name: 'GiB instead of GB'."""
    why: Text


class Asked(Piece):
    """What all questions have."""

    id: Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]
    heading: str
    """The file it stands in, without its ending."""
    topic: Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]
    level: Level
    ask: Text
    belongs_to: Stage
    see: Annotated[tuple[Annotated[int, Field(ge=1, le=11)], ...], Field(min_length=1)]
    """Numbers of the notebooks that show it."""
    page: str | None = None
    """A page of the documentation, from its folder."""
    proof: str = ""
    """Python that sets `holds` (of choices), or `answer` and `wrong`, the values of `near` in order (of numbers)."""

    @property
    def program(self) -> str:
        """The proof as it can be pasted and run."""
        return PREAMBLE + self.proof.strip() + "\n" if self.proof else ""

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data, for the page and for JSON."""
        return self.model_dump(mode="json", exclude_none=True) | {"proof": self.program}


class Choosing(Asked):
    """Pick one of several; or, if `several`, all that are right."""

    kind: Literal["choice"] = "choice"
    choices: Annotated[tuple[Choice, ...], Field(min_length=3, max_length=5)]
    several: bool = False

    @model_validator(mode="after")
    def _some_right(self) -> "Choosing":
        right = sum(choice.right for choice in self.choices)
        if right < 1 or right == len(self.choices) or (right > 1 and not self.several):
            raise ValueError(f"{self.id}: {right} of {len(self.choices)} choices are right")
        if len({choice.text for choice in self.choices}) != len(self.choices):
            raise ValueError(f"{self.id}: two choices are the same")
        return self

    @property
    def right(self) -> tuple[Choice, ...]:
        return tuple(choice for choice in self.choices if choice.right)


class Reckoning(Asked):
    """Give a number."""

    kind: Literal["number"] = "number"
    answer: float
    tolerance: Annotated[float, Field(ge=0, lt=0.2)] = 0.01
    """How far off still counts, as a share of the answer; of 0, as it is."""
    unit: str = ""
    why: Text
    near: Annotated[tuple[Near, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _told_apart(self) -> "Reckoning":
        for each in self.near:
            if self.accepts(each.value):
                raise ValueError(f"{self.id}: {each.value} ({each.mistake}) would count as right")
        return self

    def accepts(self, value: float) -> bool:
        return self.close(value, self.answer)

    def close(self, value: float, to: float) -> bool:
        return abs(value - to) <= self.tolerance * (abs(to) or 1) + 1e-12


Question = Annotated[Choosing | Reckoning, Field(discriminator="kind")]
ADAPTER: TypeAdapter[Choosing | Reckoning] = TypeAdapter(Question)


def read_question(table: dict[str, Any], heading: str) -> Choosing | Reckoning:
    """A table of a heading's file as a question; it has choices, or an answer."""
    kind = "choice" if "choices" in table else "number"
    return ADAPTER.validate_python({**table, "heading": heading, "kind": kind})
