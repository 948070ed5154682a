"""Exercises on the page: the same file, grading and progress as `cutaway learn`; only for the page with the token."""

import json
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import asdict
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from support.server import serve_in_thread, wait_until

import cutaway as ct
from cutaway.errors import InputError
from cutaway.learn.exercises import get_exercise, load_exercises
from cutaway.learn.exercises.learner_file import file_version, write_stub
from cutaway.learn.exercises.progress import ExerciseProgress
from cutaway.learn.interview import load_interview_questions
from cutaway.learn.interview.progress import InterviewProgress
from cutaway.learn.quiz import find_questions
from cutaway.learn.quiz.progress import QuizProgress
from cutaway.learn.runner.launcher import grade_files
from cutaway.serve.app import build_app
from cutaway.serve.inspect import routes
from cutaway.serve.inspect.exercise_access import ExerciseAccess, build_exercise_access
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.model_input import TokenizerAdapter
from cutaway.serve.inspect.protocol import QueryCancelled, QueryJob
from cutaway.serve.inspect.queries import QUERIES
from cutaway.serve.server import bind_socket, build_access_policy

pytestmark = pytest.mark.unchecked
NUMBER = 4
"""An exercise whose worker does not import torch."""
LOOP = "while True:\n    pass\n"
FORK_BOMBS = {
    "os.fork": "import os\nwhile True:\n    os.fork()\n",
    "subprocess": "import subprocess\nwhile True:\n    subprocess.Popen(['sleep', '100'])\n",
    "multiprocessing": "import multiprocessing\nmultiprocessing.get_context('fork').Process(target=print).start()\n",
    "spawn": "import multiprocessing\nmultiprocessing.get_context('spawn').Process(target=print).start()\n",
}


