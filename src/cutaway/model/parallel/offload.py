"""CPU offload: blocks whose weights are in CPU memory, and are copied to the GPU for each forward pass.

The weights of an offloaded block are one pinned buffer. Two buffers on the GPU take turns: while a block computes, the
weights of the next one are copied to the other buffer in a stream of their own.
"""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cutaway.device import GIB, free_memory
from cutaway.errors import InputError
from cutaway.model.transformer import Transformer

MaxMemory = Mapping[int | str, int | str]
"""Maximum number of bytes of weights on GPU 0 (key 0) and in CPU memory (key 'cpu'), as in {0: "10GiB"}."""
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": GIB, "TIB": 2**40}
_DEFAULT_FRACTION = 0.9
"""Default fraction of the free memory that weights may take. The rest is for the KV cache and activations."""
_ALIGNMENT = 256
"""Alignment of tensors in a buffer, in bytes."""


@dataclass(frozen=True)
class Placement:
    """Device of the weights: those of `offloaded` blocks are in CPU memory, all others on `device`."""

    device: torch.device
    offloaded: tuple[str, ...] = ()
    """Names of modules, such as decoder.blocks.7."""

    def device_of(self, name: str) -> torch.device:
        """Device on which a tensor of the state dict is loaded."""
        is_offloaded = any(name.startswith(f"{block}.") for block in self.offloaded)
        return torch.device("cpu") if is_offloaded else self.device


def plan_placement(model: Transformer, max_memory: MaxMemory | None = None) -> Placement:
    """Place the weights of a model on the meta device: on the GPU as many as fit, the last blocks in CPU memory.

    Without a GPU, all weights are in CPU memory, and nothing is copied."""
    limits = _read_max_memory(max_memory or {})
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu" and 0 in limits:
        raise InputError("max_memory has the key 0, but this machine has no GPU; leave the key out")
    cpu = torch.device("cpu")
    free = {key: int(_DEFAULT_FRACTION * (free_memory(each) or 2**62)) for key, each in ((0, device), ("cpu", cpu))}
    gpu_bytes, cpu_bytes = (limits.get(key, free[key]) for key in (0, "cpu"))
    if device.type == "cpu":
        if "cpu" in limits:  # weights of the stored dtype are memory-mapped, and need no free memory
            _check_fits(_num_bytes(model), cpu_bytes)
        return Placement(device)
    offloaded = select_offloaded_blocks(model, gpu_bytes)
    _check_fits(sum(_num_bytes(model.get_submodule(name)) for name in offloaded), cpu_bytes)
    return Placement(device, offloaded)


def select_offloaded_blocks(model: Transformer, max_bytes: int) -> tuple[str, ...]:
    """Names of the last blocks, as many as must be offloaded so that the rest takes at most `max_bytes`.

    The rest includes two buffers for the largest offloaded block."""
    names: dict[str, nn.Module] = {}
    for name, stack in model.stacks.items():
        blocks = list(stack.blocks)
        names |= {f"{name}.blocks.{i}": block for i, block in enumerate(blocks) if blocks.count(block) == 1}
    resident, largest, offloaded = _num_bytes(model), 0, list[str]()
    for name, block in reversed(names.items()):
        if resident + 2 * largest <= max_bytes:
            break
        size = _num_bytes(block)
        resident, largest = resident - size, max(largest, size)
        offloaded.insert(0, name)
    if resident + 2 * largest > max_bytes:
        raise InputError(
            f"the embedding, the head and two buffers for blocks take {(resident + 2 * largest) / GIB:.3g} GiB, but"
            f" {max_bytes / GIB:.3g} GiB are free on the GPU or allowed by max_memory; raise the limit, load a smaller"
            " dtype, or use device='cpu'"
        )
    return tuple(offloaded)


def _num_bytes(module: nn.Module) -> int:
    tensors = {id(tensor): tensor for tensor in module.state_dict(keep_vars=True).values()}
    return sum(tensor.nbytes for tensor in tensors.values())


