"""Checkpoints: bit-exact round trips, detection of damage, and safety against kills and full disks."""

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent import futures
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cutaway.errors import InputError
from cutaway.train.checkpoint import atomic_directory, manifest
from cutaway.train.checkpoint import checkpoint_manager as manager
from cutaway.train.checkpoint.checkpoint_manager import CheckpointManager, CheckpointWriteError
from cutaway.train.checkpoint.manifest import LoadedCheckpoint, TrainerState

TensorGroups = dict[str, dict[str, Tensor]]
RunForked = Callable[..., tuple[int, str]]


def build_tensors(seed: int) -> TensorGroups:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model": {"a": torch.randn(5, 3, generator=generator), "b": torch.randn(7, generator=generator).bfloat16()},
        "optimizer": {"step": torch.tensor(float(seed)), "none": torch.zeros(0, 4)},
    }


def build_state(step: int, seed: int | None = None, best_eval_loss: float | None = None) -> TrainerState:
    fingerprint = f"é {step if seed is None else seed}"
    return TrainerState(step=step, data_fingerprint=fingerprint, best_eval_loss=best_eval_loss, metrics_bytes=3)


def save_step(checkpoint_manager: CheckpointManager, step: int, best_eval_loss: float | None = None) -> Path:
    return checkpoint_manager.save(build_tensors(step), build_state(step, best_eval_loss=best_eval_loss))


def equals_saved(checkpoint: LoadedCheckpoint | None, step: int) -> bool:
    """Whether a checkpoint is bit-identical to what `save_step` saved."""
    if checkpoint is None:
        return False
    if checkpoint.state != build_state(step, best_eval_loss=checkpoint.state.best_eval_loss):
        return False
    expected = build_tensors(step)
    return checkpoint.tensor_groups.keys() == expected.keys() and all(
        have_equal_bits(checkpoint.tensor_groups[group], expected[group]) for group in expected
    )


def have_equal_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[key].dtype == other[key].dtype
        and one[key].shape == other[key].shape
        and to_bytes(one[key]) == to_bytes(other[key])
        for key in other
    )


def to_bytes(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def list_names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def fail_on_message(text: str) -> None:
    pytest.fail(f"unexpected message: {text}")


# Round trips


def test_every_kind_of_tensor_is_restored(tmp_path: Path) -> None:
    base = torch.randn(6, 4)
    dtypes = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "uint16"]
    special_values = torch.tensor([math.nan, -0.0, math.inf, 5e-324])
    tensors = {
        **{name: (base * 9).to(getattr(torch, name)) for name in (*dtypes, "complex64", "float8_e4m3fn")},
        "shared": base,
        "shared again": base,
        "view": base[1:3],
        "transposed": base.t(),
        "expanded": base[:1].expand(3, 4),
        "scalar": torch.tensor(3, dtype=torch.int32),
        "empty": torch.zeros(0, 5, dtype=torch.bfloat16),
        "parameter": torch.nn.Parameter(base.clone()),
        "special values": special_values,
    }
    checkpoint_manager = CheckpointManager(tmp_path)
    checkpoint_manager.save({"all": tensors, "no_tensors": {}}, build_state(7))
    checkpoint = checkpoint_manager.load_latest(log=fail_on_message)
    assert checkpoint is not None
    assert checkpoint.tensor_groups["no_tensors"] == {}
    assert have_equal_bits(checkpoint.tensor_groups["all"], tensors)
    checkpoint.tensor_groups["all"]["view"].zero_()  # loaded tensors do not share memory
    assert checkpoint.tensor_groups["all"]["shared"].any()
    assert base.any()


def test_large_group_is_split_into_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "MAX_FILE_BYTES", 100)
    tensors = {f"{n}": torch.randn(n) for n in range(40)}
    directory = CheckpointManager(tmp_path).save({"model": tensors}, build_state(1))
    assert len(list(directory.glob("model-*.safetensors"))) > 5
    checkpoint = CheckpointManager(tmp_path).load_latest(log=fail_on_message)
    assert checkpoint is not None
    assert have_equal_bits(checkpoint.tensor_groups["model"], tensors)


