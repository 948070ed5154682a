"""The table of claims: complete, with evidence that exists, and with the figures that all other texts state."""

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import jupytext
import pytest
import write_claims_page

from cutaway.errors import InputError
from cutaway.learn.claims import VERDICTS, ClaimRow, find_claims, get_claim, load_claims, load_topics
from cutaway.learn.claims.claim_table import load_surprising_ids
from cutaway.learn.exercises import load_exercises
from cutaway.learn.quiz import find_questions
from cutaway.learn.studies import STUDIES

ROOT = Path(__file__).parents[3]
SCREENS = {path.stem for path in (ROOT / "web" / "src" / "screens").glob("*.svelte")}
LEARN = ROOT / "src" / "cutaway" / "learn"


def test_ids_are_complete_and_in_order() -> None:
    assert [row.id for row in load_claims()] == [f"C{number:03}" for number in range(1, 365)]
    assert {row.topic for row in load_claims()} == {topic.slug for topic in load_topics()}
    assert set(load_surprising_ids()) <= {row.id for row in load_claims()}
    assert len(load_surprising_ids()) == 10


def test_every_kind_has_its_evidence() -> None:
    """Exact claims have a test; measured claims have a measurement or are marked; features exist or have a reason."""
    for row in load_claims():
        kinds = {item.partition(":")[0] for item in row.evidence}
        assert kinds, row.id
        if row.kind == "exact":
            assert "test" in kinds, row.id
        if row.kind == "feature":
            assert row.verdict in ("available", "left out"), row.id
        else:
            assert row.verdict not in ("available", "left out"), row.id
        if row.verdict in ("holds when", "does not hold", "left out"):
            assert row.explanation, row.id
        assert "TODO" not in row.explanation, row.id


