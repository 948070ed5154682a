"""The quiz: every answer is proved, every wrong one explained, and what was missed comes again."""

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
from cutaway.learn.quiz import (
    SECTIONS,
    Choice,
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
from cutaway.learn.quiz.question import ProofError

pytestmark = pytest.mark.unchecked

DOCS = Path(__file__).parents[3] / "docs"
EVERY = find_questions()
CHOICE_QUESTIONS = [each for each in EVERY if isinstance(each, ChoiceQuestion)]
NUMBER_QUESTIONS = [each for each in EVERY if isinstance(each, NumberQuestion)]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUTAWAY_HOME", str(tmp_path))
    return tmp_path


def letters(asked: ChoiceQuestion, seed: int, *, right: bool = True) -> str:
    return "".join(
        a for a, each in zip(CHOICE_LETTERS, shuffle_choices(asked, seed), strict=False) if each.correct is right
    )


def typed(identity: str, seed: int, *, right: bool = True) -> str:
    asked = get_question(identity)
    if isinstance(asked, ChoiceQuestion):
        return letters(asked, seed, right=right)[: None if right else 1]
    return str(asked.answer if right else asked.common_mistakes[0].value)


# ---------------------------------------------------------------------------------------- the questions


def test_every_section_is_asked_about() -> None:
    assert len(SECTIONS) == 10
    assert len(EVERY) >= 60
    assert all(len(each.questions) >= 4 and len({one.level for one in each.questions}) >= 2 for each in load_sections())
    assert Counter(each.id for each in EVERY).most_common(1)[0][1] == 1
    assert {number for each in EVERY for number in each.notebooks} == set(range(1, 12))


def test_pages_are_there() -> None:
    missing = [each.id for each in EVERY if each.docs_page is not None and not (DOCS / each.docs_page).is_file()]
    assert not missing


@pytest.mark.parametrize("extreme", [max, min])
def test_length_does_not_tell_the_right_choice(extreme: Callable[..., Choice]) -> None:
    single = [each for each in CHOICE_QUESTIONS if not each.multiple]
    told = [each.id for each in single if extreme(each.choices, key=lambda one: len(one.text)).correct]
    assert len(told) < 0.4 * len(single), told


def test_right_letters_are_spread() -> None:
    places = Counter(letters(each, 0)[0] for each in CHOICE_QUESTIONS if not each.multiple and len(each.choices) == 4)
    assert all(0.1 < places[letter] / places.total() < 0.4 for letter in "abcd"), places


@pytest.mark.parametrize("section", SECTIONS)
def test_answers_are_proved(section: str) -> None:
    proved = [run_proof(each) for each in find_questions(section)]
    assert sum(found is not None for found in proved) >= len(proved) - 1


def test_a_false_proof_is_told() -> None:
    asked = get_question("nucleus")
    with pytest.raises(ProofError, match="its proof finds 3"):
        run_proof(asked.model_copy(update={"proof": "answer, wrong = 3, [1, 3]"}))
    with pytest.raises(ProofError, match="wrong values"):
        run_proof(asked.model_copy(update={"proof": "answer, wrong = 2, [1, 4]"}))
    with pytest.raises(ProofError, match="does not hold"):
        run_proof(get_question("induction").model_copy(update={"proof": "holds = False"}))


# ---------------------------------------------------------------------------------------- verdicts


def test_each_choice_is_explained() -> None:
    for each in CHOICE_QUESTIONS:
        assert grade_answer(each, letters(each, 5), 5).correct, each.id
        for letter, choice in zip(CHOICE_LETTERS, shuffle_choices(each, 5), strict=False):
            verdict = grade_answer(each, letter, 5)
            assert verdict.correct is (choice.correct and not each.multiple), each.id
            assert choice.correct or choice.explanation in verdict.explanation, each.id


def test_each_wrong_number_has_its_hint() -> None:
    for each in NUMBER_QUESTIONS:
        assert grade_answer(each, str(each.answer)).correct, each.id
        for near in each.common_mistakes:
            verdict = grade_answer(each, str(near.value))
            assert not verdict.correct
            assert verdict.explanation == f"{near.mistake[0].upper()}{near.mistake[1:]}: {near.explanation}", each.id


def test_several_right_ones_must_all_be_named() -> None:
    asked = get_question("forms-and-objectives")
    assert isinstance(asked, ChoiceQuestion)
    some = grade_answer(asked, letters(asked, 0)[:2])
    assert not some.correct
    assert some.explanation
    assert not grade_answer(asked, "abcd").correct
    assert grade_answer(asked, ", ".join(letters(asked, 0)).upper()).correct


@pytest.mark.parametrize(
    ("identity", "text", "value"),
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
def test_numbers_as_people_type_them(identity: str, text: str, value: float) -> None:
    asked = get_question(identity)
    assert isinstance(asked, NumberQuestion)
    assert parse_number(asked, text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["much", "1.07 GiB", "1/0", "1.2.3", "b", "--1", "1e999x"])
def test_what_is_no_number_is_asked_again(text: str) -> None:
    with pytest.raises(InputError, match="give a number in GB"):
        grade_answer(get_question("cache-of-llama-3-8b"), text)


def test_common_slips_are_named() -> None:
    assert "sign" in grade_answer(get_question("layernorm-of-1234"), "1.342").explanation
    assert "1,000 times too large" in grade_answer(get_question("classic-ffn"), "134200").explanation


# ---------------------------------------------------------------------------------------- on the terminal


def order(seed: int, count: int) -> list[str]:
    return [each.id for each in QuizProgress.load().order_questions(EVERY, seed)[:count]]


def test_a_round_and_what_was_missed_comes_again_first(run_cli: CliRunner) -> None:
    first, second, third = order(3, 3)
    lines = [typed(first, 3), typed(second, 3, right=False), "no such thing!", typed(third, 3)]
    shown = run_cli("learn", "quiz", "--num-questions", 3, "--seed", 3, stdin="\n".join(lines) + "\n")
    assert "2 of 3 right; you know 2 of all" in shown
    assert "no such thing!' is no" in shown
    assert f"These come again first: {second}." in shown
    assert order(9, 1) == [second]
    again = run_cli("learn", "quiz", "--num-questions", 1, "--seed", 9, stdin=typed(second, 9) + "\n")
    assert "1 of 1 right" in again
    assert QuizProgress.load().status(second) == "known"
    assert not {first, second, third} & set(order(4, len(EVERY) - 3))  # what is known comes last


def test_not_to_know_is_missed_and_explained(run_cli: CliRunner) -> None:
    (first,) = order(1, 1)
    shown = " ".join(run_cli("learn", "quiz", "--num-questions", 1, "--seed", 1, stdin="\n", columns=200).split())
    assert grade_answer(get_question(first), "", 1).correct_explanation in shown
    assert "Not so" not in shown
    assert QuizProgress.load().status(first) == "missed"


@pytest.mark.parametrize("ending", ["", "q\n", b"\xff\xfe\n"])
def test_an_end_in_the_middle_keeps_what_was_answered(run_cli: CliRunner, ending: str | bytes) -> None:
    (first,) = order(2, 1)
    begun = f"{typed(first, 2)}\n".encode() + (ending.encode() if isinstance(ending, str) else ending)
    assert "1 of 1 right" in run_cli("learn", "quiz", "--seed", 2, stdin=begun)
    assert QuizProgress.load().status(first) == "known"


def test_ctrl_c_ends_politely(run_cli: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("cutaway.cli.views.quiz_console.QuizConsole.read_answer", interrupted)
    assert "nothing is counted" in run_cli("learn", "quiz")


def test_a_damaged_score_is_set_aside(run_cli: CliRunner, home: Path) -> None:
    for text in ("{", "[1]", '{"a": {"num_correct": "x"}}', '{"a": 3}', '{"UP": {}}'):
        (home / "quiz.json").write_text(text)
        assert "set aside" in " ".join(run_cli("learn", "quiz", "--num-questions", 1, stdin="\n").split())
        assert QuizProgress.load().num_answers == 1
    assert list(home.glob("quiz.damaged-*.json"))


def test_a_score_that_cannot_be_kept_is_told(run_cli: CliRunner, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "file").write_text("")
    monkeypatch.setenv("CUTAWAY_HOME", str(home / "file"))
    shown = " ".join(run_cli("learn", "quiz", "--num-questions", 1, stdin="\n").split())
    assert "0 of 1 right" in shown
    assert "cannot be kept" in shown


def test_sections_topics_lists_and_json(run_cli: CliRunner) -> None:
    told = json.loads(run_cli("learn", "quiz", "--section", "attention", "--json"))
    assert {each["topic"] for each in told} == {"attention"}
    assert all(each["status"] == "new" and each["stage"] for each in told)
    assert len(json.loads(run_cli("learn", "quiz", "--json"))) == len(EVERY)
    listed = run_cli("learn", "quiz", "--section", "inference", "--list")
    assert all(each.id in listed for each in find_questions("inference"))
    assert "no questions about 'atention'" in run_cli("learn", "quiz", "--section", "atention", code=2)
    assert "import cutaway as ct" in run_cli("learn", "quiz", "--section", "sites", "--show-code", stdin="a\n")


def test_neither_list_nor_round_needs_torch(home: Path) -> None:
    code = (
        "import sys; from cutaway.cli.verbs.learn_quiz import quiz; quiz(list_questions=True, section='forms');"
        "quiz(num_questions=1);"
        "sys.exit('torch' in sys.modules)"
    )
    environment = os.environ | {"CUTAWAY_HOME": str(home)}
    found = subprocess.run([sys.executable, "-c", code], input="\n", text=True, env=environment, capture_output=True)
    assert found.returncode == 0, found.stderr
    assert "0 of 1 right" in found.stdout
