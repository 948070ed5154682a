"""An inspector as `cutaway open` makes one, and its questions asked as the page asks them."""

import json
from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

from cutaway.cli.open import inspector
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.job import Job
from cutaway.serve.inspect.questions import QUESTIONS
from cutaway.serve.inspect.wire import ANSWER, PART, Answer


def opened(source: str, text: str | None = None) -> Inspector:
    return inspector(source, text, "cpu", None)


def asked(of: Inspector, question: str, **given: Any) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    """The answer's facts and arrays, after their way over the wire."""
    facts, arrays, _ = heard(of, question, **given)
    return facts, arrays


def heard(
    of: Inspector, question: str, **given: Any
) -> tuple[dict[str, Any], Mapping[str, Tensor], list[dict[str, Any]]]:
    """The same, with the parts that came before it."""
    frames: list[bytes] = []
    form = QUESTIONS[question].model_validate(given)
    answer = form.answer(of, Job(frames.append))
    assert isinstance(answer, Answer)
    parts = [facts_of(frame[5:]) for frame in frames if frame[4] == PART]
    assert all(frame[4] != ANSWER for frame in frames)
    packed = answer.packed()
    return facts_of(packed), load(packed), parts


def facts_of(packed: bytes) -> dict[str, Any]:
    size = int.from_bytes(packed[:8], "little")
    found: dict[str, Any] = json.loads(json.loads(packed[8 : 8 + size])["__metadata__"]["facts"])
    return found


def ids(count: int, size: int, seed: int = 0) -> list[int]:
    return torch.randint(size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
