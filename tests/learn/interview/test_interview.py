"""Interview questions: answers hold, references exist, and the command records the learner's assessment."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from support.cli_runner import CliRunner

from cutaway.errors import InputError
from cutaway.learn.exercises import load_exercises
from cutaway.learn.interview import (
    InterviewQuestion,
    find_interview_questions,
    load_interview_questions,
    verify_answer,
)
from cutaway.learn.interview.progress import InterviewProgress
from cutaway.learn.notebooks import load_notebooks
from cutaway.learn.quiz.question import ProofError

pytestmark = pytest.mark.unchecked
DOCS = Path(__file__).parents[3] / "docs"
QUESTIONS = load_interview_questions()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUTAWAY_HOME", str(tmp_path))
    return tmp_path


def ask(run_cli: CliRunner, *options: object, stdin: str) -> str:
    return run_cli("learn", "interview", *options, stdin=stdin, columns=100)


def test_questions_cover_all_levels_types_and_claims() -> None:
    assert len(QUESTIONS) >= 30
    assert Counter(question.id for question in QUESTIONS).most_common(1)[0][1] == 1
    assert min(Counter(question.level for question in QUESTIONS).values()) >= 8
    assert min(Counter(question.type for question in QUESTIONS).values()) >= 8
    claims = {claim for question in QUESTIONS for claim in question.claims}
    assert {f"C{number}" for number in range(307, 333)} <= claims
    assert sum("C332" in question.claims for question in QUESTIONS) >= 6


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.id)
def test_references_exist_and_answers_have_paragraphs(question: InterviewQuestion) -> None:
    notebooks, exercises = load_notebooks(), load_exercises()
    assert set(question.notebooks) <= {notebook.number for notebook in notebooks}
    assert question.exercise is None or question.exercise in {exercise.number for exercise in exercises}
    assert question.docs_page is not None
    assert (DOCS / question.docs_page).is_file()
    assert 40 < len(question.answer.split()) < 260
    assert not re.search(r"[$\\]", question.answer)  # shown as plain text in a terminal


@pytest.mark.parametrize("question", [q for q in QUESTIONS if q.proof], ids=lambda question: question.id)
def test_answers_hold(question: InterviewQuestion) -> None:
    assert verify_answer(question)


def test_derivations_are_verified_and_wrong_answers_raise() -> None:
    assert all(question.proof for question in QUESTIONS if question.type == "derivation")
    question = QUESTIONS[0].model_copy(update={"proof": "holds = 1 == 2"})
    with pytest.raises(ProofError, match="the model answer does not hold"):
        verify_answer(question)
    assert verify_answer(QUESTIONS[0].model_copy(update={"proof": ""})) is None


def test_filters() -> None:
    hard = find_interview_questions(level="hard")
    assert {question.level for question in hard} == {"hard"}
    assert {question.type for question in find_interview_questions(question_type="trade-off")} == {"trade-off"}
    assert {question.topic for question in find_interview_questions(topic="feed-forward")} == {"ffn"}
    assert {question.topic for question in find_interview_questions(topic="pre-norm")} == {"placement"}
    with pytest.raises(InputError, match=r"about 'normz' \(did you mean 'norms'\?\); use a topic \(ablation, "):
        find_interview_questions(topic="normz")
    with pytest.raises(InputError, match="there are easy recall, medium trade-off questions"):
        find_interview_questions("hard", "cache")


def test_answer_is_compared_with_the_model_answer(run_cli: CliRunner) -> None:
    [question] = find_interview_questions(topic="ffn")
    total = len(question.key_points)
    output = ask(run_cli, "--topic", "ffn", stdin="it is applied\nto each token\n\nmany\n99\n2\n")
    flat = " ".join(output.split())
    assert f"1 of 1 · {question.level} · {question.type} · ffn" in output
    assert all(paragraph in flat for paragraph in question.paragraphs)
    assert output.count("[ ] ") == total
    assert "`cutaway learn notebook 4`" in output
    assert f"'many' is not a number from 0 to {total}" in output
    assert f"1 question answered with 2 of {total} key points." in output
    progress = InterviewProgress.load()
    assert progress.status(question) == "partial"
    assert progress.order_questions(QUESTIONS, 5)[0] == question  # asked first the next time
    ask(run_cli, "--topic", "ffn", stdin=f"better\n\n{total}\n")
    progress = InterviewProgress.load()
    assert progress.status(question) == "complete"
    assert progress.order_questions(QUESTIONS, 5)[-1] == question
    assert progress.num_answers == 2


def test_model_answer_is_shown_only_after_the_answer(run_cli: CliRunner) -> None:
    output = ask(run_cli, "--level", "hard", "--num-questions", 1, stdin="q\n")
    assert "Model answer" not in output
    assert "No question was answered." in output


def test_skipped_questions_are_not_recorded_and_empty_answers_contain_nothing(run_cli: CliRunner) -> None:
    first, second = InterviewProgress.load().order_questions(QUESTIONS, 3)[:2]
    output = ask(run_cli, "--num-questions", 2, "--seed", 3, stdin="s\n\n")
    assert output.count("Model answer") == 1
    assert f"these questions are asked first: {second.id}." in output
    progress = InterviewProgress.load()
    assert (progress.status(first), progress.num_points(second)) == ("new", 0)


@pytest.mark.parametrize("ending", ["", "q\n"])
def test_interrupted_interview_keeps_answers(run_cli: CliRunner, ending: str) -> None:
    (first,) = InterviewProgress.load().order_questions(QUESTIONS, 3)[:1]
    assert "1 question answered" in ask(run_cli, "--seed", 3, stdin=f"text\n\n1\n{ending}")
    assert InterviewProgress.load().num_points(first) == 1


def test_list_and_json(run_cli: CliRunner) -> None:
    listed = run_cli("learn", "interview", "--list", "--level", "medium")
    questions = find_interview_questions("medium")
    assert all(question.id in listed for question in questions)
    assert f"{len(questions)} questions: {len(questions)} medium; " in listed
    data = json.loads(run_cli("learn", "interview", "--type", "derivation", "--json"))
    assert {question["type"] for question in data} == {"derivation"}
    assert all(question["status"] == "new" and question["key_points"] for question in data)
    assert len(json.loads(run_cli("learn", "interview", "--json"))) == len(QUESTIONS)
    assert "questions match; 5 of them are asked" in ask(run_cli, stdin="q\n")


def test_damaged_or_unwritable_progress_is_reported(
    run_cli: CliRunner, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "interview.json").write_text('{"a": 3}')
    assert "damaged and renamed" in " ".join(ask(run_cli, stdin="q\n").split())
    assert list(home.glob("interview.damaged-*.json"))
    (home / "file").write_text("")
    monkeypatch.setenv("CUTAWAY_HOME", str(home / "file"))
    assert "cannot be saved" in ask(run_cli, "--num-questions", 1, stdin="\n")


def test_interview_does_not_import_torch(home: Path) -> None:
    code = (
        "import sys; from cutaway.cli.verbs.learn_interview import interview; interview(list_questions=True);"
        "interview(num_questions=1); sys.exit('torch' in sys.modules)"
    )
    environment = os.environ | {"CUTAWAY_HOME": str(home)}
    result = subprocess.run([sys.executable, "-c", code], input="s\n", text=True, env=environment, capture_output=True)
    assert result.returncode == 0, result.stderr
