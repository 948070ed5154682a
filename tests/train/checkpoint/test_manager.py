"""Checkpoints: the same bits come back, or it is said what is wrong; no kill and no full disk costs the old ones."""

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
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cutaway.errors import InputError
from cutaway.train.checkpoint import atomic_directory, manager, manifest
from cutaway.train.checkpoint.manager import CheckpointManager, CheckpointWriteError
from cutaway.train.checkpoint.manifest import LoadedCheckpoint

Groups = dict[str, dict[str, Tensor]]


def weights(seed: int) -> Groups:
    drawn = torch.Generator().manual_seed(seed)
    return {
        "model": {"a": torch.randn(5, 3, generator=drawn), "b": torch.randn(7, generator=drawn).bfloat16()},
        "optimizer": {"step": torch.tensor(float(seed)), "none": torch.zeros(0, 4)},
    }


def state(step: int) -> dict[str, object]:
    return {"step": step, "loss": 1 / (step + 3), "words": ["é", None, True]}


def put(where: CheckpointManager, step: int, best_eval_loss: float | None = None) -> Path:
    return where.save(step, weights(step), state(step), best_eval_loss=best_eval_loss)


def is_whole(found: LoadedCheckpoint | None, step: int) -> bool:
    """Everything that was saved at this step, to the bit."""
    if found is None or found.step != step or found.state != state(step):
        return False
    wanted = weights(step)
    return found.tensor_groups.keys() == wanted.keys() and all(
        same(found.tensor_groups[key], wanted[key]) for key in wanted
    )


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[key].dtype == other[key].dtype and one[key].shape == other[key].shape and bits(one[key]) == bits(other[key])
        for key in other
    )


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def silent(text: str) -> None:
    pytest.fail(f"nothing was to be said, and this was: {text}")


# What comes back


def test_every_kind_of_tensor_comes_back(tmp_path: Path) -> None:
    base = torch.randn(6, 4)
    dtypes = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "uint16"]
    odd = torch.tensor([math.nan, -0.0, math.inf, 5e-324])
    part = {
        **{name: (base * 9).to(getattr(torch, name)) for name in (*dtypes, "complex64", "float8_e4m3fn")},
        "shared": base,
        "shared again": base,
        "view": base[1:3],
        "turned": base.t(),
        "spread": base[:1].expand(3, 4),
        "scalar": torch.tensor(3, dtype=torch.int32),
        "empty": torch.zeros(0, 5, dtype=torch.bfloat16),
        "parameter": torch.nn.Parameter(base.clone()),
        "odd": odd,
    }
    where = CheckpointManager(tmp_path)
    where.save(7, {"all": part, "no_tensors": {}}, {})
    found = where.load_latest(log=silent)
    assert found is not None
    assert found.tensor_groups["no_tensors"] == {}
    assert same(found.tensor_groups["all"], part)
    found.tensor_groups["all"]["view"].zero_()  # what came back is the reader's own
    assert found.tensor_groups["all"]["shared"].any()
    assert base.any()


def test_a_large_group_takes_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "MAX_FILE_BYTES", 100)
    part = {f"{n}": torch.randn(n) for n in range(40)}
    folder = CheckpointManager(tmp_path).save(1, {"model": part}, {})
    assert len(list(folder.glob("model-*.safetensors"))) > 5
    found = CheckpointManager(tmp_path).load_latest(log=silent)
    assert found is not None
    assert same(found.tensor_groups["model"], part)


