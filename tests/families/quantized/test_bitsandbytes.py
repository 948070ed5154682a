"""bitsandbytes checkpoints, written from the definition of the formats: dequantized, packed, and damaged."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.quantized_checkpoints import (
    QuantizedMatrix,
    check_checkpoints,
    edit_tensors,
    save_checkpoints,
)
from torch import Tensor

import cutaway as ct
from cutaway.errors import CutawayError
from cutaway.quantization.block_formats import NF4_VALUES

WEIGHT = "model.layers.0.self_attn.q_proj.weight"
STATE = f"{WEIGHT}.quant_state.bitsandbytes__nf4"
FP4_MAP = (0.0, 1 / 192, 8 / 12, 1.0, 4 / 12, 6 / 12, 2 / 12, 3 / 12)
MAPS = {"nf4": torch.tensor(NF4_VALUES), "fp4": torch.tensor([*FP4_MAP, *(-value for value in FP4_MAP)])}
DYNAMIC_MAP = torch.sort(torch.cat([torch.linspace(-1, 1, 255), torch.zeros(1)]))[0]
"""Stands for the 256 numbers of double quantization: the file stores them, so that any would do."""


def encode_json(fields: Any) -> Tensor:
    return torch.tensor(list(json.dumps(fields).encode()), dtype=torch.uint8)


def four_bits(
    kind: str = "nf4", *, block_size: int = 64, nested: bool = False, storage: torch.dtype = torch.uint8
) -> Callable[[Tensor], QuantizedMatrix]:
    def quantize(weight: Tensor) -> QuantizedMatrix:
        dtype = weight.dtype
        flat = weight.flatten().float()
        padded = torch.nn.functional.pad(flat, (0, -len(flat) % block_size)).view(-1, block_size)
        absmax = padded.abs().amax(1)
        numbers = MAPS[kind]
        codes = (padded / absmax[:, None]).unsqueeze(-1).sub(numbers).abs().argmin(-1)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": block_size, "shape": list(weight.shape)}
        state["dtype"] = str(dtype).removeprefix("torch.")
        tensors = {"weight.absmax": absmax, "weight.quant_map": numbers}
        if nested:
            offset = float(absmax.mean())
            centered = torch.nn.functional.pad(absmax - offset, (0, -len(absmax) % 256)).view(-1, 256)
            nested_absmax = centered.abs().amax(1)
            nested_codes = (centered / nested_absmax[:, None]).unsqueeze(-1).sub(DYNAMIC_MAP).abs().argmin(-1)
            absmax = (DYNAMIC_MAP[nested_codes] * nested_absmax[:, None]).flatten()[: len(absmax)] + offset
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
            tensors["weight.absmax"] = nested_codes.flatten()[: len(absmax)].to(torch.uint8)
            tensors |= {"weight.nested_absmax": nested_absmax, "weight.nested_quant_map": DYNAMIC_MAP}
        restored = (numbers[codes] * absmax[:, None]).flatten()[: len(flat)].to(dtype).view(weight.shape)
        stored = codes.flatten()[: len(flat)].to(torch.uint8)
        packed = stored[0::2] << 4 | stored[1::2]
        tensors["weight"] = packed.view(storage)[:, None]
        tensors[f"weight.quant_state.bitsandbytes__{kind}"] = encode_json(state)
        return QuantizedMatrix(tensors, restored, float(absmax.max()) * 2**-11)

    return quantize


def int8(weight: Tensor) -> QuantizedMatrix:
    absmax = weight.float().abs().amax(1)
    codes = (weight.float() * 127 / absmax[:, None]).round().to(torch.int8)
    restored = (codes * absmax[:, None] * 7.874015718698502e-3).to(weight.dtype)
    tensors = {"weight": codes, "SCB": absmax, "weight_format": torch.zeros((), dtype=torch.uint8)}
    return QuantizedMatrix(tensors, restored, float(absmax.max()) * 2**-11)


FOUR_BITS = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("options", "formats"),
    [
        ({}, {"NF4"}),
        ({"nested": True}, {"NF4"}),
        ({"block_size": 128, "nested": True}, {"NF4"}),
        ({"block_size": 4096}, set()),  # blocks of several rows
        ({"kind": "fp4"}, set()),
        ({"kind": "fp4", "nested": True}, set()),
        ({"storage": torch.bfloat16}, {"NF4"}),
    ],
)
def test_four_bits(options: dict[str, Any], formats: set[str], dtype: torch.dtype, tmp_path: Path) -> None:
    saved = save_checkpoints(tmp_path, four_bits(**options), FOUR_BITS, dtype=dtype)
    check_checkpoints(saved, formats, tmp_path)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_int8(dtype: torch.dtype, tmp_path: Path) -> None:
    config = {"load_in_8bit": True, "llm_int8_threshold": 6.0}  # old configs do not name the method
    saved = save_checkpoints(tmp_path, int8, config, dtype=dtype, plain_names=("down_proj",))
    check_checkpoints(saved, {"Q8_0"}, tmp_path)
    assert "LLM.int8()" in str(ct.load(saved.quantized).load_report)


def set_state(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def damage(path: Path) -> None:
        def edit(tensors: dict[str, Tensor]) -> None:
            fields = json.loads(bytes(tensors[STATE].tolist()))
            change(fields)
            tensors[STATE] = encode_json(fields)

        edit_tensors(path, edit)

    return damage


def set_tensor(name: str, value: Tensor) -> Callable[[Path], object]:
    return lambda path: edit_tensors(path, lambda tensors: tensors.update({name: value}))


def remove(name: str) -> Callable[[Path], object]:
    return lambda path: edit_tensors(path, lambda tensors: tensors.pop(name))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no quant_state": (remove(STATE), "quant_state of tensor .* is missing"),
    "no absmax": (remove(f"{WEIGHT}.absmax"), "stored as integers|does not have the tensors"),
    "no quant_map": (remove(f"{WEIGHT}.quant_map"), "quant_map' is missing"),
    "no nested quant_map": (remove(f"{WEIGHT}.nested_quant_map"), "nested_quant_map' is missing"),
    "quant_state is not JSON": (
        set_tensor(STATE, torch.full((40,), 255, dtype=torch.uint8)),
        "not a valid quant_state",
    ),
    "quant_state is truncated": (set_tensor(STATE, torch.tensor(list(b'{"blocksize": 6'), dtype=torch.uint8)), "valid"),
    "quant_state is nested deeply": (set_tensor(STATE, torch.full((60_000,), 91, dtype=torch.uint8)), "not a valid"),
    "quant_state is a list": (set_tensor(STATE, encode_json([1, 2])), "not a JSON object"),
    "quant_state is long": (set_tensor(STATE, torch.zeros(1 << 17, dtype=torch.uint8)), "too many for a quant_state"),
    "no block size": (set_state(lambda state: state.pop("blocksize")), "it has no 'blocksize'"),
    "block size 0": (set_state(lambda state: state.update(blocksize=0)), "not a positive integer"),
    "block size is a float": (set_state(lambda state: state.update(blocksize=64.0)), "not a positive integer"),
    "another block size": (set_state(lambda state: state.update(blocksize=32)), "absmax' in 'model.s.*' has shape"),
    "another shape": (set_state(lambda state: state.update(shape=[128, 130])), r"the shape \[128, 130\]"),
    "huge shape": (set_state(lambda state: state.update(shape=[1 << 50, 1])), "not a positive integer"),
    "shape of another order": (set_state(lambda state: state.update(shape=[64, 256])), "config.json requires"),
    "unknown dtype": (set_state(lambda state: state.update(dtype="int8")), "its dtype is 'int8'"),
    "infinite offset": (set_state(lambda state: state.update(nested_offset=math.inf)), "nested_offset is not finite"),
    "offset is a string": (set_state(lambda state: state.update(nested_offset="x")), "not a valid quant_state"),
    "codes are short": (set_tensor(WEIGHT, torch.zeros(64, 1, dtype=torch.uint8)), "has shape"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_checkpoints_are_refused(name: str, tmp_path: Path) -> None:
    damage, message = DAMAGE[name]
    saved = save_checkpoints(tmp_path, four_bits(nested=True), FOUR_BITS)
    damage(saved.quantized)
    with pytest.raises(CutawayError, match=message):
        ct.load(saved.quantized)


SCB = WEIGHT.replace("weight", "SCB")
INT8_DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no scales": (remove(SCB), "without a scale"),
    "scales of another shape": (set_tensor(SCB, torch.ones(3)), r"has shape \[3\]"),
    "layout of a GPU": (set_tensor(f"{WEIGHT}_format", torch.tensor(2, dtype=torch.uint8)), "layout of a GPU"),
    "codes are not int8": (set_tensor(WEIGHT, torch.zeros(128, 128, dtype=torch.int32)), "dtype int32, not int8"),
}


@pytest.mark.parametrize("name", INT8_DAMAGE)
def test_damaged_int8_checkpoints_are_refused(name: str, tmp_path: Path) -> None:
    damage, message = INT8_DAMAGE[name]
    saved = save_checkpoints(tmp_path, int8, {"quant_method": "bitsandbytes", "load_in_8bit": True})
    damage(saved.quantized)
    with pytest.raises(CutawayError, match=message):
        ct.load(saved.quantized)
