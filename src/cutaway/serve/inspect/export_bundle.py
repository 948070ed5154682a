"""Compact file of query results: one compressed stream with the JSON data and the tensors of all results.

Layout before compression (zlib): length of the header (4 bytes, little-endian), header (JSON), high bytes of all
float16 values, low bytes of all float16 values, float32 values, int32 values, bytes. High and low bytes of float16
values are separated because the high bytes (sign and exponent) repeat and the low bytes do not.
`web/src/lib/exportBundle.ts` reads it.
"""

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from cutaway.serve.inspect.protocol import QueryResult, to_wire_tensor

MAX_FLOAT16 = 60000.0
SIGNIFICANT_DIGITS = 5
"""Digits of the numbers in the JSON data. The page shows at most four."""
BASE85 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%.()*+-;,=>?@^_`{|}~"
"""Digits of the text encoding: four bytes are five characters, none of which has a meaning in HTML or JSON."""
FLOAT16, FLOAT16_8_BIT, FLOAT32 = "float16", "float16 with 8 bits of mantissa", "float32"
"""Precision of the float tensors of a result: relative rounding errors of at most 0.05 %, 0.2 %, and none."""
SHARED_TEXT = "\x01"
"""Placeholder of the shared text in Python code."""
POSITION = "\x02"
"""Placeholder of the token position in Python code; the key of the result has the position."""


class RowTensor(NamedTuple):
    """Tensors of consecutive positions, which are views of a section: position `first + row` is at `row · step`."""

    dtype: str
    offset: int
    step: int
    shape: list[int]
    strides: list[int] | None = None
    present: list[int] | None = None
    """1 for each position that has the tensor; None if all have it."""


class ExportBundle:
    """Results by key. Fields and tensors that results share are stored once."""

    def __init__(self, shared_text: str = "") -> None:
        """`shared_text` is stored once; in the Python code of the results it is replaced by a control character."""
        self.shared_text = shared_text
        self.results: dict[str, list[Any]] = {}
        self.rows: dict[str, dict[str, Any]] = {}
        self.bases: list[dict[str, Any]] = []
        self.base_indices: dict[str, int] = {}
        self.tensors: list[tuple[Any, ...]] = []
        """Dtype, shape, offset in the section of the dtype, and the strides of views."""
        self.tensor_indices: dict[tuple[str, tuple[int, ...], bytes], int] = {}
        self.float16: list[np.ndarray[Any, Any]] = []
        self.sections: dict[str, list[bytes]] = {"F32": [], "I32": [], "U8": []}
        self.sizes = {"F16": 0, "F32": 0, "I32": 0, "U8": 0}

    def add(
        self,
        query_name: str,
        params: Mapping[str, object],
        result: QueryResult,
        *,
        group: str = "",
        partials: list[QueryResult] | None = None,
        precision: str = FLOAT32,
    ) -> None:
        """Add the result of a query. Results of one `group` share the fields of its first result.

        `precision` is that of the float tensors.
        """
        entry = self._encode(result, f"{query_name} {group}", precision)
        if partials:
            entry.append([self._encode(part, f"{query_name} partial", FLOAT32) for part in partials])
        self.results[result_key(query_name, params)] = entry

    def add_rows(
        self,
        query_name: str,
        params: Mapping[str, object],
        position_name: str,
        first: int,
        shared_fields: Mapping[str, object],
        columns: Mapping[str, Sequence[object]],
        tensors: Mapping[str, RowTensor],
    ) -> None:
        """Add the results of a query for consecutive positions, the parameter `position_name`, from `first` on.

        `columns` has the values at each position of the fields that differ, and `shared_fields` the other fields.
        """
        key = row_key(query_name, params, position_name)
        base, *_ = self._encode(QueryResult(shared_fields), key, FLOAT32)
        self.rows[key] = {
            "first": first,
            "base": base,
            "columns": round_numbers(dict(columns)),
            "tensors": {name: tensor._asdict() for name, tensor in tensors.items()},
        }

    def _encode(self, result: QueryResult, group: str, precision: str) -> list[Any]:
        data = round_numbers(dict(result.data))
        if self.shared_text and "python_code" in data:
            data["python_code"] = data["python_code"].replace(self.shared_text, SHARED_TEXT)
        if group not in self.base_indices:
            self.base_indices[group] = len(self.bases)
            self.bases.append(data)
        index = self.base_indices[group]
        base = self.bases[index]
        if any(name not in data for name in base):  # another set of fields: a base of its own
            index, base = len(self.bases), data
            self.bases.append(data)
        changes = {name: value for name, value in data.items() if name not in base or base[name] != value}
        tensors = {name: self.add_tensor(tensor, precision) for name, tensor in result.tensors.items()}
        return [index, changes, tensors]

    def add_tensor(self, value: Tensor, precision: str) -> int:
        """Add a tensor, unless an equal one is stored; return its index."""
        array = to_wire_tensor(value).numpy()
        dtype = {"float32": "F32", "int32": "I32", "uint8": "U8"}[array.dtype.name]
        if dtype == "F32" and precision != FLOAT32 and array.size and float(np.abs(array).max()) < MAX_FLOAT16:
            dtype, array = "F16", array.astype(np.float16)
            if precision == FLOAT16_8_BIT:  # round to a multiple of four units in the last place; a carry is correct
                array = ((array.view(np.uint16) + np.uint16(2)) & np.uint16(0xFFFC)).view(np.float16)
        content = array.tobytes()
        key = (dtype, array.shape, content)
        if key not in self.tensor_indices:
            self.tensor_indices[key] = len(self.tensors)
            self.tensors.append((dtype, list(array.shape), self.sizes[dtype]))
            self.sizes[dtype] += array.size
            if dtype == "F16":
                self.float16.append(array.reshape(-1))
            else:
                self.sections[dtype].append(content)
        return self.tensor_indices[key]

    def add_row_tensor(self, value: Tensor, precision: str) -> RowTensor:
        """Add a tensor (rows, …), whose rows are the tensors of consecutive positions."""
        dtype, (_, *shape), offset = self.tensors[self.add_tensor(value, precision)]
        return RowTensor(dtype, offset, math.prod(shape), shape)

    def to_bytes(self) -> bytes:
        """Return the compressed bundle."""
        header = json.dumps(
            {
                "shared_text": self.shared_text,
                "results": self.results,
                "rows": self.rows,
                "bases": self.bases,
                "tensors": self.tensors,
                "sizes": self.sizes,
            },
            ensure_ascii=False,
            separators=(",", ":"),
            allow_nan=False,
        ).encode()
        header += b" " * (-len(header) % 4)
        float16 = np.concatenate(self.float16) if self.float16 else np.zeros(0, np.float16)
        planes = float16.view(np.uint8).reshape(-1, 2)  # little-endian: low byte, high byte
        parts = [len(header).to_bytes(4, "little"), header, planes[:, 1].tobytes(), planes[:, 0].tobytes()]
        content = b"".join([*parts, *(b"".join(chunks) for chunks in self.sections.values())])
        compressor = zlib.compressobj(8, memLevel=9, strategy=zlib.Z_FILTERED)  # for numbers with little repetition
        return compressor.compress(content) + compressor.flush()


def encode_base85(data: bytes) -> str:
    """Encode bytes, padded with zeros to a multiple of four, in base 85."""
    words = np.frombuffer(data + b"\0" * (-len(data) % 4), ">u4").astype(np.uint32)
    digits = np.empty((len(words), 5), np.uint8)
    for column in range(4, -1, -1):
        words, digits[:, column] = np.divmod(words, 85)
    return np.frombuffer(BASE85.encode(), np.uint8)[digits].tobytes().decode()


def result_key(query_name: str, params: Mapping[str, object]) -> str:
    """Return the key of a query's result in the exported page. The script of the page builds the same string.

    The token ids are left out, because an exported page has one text.
    """
    return f"{query_name} {json.dumps(_clean(params), separators=(',', ':'), sort_keys=True, ensure_ascii=False)}"


def row_key(query_name: str, params: Mapping[str, object], position_name: str) -> str:
    """Return the key of the results at all positions: that of one result, with a placeholder for the position."""
    key = result_key(query_name, {**params, position_name: 0})
    return key.replace(f'"{position_name}":0', f'"{position_name}":{POSITION}')


def _clean(value: object) -> object:
    """Drop None and the token ids."""
    if isinstance(value, Mapping):
        return {key: _clean(inner) for key, inner in value.items() if inner is not None and key != "tokens"}
    return [_clean(inner) for inner in value] if isinstance(value, list) else value


def round_numbers(value: Any) -> Any:
    """Round the floats of JSON data to SIGNIFICANT_DIGITS. NaN and infinity become None, because JSON has neither."""
    if isinstance(value, float):
        return float(f"{value:.{SIGNIFICANT_DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: round_numbers(inner) for name, inner in value.items()}
    return [round_numbers(inner) for inner in value] if isinstance(value, list | tuple) else value