def _check_fits(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise InputError(
            f"{num_bytes / GIB:.3g} GiB of weights do not fit into the {max_bytes / GIB:.3g} GiB of CPU memory that are"
            " free or allowed by max_memory, and weights are not offloaded to disk; load a smaller dtype, or split the"
            " model over several devices"
        )


def _read_max_memory(max_memory: MaxMemory) -> dict[int | str, int]:
    if not isinstance(max_memory, Mapping):
        raise InputError(f"max_memory is {max_memory!r:.60}; pass a dict, such as {{0: '10GiB', 'cpu': '30GiB'}}")
    for key in max_memory:
        if key not in (0, "cpu"):
            raise InputError(
                f"max_memory has the key {key!r:.40}; use 0 for the first GPU and 'cpu'. For several GPUs, use"
                " tensor_parallel_size"
            )
    return {key: _read_bytes(value) for key, value in max_memory.items()}


def _read_bytes(value: int | str) -> int:
    """Number of bytes of an integer or of a text such as '10GiB'."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    text = value.strip().upper() if isinstance(value, str) else ""
    unit = next((unit for unit in sorted(_UNITS, key=len, reverse=True) if text.endswith(unit)), None)
    try:
        count = float(text.removesuffix(unit)) if unit else -1.0
    except ValueError:
        count = -1.0
    if unit is None or not 0 <= count < 2**40:
        raise InputError(f"max_memory has the value {value!r:.40}; pass a number of bytes, or a text such as '10GiB'")
    return int(count * _UNITS[unit])


class _StreamedTensor(NamedTuple):
    """A parameter or buffer of an offloaded block."""

    owner: dict[str, Any]
    """`_parameters` or `_buffers` of the module."""
    name: str
    host: Tensor
    """View of the block's buffer in CPU memory."""
    offset: int

    def set(self, value: Tensor) -> None:
        if isinstance(self.owner[self.name], nn.Parameter):
            self.owner[self.name].data = value
        else:
            self.owner[self.name] = value

    def on_device(self, buffer: Tensor) -> Tensor:
        part = buffer[self.offset : self.offset + self.host.nbytes]
        return part.view(self.host.dtype).view(self.host.shape)


class _DeviceBuffer:
    """Buffer on the device that holds the weights of one block."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.data = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.block: int | None = None
        self.copied = self.released = None
        if device.type == "cuda":
            self.copied, self.released = torch.cuda.Event(), torch.cuda.Event()  # type: ignore[no-untyped-call]


class WeightStreamer:
    """Copies the weights of offloaded blocks to the device, one block ahead of the computation.

    Hooks of a block set its parameters to the copies before its forward pass, and back afterwards."""

    def __init__(self, blocks: Sequence[nn.Module], device: torch.device) -> None:
        self.device = device
        self.hosts: list[Tensor] = []
        self.tensors: list[list[_StreamedTensor]] = []
        for i, block in enumerate(blocks):
            self._move_to_host_buffer(block)
            block.register_forward_pre_hook(lambda module, args, i=i: self._load(i))
            block.register_forward_hook(lambda module, args, y, i=i: self._unload(i), always_call=True)
        self.bytes_per_pass = sum(host.nbytes for host in self.hosts)
        """Number of bytes that a forward pass copies to the device."""
        largest = max(host.nbytes for host in self.hosts)
        self.buffers = [_DeviceBuffer(largest, device) for _ in range(min(2, len(blocks)))]
        self.copy_stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.lock = threading.RLock()
        """Held during the forward pass of an offloaded block: threads that share the model share the buffers."""
        self.num_copies = 0
        self.bytes_per_second = self._measure_bandwidth()
        """Measured speed of a copy to the device; None if the device is the CPU."""

    def _move_to_host_buffer(self, block: nn.Module) -> None:
        entries: list[tuple[dict[str, Any], str, int]] = []
        size = 0
        for owner, name in _iter_tensors(block):
            entries.append((owner, name, size))
            size += -(-owner[name].nbytes // _ALIGNMENT) * _ALIGNMENT
        host = torch.empty(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        tensors = []
        for owner, name, offset in entries:
            value = owner[name].detach()
            view = host[offset : offset + value.nbytes].view(value.dtype).view(value.shape)
            view.copy_(value)
            tensors.append(_StreamedTensor(owner, name, view, offset))
            tensors[-1].set(view)
        self.hosts.append(host)
        self.tensors.append(tensors)

    def _load(self, block: int) -> None:
        """Before the forward pass of a block: set its tensors to copies on the device, and start to copy the next."""
        self.lock.acquire()
        for tensor in self.tensors[block]:
            if tensor.owner[tensor.name].data_ptr() != tensor.host.data_ptr():
                raise InputError(
                    "weights of an offloaded model were moved or converted; load the model again with another device or"
                    " dtype"
                )
        buffer = self._copy(block)
        if buffer.copied is not None:
            torch.cuda.current_stream(self.device).wait_event(buffer.copied)
        for tensor in self.tensors[block]:
            tensor.set(tensor.on_device(buffer.data))
        if len(self.buffers) > 1:
            self._copy((block + 1) % len(self.hosts), other_than=buffer)

    def _unload(self, block: int) -> None:
        """After the forward pass of a block: set its tensors back to those in CPU memory."""
        for tensor in self.tensors[block]:
            tensor.set(tensor.host)
        buffer = next((each for each in self.buffers if each.block == block), None)
        if buffer is not None and buffer.released is not None:
            buffer.released.record(torch.cuda.current_stream(self.device))
        self.lock.release()

    def _copy(self, block: int, *, other_than: _DeviceBuffer | None = None) -> _DeviceBuffer:
        """Start to copy a block's weights to a buffer, unless one has them, and return the buffer."""
        for buffer in self.buffers:
            if buffer.block == block:
                return buffer
        buffer = self.buffers[0] if other_than is not self.buffers[0] else self.buffers[1]
        host = self.hosts[block]
        with torch.cuda.stream(self.copy_stream) if self.copy_stream is not None else nullcontext():
            if self.copy_stream is not None and buffer.released is not None:
                self.copy_stream.wait_event(buffer.released)  # until the block before has used the buffer
            buffer.data[: host.nbytes].copy_(host, non_blocking=True)
            if buffer.copied is not None:
                buffer.copied.record(self.copy_stream)
        buffer.block = block
        self.num_copies += 1
        return buffer

    def _measure_bandwidth(self) -> float | None:
        """Bytes per second of a copy of the largest block to the device."""
        if self.device.type != "cuda":
            return None
        host = max(self.hosts, key=lambda each: each.nbytes)
        seconds = []
        for _ in range(3):
            torch.cuda.synchronize(self.device)
            start = time.perf_counter()
            self.buffers[0].data[: host.nbytes].copy_(host, non_blocking=True)
            torch.cuda.synchronize(self.device)
            seconds.append(time.perf_counter() - start)
        return host.nbytes / min(seconds)


def _iter_tensors(block: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield (owner, name) of each parameter and buffer of a block."""
    for module in block.modules():
        for owner in (module._parameters, module._buffers):
            for name, tensor in owner.items():
                if tensor is not None:
                    yield owner, name


def offload_blocks(model: Transformer, placement: Placement) -> WeightStreamer | None:
    """Offload the blocks of a placement, whose weights are in CPU memory. Return None if there are none."""
    if not placement.offloaded:
        return None
    model.requires_grad_(False)
    model.offloaded_modules = placement.offloaded  # type: ignore[assignment]  # not a module
    return WeightStreamer([model.get_submodule(name) for name in placement.offloaded], placement.device)