def test_the_state_comes_back_exactly(tmp_path: Path) -> None:
    drawn = random.Random(0)
    floats = [drawn.uniform(-1, 1) * 10.0 ** drawn.randint(-300, 300) for _ in range(500)] + [-0.0, 5e-324, 0.1 + 0.2]
    given = {"floats": floats, "big": 2**128 + 1, "text": 'ä\n"\ud800', "deep": {"a": [{}, [], [None, False]]}}
    given["limits"] = [math.inf, -math.inf]
    where = CheckpointManager(tmp_path)
    where.save(0, {}, given | {"nan": math.nan})
    found = where.load_latest(log=silent)
    assert found is not None
    assert math.isnan(found.state.pop("nan"))
    assert found.state == given
    assert [each.hex() for each in found.state["floats"]] == [each.hex() for each in floats]
    json.loads((found.path / manifest.STATE_FILE).read_text(), parse_constant=pytest.fail)  # JSON as others read it


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"a": {1: 2}}, r"state\.a has the key 1"),
        ({"a": [(1, 2)]}, r"state\.a\[0\] is a tuple"),
        ({"a": torch.zeros(1)}, r"state\.a is a Tensor"),
        ({"a": b""}, r"state\.a is a bytes"),
        ({"$float": "nan"}, r"the key '\$float'"),
    ],
)
def test_a_state_that_would_not_come_back_is_refused(tmp_path: Path, given: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        CheckpointManager(tmp_path / "new").save(1, {}, given)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("group", "name", "tensor"),
    [
        ("../up", "a", torch.zeros(1)),
        ("model", "a", torch.zeros(1, device="meta")),
        ("model", "a", torch.eye(2).to_sparse()),
        ("model", "a", torch.zeros(1, dtype=torch.complex128)),
        ("model", "a", torch.zeros(1, dtype=torch.uint8).view(torch.float8_e8m0fnu)),
        ("model", "__metadata__", torch.zeros(1)),
    ],
)
def test_tensors_that_would_not_come_back_are_refused(tmp_path: Path, group: str, name: str, tensor: Tensor) -> None:
    for how in (CheckpointManager(tmp_path).save, CheckpointManager(tmp_path).async_save):
        with pytest.raises(InputError):
            how(1, {group: {name: tensor}}, {})
    assert names(tmp_path) == []


def test_odd_arguments_are_refused(tmp_path: Path) -> None:
    for step in (-1, True, 1.0):
        with pytest.raises(InputError, match="step"):
            CheckpointManager(tmp_path).save(step, {}, {})  # type: ignore[arg-type]
    with pytest.raises(InputError, match="keep"):
        CheckpointManager(tmp_path, keep=0)


# Which are kept


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    where = CheckpointManager(tmp_path, keep=2)
    for step, best in enumerate([9.0, 3.0, 5.0, math.nan, 3.0, 4.0]):
        put(where, step, best_eval_loss=best)
    assert names(tmp_path) == [f"step-{step:09d}" for step in (1, 4, 5)]
    assert is_whole(where.load_latest(log=silent), 5)
    put(where, 6, best_eval_loss=2.0)
    put(where, 7)
    put(where, 8)
    assert names(tmp_path) == [f"step-{step:09d}" for step in (6, 7, 8)]


def test_a_run_that_went_back_goes_on_from_where_it_was_last(tmp_path: Path) -> None:
    where = CheckpointManager(tmp_path, keep=2)
    for step in (10, 20, 15):
        put(where, step)
    assert is_whole(CheckpointManager(tmp_path).load_latest(log=silent), 15)
    put(where, 18)
    assert names(tmp_path) == ["step-000000015", "step-000000018"]


def test_a_step_can_be_saved_again(tmp_path: Path) -> None:
    where = CheckpointManager(tmp_path)
    where.save(1, weights(5), state(5))
    put(where, 1)
    assert is_whole(where.load_latest(log=silent), 1)
    assert names(tmp_path) == ["step-000000001"]


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    others = [".hidden", "step-1", "step-0000000001", "step-00000000a", ".step-1.saving-00000000", ".x.saving-00000000"]
    for name in others:
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").touch()
    (tmp_path / ".step-000000001.saving-00000000").touch()  # a file, and we make folders
    (tmp_path / "step-000000003").touch()
    before = names(tmp_path)
    where = CheckpointManager(tmp_path, keep=1)
    assert where.load_latest(log=silent) is None
    (put(where, 1) / "notes.txt").write_text("mine, too")
    put(where, 2)
    with pytest.raises(CheckpointWriteError, match=r"step-000000003' was not saved: a file"):
        put(where, 3)
    put(where, 4)
    assert names(tmp_path) == sorted([*before, "step-000000001", "step-000000004"])


def test_there_is_nothing_to_find_where_nothing_was_saved(tmp_path: Path) -> None:
    assert CheckpointManager(tmp_path).load_latest(log=silent) is None
    assert CheckpointManager(tmp_path / "never").load_latest(log=silent) is None
    assert names(tmp_path) == []
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be read"):
        CheckpointManager(tmp_path / "file").load_latest(log=silent)
    with pytest.raises(CheckpointWriteError, match="was not saved"):
        put(CheckpointManager(tmp_path / "file"), 1)


