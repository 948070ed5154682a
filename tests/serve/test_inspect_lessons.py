"""Lessons apply to the inspected model and cover all exercises and quiz questions."""

from pathlib import Path
from typing import Any

import pytest

import cutaway as ct
from cutaway.learn.exercises import load_exercises
from cutaway.learn.interview import load_interview_questions
from cutaway.learn.lessons import build_lessons
from cutaway.learn.quiz import find_questions
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.model_input import ModelInput, TokenizerAdapter
from cutaway.serve.inspect.protocol import QueryJob
from cutaway.serve.inspect.queries.activation import Activation
from cutaway.serve.inspect.queries.lessons import InterviewQuestions, Lessons

pytestmark = pytest.mark.unchecked
FIGURES = {"tokens", "residual_stream", "next", "cache", "gradients", "size", "verification"}


def lesson_text(preset: str, slug: str) -> str:
    return " ".join(next(lesson for lesson in build_lessons(ct.config(preset)) if lesson.slug == slug).sentences)


def test_every_preset_has_all_lessons() -> None:
    for preset in ct.presets():
        for lesson in build_lessons(ct.config(preset)):
            assert lesson.sentences, (preset, lesson.slug)


@pytest.mark.parametrize(
    ("preset", "slug", "expected"),
    [
        ("gpt2", "positions", "learned vector that is added to the token embedding. There are 1,024 of them"),
        ("llama-3-8b", "positions", "RoPE"),
        ("bloom-560m", "positions", "ALiBi"),
        ("t5-small", "positions", "relative bias"),
        ("llama-3-8b", "queries", "only 8 heads, each shared by 4 query heads"),
        ("gpt2", "scores", "√64 = 8"),
        ("t5-small", "scores", "does not divide"),
        ("bert-base", "mask", "bidirectional"),
        ("bert-base", "norm", "post-norm"),
        ("mixtral-8x7b", "ffn", "2 of 8 experts"),
        ("llama-3-8b", "next-step", "65,536 numbers"),
        ("tiny-mla", "queries", "latent attention"),
        ("tiny-albert", "depth", "with the same weights"),
    ],
)
def test_lesson_text_applies_to_the_preset(preset: str, slug: str, expected: str) -> None:
    assert expected in lesson_text(preset, slug)


def test_lessons_link_to_existing_pages_and_notebooks() -> None:
    root = Path(__file__).parents[2]
    for preset in ct.presets():
        for lesson in build_lessons(ct.config(preset)):
            assert (root / "docs" / lesson.docs_page).is_file(), lesson
            assert list((root / "notebooks").glob(f"{lesson.notebook:02}_*.py")), lesson
    for question in find_questions():
        assert question.docs_page is None or (root / "docs" / question.docs_page).is_file(), question


def test_lessons_depend_on_the_form() -> None:
    slugs = {
        preset: {lesson.slug for lesson in build_lessons(ct.config(preset))}
        for preset in ("gpt2", "bert-base", "t5-small")
    }
    assert "next-step" in slugs["gpt2"]
    assert "next-step" not in slugs["bert-base"]
    assert [preset for preset, lesson_slugs in slugs.items() if "cross" in lesson_slugs] == ["t5-small"]


@pytest.mark.parametrize("preset", ["tiny-gpt", "tiny-llama", "tiny-moe", "tiny-bert", "tiny-t5"])
def test_every_lesson_figure_is_an_activation_or_a_known_figure(preset: str) -> None:
    model = ct.build(preset, seed=0)
    inspector = Inspector(model, TokenizerAdapter(model.config.vocab_size), name=preset)
    prefix = "decoder." if preset == "tiny-t5" else ""
    input_fields: dict[str, Any] = {"tokens": (5, 6, 7), **({"source": (8, 9)} if prefix else {})}
    for lesson in Lessons().run(inspector, QueryJob()).data["lessons"]:
        figure = lesson["figure"]
        if figure in FIGURES:
            continue
        block = "blocks.0." if figure.startswith(("attn", "cross", "ffn", "resid")) else ""
        site = figure if figure == "logits" else f"{prefix}{block}{figure}"
        result = Activation(input=ModelInput(**input_fields), position=2, source_position=0, site=site).run(
            inspector, QueryJob()
        )
        assert result.data["formulas"], site


def test_lessons_cover_all_exercises_and_questions() -> None:
    model = ct.build("tiny-gpt", seed=0)
    data = Lessons().run(Inspector(model, TokenizerAdapter(model.config.vocab_size), name="it"), QueryJob()).data
    exercise_numbers = [number for lesson in data["lessons"] for number in lesson["exercises"]]
    assert sorted(exercise_numbers) == [exercise.number for exercise in load_exercises()]
    question_ids = [name for lesson in data["lessons"] for name in lesson["questions"]]
    assert len(question_ids) == len(set(question_ids))
    missing_ids = {question.id for question in find_questions()} - set(question_ids)
    assert {question.stage for question in find_questions() if question.id in missing_ids} <= {
        "cross.pattern"
    }  # for encoder-decoders only
    assert sorted(data["questions"]) == sorted(question.id for question in find_questions())


def test_exercise_texts_are_html_with_formulas() -> None:
    model = ct.build("tiny-gpt", seed=0)
    data = Lessons().run(Inspector(model, TokenizerAdapter(model.config.vocab_size), name="it"), QueryJob()).data
    for exercise in data["exercises"].values():
        assert exercise["instructions"].startswith("<p>"), exercise["title"]
        assert "$" not in exercise["instructions"], exercise["title"]
        assert "<code>\\" not in exercise["instructions"], exercise["title"]
    assert "<math" in data["exercises"]["1"]["instructions"]


def test_every_question_has_a_level_and_every_level_has_questions() -> None:
    assert {question.level for question in find_questions()} == {"recall", "reason", "what-if"}
    for level in ("recall", "reason", "what-if"):
        assert find_questions(level=level)


def test_interview_questions_are_those_of_the_library() -> None:
    model = ct.build("tiny-gpt", seed=0)
    data = (
        InterviewQuestions()
        .run(Inspector(model, TokenizerAdapter(model.config.vocab_size), name="it"), QueryJob())
        .data
    )
    for row, question in zip(data["questions"], load_interview_questions(), strict=True):
        assert row["id"] == question.id
        assert row["paragraphs"] == question.paragraphs
        assert tuple(row["key_points"]) == question.key_points
