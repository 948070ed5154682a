"""The forward pass as lessons, with what may be asked and tried beside each."""

from typing import Any

from cutaway.learn.exercises import Exercise, exercises
from cutaway.learn.quiz import Choosing, headings, questions, shuffled
from cutaway.learn.quiz import Question as Asked
from cutaway.learn.quiz import question as question_of
from cutaway.learn.record import Progress
from cutaway.learn.walk import belonging, walk
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.job import Job
from cutaway.serve.inspect.question import Question
from cutaway.serve.inspect.wire import Answer


class Walk(Question):
    """Lessons that are true of this model; questions with their answers, which the page judges; exercises.

    Nothing that a learner wrote is run from here: `cutaway learn check` does that.
    """

    def answer(self, of: Inspector, job: Job) -> Answer:
        lessons = walk(of.config, fresh=of.words.fresh)
        homes = {each.id: belonging(lessons, each.topic, each.belongs_to) for each in questions()}
        told = [
            {
                "slug": lesson.slug,
                "title": lesson.title,
                "sentences": lesson.sentences,
                "shows": lesson.shows,
                "notebook": lesson.notebook,
                "page": lesson.page,
                "exercises": lesson.exercises,
                "questions": sorted((name for name, home in homes.items() if home == lesson.slug), key=easier),
            }
            for lesson in lessons
        ]
        return Answer(
            {
                "lessons": told,
                "questions": {each.id: question(each) for each in questions()},
                "headings": [
                    {"title": each.title, "questions": [one.id for one in each.questions]} for each in headings()
                ],
                "exercises": {str(each.number): task(each) for each in exercises()},
            }
        )


def easier(name: str) -> int:
    """What one knows comes before what follows from it, and that before what would happen."""
    return ("recall", "reason", "what-if").index(question_of(name).level)


def question(of: Asked) -> dict[str, Any]:
    """What is asked, what each answer means, and the program that proves the right one."""
    shown = {"choices": [choice.model_dump() for choice in shuffled(of)]} if isinstance(of, Choosing) else {}
    return of.to_dict() | shown


def task(of: Exercise) -> dict[str, Any]:
    return {"number": of.number, "title": of.title, "minutes": of.minutes, "hints": of.hints}


class Exercised(Question):
    """How far the user of this machine is with each exercise; a page that is a file knows nothing of it."""

    def answer(self, of: Inspector, job: Job) -> Answer:
        known = Progress()
        return Answer({"states": {str(each.number): known.of(each.number).state for each in exercises()}})
