"""The quiz: every answer is proved, every wrong answer explained, and missed questions are repeated first."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from support.cli_runner import CliRunner

from cutaway.errors import InputError
from cutaway.learn.notebooks import load_notebooks
from cutaway.learn.quiz import (
    SECTIONS,
    ChoiceQuestion,
    NumberQuestion,
    find_questions,
    get_question,
    grade_answer,
    load_sections,
    run_proof,
    shuffle_choices,
)
from cutaway.learn.quiz.grading import CHOICE_LETTERS, parse_number
from cutaway.learn.quiz.progress import QuizProgress
from cutaway.learn.quiz.question import Choice, ProofError

pytestmark = pytest.mark.unchecked

DOCS = Path(__file__).parents[3] / "docs"
ALL_QUESTIONS = find_questions()
CHOICE_QUESTIONS = [question for question in ALL_QUESTIONS if isinstance(question, ChoiceQuestion)]
NUMBER_QUESTIONS = [question for question in ALL_QUESTIONS if isinstance(question, NumberQuestion)]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUTAWAY_HOME", str(tmp_path))
    return tmp_path


def letters(question: ChoiceQuestion, seed: int, *, correct: bool = True) -> str:
    return "".join(
        letter
        for letter, choice in zip(CHOICE_LETTERS, shuffle_choices(question, seed), strict=False)
        if choice.correct is correct
    )


def answer_text(question_id: str, seed: int, *, correct: bool = True) -> str:
    question = get_question(question_id)
    if isinstance(question, ChoiceQuestion):
        return letters(question, seed, correct=correct)[: None if correct else 1]
    return str(question.answer if correct else question.common_mistakes[0].value)


# ---------------------------------------------------------------------------------------- questions


def test_every_section_has_questions_at_several_levels() -> None:
    assert len(SECTIONS) == 10
    assert len(ALL_QUESTIONS) >= 60
    for section in load_sections():
        assert len(section.questions) >= 4
        assert len({question.level for question in section.questions}) >= 2
    assert Counter(question.id for question in ALL_QUESTIONS).most_common(1)[0][1] == 1
    notebooks = {notebook.number for notebook in load_notebooks()}
    assert set(range(1, 12)) <= {number for question in ALL_QUESTIONS for number in question.notebooks} <= notebooks


def test_docs_pages_exist() -> None:
    missing = [
        question.id
        for question in ALL_QUESTIONS
        if question.docs_page is not None and not (DOCS / question.docs_page).is_file()
    ]
    assert not missing


@pytest.mark.parametrize("extreme", [max, min])
def test_length_does_not_reveal_the_correct_choice(extreme: Callable[..., Choice]) -> None:
    single = [question for question in CHOICE_QUESTIONS if not question.multiple]
    revealed = [question.id for question in single if extreme(question.choices, key=lambda c: len(c.text)).correct]
    assert len(revealed) < 0.4 * len(single), revealed


def test_correct_letters_are_spread() -> None:
    counts = Counter(letters(q, 0)[0] for q in CHOICE_QUESTIONS if not q.multiple and len(q.choices) == 4)
    assert all(0.1 < counts[letter] / counts.total() < 0.4 for letter in "abcd"), counts


@pytest.mark.parametrize("section", SECTIONS)
def test_answers_are_proved(section: str) -> None:
    results = [run_proof(question) for question in find_questions(section)]
    assert sum(result is not None for result in results) >= len(results) - 1


def test_wrong_proof_raises() -> None:
    question = get_question("nucleus")
    with pytest.raises(ProofError, match="its program computes 3"):
        run_proof(question.model_copy(update={"proof": "answer, wrong = 3, [1, 3]"}))
    with pytest.raises(ProofError, match="wrong values"):
        run_proof(question.model_copy(update={"proof": "answer, wrong = 2, [1, 4]"}))
    with pytest.raises(ProofError, match="does not hold"):
        run_proof(get_question("induction").model_copy(update={"proof": "holds = False"}))


# ---------------------------------------------------------------------------------------- grading


def test_every_wrong_choice_is_explained() -> None:
    for question in CHOICE_QUESTIONS:
        assert grade_answer(question, letters(question, 5), 5).correct, question.id
        for letter, choice in zip(CHOICE_LETTERS, shuffle_choices(question, 5), strict=False):
            grade = grade_answer(question, letter, 5)
            assert grade.correct is (choice.correct and not question.multiple), question.id
            assert choice.correct or choice.explanation in grade.explanation, question.id


def test_every_common_mistake_is_explained() -> None:
    for question in NUMBER_QUESTIONS:
        assert grade_answer(question, str(question.answer)).correct, question.id
        for mistake in question.common_mistakes:
            grade = grade_answer(question, str(mistake.value))
            assert not grade.correct
            assert grade.explanation == f"{mistake.mistake[0].upper()}{mistake.mistake[1:]}: {mistake.explanation}", (
                question.id
            )


def test_all_correct_choices_are_required() -> None:
    question = get_question("forms-and-objectives")
    assert isinstance(question, ChoiceQuestion)
    incomplete = grade_answer(question, letters(question, 0)[:2])
    assert not incomplete.correct
    assert incomplete.explanation
    assert not grade_answer(question, "abcd").correct
    assert grade_answer(question, ", ".join(letters(question, 0)).upper()).correct


@pytest.mark.parametrize(
    ("question_id", "text", "value"),
    [
        ("untie-gpt2", "38,597,376", 38597376),
        ("untie-gpt2", "38.6M", 38.6e6),
        ("untie-gpt2", "38.6 M parameters", 38.6e6),
        ("untie-gpt2", "3.86e7", 3.86e7),
        ("cache-of-llama-3-8b", "1.07 GB", 1.07),
        ("cache-of-llama-3-8b", "1,07", 1.07),
        ("alibi-three-back", "−1.5", -1.5),
        ("alibi-three-back", "-3/2", -1.5),
        ("entropy-of-a-bent-coin", "0,469", 0.469),
        ("entropy-of-a-bent-coin", ".469 bits", 0.469),
        ("beyond-chinchilla", "1,875", 1875),
    ],
)
def test_number_formats_are_parsed(question_id: str, text: str, value: float) -> None:
    question = get_question(question_id)
    assert isinstance(question, NumberQuestion)
    assert parse_number(question, text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["much", "1.07 GiB", "1/0", "1.2.3", "b", "--1", "1e999x"])
def test_invalid_number_is_an_error(text: str) -> None:
    with pytest.raises(InputError, match="type a number in GB"):
        grade_answer(get_question("cache-of-llama-3-8b"), text)


def test_wrong_sign_and_power_of_ten_are_explained() -> None:
    assert "sign" in grade_answer(get_question("layernorm-of-1234"), "1.342").explanation
    assert "1,000 times too large" in grade_answer(get_question("classic-ffn"), "134200").explanation


# ---------------------------------------------------------------------------------------- command line


def question_order(seed: int, count: int) -> list[str]:
    return [question.id for question in QuizProgress.load().order_questions(ALL_QUESTIONS, seed)[:count]]


def test_missed_questions_are_repeated_first(run_cli: CliRunner) -> None:
    first, second, third = question_order(3, 3)
    lines = [answer_text(first, 3), answer_text(second, 3, correct=False), "no such thing!", answer_text(third, 3)]
    output = run_cli("learn", "quiz", "--num-questions", 3, "--seed", 3, stdin="\n".join(lines) + "\n")
    assert "2 of 3 correct; 2 of all" in output
    assert "no such thing!' is no" in output
    assert f"Next time, these questions are asked first: {second}." in output
    assert question_order(9, 1) == [second]
    again = run_cli("learn", "quiz", "--num-questions", 1, "--seed", 9, stdin=answer_text(second, 9) + "\n")
    assert "1 of 1 correct" in again
    assert QuizProgress.load().status(second) == "known"
    assert not {first, second, third} & set(question_order(4, len(ALL_QUESTIONS) - 3))  # known questions come last


def test_empty_answer_counts_as_missed_and_is_explained(run_cli: CliRunner) -> None:
    (first,) = question_order(1, 1)
    output = " ".join(run_cli("learn", "quiz", "--num-questions", 1, "--seed", 1, stdin="\n", columns=200).split())
    assert grade_answer(get_question(first), "", 1).correct_explanation in output
    assert "Incorrect" not in output
    assert QuizProgress.load().status(first) == "missed"


@pytest.mark.parametrize("ending", ["", "q\n", b"\xff\xfe\n"])
def test_interrupted_round_keeps_answers(run_cli: CliRunner, ending: str | bytes) -> None:
    (first,) = question_order(2, 1)
    stdin = f"{answer_text(first, 2)}\n".encode() + (ending.encode() if isinstance(ending, str) else ending)
    assert "1 of 1 correct" in run_cli("learn", "quiz", "--seed", 2, stdin=stdin)
    assert QuizProgress.load().status(first) == "known"


def test_rest_of_a_too_long_answer_is_ignored(run_cli: CliRunner) -> None:
    (first,) = question_order(2, 1)
    stdin = "x" * 10_000 + f"\n{answer_text(first, 2)}\n"
    output = run_cli("learn", "quiz", "--num-questions", 1, "--seed", 2, stdin=stdin)
    assert "1 of 1 correct" in output
    assert output.count("q: quit)>") == 2  # the too long answer is one answer


def test_keyboard_interrupt_ends_the_round(run_cli: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("cutaway.cli.views.quiz_console.QuizConsole.read_answer", interrupted)
    assert "No question was answered" in run_cli("learn", "quiz")


def test_damaged_progress_file_is_renamed(run_cli: CliRunner, home: Path) -> None:
    for text in ("{", "[1]", '{"a": {"num_correct": "x"}}', '{"a": 3}', '{"UP": {}}'):
        (home / "quiz.json").write_text(text)
        assert "damaged and renamed" in " ".join(run_cli("learn", "quiz", "--num-questions", 1, stdin="\n").split())
        assert QuizProgress.load().num_answers == 1
    assert list(home.glob("quiz.damaged-*.json"))


def test_unwritable_progress_is_reported(run_cli: CliRunner, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "file").write_text("")
    monkeypatch.setenv("CUTAWAY_HOME", str(home / "file"))
    output = " ".join(run_cli("learn", "quiz", "--num-questions", 1, stdin="\n").split())
    assert "0 of 1 correct" in output
    assert "cannot be saved" in output


def test_section_list_json_and_show_code_options(run_cli: CliRunner) -> None:
    questions = json.loads(run_cli("learn", "quiz", "--section", "attention", "--json"))
    assert {question["topic"] for question in questions} == {"attention"}
    assert all(question["status"] == "new" and question["stage"] for question in questions)
    assert len(json.loads(run_cli("learn", "quiz", "--json"))) == len(ALL_QUESTIONS)
    listed = run_cli("learn", "quiz", "--section", "inference", "--list")
    assert all(question.id in listed for question in find_questions("inference"))
    assert "no questions about 'atention'" in run_cli("learn", "quiz", "--section", "atention", code=2)
    assert "import cutaway as ct" in run_cli("learn", "quiz", "--section", "sites", "--show-code", stdin="a\n")


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("claims", {"claims"}),
        ("Inference", {"inference"}),
        ("norms", {"norms"}),
        ("LayerNorm", {"norms"}),
        ("feed-forward", {"ffn"}),
        ("rotary", {"rope"}),
        ("worked", {"worked-examples"}),
        ("variants", {"components"}),
        ("mutual information", {"mutual-information"}),
        ("cross attention", {"cross-attention"}),
        ("post-norm", {"placement"}),
        ("expert", {"experts"}),
        ("information", {"information"}),
    ],
)
def test_sections_and_topics_are_found_by_words_of_their_titles(words: str, names: set[str]) -> None:
    questions = find_questions(words)
    assert questions
    assert all({question.section, question.topic} & names for question in questions)
    assert set(find_questions()) - set(questions)


def test_every_word_of_a_section_title_finds_its_questions() -> None:
    for section in load_sections():
        for word in section.title.split():
            if word != "and":
                found = find_questions(word)
                assert set(section.questions) <= set(found) or any(question.topic == word for question in found), word


def test_unknown_topic_lists_the_choices(run_cli: CliRunner) -> None:
    message = run_cli("learn", "quiz", "--section", "normz", code=2)
    assert "there are no questions about 'normz' (did you mean 'norms'?)" in message
    for name in (*SECTIONS, "norms", "rope", "speculation"):
        assert name in message


@pytest.mark.parametrize("level", ["recall", "reason", "what-if"])
def test_level_option(run_cli: CliRunner, level: str) -> None:
    questions = json.loads(run_cli("learn", "quiz", "--level", level, "--json"))
    assert len(questions) == sum(question.level == level for question in ALL_QUESTIONS)
    assert {question["level"] for question in questions} == {level}
    assert f"· {level}" in run_cli("learn", "quiz", "--level", level, "--num-questions", 1, stdin="q\n")


def test_level_without_questions_is_an_error(run_cli: CliRunner) -> None:
    message = run_cli("learn", "quiz", "--section", "perplexity", "--level", "what-if", code=2)
    assert "no question about 'perplexity' has the level what-if; the questions have re" in message
    assert "'hard' is not one of" in run_cli("learn", "quiz", "--level", "hard", code=2)


def test_quiz_does_not_import_torch(home: Path) -> None:
    code = (
        "import sys; from cutaway.cli.verbs.learn_quiz import quiz; quiz(list_questions=True, section='forms');"
        "quiz(num_questions=1);"
        "sys.exit('torch' in sys.modules)"
    )
    environment = os.environ | {"CUTAWAY_HOME": str(home)}
    result = subprocess.run([sys.executable, "-c", code], input="\n", text=True, env=environment, capture_output=True)
    assert result.returncode == 0, result.stderr
    assert "0 of 1 correct" in result.stdout
