"""Snapshots: the weights of a model at several steps of a run, for inspection. Runs are resumed from checkpoints only.

A snapshot is one safetensors file. It is written under a hidden name and renamed, so every visible one is complete.
"""

import re
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load as parse_safetensors
from safetensors.torch import save as serialize_safetensors
from torch import Tensor

from cutaway.train.checkpoint.atomic_directory import fsync_directory, list_directory, write_file
from cutaway.train.checkpoint.failpoints import hit_failpoint
from cutaway.train.checkpoint.manifest import checkpoint_name
from cutaway.train.distributed.dtensor import copy_to_cpu

DEFAULT_NUM_SNAPSHOTS = 12
MAX_DEFAULT_PARAMETERS = 30_000_000
"""Models with more parameters have no snapshots by default. At this size, 12 snapshots in fp32 have 1.4 GB."""
FIRST_STEP_RATIO = 0.01
"""The first snapshot after step 0 is at this fraction of all steps."""
_NAME_PATTERN = re.compile(r"step-[0-9]{9,}\.safetensors")


def resolve_num_snapshots(num_snapshots: int | None, num_parameters: int) -> int:
    """Number of snapshots of a run: `checkpoint.num_snapshots`, or the default for a model of this size."""
    if num_snapshots is not None:
        return num_snapshots
    return DEFAULT_NUM_SNAPSHOTS if num_parameters <= MAX_DEFAULT_PARAMETERS else 0


def snapshot_steps(num_snapshots: int, max_steps: int) -> list[int]:
    """Steps at which snapshots are written: 0, and logarithmically spaced steps before the last step.

    Most changes of the attention patterns are early. The last step has a checkpoint and the exported model.
    """
    num_spaced = num_snapshots - 1
    spaced = [max_steps * FIRST_STEP_RATIO ** (1 - index / num_spaced) for index in range(num_spaced)]
    return sorted({0, *(max(1, round(step)) for step in spaced)} - {max_steps}) if num_snapshots else []


def snapshot_path(directory: Path, step: int) -> Path:
    return directory / f"{checkpoint_name(step)}.safetensors"


class SnapshotWriter:
    """Writes the snapshots of a run in a thread, so that training does not wait for the disk."""

    def __init__(self, directory: Path, steps: Collection[int], log: Callable[[str], None]) -> None:
        self.directory, self.steps, self.log = directory, steps, log
        self._executor = ThreadPoolExecutor(1, "snapshot")
        self._pending: tuple[int, Future[None]] | None = None

    def is_due(self, step: int) -> bool:
        """Whether the step has a snapshot that is not written yet. A resumed run repeats steps with the same result."""
        return step in self.steps and not snapshot_path(self.directory, step).exists()

    def save(self, step: int, weights: Mapping[str, Tensor]) -> None:
        """Copy the weights to the CPU and write them in the thread."""
        self.wait()  # before copying, so that there is one copy in memory at a time
        copies = {name: copy_to_cpu(weight) for name, weight in weights.items()}
        self._pending = step, self._executor.submit(save_snapshot, self.directory, step, copies)

    def wait(self) -> None:
        """Wait until the last snapshot is written. If writing failed, log it."""
        if self._pending is None:
            return
        (step, future), self._pending = self._pending, None
        try:
            future.result()
        except OSError as error:
            reason = error.strerror or error
            self.log(f"could not save the snapshot of step {step}: {reason}; training continues")


def save_snapshot(directory: Path, step: int, weights: Mapping[str, Tensor]) -> None:
    """Write a snapshot and flush it to disk."""
    path = snapshot_path(directory, step)
    directory.mkdir(exist_ok=True)
    temporary = path.with_name(f".{path.name}.saving")
    temporary.unlink(missing_ok=True)  # left by a killed process
    write_file(temporary, serialize_safetensors(dict(weights)))
    hit_failpoint("before-snapshot-rename")
    temporary.replace(path)
    fsync_directory(directory)


def list_snapshots(directory: Path) -> dict[int, Path]:
    """Snapshots in a directory by step."""
    paths = [path for path in list_directory(directory) if _NAME_PATTERN.fullmatch(path.name)]
    return {int(path.name[5:].removesuffix(".safetensors")): path for path in paths}


def read_snapshot(path: Path) -> dict[str, Tensor] | str:
    """Read the weights of a snapshot, or return a description of the problem as a string."""
    try:
        return parse_safetensors(path.read_bytes())
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    except SafetensorError as error:
        return f"it cannot be parsed ({error})"