@pytest.fixture
def access(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ExerciseAccess:
    monkeypatch.setenv("CUTAWAY_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return ExerciseAccess("", directory=Path("learn"))


@pytest.fixture(scope="module")
def inspector() -> Inspector:
    model = ct.build("tiny-gpt", seed=0)
    return Inspector(model, TokenizerAdapter(model.config.vocab_size), name="it")


def run(inspector: Inspector, access: ExerciseAccess, name: str, **params: Any) -> dict[str, Any]:
    query = QUERIES[name].model_validate({"token": access.token, **params})
    return json.loads(json.dumps(query.run(inspector, QueryJob(exercise_access=access)).data))


def grade(inspector: Inspector, access: ExerciseAccess, text: str, version: str = "") -> dict[str, Any]:
    return run(inspector, access, "grade_exercise", number=NUMBER, text=text, version=version)


def test_a_new_exercise_shows_the_stub_and_writes_nothing(inspector: Inspector, access: ExerciseAccess) -> None:
    for exercise in load_exercises():
        data = run(inspector, access, "open_exercise", number=exercise.number)
        assert data["text"] == exercise.stub
        assert data["version"] == ""
        assert data["status"] == "not started"
    assert not Path("learn").exists()


def test_the_solution_passes_and_progress_is_that_of_the_command_line(
    inspector: Inspector, access: ExerciseAccess
) -> None:
    exercise = get_exercise(NUMBER)
    data = grade(inspector, access, exercise.solution)
    path = Path("learn") / f"{exercise.slug}.py"
    assert data["report"]["status"] == "passed"
    assert path.read_text() == exercise.solution
    assert data["exercise"]["version"] == file_version(path)
    record = ExerciseProgress().get(NUMBER)
    assert (record.status, record.attempts, record.file) == ("passed", 1, str(path.resolve()))
    assert run(inspector, access, "learner_progress")["exercises"][str(NUMBER)] == "passed"


def test_a_wrong_solution_has_the_report_of_the_command_line(inspector: Inspector, access: ExerciseAccess) -> None:
    exercise = get_exercise(NUMBER)
    [mistake, *_] = exercise.mistakes
    text = exercise.solution
    for old, new in mistake.replace.items():
        text = text.replace(old, new)
    data = grade(inspector, access, text)
    [report] = grade_files(exercise, [Path(data["exercise"]["file"])])
    assert data["report"] == json.loads(json.dumps(asdict(report)))
    assert data["report"]["status"] == "failed"
    assert any(mistake.name in task["mistakes"] for task in data["report"]["tasks"])


def test_an_unchanged_stub_is_not_an_attempt(inspector: Inspector, access: ExerciseAccess) -> None:
    data = grade(inspector, access, get_exercise(NUMBER).stub)
    assert data["report"]["status"] == "not_written"
    assert ExerciseProgress().get(NUMBER).attempts == 0


def test_the_file_of_the_command_line_is_opened(inspector: Inspector, access: ExerciseAccess) -> None:
    exercise = get_exercise(NUMBER)
    path, _ = write_stub(exercise, Path("learn"))
    path.write_text("x = 1\n")
    data = run(inspector, access, "open_exercise", number=NUMBER)
    assert data["text"] == "x = 1\n"
    assert data["file"] == str(path.absolute())


def test_a_notebook_is_graded_as_it_is(inspector: Inspector, access: ExerciseAccess) -> None:
    path, _ = write_stub(get_exercise(NUMBER), Path("learn"), as_notebook=True)
    before = path.read_bytes()
    data = grade(inspector, access, "ignored", file_version(path))
    assert data["exercise"]["is_notebook"]
    assert data["report"]["status"] == "not_written"
    assert path.read_bytes() == before


@pytest.mark.parametrize("query", ["save_exercise", "grade_exercise"])
def test_a_file_changed_on_disk_is_not_overwritten(query: str, inspector: Inspector, access: ExerciseAccess) -> None:
    data = run(inspector, access, "save_exercise", number=NUMBER, text="mine = 1\n", version="")
    version, path = data["exercise"]["version"], Path(data["exercise"]["file"])
    path.write_text("theirs = 2\n")
    data = run(inspector, access, query, number=NUMBER, text="mine = 3\n", version=version)
    assert not data["is_saved"]
    assert "report" not in data
    assert data["exercise"]["text"] == path.read_text() == "theirs = 2\n"
    new = data["exercise"]["version"]
    assert run(inspector, access, "save_exercise", number=NUMBER, text="mine = 3\n", version=new)["is_saved"]
    assert path.read_text() == "mine = 3\n"
    assert not run(inspector, access, "save_exercise", number=NUMBER, text="", version="")["is_saved"]


def test_reset_keeps_the_old_file(inspector: Inspector, access: ExerciseAccess) -> None:
    run(inspector, access, "save_exercise", number=NUMBER, text="mine = 1\n", version="")
    data = run(inspector, access, "reset_exercise", number=NUMBER)
    assert data["exercise"]["text"] == get_exercise(NUMBER).stub
    assert Path(data["backup"]).read_text() == "mine = 1\n"


def test_hints_come_one_at_a_time_and_then_the_solution(inspector: Inspector, access: ExerciseAccess) -> None:
    exercise = get_exercise(NUMBER)
    with pytest.raises(InputError, match="has no attempt"):
        run(inspector, access, "show_solution", number=NUMBER)
    for count in range(1, len(exercise.hints) + 1):
        data = run(inspector, access, "next_hint", number=NUMBER)
        assert data["hints"] == list(exercise.hints[:count])
        assert ExerciseProgress().get(NUMBER).num_hints == count
    assert data["may_show_solution"]
    assert run(inspector, access, "next_hint", number=NUMBER)["hints"] == list(exercise.hints)
    assert run(inspector, access, "show_solution", number=NUMBER)["solution"] == exercise.solution
    assert ExerciseProgress().get(NUMBER).solution_shown


def test_quiz_and_interview_progress_is_that_of_the_command_line(inspector: Inspector, access: ExerciseAccess) -> None:
    question, interview = find_questions()[0], load_interview_questions()[0]
    run(inspector, access, "record_quiz_answer", id=question.id, correct=True)
    run(inspector, access, "record_interview_answer", id=interview.id, num_points=2)
    assert QuizProgress.load().status(question.id) == "known"
    assert InterviewProgress.load().num_points(interview) == 2
    data = run(inspector, access, "learner_progress")
    assert data["quiz"] == {question.id: True}
    assert data["interview"] == {interview.id: 2}
    with pytest.raises(InputError, match="there is no question"):
        run(inspector, access, "record_quiz_answer", id="none", correct=True)
    with pytest.raises(InputError, match="key points"):
        run(inspector, access, "record_interview_answer", id=interview.id, num_points=99)


@pytest.mark.parametrize("name", FORK_BOMBS)
def test_fork_bombs_are_refused(name: str, inspector: Inspector, access: ExerciseAccess) -> None:
    report = grade(inspector, access, FORK_BOMBS[name])["report"]
    assert report["status"] == "error"
    assert "must not start processes" in report["message"]


def test_the_network_is_refused(inspector: Inspector, access: ExerciseAccess) -> None:
    text = "import socket\nsocket.create_connection(('127.0.0.1', 80))\n"
    assert "must not use the network" in grade(inspector, access, text)["report"]["message"]


def test_output_is_limited(inspector: Inspector, access: ExerciseAccess) -> None:
    text = "for _ in range(300):\n    print('x' * 100_000)\n" + get_exercise(NUMBER).solution
    report = grade(inspector, access, text)["report"]
    assert report["status"] == "passed"
    assert len(report["output"]) < 10_000
    assert "the rest is omitted" in report["output"]


def test_cancel_kills_an_infinite_loop(inspector: Inspector, access: ExerciseAccess, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    text = f"import os\nopen({str(pid_file)!r}, 'w').write(str(os.getpid()))\n" + LOOP
    job = QueryJob(exercise_access=access)
    query = QUERIES["grade_exercise"].model_validate(
        {"token": access.token, "number": NUMBER, "text": text, "version": ""}
    )
    errors: list[BaseException] = []

    def grade_in_thread() -> None:
        try:
            query.run(inspector, job)
        except QueryCancelled as error:
            errors.append(error)

    thread = threading.Thread(target=grade_in_thread)
    thread.start()
    assert wait_until(lambda: pid_file.exists() and pid_file.read_text() != "")
    with pytest.raises(InputError, match="another exercise is being graded"):
        grade(inspector, access, get_exercise(NUMBER).stub, file_version(Path("learn") / "04-attention-params.py"))
    job.cancelled.set()
    thread.join()
    assert errors
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


# Access


def post(url: str, name: str, params: Any, headers: dict[str, str] | None = None) -> tuple[int, str]:
    """Send a query and return the status and the body, or the error message."""
    connection = HTTPConnection("127.0.0.1", urlsplit(url).port or 0, timeout=120)
    try:
        sent = {"content-type": "application/json"} | (headers or {})
        connection.request("POST", f"/api/query/{name}", json.dumps(params), sent)
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")
    finally:
        connection.close()


@pytest.fixture
def url(inspector: Inspector, access: ExerciseAccess) -> Iterator[str]:
    executor = routes.QueryExecutor(inspector, access)
    policy = build_access_policy("127.0.0.1", None)
    app = build_app([routes.build_router(executor)], access_policy=policy, on_shutdown=[executor.close])
    with serve_in_thread(app, bind_socket("127.0.0.1", 0)) as address:
        yield address


RUN_QUERIES: dict[str, dict[str, Any]] = {
    "open_exercise": {},
    "save_exercise": {"text": "x = 1\n", "version": ""},
    "grade_exercise": {"text": "x = 1\n", "version": ""},
    "reset_exercise": {},
    "next_hint": {},
    "show_solution": {},
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", RUN_QUERIES)
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "http://attacker.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"host": "attacker.example"}, 421),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": "multipart/form-data; boundary=x"}, 415),
    ],
)
def test_requests_of_other_sites_are_refused(
    name: str, headers: dict[str, str], status: int, url: str, access: ExerciseAccess
) -> None:
    params = {"token": access.token, "number": NUMBER, **RUN_QUERIES[name]}  # even with the right token
    assert post(url, name, params, headers)[0] == status
    assert not Path("learn").exists()


