"""Bytes of packed weights equal those of tensors and files; the precision of GGUF files and quantized directories."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import cutaway as ct
from cutaway.errors import InputError
from cutaway.families.gguf.load_save import save_gguf
from cutaway.quantization.block_formats import BLOCK_FORMATS, pack_weights, unpack_blocks
from cutaway.size.precision import BLOCK_PRECISIONS, get_precision
from cutaway.size.stored_precision import stored_precision

REFERENCES = json.loads((Path(__file__).parents[1] / "config/data/published_models.json").read_text())["models"]


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("q8_0", 8.5),
        ("q4_k", 4.5),
        ("q6_k", 6.5625),
        ("mxfp4", 4.25),
        ("int4_g128", 4.25),
        ("nf4", 4.25),
        ("fp8_g128", 8.25),
        ("int8_g32", 9.0),
    ],
)
def test_bits_per_weight(name: str, bits: float) -> None:
    assert get_precision(name.upper()) is get_precision(name) is BLOCK_PRECISIONS[name]
    kind = "experts" if name == "mxfp4" else "layer"
    assert 8 * BLOCK_PRECISIONS[name].tensor_bytes((3, 512), kind) == 3 * 512 * bits
    assert BLOCK_PRECISIONS[name].tensor_bytes((3, 7), kind) == 3 * 7 * 2  # no whole blocks: not quantized
    assert BLOCK_PRECISIONS[name].tensor_bytes((512,)) == 512 * 2


@pytest.mark.parametrize("name", ["Q8_0", "Q4_1", "Q4_K", "Q6_K"])
def test_bytes_equal_those_of_packed_matrices(name: str) -> None:
    packed = pack_weights(torch.randn(6, 512), BLOCK_FORMATS[name])
    assert packed.nbytes == get_precision(name).tensor_bytes((6, 512), "layer")
    assert unpack_blocks(packed, BLOCK_FORMATS[name]).codes.shape == (6, 512)


def test_quantized_kinds() -> None:
    """GGUF formats hold all matrices, those of GPTQ, AWQ, NF4 and fp8 the layers, and MXFP4 the experts."""
    sizes = {
        name: ct.size("gpt-oss-20b", dtype=name).checkpoint.total_bytes for name in ("bf16", "mxfp4", "nf4", "q4_0")
    }
    experts = 24 * 32 * 3 * 2880 * 2880
    assert sizes["bf16"] - sizes["mxfp4"] == experts * (16 - 4.25) / 8
    assert sizes["bf16"] > sizes["mxfp4"] > sizes["nf4"] > sizes["q4_0"]
    assert ct.size("gpt-oss-20b", dtype="mxfp4").inference_memory.total_bytes < 18e9  # of a card with 24 GB


def test_decode_reads_the_packed_bytes() -> None:
    bf16, q4, q8 = (
        ct.size("llama-3-8b", dtype=name, hardware="h200", context=128) for name in ("bf16", "q4_k", "q8_0")
    )
    times = [size.decode_time.min_seconds for size in (bf16, q8, q4) if size.decode_time is not None]
    assert times[0] / times[1] == pytest.approx(16 / 8.5, rel=0.01)
    assert times[0] / times[2] == pytest.approx(16 / 4.5, rel=0.01)
    assert q4.prefill_time is not None
    assert bf16.prefill_time is not None
    assert q4.prefill_time.compute_seconds == bf16.prefill_time.compute_seconds


@pytest.mark.parametrize(("quantization", "name"), [("q8_0", "q8_0"), ("q4_k", "q4_k"), ("q4_1", "q4_1")])
def test_weights_of_a_gguf_file(quantization: str, name: str, tmp_path: Path) -> None:
    config = ct.config("tiny-llama").replace({"d_model": 256, "vocab_size": 300, "decoder.block.ffn.hidden": 512})
    path = save_gguf(ct.build(config, seed=0), tmp_path / "model.gguf", quantization=quantization)
    size = ct.size(path, context=64)
    assert size.options.precision.name == name
    assert size.checkpoint.total_bytes == ct.size(config, dtype=quantization).checkpoint.total_bytes
    loaded = ct.load(path, dequantize=False).model
    assert size.options.config == ct.config(path) == loaded.config
    matrices = sum(parameter.nbytes for parameter in loaded.parameters() if parameter.ndim > 1)
    vectors = sum(2 * parameter.numel() for parameter in loaded.parameters() if parameter.ndim == 1)
    assert size.inference_memory.bytes_by_component["weights"] == matrices + vectors
    assert ct.size(path, dtype="bf16").options.precision.name == "bf16"
    assert ct.size(path, mode="train").options.precision.name == "mixed"


def test_plain_gguf_file(tmp_path: Path) -> None:
    path = save_gguf(ct.build("tiny-llama", seed=0), tmp_path / "model.gguf")
    assert ct.size(path).options.precision.name == "bf16"


GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
FP8_WEIGHTS = {"num_bits": 8, "type": "float"}
WEIGHTS: dict[str, Any] = {"num_bits": 4, "type": "int", "group_size": 32, "symmetric": False}


@pytest.mark.parametrize(
    ("quantization_config", "name"),
    [
        (GPTQ, "int4_g128"),
        (GPTQ | {"group_size": 32}, "q4_0"),
        (GPTQ | {"group_size": 64, "sym": False}, "q4_1"),
        (GPTQ | {"bits": 8}, "q8_0"),
        (GPTQ | {"bits": 8, "sym": False}, "int8_g32"),
        (GPTQ | {"desc_act": True}, "int4_g128"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, "int4_g128"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "nf4"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, None),  # fp4
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "q8_0"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8_g128"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": WEIGHTS}}}, "q4_1"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": FP8_WEIGHTS}}}, "fp8_g128"),
        ({"quant_method": "compressed-tensors"}, None),
        ({"quant_method": "aqlm"}, None),
        ("damaged", None),
        (GPTQ | {"bits": "4", "group_size": "128"}, None),
        (None, None),
    ],
)  # fmt: skip
def test_precision_of_a_quantized_directory(quantization_config: Any, name: str | None, tmp_path: Path) -> None:
    reference = next(fact for fact in REFERENCES if fact["name"] == "llama-3-8b")["config"]
    (tmp_path / "config.json").write_text(json.dumps(reference | {"quantization_config": quantization_config}))
    for source in (tmp_path, tmp_path / "config.json"):
        precision = stored_precision(source)
        assert (None if precision is None else precision.name) == name
    if name is not None:
        size = ct.size(tmp_path)
        expected = 2 * 2 * 128256 * 4096 if name != "mxfp4" else 0  # the embedding and the head are not quantized
        assert size.inference_memory.bytes_by_component["weights"] > expected
        assert size.options.precision.stored_as.startswith("by ")
        assert size.to_dict()["options"]["infer"]["dtype"] == name


def test_unknown_dtype_lists_the_formats() -> None:
    with pytest.raises(InputError, match=r"int4, q4_0, .*q6_k, mxfp4, int4_g128, nf4, fp8_g128, int8_g32"):
        ct.size("gpt2", dtype="q3_k")
    with pytest.raises(InputError, match="inference only"):
        ct.size("gpt2", dtype="q4_k", mode="train").to_dict()
