"""Lock of a run directory: a second process is refused, a killed process leaves no lock, damaged run.json."""

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.tiny_runs import newest_checkpoint, read_metrics, run_digest, tiny_recipe_in

from cutaway.cli.views.run_status import load_run_status
from cutaway.errors import InputError
from cutaway.train.checkpoint.run_directory import RunDirectory
from cutaway.train.checkpoint.run_lock import LOCK_FILE, RunLock, is_locked
from cutaway.train.logging.callbacks import Callback
from cutaway.train.recipe import load_recipe
from cutaway.train.trainer.launch import prepare_trainer, resume, resume_trainer, train

HOLDER = """
import fcntl, os, socket, sys, time
file = open(sys.argv[1], "a+")
fcntl.flock(file, fcntl.LOCK_EX)
file.truncate(0)
file.write(f"{os.getpid()} {sys.argv[2] or socket.gethostname()}\\n")
file.flush()
print("locked", flush=True)
time.sleep(600)
"""


@pytest.fixture
def hold_lock() -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Start a process that has the lock of a run directory."""
    processes = []

    def start(directory: Path, host: str = "") -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", HOLDER, str(directory / LOCK_FILE), host]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert processes[-1].stdout is not None
        assert processes[-1].stdout.readline() == "locked\n"
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return tiny_recipe_in(tmp_path_factory.mktemp("data"), training={"preflight": False})


@pytest.fixture(scope="module")
def trained_run(recipe: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after step 6 of 12. The tests change copies of it."""
    run = tmp_path_factory.mktemp("trained") / "run"
    trainer = prepare_trainer(load_recipe(recipe), run, device="cpu")
    trainer.callback.on_step_end = lambda row, timing: trainer.stop_requested.set() if row["step"] == 6 else None
    trainer.train()
    return run


@pytest.fixture
def stopped_run(trained_run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained_run, tmp_path / "run")


def test_second_process_is_refused_until_the_first_one_ends(
    stopped_run: Path, recipe: dict[str, Any], tmp_path: Path, hold_lock: Callable[..., "subprocess.Popen[str]"]
) -> None:
    holder = hold_lock(stopped_run)
    before = {path: path.read_bytes() for path in stopped_run.rglob("*") if path.is_file()}
    assert is_locked(stopped_run)
    with pytest.raises(InputError, match=rf"being trained by process {holder.pid}, .* `kill {holder.pid}`"):
        resume(stopped_run, device="cpu")
    assert {path: path.read_bytes() for path in stopped_run.rglob("*") if path.is_file()} == before
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert not is_locked(stopped_run)
    resume(stopped_run, device="cpu")
    uninterrupted = train(recipe, tmp_path / "uninterrupted", device="cpu")
    assert run_digest(stopped_run) == run_digest(uninterrupted.directory)
    assert len([row for row in read_metrics(stopped_run) if "loss" in row]) == 12


def test_holder_on_another_host(stopped_run: Path, hold_lock: Callable[..., "subprocess.Popen[str]"]) -> None:
    holder = hold_lock(stopped_run, "node7")
    with pytest.raises(InputError, match=rf"being trained by process {holder.pid} on node7, .* stop it there"):
        RunLock(stopped_run).acquire()


def test_lock_file_that_is_still_empty(stopped_run: Path) -> None:
    with (stopped_run / LOCK_FILE).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="being trained by another process"):
            RunLock(stopped_run).acquire()


def test_lock_is_held_from_preparation_to_the_end_and_after_errors_released(
    recipe: dict[str, Any], tmp_path: Path
) -> None:
    trainer = prepare_trainer(load_recipe(recipe, ["training.max_steps=2"]), tmp_path / "run", device="cpu")
    assert is_locked(tmp_path / "run")
    with pytest.raises(InputError, match="another thread of this process"):
        resume_trainer(tmp_path / "run", device="cpu")
    trainer.train()
    assert is_locked(tmp_path / "run") is False
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(InputError, match="has no checkpoint") as caught:  # `caught` retains the frames of the error
        resume_trainer(tmp_path / "run", device="cpu")
    assert is_locked(tmp_path / "run") is False, caught


def test_reading_the_state_does_not_refuse_a_process_that_starts(stopped_run: Path) -> None:
    """`cutaway open` looks at the lock while `cutaway train` acquires it."""
    with (stopped_run / LOCK_FILE).open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        messages: list[str] = []
        original = fcntl.flock

        def flock(target: Any, operation: int) -> None:
            try:
                original(target, operation)
            except BlockingIOError:
                file.close()  # after the first attempt
                raise

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fcntl, "flock", flock)
            with RunLock(stopped_run, messages.append):
                assert is_locked(stopped_run)
    assert messages == []


