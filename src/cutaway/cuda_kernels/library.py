"""CUDA C kernels: compiled on first use by NVRTC, which is part of PyTorch's CUDA builds, and cached on disk."""

import ctypes
import functools
import hashlib
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from cutaway.user_files import user_cache_dir

_HEADER = "device.cuh"
_OPTIONS = ("--std=c++17", "-default-device", "--diag-suppress=128,186,177")
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
"""CUlaunchAttributeID: the kernel may start before the previous one has finished, and waits for it itself."""
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
"""CUfunction_attribute."""


class _LaunchAttribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_int * 15))


class _LaunchConfig(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    )


class CUDAKernel:
    """A function of a compiled module. The arguments are ctypes values or structures, in the order of the function."""

    def __init__(self, module: ctypes.c_void_p, name: str) -> None:
        self.function = ctypes.c_void_p()
        _check(_driver().cuModuleGetFunction(ctypes.byref(self.function), module, name.encode()))
        self.max_shared_bytes = 32 * 1024
        """Above this size, the maximum is set. Without it, it is 48 KiB together with the variables of the kernel."""

    def __call__(
        self,
        grid: tuple[int, int],
        num_threads: int,
        arguments: Sequence[Any],
        *,
        shared_bytes: int = 0,
        overlap: bool = False,
    ) -> None:
        """Launch the kernel on PyTorch's current stream. `overlap`: programmatic dependent launch."""
        if shared_bytes > self.max_shared_bytes:
            _check(_driver().cuFuncSetAttribute(self.function, _MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes))
            self.max_shared_bytes = shared_bytes
        attribute = _LaunchAttribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1)
        config = _LaunchConfig(
            (grid[0], grid[1], 1),
            (num_threads, 1, 1),
            shared_bytes,
            torch.cuda.current_stream().cuda_stream,
            ctypes.pointer(attribute),
            int(overlap),
        )
        addresses = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        _check(_driver().cuLaunchKernelEx(ctypes.byref(config), self.function, addresses, None))


@functools.cache
def has_cuda_kernels() -> bool:
    """Whether CUDA C kernels can be compiled: an NVIDIA GPU with bf16 tensor cores, and NVRTC."""
    if not torch.cuda.is_available() or torch.version.cuda is None or torch.cuda.get_device_capability() < (8, 0):
        return False
    try:
        _nvrtc()
        _driver()
    except OSError:
        return False
    return True


def load_kernel(source: Path, name: str, macros: Mapping[str, int]) -> CUDAKernel:
    """Compile a kernel with the values of its macros for the current GPU, or load it from the cache."""
    return _load_kernel(
        source, name, tuple((key, int(value)) for key, value in sorted(macros.items())), torch.cuda.current_device()
    )


@functools.cache
def _load_kernel(source: Path, name: str, macros: tuple[tuple[str, int], ...], device: int) -> CUDAKernel:
    return CUDAKernel(_load_module(source, macros, device), name)


@functools.cache
def _load_module(source: Path, macros: tuple[tuple[str, int], ...], device: int) -> ctypes.c_void_p:
    major, minor = torch.cuda.get_device_capability(device)
    options = (f"--gpu-architecture=sm_{major}{minor}", *_OPTIONS, *(f"-D{key}={value}" for key, value in macros))
    header = source.with_name(_HEADER)
    text = source.read_bytes().replace(f'#include "{_HEADER}"'.encode(), header.read_bytes())
    fingerprint = hashlib.sha256(repr((text, options, _nvrtc_version())).encode()).hexdigest()[:16]
    path = user_cache_dir() / "kernels" / f"cuda-{fingerprint}.cubin"
    try:
        cubin = path.read_bytes()
    except OSError:
        cubin = _compile(text, source.name, options)
        _write(path, cubin)
    module = ctypes.c_void_p()
    _check(_driver().cuModuleLoadData(ctypes.byref(module), cubin))
    return module


def _write(path: Path, data: bytes) -> None:
    """Write to a temporary file, renamed when complete. A cache that cannot be written is not used."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, staging = tempfile.mkstemp(suffix=".cubin", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(staging).replace(path)
    except OSError:
        return


def _compile(source: bytes, name: str, options: Sequence[str]) -> bytes:
    nvrtc, program = _nvrtc(), ctypes.c_void_p()
    _check_nvrtc(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, name.encode(), 0, None, None))
    try:
        encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if nvrtc.nvrtcCompileProgram(program, len(options), encoded):
            log = _read_output(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
            raise RuntimeError(f"compiling {name} failed: {log.decode(errors='replace')[:2000]}")
        return _read_output(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _read_output(program: ctypes.c_void_p, get_size: Any, get_data: Any) -> bytes:
    size = ctypes.c_size_t()
    _check_nvrtc(get_size(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check_nvrtc(get_data(program, buffer))
    return buffer.raw


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    """NVRTC of PyTorch's CUDA version: a package of its own beside torch, or part of the installed toolkit."""
    cuda = torch.version.cuda
    assert cuda is not None
    name = f"libnvrtc.so.{cuda.split('.')[0]}" if sys.platform != "win32" else f"nvrtc64_{cuda.split('.')[0]}0_0.dll"
    packages = Path(torch.__file__).parent.parent / "nvidia"
    found = sorted(packages.glob(f"*/lib/{name}")) + sorted(packages.glob(f"*/bin/**/{name}"))
    return ctypes.CDLL(str(found[0]) if found else name)


def _nvrtc_version() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check_nvrtc(_nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


def _check_nvrtc(status: int) -> None:
    if status:
        raise RuntimeError(f"NVRTC failed with status {status}")


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1" if sys.platform != "win32" else "nvcuda.dll")


def _check(status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"CUDA driver error {status}: {(text.value or b'unknown').decode()}")
