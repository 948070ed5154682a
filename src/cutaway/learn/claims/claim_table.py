"""The table of claims, read from claims.toml. This module does not import torch.

A figure that a study measured is written as ${study:key} and replaced by the stored estimate, so that every text that
quotes it shows the same number.
"""

import difflib
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from cutaway.errors import InputError
from cutaway.learn.studies.study import STUDIES, load_results

CLAIMS_FILE = Path(__file__).with_name("claims.toml")
Kind = Literal["exact", "measured", "disputed", "feature"]
Verdict = Literal["holds", "holds when", "does not hold", "available", "left out"]
KINDS: dict[Kind, str] = {
    "exact": "an exact computation, shown by a test",
    "measured": "an empirical statement, measured over seeds unless the figure says otherwise",
    "disputed": "a statement that texts make imprecisely or contradict each other on",
    "feature": "a question, exercise or view that a learner asks for",
}
VERDICTS: dict[Verdict, str] = {
    "holds": "holds as stated",
    "holds when": "holds under the stated condition",
    "does not hold": "does not hold as stated",
    "available": "exists in the product",
    "left out": "does not exist in the product, for the stated reason",
}
_FIGURE = re.compile(r"\$\{([\w-]+):([^}]+)\}")
EVIDENCE_KINDS = ("test", "notebook", "study", "command", "docs", "exercise", "quiz", "interview", "page", "source")
_Text = Annotated[str, Field(min_length=1, pattern=r"^\S(.*\S)?$")]
_Evidence = Annotated[str, Field(pattern=rf"^({'|'.join(EVIDENCE_KINDS)}): \S")]


class ClaimRow(BaseModel):
    """One statement, its verdict, and where it is shown."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: Annotated[str, Field(pattern=r"^C\d{3}$")]
    topic: str
    kind: Kind
    statement: _Text
    """The statement as texts make it."""
    verdict: Verdict
    explanation: str = ""
    """The condition under which it holds, the correction, or the reason why it is left out."""
    figure: str = ""
    """The measured figure."""
    pattern: str = ""
    """Regular expression of sentences elsewhere that state the same figure: a test compares their numbers."""
    evidence: tuple[_Evidence, ...] = ()
    """Where the statement is shown, such as `test: claims/test_norms.py::test_c100_layernorm_statistics`."""


class ClaimTopic(BaseModel):
    """A group of claims."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    slug: str
    title: str


@cache
def _read_file() -> dict[str, Any]:
    return tomllib.loads(CLAIMS_FILE.read_text("utf-8"))


def load_surprising_ids() -> tuple[str, ...]:
    """Ids of the claims whose result differs most from what texts say."""
    return tuple(_read_file()["surprising"])


@cache
def load_topics() -> tuple[ClaimTopic, ...]:
    return tuple(ClaimTopic.model_validate(table) for table in _read_file()["topics"])


@cache
def load_claims() -> tuple[ClaimRow, ...]:
    """Load all claims, with the figures of the studies filled in."""
    rows = []
    for table in _read_file()["claims"]:
        row = ClaimRow.model_validate(table)
        filled = {name: fill_figures(getattr(row, name)) for name in ("explanation", "figure")}
        rows.append(row.model_copy(update=filled))
    return tuple(rows)


def fill_figures(text: str) -> str:
    """Replace each ${study:key} with the stored estimate of the study: mean and 95 % interval."""
    return _FIGURE.sub(lambda match: str(load_results(match[1]).get(match[2])), text)


def get_claim(claim_id: str) -> ClaimRow:
    """Return the claim with this id. `c51` and `51` are short for C051."""
    number = claim_id.strip().upper().removeprefix("C")
    for row in load_claims():
        if number.isdecimal() and int(number) == int(row.id[1:]):
            return row
    raise InputError(f"there is no claim '{claim_id}'; the ids are {load_claims()[0].id} to {load_claims()[-1].id}")


def claims_of_question(question_id: str) -> list[ClaimRow]:
    """Claims whose evidence names the quiz question; features are not claims about Transformers."""
    return [row for row in load_claims() if f"quiz: {question_id}" in row.evidence and row.kind != "feature"]


def find_claims(
    query: str | None = None, *, verdict: str | None = None, kind: str | None = None
) -> tuple[ClaimRow, ...]:
    """Find claims by id, topic or words of the text, by verdict and by kind.

    An id finds one claim, a topic or a study all of its claims. Words ignore hyphens: `warmup` finds `warm-up`.
    """
    verdict = verdict.replace("-", " ") if verdict else verdict
    for name, value, choices in (("verdict", verdict, VERDICTS), ("kind", kind, KINDS)):
        if value is not None and value not in choices:
            raise InputError(f"{name} is '{value}'; use one of {', '.join(choices)}")
    found = load_claims() if query is None else _match_claims(query)
    selected = tuple(row for row in found if verdict in (None, row.verdict) and kind in (None, row.kind))
    if not selected:
        options = " and ".join(f"{name} '{value}'" for name, value in (("verdict", verdict), ("kind", kind)) if value)
        matching = "" if query is None else f" of the {len(found)} that match '{query}'"
        raise InputError(f"no claim{matching} has {options}; leave an option out")
    return selected


def _match_claims(query: str) -> tuple[ClaimRow, ...]:
    if all(re.fullmatch(r"[cC]?\d{1,3}", part) for part in query.split()):
        return tuple(get_claim(part) for part in query.split())
    if query.lower() in STUDIES:
        return tuple(row for row in load_claims() if f"study: {query.lower()}" in row.evidence)
    titles = {topic.slug: topic.title for topic in load_topics()}
    if query.lower() in titles:
        return tuple(row for row in load_claims() if row.topic == query.lower())
    words = [word.replace("-", "") for word in query.lower().replace("positional", "position").split()]

    def matches(row: ClaimRow) -> bool:
        text = f"{row.topic} {titles[row.topic]} {row.statement} {row.explanation}".lower().replace("-", "")
        return all(word in text or word in text.replace(" ", "") for word in words)

    found = tuple(row for row in load_claims() if matches(row))
    if not found:
        near = difflib.get_close_matches(query.lower(), titles, 1)
        suggestion = f"did you mean the topic '{near[0]}'? Else pass" if near else "pass"
        raise InputError(
            f"no claim matches '{query}'; {suggestion} an id such as C051, words, or a topic: {', '.join(titles)}"
        )
    return found