def test_file_system_without_locks(recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    messages: list[str] = []
    monkeypatch.setattr(fcntl, "flock", flock)
    callback = Callback(on_message=messages.append)
    run = train(recipe, tmp_path / "run", overrides=["training.max_steps=1"], device="cpu", callback=callback)
    assert sum("has no file locks (No locks available)" in message for message in messages) == 1
    assert run.is_training() is None


def test_run_whose_checkpoints_were_removed_is_not_restarted(stopped_run: Path) -> None:
    before = (stopped_run / "metrics.jsonl").read_bytes()
    shutil.rmtree(stopped_run / "checkpoints")
    message = r"checkpoints' has no checkpoint, but the run has logged 6 steps and saves one every 4 steps"
    with pytest.raises(InputError, match=message):
        resume(stopped_run, device="cpu")
    assert (stopped_run / "metrics.jsonl").read_bytes() == before
    (stopped_run / "checkpoints").mkdir()  # 6 steps: a process may be killed while it writes the checkpoint of step 4
    messages: list[str] = []
    trainer = resume_trainer(stopped_run, device="cpu", callback=Callback(on_message=messages.append))
    assert trainer.global_step == 0
    assert "the run had no checkpoint yet; it starts at step 0 again, and 6 logged steps are removed" in messages


def test_run_with_a_model_is_not_restarted(recipe: dict[str, Any], tmp_path: Path) -> None:
    run = train(recipe, tmp_path / "run", overrides=["training.max_steps=2"], device="cpu")
    shutil.rmtree(newest_checkpoint(run.directory))
    with pytest.raises(InputError, match="has no checkpoint"):
        resume(run.directory, device="cpu")
    assert run.model_directory.exists()


DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no recipe": (lambda data: data.pop("recipe"), "recipe: this key is required"),
    "no fingerprint": (lambda data: data.pop("data_fingerprint"), "data_fingerprint: this key is required"),
    "unknown key": (lambda data: data.update(origin={}), "origin: "),
    "unknown key of base": (lambda data: data.update(base_checkpoint={"origin": 1}), "base_checkpoint.origin: "),
    "base is a list": (lambda data: data.update(base_checkpoint=[1]), "base_checkpoint: "),
    "type in base": (lambda data: data.update(base_checkpoint={"family": 7}), "base_checkpoint.family: "),
    "recipe is a name": (lambda data: data.update(recipe="sft"), "recipe: "),
    "recipe is a list": (lambda data: data.update(recipe=[1]), "recipe: "),
    "number as fingerprint": (lambda data: data.update(data_fingerprint=3), "data_fingerprint: "),
    "wrong step count": (
        lambda data: data["recipe"]["training"].update(max_steps="many"),
        "recipe: training.max_steps",
    ),
    "unknown key of recipe": (lambda data: data["recipe"].update(origin=1), "recipe: unknown key 'origin'"),
    "other format": (lambda data: data.update(format=2), "does not have the supported format"),
}


TEXTS = {
    "empty": "",
    "text": "hello",
    "list": "[1]",
    "null": "null",
    "nested": "[" * 100_000,
    "infinite": "1e999",
    "number of 5,000 digits": "9" * 5_000,
}


@pytest.mark.parametrize("name", [*DAMAGES, *TEXTS, "truncated", "UTF-16"])
def test_damaged_run_file_is_an_error_in_one_sentence(name: str, stopped_run: Path) -> None:
    path = stopped_run / "run.json"
    text, message = path.read_text(), "restore it, or start a new run"
    if name in DAMAGES:
        damage, message = DAMAGES[name]
        data = json.loads(text)
        damage(data)
        path.write_text(json.dumps(data))
    elif name == "truncated":
        path.write_text(text[: len(text) // 2])
    else:
        path.write_bytes(text.encode("utf-16") if name == "UTF-16" else TEXTS[name].encode())
    for read in (RunDirectory.open, load_run_status, resume):
        with pytest.raises(InputError) as caught:
            read(stopped_run)
        assert message in str(caught.value)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_resume_with_another_number_of_threads_is_said(stopped_run: Path) -> None:
    state = newest_checkpoint(stopped_run) / "state.json"
    assert json.loads(state.read_text())["num_threads"] >= 1
    trainer = resume_trainer(stopped_run, device="cpu")
    assert trainer.num_threads is not None
    trainer.lock.release()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.get_num_threads", lambda: 77)
        messages: list[str] = []
        resume_trainer(stopped_run, device="cpu", callback=Callback(on_message=messages.append)).lock.release()
    assert any("continues with 77 CPU threads instead of" in message for message in messages)
