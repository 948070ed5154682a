"""The forward pass as lessons, with what may be asked and tried beside each."""

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
    """Lessons that are true of this model; questions with their answers, which the page judges; exercises.

    Nothing that a learner wrote is run from here: `cutaway learn check` does that.
    """

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        lessons = build_lessons(inspector.config, is_untrained=inspector.tokenizer.is_untrained)
        homes = {each.id: find_lesson(lessons, each.topic, each.stage) for each in find_questions()}
        told = [
            {
                "slug": lesson.slug,
                "title": lesson.title,
                "sentences": lesson.sentences,
                "figure": lesson.figure,
                "notebook": lesson.notebook,
                "docs_page": lesson.docs_page,
                "exercises": lesson.exercises,
                "questions": sorted((name for name, home in homes.items() if home == lesson.slug), key=_difficulty),
            }
            for lesson in lessons
        ]
        return QueryResult(
            {
                "lessons": told,
                "questions": {each.id: _question_to_dict(each) for each in find_questions()},
                "sections": [
                    {"title": each.title, "questions": [one.id for one in each.questions]} for each in load_sections()
                ],
                "exercises": {str(each.number): _exercise_to_dict(each) for each in load_exercises()},
            }
        )


def _difficulty(question_id: str) -> int:
    """What one knows comes before what follows from it, and that before what would happen."""
    return ("recall", "reason", "what-if").index(get_question(question_id).level)


def _question_to_dict(question: Question) -> dict[str, Any]:
    """What is asked, what each answer means, and the program that proves the right one."""
    shown = (
        {"choices": [choice.model_dump() for choice in shuffle_choices(question)]}
        if isinstance(question, ChoiceQuestion)
        else {}
    )
    return question.to_dict() | shown


def _exercise_to_dict(exercise: Exercise) -> dict[str, Any]:
    return {"number": exercise.number, "title": exercise.title, "minutes": exercise.minutes, "hints": exercise.hints}


class ExerciseProgress(Query):
    """How far the user of this machine is with each exercise; a page that is a file knows nothing of it."""

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        known = progress.ExerciseProgress()
        return QueryResult({"states": {str(each.number): known.get(each.number).status for each in load_exercises()}})