@cache
def functions_of(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def evidence_exists(item: str) -> bool:
    kind, _, target = item.partition(": ")
    match kind:
        case "test":
            file, _, name = target.partition("::")
            return (ROOT / "tests" / file).exists() and name in functions_of(ROOT / "tests" / file)
        case "notebook":
            return bool(list((ROOT / "notebooks").glob(f"{int(target.partition(',')[0]):02}_*.py")))
        case "study":
            return target in STUDIES
        case "docs":
            return (ROOT / "docs" / target.partition("#")[0]).exists()
        case "exercise":
            return int(target) in {exercise.number for exercise in load_exercises()}
        case "quiz":
            return target in {question.id for question in find_questions(None)}
        case "interview":
            questions = tomllib.loads((LEARN / "interview" / "questions.toml").read_text("utf-8"))["questions"]
            return target in {question["id"] for question in questions}
        case "page":
            return target.partition(",")[0] in SCREENS
        case "command":
            return target.startswith("cutaway ")
        case _:
            return target.startswith("https://")


@pytest.mark.parametrize("row", load_claims(), ids=lambda row: row.id)
def test_evidence_exists(row: ClaimRow) -> None:
    assert [item for item in row.evidence if not evidence_exists(item)] == []


def test_page_is_generated() -> None:
    assert write_claims_page.CLAIMS_PAGE.read_text("utf-8") == write_claims_page.render_page()


def test_figures_of_studies_in_pages_are_current() -> None:
    for path in write_claims_page.pages_with_figures():
        text = path.read_text("utf-8")
        assert text == write_claims_page.refresh_figures(text), path.name


def test_claims_are_found_by_id_topic_and_words() -> None:
    assert [row.id for row in find_claims("c051")] == ["C051"]
    assert {row.id for row in load_claims() if row.topic == "norms"} <= {row.id for row in find_claims("norms")}
    assert {row.verdict for row in find_claims(verdict="does not hold")} == {"does not hold"}
    assert set(VERDICTS) >= {row.verdict for row in load_claims()}
    with pytest.raises(InputError, match="pass an id"):
        find_claims("zebra crossing")
    with pytest.raises(InputError, match="use one of"):
        find_claims(verdict="maybe")
    with pytest.raises(InputError, match="C001 to C364"):
        get_claim("C999")


# Figures in other texts

NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def to_number(text: str) -> float:
    return float(text.replace(",", "").replace("−", "-").rstrip("."))


@cache
def teaching_texts() -> tuple[tuple[str, str], ...]:
    """(file, text) of everything that teaches: pages, notebooks, quiz, lessons, interview questions, web page."""
    texts: list[tuple[str, str]] = []
    for path in sorted((ROOT / "docs").rglob("*.md")):
        if path.name != "claims.md":
            texts.append(
                (
                    path.name,
                    re.sub(r"```.*?```|<!-- figure.*?-->|<!-- end -->", "", path.read_text("utf-8"), flags=re.S),
                )
            )
    for path in sorted((ROOT / "notebooks").glob("*.py")):
        cells = jupytext.read(path).cells
        texts += [(path.name, cell.source) for cell in cells if cell.cell_type == "markdown"]
    for path in sorted(LEARN.rglob("*.toml")):
        if path.parent.name != "claims":
            texts.append((path.name, re.sub(r"proof = \'\'\'.*?\'\'\'", "", path.read_text("utf-8"), flags=re.S)))
    for path in sorted((ROOT / "web" / "src").rglob("*.svelte")):
        texts.append((path.name, re.sub(r"<(script|style).*?</\1>", "", path.read_text("utf-8"), flags=re.S)))
    return tuple((name, " ".join(text.split())) for name, text in texts)


def find_conflicts(row: ClaimRow, text: str) -> list[str]:
    """Parts of a text that match the row's pattern with a number that is not in the row, rounded or not."""
    known = [to_number(number) for number in NUMBER.findall(f"{row.statement} {row.explanation} {row.figure}")]

    def is_known(number: str) -> bool:
        decimals = len(number.rstrip(".").partition(".")[2])
        return any(abs(abs(to_number(number)) - value) <= 0.5001 * 10**-decimals for value in known)

    matches = re.finditer(row.pattern, text)
    return [match[0] for match in matches if not all(is_known(group) for group in match.groups() if group)]


@pytest.mark.parametrize("row", [row for row in load_claims() if row.pattern], ids=lambda row: row.id)
def test_no_other_text_states_another_figure(row: ClaimRow) -> None:
    """A pattern with a group for the number finds the same statement in other texts, at least once."""
    conflicts = [(name, part) for name, text in teaching_texts() for part in find_conflicts(row, text)]
    assert conflicts == []
    assert any(re.search(row.pattern, text) for _, text in teaching_texts())


def test_a_conflicting_figure_is_found() -> None:
    row = get_claim("C157")
    assert find_conflicts(row, "its slope is between -0.129 and 1.129") == []
    assert find_conflicts(row, "its slope is between -0.2 and 1.129") == ["slope is between -0.2 and 1.129"]


def test_id_and_topic_find_exactly_their_claims() -> None:
    for query in ("C039", "c39", "39"):
        assert [row.id for row in find_claims(query)] == ["C039"]
    assert {row.topic for row in find_claims("norms")} == {"norms"}
    assert {row.id for row in find_claims("warmup")} == {row.id for row in find_claims("warm-up")}
    assert find_claims(verdict="does-not-hold") == find_claims(verdict="does not hold")
    with pytest.raises(InputError, match="no claim of the 1 that match 'C150' has verdict 'holds'"):
        find_claims("C150", verdict="holds")
    with pytest.raises(InputError, match="did you mean the topic 'norms'"):
        find_claims("normz")


def test_studies_without_results_are_not_evidence() -> None:
    shown = {item.partition(": ")[2] for row in load_claims() for item in row.evidence if item.startswith("study: ")}
    assert shown == {name for name, study in STUDIES.items() if study.results_file.exists()}