# Damage


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


FILES = ["manifest.json", "optimizer.safetensors", "state.json", "model.safetensors"]


def swap(one: Path, other: Path) -> None:
    between = one.with_name("between")
    one.rename(between)
    other.rename(one)
    between.rename(other)


def replace_by_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


MODEL_FILE, OPTIMIZER_FILE = "model.safetensors", "optimizer.safetensors"
# What is done to the newest of three folders, which files are then named, and how.
DAMAGE: dict[str, tuple[Callable[[Path], object], list[str], str]] = {
    **{f"{file} cut": (lambda path, file=file: os.truncate(path / file, 40), [file], "") for file in FILES},
    **{f"{file} emptied": (lambda path, file=file: os.truncate(path / file, 0), [file], "") for file in FILES},
    **{f"{file} deleted": (lambda path, file=file: (path / file).unlink(), [file], "is missing") for file in FILES},
    **{f"{file} flipped": (lambda path, file=file: flip(path / file, 333), [file], "") for file in FILES},
    "garbage": (lambda path: (path / "manifest.json").write_bytes(b"\xff{"), ["manifest.json"], "is damaged"),
    "nothing": (lambda path: (path / "manifest.json").write_text("{}"), ["manifest.json"], "is damaged"),
    "extra": (lambda path: (path / "more").touch(), ["more"], "is not in the manifest"),
    "grown": (lambda path: os.truncate(path / "state.json", 9999), ["state.json"], "has 9,999 bytes instead of"),
    "swapped": (
        lambda path: swap(path / MODEL_FILE, path / OPTIMIZER_FILE),
        [MODEL_FILE, OPTIMIZER_FILE],
        "bytes instead of",
    ),
    "link": (lambda path: replace_by_link(path / "state.json"), ["state.json"], "is no plain file"),
    "folder": (lambda path: replace_by_folder(path / "state.json"), ["state.json"], "is no plain file"),
}


def named(report: str) -> list[str]:
    """The files that a report names."""
    return [part.split()[0] for part in report.split(": ", 1)[1].split("; ")[:-1]]


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_and_the_one_before_is_taken(tmp_path: Path, kind: str) -> None:
    damage, files, said = DAMAGE[kind]
    for step in (0, 1, 2):
        put(CheckpointManager(tmp_path, keep=3), step)
    damage(tmp_path / "step-000000002")
    reports: list[str] = []
    where = CheckpointManager(tmp_path, keep=3)
    assert is_whole(where.load_latest(log=reports.append), 1)
    [report] = reports
    assert report.startswith("checkpoint step-000000002: ")
    assert named(report) == files
    assert said in report
    put(where, 2)  # the run comes to that step again
    assert is_whole(CheckpointManager(tmp_path).load_latest(log=silent), 2)


def test_a_file_of_another_checkpoint_is_noticed_in_both(tmp_path: Path) -> None:
    one, two, three = (put(CheckpointManager(tmp_path, keep=3), step) for step in (1, 2, 3))
    swap(two / MODEL_FILE, three / MODEL_FILE)
    reports: list[str] = []
    found = CheckpointManager(tmp_path).load_latest(log=reports.append)
    assert is_whole(found, 1)
    assert found is not None
    assert found.path == one
    said = "model.safetensors differs from its sha256; it is not used"
    assert reports == [f"checkpoint {path.name}: {said}" for path in (three, two)]


def test_every_bit_of_every_file_counts(tmp_path: Path) -> None:
    folder = CheckpointManager(tmp_path).save(1, {"model": {"a": torch.ones(2)}}, {"a": 1}, best_eval_loss=1.0)
    for path in folder.iterdir():
        for bit in range(0, path.stat().st_size * 8, 3):
            flip(path, bit)
            assert path.name in str(manifest.read_checkpoint(folder)), bit
            flip(path, bit)
    assert isinstance(manifest.read_checkpoint(folder), LoadedCheckpoint)


