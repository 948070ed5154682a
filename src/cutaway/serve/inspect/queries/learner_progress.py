"""Queries: the learner's progress in quiz, interview and exercises, in the same files as that of `cutaway learn`."""

from typing import Annotated

from pydantic import Field

from cutaway.errors import InputError
from cutaway.learn.exercises import load_exercises
from cutaway.learn.exercises.progress import ExerciseProgress
from cutaway.learn.interview import load_interview_questions
from cutaway.learn.interview.progress import InterviewProgress
from cutaway.learn.quiz import get_question
from cutaway.learn.quiz.progress import QuizProgress
from cutaway.serve.inspect.queries.base import Inspector, Query, QueryJob, QueryResult

Token = Annotated[str, Field(max_length=256)]


class LearnerProgress(Query):
    """The progress of the user of this machine, if the query has the token of the server; otherwise why not."""

    token: Token = ""

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        if problem := job.exercise_access.find_problem(self.token):
            return QueryResult({"problem": problem})
        quiz, interview, exercises = QuizProgress.load(), InterviewProgress.load(), ExerciseProgress()
        points = {question.id: interview.num_points(question) for question in load_interview_questions()}
        data = {
            "problem": "",
            "quiz": {question_id: stats.last_correct for question_id, stats in quiz.stats.items()},
            "interview": {question_id: count for question_id, count in points.items() if count is not None},
            "exercises": {str(item.number): exercises.get(item.number).status for item in load_exercises()},
        }
        return QueryResult(data)


class RecordQuizAnswer(Query):
    """Count an answer to a quiz question."""

    token: Token
    id: str
    correct: bool

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        job.exercise_access.require(self.token)
        progress = QuizProgress.load()
        progress.record_answer(get_question(self.id).id, correct=self.correct)
        return QueryResult({"note": progress.note})


class RecordInterviewAnswer(Query):
    """Count an answer to an interview question, with the number of its key points that the answer contained."""

    token: Token
    id: str
    num_points: Annotated[int, Field(ge=0)]

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        job.exercise_access.require(self.token)
        question = next((item for item in load_interview_questions() if item.id == self.id), None)
        if question is None:
            raise InputError(f"there is no interview question '{self.id}'; `cutaway learn interview --list` lists all")
        if self.num_points > len(question.key_points):
            limit = len(question.key_points)
            raise InputError(
                f"num_points is {self.num_points}, but the question has {limit} key points; send 0 to {limit}"
            )
        progress = InterviewProgress.load()
        progress.record_answer(question.id, self.num_points)
        return QueryResult({"note": progress.note})