def test_state_is_restored_exactly(tmp_path: Path) -> None:
    rng = random.Random(0)
    floats = [rng.uniform(-1, 1) * 10.0 ** rng.randint(-300, 300) for _ in range(500)]
    for value in (*floats, -0.0, 5e-324, 0.1 + 0.2, math.inf, -math.inf, math.nan, None):
        state = build_state(2**40, best_eval_loss=value)
        restored = TrainerState.model_validate_json(state.model_dump_json())
        assert repr(restored) == repr(state)
    directory = CheckpointManager(tmp_path).save({}, build_state(0, best_eval_loss=math.nan))
    json.loads((directory / manifest.STATE_FILE).read_text(), parse_constant=pytest.fail)  # standard JSON
    checkpoint = CheckpointManager(tmp_path).load_latest(log=fail_on_message)
    assert checkpoint is not None
    assert math.isnan(checkpoint.state.best_eval_loss or 0)


# Pruning


def test_newest_and_best_are_kept(tmp_path: Path) -> None:
    checkpoint_manager = CheckpointManager(tmp_path, keep=2)
    for step, best in enumerate([9.0, 3.0, 5.0, math.nan, 3.0, 4.0]):
        save_step(checkpoint_manager, step, best_eval_loss=best)
    assert list_names(tmp_path) == [f"step-{step:09d}" for step in (1, 4, 5)]
    assert equals_saved(checkpoint_manager.load_latest(log=fail_on_message), 5)
    save_step(checkpoint_manager, 6, best_eval_loss=2.0)
    save_step(checkpoint_manager, 7)
    save_step(checkpoint_manager, 8)
    assert list_names(tmp_path) == [f"step-{step:09d}" for step in (6, 7, 8)]


def test_latest_is_the_last_written_not_the_highest_step(tmp_path: Path) -> None:
    checkpoint_manager = CheckpointManager(tmp_path, keep=2)
    for step in (10, 20, 15):
        save_step(checkpoint_manager, step)
    assert equals_saved(CheckpointManager(tmp_path).load_latest(log=fail_on_message), 15)
    save_step(checkpoint_manager, 18)
    assert list_names(tmp_path) == ["step-000000015", "step-000000018"]


def test_step_can_be_saved_again(tmp_path: Path) -> None:
    checkpoint_manager = CheckpointManager(tmp_path)
    checkpoint_manager.save(build_tensors(5), build_state(1, 5))
    save_step(checkpoint_manager, 1)
    assert equals_saved(checkpoint_manager.load_latest(log=fail_on_message), 1)
    assert list_names(tmp_path) == ["step-000000001"]


