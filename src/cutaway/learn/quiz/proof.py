"""Run the program behind an answer."""

from typing import Any

from cutaway.errors import CutawayError
from cutaway.learn.quiz.kinds import Choosing, Reckoning

ROUNDED = 1e-3
"""Wrong values are written with so many digits, however exact the right one must be."""


class ProofError(CutawayError, AssertionError):
    """A program that does not give the answer it is the proof of."""


def prove(question: Choosing | Reckoning) -> float | bool | None:
    """What the question's proof gives, held against its answer; None where there is none. It needs torch."""
    if not question.proof:
        return None
    names: dict[str, Any] = {"__name__": f"proof of {question.id}"}
    exec(compile(question.program, names["__name__"], "exec"), names)
    if isinstance(question, Choosing):
        if not bool(names["holds"]):
            raise ProofError(f"{question.id}: what is called right does not hold")
        return True
    found = float(names["answer"])
    if not question.close(found, question.answer):
        raise ProofError(f"{question.id}: the answer is given as {question.answer}, and its proof finds {found}")
    wrong = [float(value) for value in names["wrong"]]
    told = [each.value for each in question.near]
    same = all(abs(one - other) <= ROUNDED * abs(other) for one, other in zip(wrong, told, strict=False))
    if len(wrong) != len(told) or not (same or all(map(question.close, wrong, told))):
        raise ProofError(f"{question.id}: the wrong values are given as {told}, and the proof finds {wrong}")
    return found
