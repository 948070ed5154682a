"""What the page is answered: facts and arrays in one piece, in the layout of safetensors. Pieces come as frames.

A frame is its length (4 bytes, little-endian), its kind (1 byte) and what it holds.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from cutaway.lens.readings.reading import finite

PROGRESS, ANSWER, ERROR, PART = range(4)
"""Kinds of frames: {done, total, what} as JSON; the answer; {message} as JSON; some of an answer, and more to come."""


@dataclass(frozen=True)
class Answer:
    """Facts, which JSON can hold, and arrays by name."""

    facts: dict[str, Any]
    arrays: Mapping[str, Tensor] = field(default_factory=dict)

    def packed(self) -> bytes:
        """As a safetensors file whose metadata hold the facts; numbers as fp32, whole ones and truths as they are."""
        facts = json.dumps(finite(self.facts), allow_nan=False, separators=(",", ":"))
        return save({name: sent(each) for name, each in self.arrays.items()}, {"facts": facts})


def sent(value: Tensor) -> Tensor:
    value = value.detach().as_subclass(Tensor).cpu().contiguous()
    if value.dtype == torch.bool:
        return value.to(torch.uint8)
    if value.dtype == torch.int64:
        return value.to(torch.int32)
    return value if value.dtype in (torch.uint8, torch.int32) else value.float()


def frame(kind: int, held: bytes) -> bytes:
    return len(held).to_bytes(4, "little") + bytes([kind]) + held


def told(kind: int, facts: Mapping[str, Any]) -> bytes:
    return frame(kind, json.dumps(facts).encode())