def test_foreign_files_are_kept(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("note")
    others = [".hidden", "step-1", "step-0000000001", "step-00000000a", ".step-1.saving-00000000", ".x.saving-00000000"]
    for name in others:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    (tmp_path / ".step-000000001.saving-00000000").touch()  # a file, not a directory
    (tmp_path / "step-000000003").touch()
    before = list_names(tmp_path)
    checkpoint_manager = CheckpointManager(tmp_path, keep=1)
    assert checkpoint_manager.load_latest(log=fail_on_message) is None
    (save_step(checkpoint_manager, 1) / "notes.txt").write_text("another note")
    save_step(checkpoint_manager, 2)
    with pytest.raises(CheckpointWriteError, match=r"step-000000003': the target path is a file"):
        save_step(checkpoint_manager, 3)
    save_step(checkpoint_manager, 4)
    assert list_names(tmp_path) == sorted([*before, "step-000000001", "step-000000004"])


def test_load_without_checkpoints(tmp_path: Path) -> None:
    assert CheckpointManager(tmp_path).load_latest(log=fail_on_message) is None
    assert CheckpointManager(tmp_path / "never").load_latest(log=fail_on_message) is None
    assert list_names(tmp_path) == []
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot read"):
        CheckpointManager(tmp_path / "file").load_latest(log=fail_on_message)
    with pytest.raises(CheckpointWriteError, match="could not save"):
        save_step(CheckpointManager(tmp_path / "file"), 1)


# Damage


def flip_bit(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


FILES = ["manifest.json", "optimizer.safetensors", "state.json", "model.safetensors"]


def swap(one: Path, other: Path) -> None:
    temporary = one.with_name("temporary")
    one.rename(temporary)
    other.rename(one)
    temporary.rename(other)


def replace_by_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def replace_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


MODEL_FILE, OPTIMIZER_FILE = "model.safetensors", "optimizer.safetensors"
# Kind of damage to the newest of three checkpoints: the damage, the files that are reported, and part of the message
DAMAGE: dict[str, tuple[Callable[[Path], object], list[str], str]] = {
    **{f"{file} truncated": (lambda path, file=file: os.truncate(path / file, 40), [file], "") for file in FILES},
    **{f"{file} emptied": (lambda path, file=file: os.truncate(path / file, 0), [file], "") for file in FILES},
    **{f"{file} deleted": (lambda path, file=file: (path / file).unlink(), [file], "is missing") for file in FILES},
    **{f"{file} flipped": (lambda path, file=file: flip_bit(path / file, 333), [file], "") for file in FILES},
    "invalid": (lambda path: (path / "manifest.json").write_bytes(b"\xff{"), ["manifest.json"], "is damaged"),
    "empty object": (lambda path: (path / "manifest.json").write_text("{}"), ["manifest.json"], "is damaged"),
    "extra": (lambda path: (path / "more").touch(), ["more"], "is not in the manifest"),
    "grown": (lambda path: os.truncate(path / "state.json", 9999), ["state.json"], "has 9,999 bytes instead of"),
    "swapped": (
        lambda path: swap(path / MODEL_FILE, path / OPTIMIZER_FILE),
        [MODEL_FILE, OPTIMIZER_FILE],
        "bytes instead of",
    ),
    "link": (lambda path: replace_by_link(path / "state.json"), ["state.json"], "is not a regular file"),
    "directory": (lambda path: replace_by_directory(path / "state.json"), ["state.json"], "is not a regular file"),
}


def reported_files(message: str) -> list[str]:
    """The files that a message names."""
    return [part.split()[0] for part in message.split(": ", 1)[1].split("; ")[:-1]]


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_reported_and_the_previous_checkpoint_used(tmp_path: Path, kind: str) -> None:
    damage, files, expected = DAMAGE[kind]
    for step in (0, 1, 2):
        save_step(CheckpointManager(tmp_path, keep=3), step)
    damage(tmp_path / "step-000000002")
    messages: list[str] = []
    checkpoint_manager = CheckpointManager(tmp_path, keep=3)
    assert equals_saved(checkpoint_manager.load_latest(log=messages.append), 1)
    [message] = messages
    assert message.startswith("checkpoint step-000000002: ")
    assert reported_files(message) == files
    assert expected in message
    save_step(checkpoint_manager, 2)  # the run reaches that step again
    assert equals_saved(CheckpointManager(tmp_path).load_latest(log=fail_on_message), 2)


def test_swapped_files_of_two_checkpoints_are_detected(tmp_path: Path) -> None:
    one, two, three = (save_step(CheckpointManager(tmp_path, keep=3), step) for step in (1, 2, 3))
    swap(two / MODEL_FILE, three / MODEL_FILE)
    messages: list[str] = []
    checkpoint = CheckpointManager(tmp_path).load_latest(log=messages.append)
    assert equals_saved(checkpoint, 1)
    assert checkpoint is not None
    assert checkpoint.path == one
    problem = "model.safetensors does not match its SHA-256; it is skipped"
    assert messages == [f"checkpoint {path.name}: {problem}" for path in (three, two)]


@pytest.mark.nightly
def test_every_flipped_bit_is_detected(tmp_path: Path) -> None:
    directory = CheckpointManager(tmp_path).save({"model": {"a": torch.ones(2)}}, build_state(1, best_eval_loss=1.0))
    for path in directory.iterdir():
        for bit in range(0, path.stat().st_size * 8, 3):
            flip_bit(path, bit)
            assert path.name in str(manifest.read_checkpoint(directory)), bit
            flip_bit(path, bit)
    assert isinstance(manifest.read_checkpoint(directory), LoadedCheckpoint)


def test_swapped_directories_are_detected(tmp_path: Path) -> None:
    checkpoint_manager = CheckpointManager(tmp_path)
    swap(save_step(checkpoint_manager, 1), save_step(checkpoint_manager, 2))
    messages: list[str] = []
    with pytest.raises(InputError, match=r"no checkpoint in .* is valid"):
        checkpoint_manager.load_latest(log=messages.append)
    assert sorted(messages) == [
        "checkpoint step-000000001: manifest.json belongs to step-000000002; it is skipped",
        "checkpoint step-000000002: manifest.json belongs to step-000000001; it is skipped",
    ]


def test_error_lists_all_checkpoints_if_none_is_valid(tmp_path: Path) -> None:
    checkpoint_manager = CheckpointManager(tmp_path)
    for step in (1, 2):
        (save_step(checkpoint_manager, step) / FILES[step]).unlink()
    with pytest.raises(InputError) as error_info:
        checkpoint_manager.load_latest(log=lambda text: None)
    for part in ("step-000000001: optimizer.safetensors is missing", "step-000000002: state.json is missing"):
        assert part in str(error_info.value)


def test_all_damaged_files_of_a_checkpoint_are_reported(tmp_path: Path) -> None:
    directory = save_step(CheckpointManager(tmp_path), 1)
    flip_bit(directory / "state.json", 9)
    flip_bit(directory / "model.safetensors", 999)
    assert manifest.read_checkpoint(directory) == (
        "model.safetensors does not match its SHA-256; state.json does not match its SHA-256"
    )


def test_damaged_checkpoints_do_not_count_in_pruning(tmp_path: Path) -> None:
    checkpoint_manager = CheckpointManager(tmp_path, keep=2)
    for step in (1, 2, 3):
        save_step(checkpoint_manager, step)
    flip_bit(tmp_path / "step-000000003" / "model.safetensors", 999)
    resumed = CheckpointManager(tmp_path, keep=2)
    assert equals_saved(resumed.load_latest(log=lambda text: None), 2)
    save_step(resumed, 4)
    assert list_names(tmp_path) == ["step-000000002", "step-000000003", "step-000000004"]


# Kills

CHILD_CODE = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from train.checkpoint.test_checkpoint_manager import CheckpointManager, build_state, build_tensors, save_step
checkpoint_manager = CheckpointManager(Path({directory!r}), keep=2)
for step in {steps}:
    {save}
checkpoint_manager.wait_for_async_save()
"""


def save_in_killed_child(
    run_forked: RunForked, directory: Path, steps: list[int], failpoint: str, *, is_async: bool = False
) -> None:
    save = (
        "checkpoint_manager.async_save(build_tensors(step), build_state(step))"
        if is_async
        else "save_step(checkpoint_manager, step)"
    )
    tests = str(Path(__file__).parents[2])
    code = CHILD_CODE.format(tests=tests, directory=str(directory), steps=steps, save=save)
    exit_code, output = run_forked(code, CUTAWAY_FAILPOINT=failpoint)
    assert exit_code == -signal.SIGKILL, output


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("failpoint", "expected"),
    [
        ("before-save", 2),
        ("after-file-write", 2),
        ("after-file-write:2", 2),
        ("after-file-write:3", 2),
        ("before-manifest", 2),
        ("before-rename", 3),  # it was complete: only the rename was missing
        ("after-rename", 3),
        ("before-remove", 3),
        ("after-prune", 3),
        ("async, after-file-write:2", 2),
        ("async, after-rename", 3),
    ],
)
def test_kill_leaves_valid_checkpoints(tmp_path: Path, failpoint: str, expected: int, run_forked: RunForked) -> None:
    save_step(CheckpointManager(tmp_path), 1)
    save_step(CheckpointManager(tmp_path), 2)
    is_async = failpoint.startswith("async, ")
    save_in_killed_child(run_forked, tmp_path, [3], failpoint.removeprefix("async, "), is_async=is_async)
    assert equals_saved(CheckpointManager(tmp_path).load_latest(log=fail_on_message), expected)
    assert not any(name.startswith(".") for name in list_names(tmp_path))
    checkpoint_manager = CheckpointManager(tmp_path)
    save_step(checkpoint_manager, 4)
    assert list_names(tmp_path) == [f"step-{expected:09d}", "step-000000004"]
    assert equals_saved(checkpoint_manager.load_latest(log=fail_on_message), 4)


@pytest.mark.sample(1)
@pytest.mark.parametrize("failpoint", ["before-manifest", "before-rename", "between-renames", "after-rename"])
def test_kill_during_replacement_leaves_the_old_or_the_new(
    tmp_path: Path, failpoint: str, run_forked: RunForked
) -> None:
    CheckpointManager(tmp_path).save(build_tensors(9), build_state(3, 9))
    save_in_killed_child(run_forked, tmp_path, [3], failpoint)
    before = sorted(tmp_path.iterdir())
    checkpoint = CheckpointManager(tmp_path).load_latest(log=fail_on_message)
    assert checkpoint is not None
    if failpoint in ("before-manifest", "before-rename"):
        assert checkpoint.state == build_state(3, 9)
        assert have_equal_bits(checkpoint.tensor_groups["model"], build_tensors(9)["model"])
    else:
        assert equals_saved(checkpoint, 3)
    assert before != sorted(tmp_path.iterdir())
    assert list_names(tmp_path) == ["step-000000003"]


@pytest.mark.nightly
def test_kills_at_random_times_leave_valid_checkpoints(tmp_path: Path) -> None:
    """A process that saves continuously is killed and resumes, never from an older checkpoint than it had written."""
    code = CHILD_CODE.format(
        tests=str(Path(__file__).parents[2]),
        directory=str(tmp_path),
        steps="range(int(sys.argv[1]), 10**9)",
        save="save_step(checkpoint_manager, step); print(step, flush=True)",
    )
    rng, last_step = random.Random(0), 0
    for _ in range(25):
        child = subprocess.Popen([sys.executable, "-c", code, str(last_step + 1)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        output = child.stdout.readline()
        time.sleep(rng.uniform(0, 0.1))
        child.kill()
        output += child.stdout.read()
        child.wait()
        last_saved = int(output.split()[-1])
        checkpoint = CheckpointManager(tmp_path).load_latest(log=fail_on_message)
        assert checkpoint is not None
        assert checkpoint.state.step >= last_saved
        assert equals_saved(checkpoint, checkpoint.state.step)
        last_step = checkpoint.state.step
        assert not any(name.startswith(".") for name in list_names(tmp_path))


def test_next_save_removes_partial_saves(tmp_path: Path, run_forked: RunForked) -> None:
    save_in_killed_child(run_forked, tmp_path, [1, 2, 3], "after-file-write:8")
    assert any(name.startswith(".") for name in list_names(tmp_path))
    save_step(CheckpointManager(tmp_path), 4)
    assert list_names(tmp_path) == ["step-000000002", "step-000000004"]


def test_old_checkpoint_is_recovered_if_the_new_one_is_incomplete(tmp_path: Path) -> None:
    directory = save_step(CheckpointManager(tmp_path), 1)
    incomplete = atomic_directory.hidden_path(directory, atomic_directory.SAVING)
    incomplete.mkdir()
    shutil.copy(directory / "manifest.json", incomplete)  # without the files that it lists
    directory.rename(atomic_directory.hidden_path(directory, atomic_directory.REPLACED))
    assert equals_saved(CheckpointManager(tmp_path).load_latest(log=fail_on_message), 1)
    assert list_names(tmp_path) == ["step-000000001"]


def test_loading_does_not_remove_a_save_in_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_step(CheckpointManager(tmp_path), 1)
    names: list[str] = []

    def load_during_save(failpoint: str) -> None:
        if failpoint == "before-manifest":
            assert equals_saved(CheckpointManager(tmp_path).load_latest(log=fail_on_message), 1)
            names.extend(list_names(tmp_path))

    monkeypatch.setattr(manager, "hit_failpoint", load_during_save)
    save_step(CheckpointManager(tmp_path), 2)
    assert len(names) == 2
    assert equals_saved(CheckpointManager(tmp_path).load_latest(log=fail_on_message), 2)


# Full disk

FULL_DISK_CODE = """
import resource, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import pytest, torch
from train.checkpoint.test_checkpoint_manager import (
    CheckpointManager, CheckpointWriteError, build_state, equals_saved, fail_on_message, list_names, save_step
)
directory = Path({directory!r})
checkpoint_manager = CheckpointManager(directory)
save_step(checkpoint_manager, 1)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))  # writing larger files fails
def async_save(*args):
    checkpoint_manager.async_save(*args)
    checkpoint_manager.wait_for_async_save()
