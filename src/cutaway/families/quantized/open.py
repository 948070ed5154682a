"""Open a quantized checkpoint: the reader for the method that its config.json names."""

from collections.abc import Mapping

import torch

from cutaway.errors import ConfigError
from cutaway.families.quantized.awq import AWQReader
from cutaway.families.quantized.bitsandbytes import BitsAndBytesReader
from cutaway.families.quantized.compressed_tensors import CompressedTensorsReader
from cutaway.families.quantized.fp8 import FP8Reader
from cutaway.families.quantized.gptq import GPTQReader
from cutaway.families.quantized.mxfp4 import MXFP4Reader
from cutaway.families.quantized.reader import FLOAT_DTYPES, QuantizedReader, ReadOptions
from cutaway.families.safetensors_reader import TensorReader

READERS: dict[str, type[QuantizedReader]] = {
    "gptq": GPTQReader,
    "awq": AWQReader,
    "bitsandbytes": BitsAndBytesReader,
    "compressed-tensors": CompressedTensorsReader,
    "fp8": FP8Reader,
    "fbgemm_fp8": FP8Reader,
    "mxfp4": MXFP4Reader,
}
"""Reader of each quant_method."""


def open_quantized(
    reader: TensorReader, quantization_config: object, dtype: torch.dtype | None = None, *, packed: bool = False
) -> QuantizedReader:
    """Wrap a reader so that quantized matrices are dequantized, or stay packed; raise for unsupported methods.

    `dtype` is the dtype of dequantized weights."""
    if not isinstance(quantization_config, Mapping):
        value = f"{quantization_config!r:.60}"
        raise ConfigError(f"config.json's 'quantization_config' is {value}, not a JSON object; correct it")
    method = quantization_config.get("quant_method")
    if method is None and (quantization_config.get("load_in_4bit") or quantization_config.get("load_in_8bit")):
        method = "bitsandbytes"
    if not isinstance(method, str) or method not in READERS:
        supported = f"cutaway supports {', '.join(READERS)}; load the unquantized checkpoint"
        raise ConfigError(f"config.json's 'quantization_config' has quant_method {method!r:.60}; {supported}")
    return READERS[method](reader, quantization_config, ReadOptions(dtype if dtype in FLOAT_DTYPES else None, packed))


def read_dtype(hf_config: Mapping[str, object]) -> torch.dtype | None:
    """dtype of the model in config.json; None if there is none for weights."""
    name = hf_config.get("dtype") or hf_config.get("torch_dtype")
    return next((dtype for dtype in FLOAT_DTYPES if name in (str(dtype), str(dtype).removeprefix("torch."))), None)
