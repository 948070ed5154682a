"""Runs the CUDA kernels of packed integer weights on a CPU: see emulator.h. It checks results, not speed."""

import ctypes
import functools
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

DIRECTORY = Path(__file__).parent
LAUNCH_TYPES = (ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_void_p)


def load_kernel(source: Path, name: str, macros: Mapping[str, int]) -> Callable[..., None]:
    """As `cutaway.cuda_kernels.library.load_kernel`, for tensors on the CPU."""
    function = getattr(
        _compile(source, tuple(sorted((key, int(value)) for key, value in macros.items()))), f"emulate_{name}"
    )
    function.argtypes, function.restype = LAUNCH_TYPES, ctypes.c_char_p

    def launch(
        grid: tuple[int, int],
        num_threads: int,
        arguments: Sequence[Any],
        *,
        shared_bytes: int = 0,
        overlap: bool = False,
    ) -> None:
        addresses = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        failure = function(*grid, num_threads, shared_bytes, addresses)
        if failure is not None:
            raise RuntimeError(f"{name} with {dict(macros)}: {failure.decode()}")

    return launch


@functools.cache
def _compile(source: Path, macros: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as directory:
        main, library = Path(directory) / "main.cpp", Path(directory) / "kernel.so"
        main.write_text("".join(f'#include "{each}"\n' for each in ("emulator.h", source, "main.h")), encoding="utf-8")
        flags = (
            "-O1",
            "-std=c++17",
            "-shared",
            "-fPIC",
            "-w",
            f"-I{DIRECTORY}",
            *(f"-D{key}={value}" for key, value in macros),
        )
        subprocess.run(["c++", *flags, "-o", library, main], check=True)
        return ctypes.CDLL(str(library))
