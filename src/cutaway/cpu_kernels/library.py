"""C kernels for the CPU: compiled on first use by the compiler of the machine, for its processor, and cached."""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

from cutaway.user_files import user_cache_dir

_FLAGS = ("-O3", "-fno-math-errno", "-shared", "-fPIC")
_SOURCES = tuple(sorted(Path(__file__).parent.glob("*.c")))
_HEADERS = tuple(sorted(Path(__file__).parent.glob("*.h")))


class Linear(ctypes.Structure):
    """The struct Linear of vectors.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("column_order", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "format")),
    )


@functools.cache
def load_cpu_kernels() -> ctypes.CDLL | None:
    """Load the library. None, with a warning, if there is no C compiler, or if it fails."""
    compiler = os.environ.get("CC") or next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        _warn("no C compiler (cc) was found")
        return None
    _share_openmp()
    directory = user_cache_dir() / "kernels"
    try:
        path = directory / f"cpu-{_fingerprint(compiler)}.so"
        if not path.exists():
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            _compile(compiler, path)
        library = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        _warn(f"compiling the CPU kernels with '{compiler}' failed: {str(detail).strip()[:300]}")
        return None
    address, number = ctypes.c_void_p, ctypes.c_int64
    library.linear.argtypes = (address, address, number, address, ctypes.c_int)
    library.dequantize.argtypes = (number, address, number, address, ctypes.c_int)
    library.decode_blocks.argtypes = (address, number, address, number, ctypes.c_int)
    for function in (library.linear, library.dequantize, library.decode_blocks):
        function.restype = None
    return library


def _warn(reason: str) -> None:
    warnings.warn(
        f"{reason}; generation on the CPU runs without C kernels, which takes longer; install gcc or clang",
        stacklevel=4,
    )


def _compile(compiler: str, target: Path) -> None:
    """Compile to a temporary file, renamed when complete. Without OpenMP, if the compiler has none, one thread runs."""
    native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    handle, staging = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(handle)
    try:
        command = [*compiler.split(), *_FLAGS, native, *map(str, _SOURCES), "-o", staging, "-lm"]
        for openmp in (["-fopenmp"], []):
            result = subprocess.run([*command, *openmp], capture_output=True, text=True, check=False, timeout=300)
            if result.returncode == 0:
                Path(staging).replace(target)
                return
        result.check_returncode()
    finally:
        Path(staging).unlink(missing_ok=True)


def _fingerprint(compiler: str) -> str:
    """Hash of everything that the library depends on: sources, compiler, flags and processor."""
    found = shutil.which(compiler.split()[0]) or compiler
    stat = Path(found).resolve().stat()
    sources = [path.read_bytes() for path in (*_SOURCES, *_HEADERS)]
    parts = (sources, compiler, stat.st_size, stat.st_mtime_ns, _FLAGS, platform.machine(), _cpu_features())
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _cpu_features() -> str:
    """Instruction set extensions of the processor, as far as Linux lists them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _share_openmp() -> None:
    """Make PyTorch's OpenMP library visible to libraries that are loaded later.

    Otherwise a second library has threads of its own, which compete with PyTorch's for the cores."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for path in {line.split()[-1] for line in lines if "libgomp" in line or "libomp" in line}:
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
