"""Queries: lessons about the forward pass with their quiz questions and exercises, and exercise progress."""

from typing import Any

from cutaway.learn.exercises import Exercise, load_exercises, progress
from cutaway.learn.lessons import build_lessons, find_lesson
from cutaway.learn.quiz import (
    ChoiceQuestion,
    Question,
    find_questions,
    get_question,
    load_sections,
    shuffle_choices,
)
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.protocol import QueryJob, QueryResult
from cutaway.serve.inspect.queries.base import Query


class Lessons(Query):
    """Lessons that apply to this model, quiz questions with their solutions (the page grades them), exercises.

    Learners' code is not run here; `cutaway learn check` runs it.
    """

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        lessons = build_lessons(inspector.config, is_untrained=inspector.tokenizer.is_untrained)
        lesson_by_question = {
            question.id: find_lesson(lessons, question.topic, question.stage) for question in find_questions()
        }
        lesson_data = [
            {
                "slug": lesson.slug,
                "title": lesson.title,
                "sentences": lesson.sentences,
                "figure": lesson.figure,
                "notebook": lesson.notebook,
                "docs_page": lesson.docs_page,
                "exercises": lesson.exercises,
                "questions": sorted(
                    (name for name, slug in lesson_by_question.items() if slug == lesson.slug), key=_difficulty
                ),
            }
            for lesson in lessons
        ]
        return QueryResult(
            {
                "lessons": lesson_data,
                "questions": {question.id: _question_to_dict(question) for question in find_questions()},
                "sections": [
                    {
                        "title": section.title,
                        "questions": [question.id for question in section.questions],
                    }
                    for section in load_sections()
                ],
                "exercises": {str(exercise.number): _exercise_to_dict(exercise) for exercise in load_exercises()},
            }
        )


def _difficulty(question_id: str) -> int:
    """Sort key of questions: recall, then reason, then what-if."""
    return ("recall", "reason", "what-if").index(get_question(question_id).level)


def _question_to_dict(question: Question) -> dict[str, Any]:
    """Return a question as JSON, with choices shuffled, explanations and the program that verifies the solution."""
    choices = (
        {"choices": [choice.model_dump() for choice in shuffle_choices(question)]}
        if isinstance(question, ChoiceQuestion)
        else {}
    )
    return question.to_dict() | choices


def _exercise_to_dict(exercise: Exercise) -> dict[str, Any]:
    return {"number": exercise.number, "title": exercise.title, "minutes": exercise.minutes, "hints": exercise.hints}


class ExerciseProgress(Query):
    """Status of each exercise of the local user; not part of an exported page."""

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        stored_progress = progress.ExerciseProgress()
        return QueryResult(
            {
                "states": {
                    str(exercise.number): stored_progress.get(exercise.number).status for exercise in load_exercises()
                }
            }
        )
