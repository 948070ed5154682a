"""Queries: lessons about the forward pass with their quiz questions and exercises, and the interview questions."""

from cutaway.learn.claims import ClaimRow, claims_of_question, load_claims
from cutaway.learn.exercises import Exercise, load_exercises
from cutaway.learn.interview import InterviewQuestion, load_interview_questions
from cutaway.learn.lessons import build_lessons, find_lesson
from cutaway.learn.notebooks.html_page import render_markdown
from cutaway.learn.quiz import ChoiceQuestion, Question, find_questions, get_question, load_sections, shuffle_choices
from cutaway.learn.quiz.question_search import topic_title
from cutaway.serve.inspect.queries.base import Inspector, Query, QueryJob, QueryResult

EXERCISE_FIELDS = ("number", "title", "minutes", "hints")
LESSON_FIELDS = ("slug", "title", "sentences", "figure", "notebook", "docs_page", "exercises")


class Lessons(Query):
    """The lessons that apply to this model, the quiz questions and the exercises.

    Questions include their solutions, because the web page grades the answers.
    """

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        lessons = build_lessons(inspector.config, is_untrained=inspector.tokenizer.is_untrained)
        questions = find_questions()
        slugs = {question.id: find_lesson(lessons, question.topic, question.stage) for question in questions}
        lesson_data = [{name: getattr(lesson, name) for name in LESSON_FIELDS} for lesson in lessons]
        for lesson in lesson_data:
            ids = [question for question, slug in slugs.items() if slug == lesson["slug"]]
            lesson["questions"] = sorted(ids, key=_difficulty)
        for lesson, source in zip(lesson_data, lessons, strict=True):
            rows = [row for row in load_claims() if row.topic in source.claim_topics and row.kind != "feature"]
            lesson["claims"] = [_claim_to_dict(row) for row in rows]
        sections = [(section.title, [question.id for question in section.questions]) for section in load_sections()]
        data = {
            "lessons": lesson_data,
            "questions": {question.id: _question_to_dict(question) for question in questions},
            "sections": [{"title": title, "questions": ids} for title, ids in sections],
            "exercises": {str(exercise.number): _exercise_to_dict(exercise) for exercise in load_exercises()},
        }
        return QueryResult(data)


def _difficulty(question_id: str) -> int:
    """Return the sort key of a question: 0 for recall, 1 for reason, 2 for what-if."""
    return ("recall", "reason", "what-if").index(get_question(question_id).level)


def _claim_to_dict(row: ClaimRow) -> dict[str, object]:
    """A claim with the notebooks, tests and commands that show it."""
    data: dict[str, object] = row.model_dump(include={"id", "statement", "verdict", "explanation", "figure"})
    evidence = [item.partition(": ") for item in row.evidence]
    numbers = [int(target.partition(",")[0]) for kind, _, target in evidence if kind == "notebook"]
    studies = [f"cutaway learn study {target}" for kind, _, target in evidence if kind == "study"]
    tests = [f"pytest tests/{target}" for kind, _, target in evidence if kind == "test"]
    commands = [target for kind, _, target in evidence if kind == "command"]
    return data | {"notebooks": sorted(set(numbers)), "commands": studies + commands + tests}


def _exercise_to_dict(exercise: Exercise) -> dict[str, object]:
    """Return an exercise as JSON values, with its text as HTML without the title."""
    data = {name: getattr(exercise, name) for name in EXERCISE_FIELDS}
    text = exercise.instructions.partition("\n")[2]
    return data | {
        "notebook": int(exercise.notebook[:2]),
        "instructions": render_markdown(text, lambda name: f"notebooks/{int(name[:2])}"),
    }


def _question_to_dict(question: Question) -> dict[str, object]:
    """Return a question as JSON values: shuffled choices, explanations and the program that verifies the answer."""
    data: dict[str, object] = question.to_dict()
    data["topic_title"] = topic_title(question.topic)
    data["claims"] = [_claim_to_dict(row) for row in claims_of_question(question.id)]
    if isinstance(question, ChoiceQuestion):
        data["choices"] = [choice.model_dump() for choice in shuffle_choices(question)]
    return data


class InterviewQuestions(Query):
    """The interview questions with their model answers and key points, in the order of difficulty."""

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        return QueryResult({"questions": [_interview_question_to_dict(item) for item in load_interview_questions()]})


def _interview_question_to_dict(question: InterviewQuestion) -> dict[str, object]:
    names = ("id", "level", "type", "question", "paragraphs", "key_points", "notebooks", "exercise")
    return {name: getattr(question, name) for name in names} | {"topic": topic_title(question.topic)}
