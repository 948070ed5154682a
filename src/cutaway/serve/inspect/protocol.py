"""Wire protocol of the inspector: results are safetensors with JSON metadata, streamed in frames.

A frame is the payload length (4 bytes, little-endian), the kind (1 byte) and the payload.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from safetensors.torch import save
from torch import Tensor

from cutaway.errors import InputError
from cutaway.lens.labeled_tensor import replace_nonfinite
from cutaway.serve.inspect.exercise_access import ExerciseAccess

PROGRESS, RESULT, ERROR, PARTIAL = range(4)
"""Frame kinds. Their payloads, in this order: JSON {completed, total, description}, result, JSON {message}, result."""


@dataclass(frozen=True)
class QueryResult:
    """Result of a query: JSON data, and tensors by name."""

    data: Mapping[str, object]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def to_safetensors(self) -> bytes:
        """Serialize as safetensors, with the data as metadata. Floats become fp32, integers int32, booleans uint8."""
        data = json.dumps(replace_nonfinite(dict(self.data)), allow_nan=False, separators=(",", ":"))
        return save({name: to_wire_tensor(tensor) for name, tensor in self.tensors.items()}, {"data": data})


def to_wire_tensor(value: Tensor) -> Tensor:
    """Return a tensor on the CPU in a dtype of the protocol: fp32, int32 or uint8."""
    value = value.detach().as_subclass(Tensor).cpu().contiguous()
    if value.dtype == torch.bool:
        return value.to(torch.uint8)
    if value.dtype == torch.int64:
        return value.to(torch.int32)
    return value if value.dtype in (torch.uint8, torch.int32) else value.float()


def _encode_frame(kind: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "little") + bytes([kind]) + payload


def encode_json_frame(kind: int, data: Mapping[str, object]) -> bytes:
    return _encode_frame(kind, json.dumps(data).encode())


class QueryCancelled(Exception):  # noqa: N818  # named like asyncio.CancelledError: not an error
    """The client canceled the query or disconnected."""


class QueryJob:
    """A running query: sends progress and results as frames, and checks for cancellation and timeout."""

    def __init__(
        self,
        send: Callable[[bytes], None] = lambda frame: None,
        timeout: float = float("inf"),
        exercise_access: ExerciseAccess | None = None,
    ) -> None:
        self.send, self.timeout = send, timeout
        self.exercise_access = exercise_access or ExerciseAccess()
        self.cancelled = threading.Event()
        self.deadline = time.monotonic() + timeout

    def check_cancelled(self) -> None:
        if self.cancelled.is_set():
            raise QueryCancelled
        if time.monotonic() > self.deadline:
            raise InputError(f"the query took more than {self.timeout:.0f} s and was canceled; use a shorter text")

    def report_progress(self, completed: int, total: int, description: str = "") -> None:
        self.check_cancelled()
        self.send(encode_json_frame(PROGRESS, {"completed": completed, "total": total, "description": description}))

    def send_partial(self, result: QueryResult) -> None:
        """Send a partial result before the query is finished."""
        self.check_cancelled()
        self.send(_encode_frame(PARTIAL, result.to_safetensors()))

    def send_result(self, result: QueryResult) -> None:
        self.send(_encode_frame(RESULT, result.to_safetensors()))
