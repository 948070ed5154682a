"""Results of an exported page, decoded like by `web/src/lib/exportBundle.ts`."""

import json
import re
import zlib
from typing import Any

import numpy as np

from cutaway.serve.inspect.export_bundle import BASE85, POSITION, SHARED_TEXT

Results = dict[str, tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]]


def read_exported_results(page: str) -> Results:
    """Return data and tensors of each query of an exported page, by key."""
    match = re.search(r'id="cutaway-results">(.*?)</script>', page, re.DOTALL)
    assert match is not None
    embedded = json.loads(match[1])
    data = zlib.decompress(_decode_base85(embedded["bundle"])[: embedded["bundle_bytes"]])
    header_size = int.from_bytes(data[:4], "little")
    header = json.loads(data[4 : 4 + header_size])
    sections, offset = {}, 4 + header_size
    sizes = header["sizes"]
    planes = np.frombuffer(data, np.uint8, 2 * sizes["F16"], offset).reshape(2, -1)
    sections["F16"] = np.stack([planes[1], planes[0]], 1).copy().view(np.float16)[:, 0].astype(np.float32)
    offset += 2 * sizes["F16"]
    for name, dtype in (("F32", np.float32), ("I32", np.int32), ("U8", np.uint8)):
        sections[name] = np.frombuffer(data, dtype, sizes[name], offset)
        offset += sections[name].nbytes
    assert offset == len(data)

    def decode_tensor(
        dtype: str, shape: list[int], start: int, strides: list[int] | None = None
    ) -> np.ndarray[Any, Any]:
        section = sections[dtype][start:]
        if strides is not None:
            return np.lib.stride_tricks.as_strided(section, shape, [4 * stride for stride in strides])
        return section[: int(np.prod(shape))].reshape(shape)

    def decode_fields(base: int, changes: dict[str, Any], position: object) -> dict[str, Any]:
        fields = {**header["bases"][base], **changes}
        if "python_code" in fields:
            code = fields["python_code"].replace(SHARED_TEXT, header["shared_text"])
            fields["python_code"] = code.replace(POSITION, str(position))
        return fields

    results: Results = {}
    for key, (base, changes, tensors, *_) in header["results"].items():
        match = re.search(r'position":(\d+)', key)
        fields = decode_fields(base, changes, match[1] if match else "")
        results[key] = fields, {name: decode_tensor(*header["tensors"][index]) for name, index in tensors.items()}
    for key, rows in header["rows"].items():
        for row in range(len(next(iter(rows["columns"].values())))):
            position = rows["first"] + row
            changes = {name: values[row] for name, values in rows["columns"].items()}
            fields = decode_fields(rows["base"], changes, position)
            decoded = {
                name: decode_tensor(t["dtype"], t["shape"], t["offset"] + row * t["step"], t["strides"])
                for name, t in rows["tensors"].items()
                if t["present"] is None or t["present"][row]
            }
            results[key.replace(POSITION, str(position))] = fields, decoded
    return results


def _decode_base85(text: str) -> bytes:
    digits = np.array([BASE85.index(character) for character in text], np.uint64).reshape(-1, 5)
    weights = np.array([85**power for power in range(4, -1, -1)], np.uint64)
    return (digits * weights).sum(1).astype(">u4").tobytes()
