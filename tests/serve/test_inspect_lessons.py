"""Lessons say what is true of the model that is open, and everything that can be asked or tried has its place."""

from pathlib import Path
from typing import Any

import pytest

import cutaway as ct
from cutaway.learn.exercises import load_exercises, progress
from cutaway.learn.lessons import build_lessons
from cutaway.learn.quiz import find_questions
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.model_input import ModelInput, TokenizerAdapter
from cutaway.serve.inspect.protocol import QueryJob
from cutaway.serve.inspect.queries.activation import Activation
from cutaway.serve.inspect.queries.lessons import ExerciseProgress, Lessons

pytestmark = pytest.mark.unchecked
PICTURES = {"tokens", "highway", "next", "cache", "gradients", "size", "proofs"}


def said(preset: str, slug: str) -> str:
    return " ".join(next(each for each in build_lessons(ct.config(preset)) if each.slug == slug).sentences)


def test_every_preset_has_a_whole_walk() -> None:
    for preset in ct.presets():
        for lesson in build_lessons(ct.config(preset)):
            assert lesson.sentences, (preset, lesson.slug)


@pytest.mark.parametrize(
    ("preset", "slug", "words"),
    [
        ("gpt2", "positions", "learned vector that is added to the token's. There are 1,024 of them"),
        ("llama-3-8b", "positions", "RoPE"),
        ("bloom-560m", "positions", "ALiBi"),
        ("t5-small", "positions", "relative bias"),
        ("llama-3-8b", "queries", "8 heads only: each serves 4 heads"),
        ("gpt2", "scores", "√64 = 8"),
        ("t5-small", "scores", "does not divide"),
        ("bert-base", "mask", "see both sides"),
        ("bert-base", "norm", "behind the sum"),
        ("mixtral-8x7b", "ffn", "2 of 8 experts"),
        ("llama-3-8b", "next-step", "65,536 numbers"),
        ("tiny-mla", "queries", "latent attention"),
        ("tiny-albert", "depth", "with the same weights"),
    ],
)
def test_what_is_said_is_so(preset: str, slug: str, words: str) -> None:
    assert words in said(preset, slug)


def test_lessons_point_to_pages_and_notebooks_that_are_there() -> None:
    root = Path(__file__).parents[2]
    for preset in ct.presets():
        for lesson in build_lessons(ct.config(preset)):
            assert (root / "docs" / lesson.docs_page).is_file(), lesson
            assert list((root / "notebooks").glob(f"{lesson.notebook:02}_*.py")), lesson
    for each in find_questions():
        assert each.docs_page is None or (root / "docs" / each.docs_page).is_file(), each


def test_an_encoder_has_no_next_step_and_only_a_pair_of_stacks_reads_a_source() -> None:
    slugs = {
        preset: {each.slug for each in build_lessons(ct.config(preset))} for preset in ("gpt2", "bert-base", "t5-small")
    }
    assert "next-step" in slugs["gpt2"]
    assert "next-step" not in slugs["bert-base"]
    assert [preset for preset, found in slugs.items() if "cross" in found] == ["t5-small"]


@pytest.mark.parametrize("preset", ["tiny-gpt", "tiny-llama", "tiny-moe", "tiny-bert", "tiny-t5"])
def test_every_lesson_shows_something_of_this_model(preset: str) -> None:
    model = ct.build(preset, seed=0)
    of = Inspector(model, TokenizerAdapter(model.config.vocab_size), name=preset)
    prefix = "decoder." if preset == "tiny-t5" else ""
    given: dict[str, Any] = {"tokens": (5, 6, 7), **({"source": (8, 9)} if prefix else {})}
    for lesson in Lessons().run(of, QueryJob()).data["lessons"]:
        shows = lesson["figure"]
        if shows in PICTURES:
            continue
        block = "blocks.0." if shows.startswith(("attn", "cross", "ffn", "resid")) else ""
        site = shows if shows == "logits" else f"{prefix}{block}{shows}"
        told = Activation(input=ModelInput(**given), position=2, source_position=0, site=site).run(of, QueryJob())
        assert told.data["formulas"], site


def test_every_exercise_and_nearly_every_question_stands_beside_a_lesson() -> None:
    model = ct.build("tiny-gpt", seed=0)
    told = Lessons().run(Inspector(model, TokenizerAdapter(model.config.vocab_size), name="it"), QueryJob()).data
    tried = [number for lesson in told["lessons"] for number in lesson["exercises"]]
    assert sorted(tried) == [each.number for each in load_exercises()]
    asked = [name for lesson in told["lessons"] for name in lesson["questions"]]
    assert len(asked) == len(set(asked))
    absent = {each.id for each in find_questions()} - set(asked)
    assert {each.stage for each in find_questions() if each.id in absent} <= {"cross.pattern"}  # an encoder-decoder's
    assert sorted(told["questions"]) == sorted(each.id for each in find_questions())


def test_the_page_knows_how_far_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTAWAY_HOME", str(tmp_path))
    progress.ExerciseProgress().mark_attempted(3, tmp_path / "mine.py", passed=True)
    model = ct.build("tiny-gpt", seed=0)
    of = Inspector(model, TokenizerAdapter(model.config.vocab_size), name="it")
    states = ExerciseProgress().run(of, QueryJob()).data["states"]
    assert states["3"] == "passed"
    assert states["4"] == "not started"