def test_whole_folders_that_changed_places_are_noticed(tmp_path: Path) -> None:
    where = CheckpointManager(tmp_path)
    swap(put(where, 1), put(where, 2))
    reports: list[str] = []
    with pytest.raises(InputError, match=r"no checkpoint in .* is whole"):
        where.load_latest(log=reports.append)
    assert sorted(reports) == [
        "checkpoint step-000000001: manifest.json is that of step-000000002; it is not used",
        "checkpoint step-000000002: manifest.json is that of step-000000001; it is not used",
    ]


def test_if_none_is_whole_all_are_listed(tmp_path: Path) -> None:
    where = CheckpointManager(tmp_path)
    for step in (1, 2):
        (put(where, step) / FILES[step]).unlink()
    with pytest.raises(InputError) as raised:
        where.load_latest(log=lambda text: None)
    for part in ("step-000000001: optimizer.safetensors is missing", "step-000000002: state.json is missing"):
        assert part in str(raised.value)


def test_all_damaged_files_of_one_checkpoint_are_named(tmp_path: Path) -> None:
    folder = put(CheckpointManager(tmp_path), 1)
    flip(folder / "state.json", 9)
    flip(folder / "model.safetensors", 999)
    assert manifest.read_checkpoint(folder) == (
        "model.safetensors differs from its sha256; state.json differs from its sha256"
    )


def test_damaged_ones_do_not_push_whole_ones_out(tmp_path: Path) -> None:
    where = CheckpointManager(tmp_path, keep=2)
    for step in (1, 2, 3):
        put(where, step)
    flip(tmp_path / "step-000000003" / "model.safetensors", 999)
    again = CheckpointManager(tmp_path, keep=2)
    assert is_whole(again.load_latest(log=lambda text: None), 2)
    put(again, 4)
    assert names(tmp_path) == ["step-000000002", "step-000000003", "step-000000004"]


# Kills

CHILD = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from train.checkpoint.test_manager import CheckpointManager, put, state, weights
where = CheckpointManager(Path({directory!r}), keep=2)
for step in {steps}:
    {how}
