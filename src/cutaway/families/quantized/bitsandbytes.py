"""bitsandbytes: NF4 and FP4 in blocks of the flattened matrix, and int8 with one scale per row.

| tensor                                  | content                                                                 |
|-----------------------------------------|-------------------------------------------------------------------------|
| `weight`, 4 bits                        | two codes per byte of the flattened matrix, the first one in the high bits |
| `weight.absmax`                         | scale of each block; with double quantization, a code of 8 bits         |
| `weight.quant_map`                      | the 16 numbers that the codes stand for                                 |
| `weight.nested_absmax`, `.nested_quant_map` | double quantization: scales and numbers of the codes of the scales  |
| `weight.quant_state.bitsandbytes__nf4`  | JSON: block sizes, shape and dtype of the matrix                        |
| `weight`, `SCB`, 8 bits                 | int8 numbers, and the largest absolute value of each row                |
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cutaway.errors import WeightError
from cutaway.families.quantized.matrix import QuantizedMatrix, contiguous_groups
from cutaway.families.quantized.reader import FLOAT_DTYPES, QuantizedReader
from cutaway.families.safetensors_reader import TensorInfo
from cutaway.quantization.block_formats import NF4_VALUES

_QUANT_STATES = {"nf4": ".quant_state.bitsandbytes__nf4", "fp4": ".quant_state.bitsandbytes__fp4"}
_MAX_STATE_BYTES = 1 << 16
_INT8_FACTOR = 7.874015718698502e-3
"""1 / 127 as bitsandbytes rounds it."""
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in FLOAT_DTYPES}


@dataclass(frozen=True)
class _QuantState:
    """The JSON object of a 4-bit matrix."""

    shape: tuple[int, int]
    block_size: int
    dtype: torch.dtype
    nested_block_size: int
    nested_offset: float

    @property
    def num_blocks(self) -> int:
        return -(-math.prod(self.shape) // self.block_size)


class BitsAndBytesReader(QuantizedReader):
    """Checkpoints that transformers saved with load_in_4bit or load_in_8bit."""

    method = "bitsandbytes"

    def find_matrices(self) -> None:
        self.states: dict[str, _QuantState] = {}
        kinds = set()
        for stored in self.reader.tensor_infos:
            if stored.endswith(".absmax"):
                kinds.add(self._add_4_bit(stored.removesuffix(".absmax")))
            elif stored.endswith(".SCB"):
                self._add_8_bit(stored.removesuffix(".SCB"))
                kinds.add("int8")
        if kinds:
            self.method = f"bitsandbytes, {' and '.join(sorted(kinds))}"
        if "int8" in kinds:
            self.notes.append("activations are not quantized, so results differ slightly from those of LLM.int8()")

    def _add_4_bit(self, name: str) -> str:
        kinds = [kind for kind, suffix in _QUANT_STATES.items() if name + suffix in self.reader.tensor_infos]
        if len(kinds) != 1:
            problem = "is missing" if not kinds else "is stored more than once"
            raise WeightError(
                f"the quant_state of tensor '{name}' {problem}, so its shape is unknown; download it again"
            )
        parts = {
            "weight": name,
            "absmax": f"{name}.absmax",
            "quant_map": f"{name}.quant_map",
            "quant_state": name + _QUANT_STATES[kinds[0]],
        }
        info = self.check_part(parts["quant_state"], name, None, torch.uint8, dims=1)
        state = self.states[name] = self._read_state(parts["quant_state"], info)
        weight = self.check_part(name, name, None, torch.uint8, torch.int8, *FLOAT_DTYPES)
        num_weights = math.prod(state.shape)
        if weight.numel * weight.dtype.itemsize != -(-num_weights // 2):
            raise WeightError(
                f"tensor '{name}' has shape {list(weight.shape)}, but its quant_state has"
                f" the shape {list(state.shape)}; the file is damaged"
            )
        self.check_part(parts["quant_map"], name, (16,), *FLOAT_DTYPES)
        if f"{name}.nested_absmax" in self.reader.tensor_infos:
            parts |= {key: f"{name}.{key}" for key in ("nested_absmax", "nested_quant_map")}
            self.check_part(parts["absmax"], name, (state.num_blocks,), torch.uint8)
            self.check_part(parts["nested_quant_map"], name, (256,), *FLOAT_DTYPES)
            num_nested = -(-state.num_blocks // state.nested_block_size)
            self.check_part(parts["nested_absmax"], name, (num_nested,), *FLOAT_DTYPES)
        else:
            self.check_part(parts["absmax"], name, (state.num_blocks,), *FLOAT_DTYPES)
        self.add_matrix(name, parts, state.shape, kinds[0])
        return kinds[0]

    def _read_state(self, stored: str, info: TensorInfo) -> _QuantState:
        if info.numel > _MAX_STATE_BYTES:
            raise WeightError(
                f"tensor '{stored}' has {info.numel:,} bytes, too many for a quant_state; the file is damaged"
            )
        try:
            fields = json.loads(bytes(self.reader.read_tensor(stored).tolist()))
            return _parse_state(fields)
        except (ValueError, RecursionError, TypeError, KeyError) as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise WeightError(
                f"tensor '{stored}' is not a valid quant_state: {reason:.200}; the file is damaged"
            ) from None

    def _add_8_bit(self, stem: str) -> None:
        name = f"{stem}.weight"
        rows, columns = self.check_part(name, name, None, torch.int8, dims=2).shape
        parts = {"weight": name, "scales": f"{stem}.SCB"}
        self.check_part(parts["scales"], name, (rows,), *FLOAT_DTYPES)
        if (layout := f"{stem}.weight_format") in self.reader.tensor_infos:
            parts["layout"] = layout
            self.check_part(layout, name, None, torch.uint8)
            if self.reader.read_tensor(layout).any():
                raise WeightError(
                    f"tensor '{layout}' says that '{name}' has a layout of a GPU; save it row by row with"
                    " bitsandbytes 0.43 or later"
                )
        self.add_matrix(name, parts, (rows, columns), "int8")

    def read_matrix(self, name: str) -> QuantizedMatrix | Tensor:
        if name not in self.states:
            weight = self.read_part(name, "weight")
            return QuantizedMatrix(
                codes=weight.view(torch.uint8) ^ 0x80,
                scales=self.read_part(name, "scales")[:, None],
                groups=torch.zeros(weight.shape[1], dtype=torch.long),
                zero_points=128,
                factor=_INT8_FACTOR,
            )
        state = self.states[name]
        data = self.read_part(name, "weight").flatten().view(torch.uint8)
        codes = torch.stack((data >> 4, data & 15), -1).flatten()[: math.prod(state.shape)]
        numbers = self.read_part(name, "quant_map").float()
        is_nf4 = torch.equal(numbers, torch.tensor(NF4_VALUES))
        # Blocks that do not end with the rows are those of a matrix with one row.
        shape = state.shape if state.shape[1] % state.block_size == 0 else (1, len(codes))
        matrix = QuantizedMatrix(
            codes=codes.view(shape),
            scales=self._read_scales(name, state).view(shape[0], -1),
            groups=contiguous_groups(shape[1], state.block_size),
            values=NF4_VALUES if is_nf4 else tuple(numbers.tolist()),
            compute_dtype=state.dtype,
            num_bits=4,
        )
        return matrix if shape == state.shape else matrix.dequantize(self.dtype).view(state.shape)

    def _read_scales(self, name: str, state: _QuantState) -> Tensor:
        absmax = self.read_part(name, "absmax")
        if "nested_absmax" not in self.parts[name]:
            return absmax.float()
        numbers = self.read_part(name, "nested_quant_map").float()[absmax.int()]
        nested = self.read_part(name, "nested_absmax").float()
        return numbers * nested[torch.arange(len(numbers)) // state.nested_block_size] + state.nested_offset


def _parse_state(fields: Any) -> _QuantState:
    if not isinstance(fields, Mapping):
        raise ValueError("it is not a JSON object")
    shape = fields["shape"]
    sizes = [fields["blocksize"], fields.get("nested_blocksize", 1)]
    if not isinstance(shape, list) or len(shape) != 2:
        raise ValueError(f"its shape is {shape!r:.60}, not that of a matrix")
    for value in (*shape, *sizes):
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 40:
            raise ValueError(f"a size in it is {value!r:.60}, not a positive integer")
    if fields["dtype"] not in _DTYPES:
        raise ValueError(f"its dtype is {fields['dtype']!r:.60}")
    offset = float(fields.get("nested_offset", 0.0))
    if not math.isfinite(offset):
        raise ValueError("its nested_offset is not finite")
    return _QuantState((shape[0], shape[1]), sizes[0], _DTYPES[fields["dtype"]], sizes[1], offset)
