"""Processes of `--devices N`: rank 0 runs the command, and its workers repeat the forward passes of its engine.

`--devices N` starts the workers as child processes. Under torchrun, all ranks run the command, and those above 0
become workers.
"""

import atexit
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from cutaway.errors import CutawayError, InputError

if TYPE_CHECKING:
    from cutaway.cli.options import DType

_REPORT_DELAY = 2.0
"""Seconds in which rank 0 can end with the same error as a worker, before that of the worker is reported."""
_EXIT_TIMEOUT = 5.0
"""Seconds that workers have to end after rank 0, before they are killed."""


def start_processes(
    devices: int | None, source: str, device: str | None, dtype: "DType | None", *, num_models: int = 1
) -> int:
    """Start the workers of `--devices` and return the number of processes. A worker does not return.

    Without `--devices`, it is the number of processes that torchrun has started.
    """
    num_started = int(os.environ.get("WORLD_SIZE", "1"))
    if num_started > 1 and devices not in (None, num_started):
        raise InputError(
            f"--devices is {devices}, but torchrun has started {num_started} processes; leave out --devices, or start"
            " the command without torchrun"
        )
    size = devices or num_started
    if size == 1:
        return 1
    if num_models > 1:
        raise InputError(
            f"--devices splits one model over processes, but there are {num_models} models; start a server for each"
        )
    if num_started > 1 and os.environ["RANK"] != "0":
        run_worker_process(source, device, dtype, size)
        sys.exit(0)
    if num_started > 1:
        from cutaway.cli.model_loading import default_device
        from cutaway.generate.engine.workers import Result
        from cutaway.model.parallel.process_group import join_processes, rank_device

        ranks = join_processes(rank_device(default_device(device)), has_workers=True)
        atexit.register(lambda: None if ranks.has_failed else ranks.broadcast_object(Result(None, None)))
        return size
    workers = Workers(size, source, device, dtype)
    atexit.register(workers.close)
    workers.join_as_rank_0(device)
    return size


def run_worker_process(
    source: str,
    device: str | None,
    dtype: "DType | None",
    size: int,
    *,
    rank: int | None = None,
    store_path: str | None = None,
) -> None:
    """Load this rank's part of the model, and repeat the forward passes of rank 0 until it ends."""
    import signal

    import torch.distributed as dist

    from cutaway.cli.model_loading import default_device, load_checkpoint
    from cutaway.generate.engine.workers import run_worker_loop
    from cutaway.model.parallel.process_group import join_processes, rank_device

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C and a stop of the service are for rank 0, which then ends all
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    store = None if store_path is None else dist.FileStore(store_path, size)  # type: ignore[attr-defined]
    target = rank_device(default_device(device))
    join_processes(target, store=store, rank=rank, world_size=size, has_workers=True)
    run_worker_loop(load_checkpoint(source, device, dtype, quiet=True, tensor_parallel_size=size).model)


class Workers:
    """Child processes with the ranks 1 … size − 1. If one of them ends early, this process ends too."""

    def __init__(self, size: int, source: str, device: str | None, dtype: "DType | None") -> None:
        self.size, self.closing = size, False
        self.directory = tempfile.TemporaryDirectory(prefix="cutaway-")
        self.store_path = str(Path(self.directory.name) / "store")
        _use_loopback()
        self.num_threads = max(1, (os.cpu_count() or 1) // size)
        self.processes = [self._start(rank, source, device, dtype) for rank in range(1, size)]
        for rank, process in enumerate(self.processes, 1):
            threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()

    def _start(self, rank: int, source: str, device: str | None, dtype: "DType | None") -> "subprocess.Popen[str]":
        job = {
            "source": source, "device": device, "dtype": dtype, "size": self.size, "rank": rank,
            "store_path": self.store_path,
        }  # fmt: skip
        environment = os.environ | {
            "LOCAL_RANK": str(rank),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(self.num_threads)),
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),  # the modules of this process
        }
        command = [sys.executable, "-P", "-m", "cutaway.cli.parallel_processes", json.dumps(job)]
        # The standard input is a pipe that ends when this process ends, for whatever reason. A session of their own
        # keeps the terminal's Ctrl-C from the workers.
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
        )

    def join_as_rank_0(self, device: str | None) -> None:
        """Join the process group. This waits until all workers have started."""
        import torch
        import torch.distributed as dist

        from cutaway.cli.model_loading import default_device
        from cutaway.model.parallel.process_group import join_processes, rank_device

        target = rank_device(default_device(device))
        if target.type == "cpu":
            torch.set_num_threads(min(torch.get_num_threads(), self.num_threads))
        store = dist.FileStore(self.store_path, self.size)  # type: ignore[attr-defined]
        join_processes(target, store=store, rank=0, world_size=self.size, has_workers=True)

    def _watch(self, rank: int, process: "subprocess.Popen[str]") -> None:
        """End this process with a message if a worker ends first. Its output is the error, if it could report one."""
        assert process.stdout is not None
        reason = process.stdout.read().strip()
        code = process.wait()
        time.sleep(_REPORT_DELAY if reason else 0)
        if self.closing:
            return
        reason = reason or (f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}")
        sys.stderr.write(f"cutaway: process {rank} of {self.size}: {reason}; all processes were stopped\n")
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(2)

    def close(self) -> None:
        """End the workers."""
        self.closing = True
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        deadline = time.monotonic() + _EXIT_TIMEOUT
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.directory.cleanup()


def _use_loopback() -> None:
    """Let the processes communicate over the loopback interface, which other machines cannot reach."""
    for _, name in socket.if_nameindex():
        if name in ("lo", "lo0"):
            for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                os.environ.setdefault(variable, name)


def _exit_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


def main() -> None:
    """Run a worker, whose arguments are a JSON object."""
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    try:
        run_worker_process(**json.loads(sys.argv[1]))
    except (CutawayError, OSError, MemoryError) as error:
        sys.stdout.write(str(error) or type(error).__name__)
        sys.exit(2)


if __name__ == "__main__":
    main()