where.wait_for_async_save()
"""


def killed(directory: Path, steps: list[int], failpoint: str, *, soon: bool = False) -> None:
    how = "where.async_save(step, weights(step), state(step))" if soon else "put(where, step)"
    code = CHILD.format(tests=str(Path(__file__).parents[2]), directory=str(directory), steps=steps, how=how)
    environment = os.environ | {"CUTAWAY_FAILPOINT": failpoint, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, check=False, capture_output=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()


@pytest.mark.parametrize(
    ("failpoint", "left"),
    [
        ("before-save", 2),
        ("after-file-write", 2),
        ("after-file-write:2", 2),
        ("after-file-write:3", 2),
        ("before-manifest", 2),
        ("before-rename", 3),  # it was whole: only its name was missing
        ("after-rename", 3),
        ("before-remove", 3),
        ("after-prune", 3),
        ("soon, after-file-write:2", 2),
        ("soon, after-rename", 3),
    ],
)
def test_a_kill_leaves_whole_checkpoints(tmp_path: Path, failpoint: str, left: int) -> None:
    put(CheckpointManager(tmp_path), 1)
    put(CheckpointManager(tmp_path), 2)
    killed(tmp_path, [3], failpoint.removeprefix("soon, "), soon=failpoint.startswith("soon, "))
    assert is_whole(CheckpointManager(tmp_path).load_latest(log=silent), left)
    assert not any(name.startswith(".") for name in names(tmp_path))
    where = CheckpointManager(tmp_path)
    put(where, 4)
    assert names(tmp_path) == [f"step-{left:09d}", "step-000000004"]
    assert is_whole(where.load_latest(log=silent), 4)


@pytest.mark.parametrize("failpoint", ["before-manifest", "before-rename", "between-renames", "after-rename"])
def test_a_kill_while_a_step_is_replaced_leaves_the_old_or_the_new(tmp_path: Path, failpoint: str) -> None:
    CheckpointManager(tmp_path).save(3, weights(9), state(9))
    killed(tmp_path, [3], failpoint)
    before = sorted(tmp_path.iterdir())
    found = CheckpointManager(tmp_path).load_latest(log=silent)
    assert found is not None
    if failpoint in ("before-manifest", "before-rename"):
        assert found.state == state(9)
        assert same(found.tensor_groups["model"], weights(9)["model"])
    else:
        assert is_whole(found, 3)
    assert before != sorted(tmp_path.iterdir())
    assert names(tmp_path) == ["step-000000003"]


@pytest.mark.nightly
def test_kills_at_random_instants_leave_whole_checkpoints(tmp_path: Path) -> None:
    """A run that saves without end is killed and goes on from what it finds, never further back than it had come."""
    code = CHILD.format(
        tests=str(Path(__file__).parents[2]),
        directory=str(tmp_path),
        steps="range(int(sys.argv[1]), 10**9)",
        how="put(where, step); print(step, flush=True)",
    )
    drawn, come = random.Random(0), 0
    for _ in range(25):
        child = subprocess.Popen([sys.executable, "-c", code, str(come + 1)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        said = child.stdout.readline()
        time.sleep(drawn.uniform(0, 0.1))
        child.kill()
        said += child.stdout.read()
        child.wait()
        last = int(said.split()[-1])
        found = CheckpointManager(tmp_path).load_latest(log=silent)
        assert found is not None
        assert found.step >= last
        assert is_whole(found, found.step)
        come = found.step
        assert not any(name.startswith(".") for name in names(tmp_path))


def test_the_next_save_clears_up_without_a_load(tmp_path: Path) -> None:
    killed(tmp_path, [1, 2, 3], "after-file-write:8")
    assert any(name.startswith(".") for name in names(tmp_path))
    put(CheckpointManager(tmp_path), 4)
    assert names(tmp_path) == ["step-000000002", "step-000000004"]


def test_the_old_one_comes_back_if_the_new_one_is_lost_between_renames(tmp_path: Path) -> None:
    folder = put(CheckpointManager(tmp_path), 1)
    lost = atomic_directory.hidden_path(folder, atomic_directory.SAVING)
    lost.mkdir()
    shutil.copy(folder / "manifest.json", lost)  # and none of the files that it lists
    folder.rename(atomic_directory.hidden_path(folder, atomic_directory.REPLACED))
    assert is_whole(CheckpointManager(tmp_path).load_latest(log=silent), 1)
    assert names(tmp_path) == ["step-000000001"]


def test_a_reader_leaves_alone_what_is_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(CheckpointManager(tmp_path), 1)
    seen: list[str] = []

    def look(name: str) -> None:
        if name == "before-manifest":
            assert is_whole(CheckpointManager(tmp_path).load_latest(log=silent), 1)
            seen.extend(names(tmp_path))

    monkeypatch.setattr(manager, "hit_failpoint", look)
    put(CheckpointManager(tmp_path), 2)
    assert len(seen) == 2
    assert is_whole(CheckpointManager(tmp_path).load_latest(log=silent), 2)


@pytest.mark.parametrize("value", ["after-file-write:0", "after-file-write:x", "after-file-write:"])
def test_a_failpoint_needs_a_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("CUTAWAY_FAILPOINT", value)
    with pytest.raises(InputError, match="CUTAWAY_FAILPOINT"):
        put(CheckpointManager(tmp_path), 1)


# A full disk

FULL = """
import resource, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import pytest, torch
from train.checkpoint.test_manager import (
    CheckpointManager, CheckpointWriteError, is_whole, names, put, silent, state
)
directory = Path({directory!r})
where = CheckpointManager(directory)
put(where, 1)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))  # a file of more is refused half-way
for how in (where.save, lambda *args: (where.async_save(*args), where.wait_for_async_save())):
    with pytest.raises(CheckpointWriteError, match="step-000000002' was not saved: File too large; make room"):
        how(2, {{"model": {{"a": torch.zeros(100_000)}}}}, state(2))
    assert names(directory) == ["step-000000001"]
    assert is_whole(where.load_latest(log=silent), 1)
