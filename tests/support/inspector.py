"""Inspectors built as by `cutaway open`, and queries run with the wire format of the web page."""

import json
from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

from cutaway.cli.verbs.open import load_inspector
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.protocol import PARTIAL, RESULT, QueryJob, QueryResult
from cutaway.serve.inspect.queries import QUERIES


def open_inspector(source: str, text: str | None = None) -> Inspector:
    return load_inspector(source, text, "cpu", None)


def run_query(inspector: Inspector, query_name: str, **params: Any) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    """Run a query and return its data and tensors, after serialization."""
    data, tensors, _ = run_query_with_partials(inspector, query_name, **params)
    return data, tensors


def run_query_with_partials(
    inspector: Inspector, query_name: str, **params: Any
) -> tuple[dict[str, Any], Mapping[str, Tensor], list[dict[str, Any]]]:
    """Run a query and return its data, tensors and partial results."""
    frames: list[bytes] = []
    query = QUERIES[query_name].model_validate(params)
    result = query.run(inspector, QueryJob(frames.append))
    assert isinstance(result, QueryResult)
    partials = [_parse_data(frame[5:]) for frame in frames if frame[4] == PARTIAL]
    assert all(frame[4] != RESULT for frame in frames)
    serialized = result.to_safetensors()
    return _parse_data(serialized), load(serialized), partials


def _parse_data(safetensors_bytes: bytes) -> dict[str, Any]:
    size = int.from_bytes(safetensors_bytes[:8], "little")
    data: dict[str, Any] = json.loads(json.loads(safetensors_bytes[8 : 8 + size])["__metadata__"]["data"])
    return data


def random_token_ids(num_tokens: int, vocab_size: int, seed: int = 0) -> list[int]:
    return torch.randint(vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