for save in (checkpoint_manager.save, async_save):
    with pytest.raises(CheckpointWriteError, match="step-000000002': File too large. Earlier checkpoints are kept"):
        save({{"model": {{"a": torch.zeros(100_000)}}}}, build_state(2))
    assert list_names(directory) == ["step-000000001"]
    assert equals_saved(checkpoint_manager.load_latest(log=fail_on_message), 1)
save_step(checkpoint_manager, 3)
assert equals_saved(checkpoint_manager.load_latest(log=fail_on_message), 3)
print("finished")
"""


def test_full_disk_keeps_old_checkpoints_and_later_saves_succeed(tmp_path: Path, run_forked: RunForked) -> None:
    code = FULL_DISK_CODE.format(tests=str(Path(__file__).parents[2]), directory=str(tmp_path))
    assert run_forked(code) == (0, "finished\n")


@pytest.mark.parametrize("function", ["write_file", "fsync_directory", "rename_into_place"])
def test_write_error_keeps_old_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    save_step(CheckpointManager(tmp_path), 1)
    CheckpointManager(tmp_path).save(build_tensors(7), build_state(2, 7))
    calls = 0

    def fail(*args: object) -> None:
        nonlocal calls
        calls += 1
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(manager, function, fail)
        with pytest.raises(CheckpointWriteError, match="No space left"):
            save_step(CheckpointManager(tmp_path), 2)
    assert calls == 1
    assert list_names(tmp_path) == ["step-000000001", "step-000000002"]
    checkpoint = CheckpointManager(tmp_path).load_latest(log=fail_on_message)
    assert checkpoint is not None
    assert checkpoint.state == build_state(2, 7)


def test_failed_rename_restores_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CheckpointManager(tmp_path).save(build_tensors(7), build_state(2, 7))
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if atomic_directory.SAVING in self.name:
            raise OSError(5, "Input/output error")
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail)
        with pytest.raises(CheckpointWriteError, match="Input/output"):
            save_step(CheckpointManager(tmp_path), 2)
    assert list_names(tmp_path) == ["step-000000002"]


def test_failed_removal_is_reported_and_the_new_checkpoint_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_step(CheckpointManager(tmp_path, keep=1), 1)

    def fail(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError(1, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", fail)
        with pytest.raises(CheckpointWriteError, match=r"saved .*, but could not remove"):
            save_step(CheckpointManager(tmp_path, keep=1), 2)
        messages: list[str] = []
        assert equals_saved(CheckpointManager(tmp_path).load_latest(log=messages.append), 2)
        assert messages[0].startswith("could not remove ")
        assert messages[0].endswith("(Operation not permitted)")
    save_step(CheckpointManager(tmp_path, keep=1), 3)
    assert list_names(tmp_path) == ["step-000000003"]


# Asynchronous saves


def test_async_save_writes_the_same_bytes(tmp_path: Path) -> None:
    sync_manager, async_manager = CheckpointManager(tmp_path / "sync"), CheckpointManager(tmp_path / "async")
    tensors, state = build_tensors(1), build_state(1, best_eval_loss=0.5)
    directory = sync_manager.save(tensors, state)
    async_manager.async_save(tensors, state)
    for group in tensors.values():
        for tensor in group.values():
            tensor.fill_(9)  # training continues during the save
    async_manager.wait_for_async_save()
    for path in directory.iterdir():
        assert path.read_bytes() == (tmp_path / "async" / directory.name / path.name).read_bytes()


def test_consecutive_async_saves(tmp_path: Path) -> None:
    checkpoint_manager = CheckpointManager(tmp_path)
    for step in range(6):
        checkpoint_manager.async_save(build_tensors(step), build_state(step))
    assert equals_saved(checkpoint_manager.load_latest(log=fail_on_message), 5)
    save_step(checkpoint_manager, 6)
    checkpoint_manager.wait_for_async_save()
    assert list_names(tmp_path) == ["step-000000005", "step-000000006"]


def test_async_error_is_raised_once_and_the_next_save_succeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint_manager = CheckpointManager(tmp_path)
    for next_call in ("wait_for_async_save", "async_save", "save"):
        with monkeypatch.context() as patch:
            patch.setattr(manager, "write_file", lambda *args: (_ for _ in ()).throw(OSError(28, "No space left")))
            checkpoint_manager.async_save(build_tensors(1), build_state(1))
            futures.wait(checkpoint_manager._pending_saves)
        if next_call == "save":  # a synchronous save succeeds; the error is raised by wait_for_async_save
            assert save_step(checkpoint_manager, 3).exists()
            with pytest.raises(CheckpointWriteError, match="step-000000001"):
                checkpoint_manager.wait_for_async_save()
        else:
            args = () if next_call == "wait_for_async_save" else (build_tensors(2), build_state(2))
            with pytest.raises(CheckpointWriteError, match="step-000000001"):
                getattr(checkpoint_manager, next_call)(*args)
        checkpoint_manager.wait_for_async_save()
    assert list_names(tmp_path) == ["step-000000002", "step-000000003"]


def test_async_save_completes_before_the_process_exits(tmp_path: Path) -> None:
    code = CHILD_CODE.replace("checkpoint_manager.wait_for_async_save()", "").format(
        tests=str(Path(__file__).parents[2]),
        directory=str(tmp_path),
        steps=[1],
        save="checkpoint_manager.async_save(build_tensors(step), build_state(step))",
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert equals_saved(CheckpointManager(tmp_path).load_latest(log=fail_on_message), 1)