@pytest.mark.parametrize("name", [*RUN_QUERIES, "record_quiz_answer", "record_interview_answer"])
def test_a_missing_or_wrong_token_is_refused(name: str, url: str, access: ExerciseAccess, tmp_path: Path) -> None:
    extra: dict[str, Any] = {"number": NUMBER, **RUN_QUERIES.get(name, {})}
    if name == "record_quiz_answer":
        extra = {"id": find_questions()[0].id, "correct": True}
    elif name == "record_interview_answer":
        extra = {"id": load_interview_questions()[0].id, "num_points": 0}
    assert post(url, name, extra)[0] == 400
    for token in ("", "0" * 64, access.token[:-1], access.token + "0", "é"):
        status, body = post(url, name, {**extra, "token": token})
        assert status == 400
        assert "without its token" in body
    assert not Path("learn").exists()
    assert not (tmp_path / "state").exists()


def test_no_response_contains_the_token(url: str, access: ExerciseAccess) -> None:
    for name in ("learner_progress", "lessons", "model_info"):
        status, body = post(url, name, {})
        assert status == 200
        assert access.token not in body
    assert access.token not in repr(access)


def test_the_page_with_the_token_can_run_code(url: str, access: ExerciseAccess) -> None:
    params = {"token": access.token, "number": NUMBER, "text": get_exercise(NUMBER).stub, "version": ""}
    status, body = post(url, "grade_exercise", params, {"origin": url, "sec-fetch-site": "same-origin"})
    assert status == 200
    assert "not_written" in body


def test_a_server_that_other_machines_can_reach_runs_no_code(inspector: Inspector, tmp_path: Path) -> None:
    with bind_socket("0.0.0.0", 0) as sock:
        access = build_exercise_access(sock, tmp_path / "learn")
    assert "0.0.0.0, which other machines can reach" in access.problem
    for name, params in RUN_QUERIES.items():
        with pytest.raises(InputError, match="does not run code"):
            run(inspector, access, name, number=NUMBER, **params)
    assert not (tmp_path / "learn").exists()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_a_loopback_server_runs_code(host: str) -> None:
    if host == "::1" and not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    with bind_socket(host, 0) as sock:
        assert build_exercise_access(sock).problem == ""


def test_a_notebook_widget_runs_no_code(inspector: Inspector) -> None:
    assert "cutaway learn" in run(inspector, ExerciseAccess(), "learner_progress")["problem"]
