"""The quiz: every answer is proved, every wrong one explained, and what was missed comes again."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from verbs import Run

from cutaway.errors import InputError
from cutaway.learn.quiz import (
    HEADINGS,
    Choice,
    Choosing,
    Reckoning,
    headings,
    judge,
    prove,
    question,
    questions,
    shuffled,
)
from cutaway.learn.quiz.judging import LETTERS, number
from cutaway.learn.quiz.proof import ProofError
from cutaway.learn.quiz.score import Score

pytestmark = pytest.mark.unchecked

DOCS = Path(__file__).parent.parent / "docs"
EVERY = questions()
CHOOSING = [each for each in EVERY if isinstance(each, Choosing)]
RECKONING = [each for each in EVERY if isinstance(each, Reckoning)]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUTAWAY_HOME", str(tmp_path))
    return tmp_path


def letters(asked: Choosing, seed: int, *, right: bool = True) -> str:
    return "".join(a for a, each in zip(LETTERS, shuffled(asked, seed), strict=False) if each.right is right)


def typed(identity: str, seed: int, *, right: bool = True) -> str:
    asked = question(identity)
    if isinstance(asked, Choosing):
        return letters(asked, seed, right=right)[: None if right else 1]
    return str(asked.answer if right else asked.near[0].value)


# ---------------------------------------------------------------------------------------- the questions


def test_every_heading_is_asked_about() -> None:
    assert len(HEADINGS) == 10
    assert len(EVERY) >= 60
    assert all(len(each.questions) >= 4 and len({one.level for one in each.questions}) >= 2 for each in headings())
    assert Counter(each.id for each in EVERY).most_common(1)[0][1] == 1
    assert {number for each in EVERY for number in each.see} == set(range(1, 12))


def test_pages_are_there() -> None:
    missing = [each.id for each in EVERY if each.page is not None and not (DOCS / each.page).is_file()]
    assert not missing


@pytest.mark.parametrize("extreme", [max, min])
def test_length_does_not_tell_the_right_choice(extreme: Callable[..., Choice]) -> None:
    single = [each for each in CHOOSING if not each.several]
    told = [each.id for each in single if extreme(each.choices, key=lambda one: len(one.text)).right]
    assert len(told) < 0.4 * len(single), told


def test_right_letters_are_spread() -> None:
    places = Counter(letters(each, 0)[0] for each in CHOOSING if not each.several and len(each.choices) == 4)
    assert all(0.1 < places[letter] / places.total() < 0.4 for letter in "abcd"), places


@pytest.mark.parametrize("heading", HEADINGS)
def test_answers_are_proved(heading: str) -> None:
    proved = [prove(each) for each in questions(heading)]
    assert sum(found is not None for found in proved) >= len(proved) - 1


def test_a_false_proof_is_told() -> None:
    asked = question("nucleus")
    with pytest.raises(ProofError, match="its proof finds 3"):
        prove(asked.model_copy(update={"proof": "answer, wrong = 3, [1, 3]"}))
    with pytest.raises(ProofError, match="wrong values"):
        prove(asked.model_copy(update={"proof": "answer, wrong = 2, [1, 4]"}))
    with pytest.raises(ProofError, match="does not hold"):
        prove(question("induction").model_copy(update={"proof": "holds = False"}))


# ---------------------------------------------------------------------------------------- verdicts


def test_each_choice_is_explained() -> None:
    for each in CHOOSING:
        assert judge(each, letters(each, 5), 5).right, each.id
        for letter, choice in zip(LETTERS, shuffled(each, 5), strict=False):
            verdict = judge(each, letter, 5)
            assert verdict.right is (choice.right and not each.several), each.id
            assert choice.right or choice.why in verdict.why, each.id


def test_each_wrong_number_has_its_hint() -> None:
    for each in RECKONING:
        assert judge(each, str(each.answer)).right, each.id
        for near in each.near:
            verdict = judge(each, str(near.value))
            assert not verdict.right
            assert verdict.why == f"{near.mistake[0].upper()}{near.mistake[1:]}: {near.why}", each.id


def test_several_right_ones_must_all_be_named() -> None:
    asked = question("forms-and-objectives")
    assert isinstance(asked, Choosing)
    some = judge(asked, letters(asked, 0)[:2])
    assert not some.right
    assert some.why
    assert not judge(asked, "abcd").right
    assert judge(asked, ", ".join(letters(asked, 0)).upper()).right


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
    asked = question(identity)
    assert isinstance(asked, Reckoning)
    assert number(asked, text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["much", "1.07 GiB", "1/0", "1.2.3", "b", "--1", "1e999x"])
def test_what_is_no_number_is_asked_again(text: str) -> None:
    with pytest.raises(InputError, match="give a number in GB"):
        judge(question("cache-of-llama-3-8b"), text)


def test_common_slips_are_named() -> None:
    assert "sign" in judge(question("layernorm-of-1234"), "1.342").why
    assert "1,000 times too large" in judge(question("classic-ffn"), "134200").why


# ---------------------------------------------------------------------------------------- on the terminal


def order(seed: int, count: int) -> list[str]:
    return [each.id for each in Score.read().ordered(EVERY, seed)[:count]]


def test_a_round_and_what_was_missed_comes_again_first(verb: Run) -> None:
    first, second, third = order(3, 3)
    lines = [typed(first, 3), typed(second, 3, right=False), "no such thing!", typed(third, 3)]
    shown = verb("learn", "quiz", "--count", 3, "--seed", 3, typed="\n".join(lines) + "\n")
    assert "2 of 3 right; you know 2 of all" in shown
    assert "no such thing!' is no" in shown
    assert f"These come again first: {second}." in shown
    assert order(9, 1) == [second]
    again = verb("learn", "quiz", "--count", 1, "--seed", 9, typed=typed(second, 9) + "\n")
    assert "1 of 1 right" in again
    assert Score.read().state(second) == "known"
    assert not {first, second, third} & set(order(4, len(EVERY) - 3))  # what is known comes last


def test_not_to_know_is_missed_and_explained(verb: Run) -> None:
    (first,) = order(1, 1)
    shown = " ".join(verb("learn", "quiz", "--count", 1, "--seed", 1, typed="\n", columns=200).split())
    assert judge(question(first), "", 1).because in shown
    assert "Not so" not in shown
    assert Score.read().state(first) == "missed"


@pytest.mark.parametrize("ending", ["", "q\n", b"\xff\xfe\n"])
def test_an_end_in_the_middle_keeps_what_was_answered(verb: Run, ending: str | bytes) -> None:
    (first,) = order(2, 1)
    begun = f"{typed(first, 2)}\n".encode() + (ending.encode() if isinstance(ending, str) else ending)
    assert "1 of 1 right" in verb("learn", "quiz", "--seed", 2, typed=begun)
    assert Score.read().state(first) == "known"


def test_ctrl_c_ends_politely(verb: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("cutaway.cli.learn_quiz_view.View.read", interrupted)
    assert "nothing is counted" in verb("learn", "quiz")


def test_a_damaged_score_is_set_aside(verb: Run, home: Path) -> None:
    for text in ("{", "[1]", '{"a": {"right": "x"}}', '{"a": 3}', '{"UP": {}}'):
        (home / "quiz.json").write_text(text)
        assert "set aside" in " ".join(verb("learn", "quiz", "--count", 1, typed="\n").split())
        assert Score.read().answers == 1
    assert list(home.glob("quiz.damaged-*.json"))


def test_a_score_that_cannot_be_kept_is_told(verb: Run, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "file").write_text("")
    monkeypatch.setenv("CUTAWAY_HOME", str(home / "file"))
    shown = " ".join(verb("learn", "quiz", "--count", 1, typed="\n").split())
    assert "0 of 1 right" in shown
    assert "cannot be kept" in shown


def test_headings_topics_lists_and_json(verb: Run) -> None:
    told = json.loads(verb("learn", "quiz", "--heading", "attention", "--json"))
    assert {each["topic"] for each in told} == {"attention"}
    assert all(each["state"] == "new" and each["belongs_to"] for each in told)
    assert len(json.loads(verb("learn", "quiz", "--json"))) == len(EVERY)
    listed = verb("learn", "quiz", "--heading", "inference", "--list")
    assert all(each.id in listed for each in questions("inference"))
    assert "no questions about 'atention'" in verb("learn", "quiz", "--heading", "atention", code=2)
    assert "import cutaway as ct" in verb("learn", "quiz", "--heading", "sites", "--proofs", typed="a\n")


def test_neither_list_nor_round_needs_torch(home: Path) -> None:
    code = (
        "import sys; from cutaway.cli.learn_quiz import quiz; quiz(as_list=True, heading='forms'); quiz(count=1);"
        "sys.exit('torch' in sys.modules)"
    )
    environment = os.environ | {"CUTAWAY_HOME": str(home)}
    found = subprocess.run([sys.executable, "-c", code], input="\n", text=True, env=environment, capture_output=True)
    assert found.returncode == 0, found.stderr
    assert "0 of 1 right" in found.stdout