put(where, 3)
assert is_whole(where.load_latest(log=silent), 3)
print("went on")
"""


def test_a_full_disk_leaves_the_old_ones_and_a_run_goes_on(tmp_path: Path) -> None:
    code = FULL.format(tests=str(Path(__file__).parents[2]), directory=str(tmp_path))
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert ended.stdout == "went on\n", ended.stderr


@pytest.mark.parametrize("place", ["write_file", "fsync_directory", "rename_into_place"])
def test_any_error_of_the_disk_leaves_the_old_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    put(CheckpointManager(tmp_path), 1)
    CheckpointManager(tmp_path).save(2, weights(7), state(7))
    calls = 0

    def fail(*given: object) -> None:
        nonlocal calls
        calls += 1
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(manager, place, fail)
        with pytest.raises(CheckpointWriteError, match="No space left"):
            put(CheckpointManager(tmp_path), 2)
    assert calls == 1
    assert names(tmp_path) == ["step-000000001", "step-000000002"]
    found = CheckpointManager(tmp_path).load_latest(log=silent)
    assert found is not None
    assert found.state == state(7)


def test_a_rename_that_fails_gives_the_old_one_its_name_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CheckpointManager(tmp_path).save(2, weights(7), state(7))
    plain = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if atomic_directory.SAVING in self.name:
            raise OSError(5, "Input/output error")
        return plain(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", fail)
        with pytest.raises(CheckpointWriteError, match="Input/output"):
            put(CheckpointManager(tmp_path), 2)
    assert names(tmp_path) == ["step-000000002"]


def test_what_cannot_be_removed_is_said_and_the_new_one_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(CheckpointManager(tmp_path, keep=1), 1)

    def fail(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError(1, "Operation not permitted")

    with monkeypatch.context() as patched:
        patched.setattr("shutil.rmtree", fail)
        with pytest.raises(CheckpointWriteError, match=r"is saved, but .* could not be removed"):
            put(CheckpointManager(tmp_path, keep=1), 2)
        reports: list[str] = []
        assert is_whole(CheckpointManager(tmp_path).load_latest(log=reports.append), 2)
        assert "could not be removed (Operation not permitted)" in reports[0]
    put(CheckpointManager(tmp_path, keep=1), 3)
    assert names(tmp_path) == ["step-000000003"]


# Meanwhile


def test_saving_soon_writes_the_same_bytes(tmp_path: Path) -> None:
    now, soon = CheckpointManager(tmp_path / "now"), CheckpointManager(tmp_path / "soon")
    given, kept = weights(1), state(1)
    folder = now.save(1, given, kept, best_eval_loss=0.5)
    soon.async_save(1, given, kept, best_eval_loss=0.5)
    for part in given.values():
        for tensor in part.values():
            tensor.fill_(9)  # the run goes on at once
    kept["loss"] = 9
    soon.wait_for_async_save()
    for path in folder.iterdir():
        assert path.read_bytes() == (tmp_path / "soon" / folder.name / path.name).read_bytes()


def test_saves_that_are_soon_follow_each_other(tmp_path: Path) -> None:
    where = CheckpointManager(tmp_path)
    for step in range(6):
        where.async_save(step, weights(step), state(step))
    assert is_whole(where.load_latest(log=silent), 5)
    put(where, 6)
    where.wait_for_async_save()
    assert names(tmp_path) == ["step-000000005", "step-000000006"]


def test_an_error_of_the_thread_is_raised_once_and_the_next_save_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = CheckpointManager(tmp_path)
    for next_call in ("wait_for_async_save", "async_save", "save"):
        with monkeypatch.context() as patched:
            patched.setattr(manager, "write_file", lambda *given: (_ for _ in ()).throw(OSError(28, "No space left")))
            where.async_save(1, weights(1), state(1))
            where._join_writer()
        if next_call == "save":  # this one is well: the error waits for who asks
            assert put(where, 3).exists()
            with pytest.raises(CheckpointWriteError, match="step-000000001"):
                where.wait_for_async_save()
        else:
            with pytest.raises(CheckpointWriteError, match="step-000000001"):
                where.wait_for_async_save() if next_call == "wait_for_async_save" else where.async_save(
                    2, weights(2), state(2)
                )
        where.wait_for_async_save()
    assert names(tmp_path) == ["step-000000002", "step-000000003"]


def test_a_process_that_ends_finishes_its_save(tmp_path: Path) -> None:
    code = CHILD.replace("where.wait_for_async_save()", "").format(
        tests=str(Path(__file__).parents[2]),
        directory=str(tmp_path),
        steps=[1],
        how="where.async_save(step, weights(step), state(step))",
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert is_whole(CheckpointManager(tmp_path).load_latest(log=silent), 1)
