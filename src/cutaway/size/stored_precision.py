"""Precision of the weights as a GGUF file or a quantized model directory stores them."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from cutaway.bounded_files import read_json_object
from cutaway.errors import ConfigError
from cutaway.size.precision import ALL_MATRICES, MatrixKind, Precision, get_precision

FormatSizes = Mapping[str, Mapping[str, tuple[int, int]]]
"""{kind of matrix: {format: (number of weights, number of bytes)}}."""


def stored_precision(source: object) -> Precision | None:
    """Return the precision of a .gguf file, or of the quantized weights that a config.json describes.

    None if the weights are not quantized, or in a way for which there is no block format: bf16 is then the default."""
    if isinstance(source, Mapping):
        return _precision_of_config(source)
    if not isinstance(source, str | Path):
        return None
    path = Path(source)
    try:
        if path.suffix == ".gguf" and path.is_file():
            # `families` reads the file. It is resolved by name, because size must not depend on it.
            read: Callable[[Path], FormatSizes] = resolve_name("cutaway.families.gguf.load_save:gguf_format_sizes")
            return _precision_of_gguf(read(path))
        config_path = path / "config.json" if path.is_dir() else path
        if config_path.name != "config.json" or not config_path.is_file():
            return None
    except OSError:
        return None
    return _precision_of_config(read_json_object(config_path, ConfigError))


def _precision_of_gguf(sizes: FormatSizes) -> Precision | None:
    """Precision with the average bits per weight of each kind of matrix."""
    totals = {
        kind: Fraction(8 * sum(nbytes for _, nbytes in formats.values()), sum(count for count, _ in formats.values()))
        for kind, formats in sizes.items()
    }
    if "layer" not in totals or "embedding" not in totals:
        return None
    bits: dict[MatrixKind, Fraction] = dict.fromkeys(ALL_MATRICES, totals["layer"])
    bits["embedding"] = totals["embedding"]
    bits["output"] = totals.get("output", totals["embedding"])  # without a matrix of its own, it is the embedding table
    counts: Counter[str] = Counter()
    for formats in sizes.values():
        counts.update({name: nbytes for name, (_, nbytes) in formats.items()})
    names = [name.lower() for name, _ in counts.most_common()]
    if min(bits.values()) >= 16:
        return None
    return Precision(
        "+".join(names[:2]),
        float(min(bits.values())),
        2,
        2,
        stored_as=f"in {', '.join(names)}",
        quantized_kinds=ALL_MATRICES,
        stored_bits=tuple(bits.items()),
        compute_dtype="int8",
    )


def _precision_of_config(config: Mapping[str, Any]) -> Precision | None:
    quantization = config.get("quantization_config")
    if not isinstance(quantization, Mapping):
        return None
    name = _find_format(quantization)
    if name is None:
        return None
    precision = get_precision(name)
    method = quantization.get("quant_method")
    # The formats of GGUF quantize the embedding too, these methods only the layers; MXFP4 of gpt-oss only the experts.
    kinds: tuple[MatrixKind, ...] = ("experts",) if method == "mxfp4" else ("layer", "experts")
    return replace(precision, quantized_kinds=kinds, stored_as=f"by {method}")


def _find_format(quantization: Mapping[str, Any]) -> str | None:
    """The block format that represents quantized matrices, as in families/quantized; None if there is none."""
    bits, group_size = quantization.get("bits"), quantization.get("group_size", 128)
    match quantization.get("quant_method"):
        case "mxfp4":
            return "mxfp4"
        case "fp8" | "fbgemm_fp8":
            return "fp8_g128"
        case "gptq":
            return _integer_format(bits, group_size, is_symmetric=quantization.get("sym") is True)
        case "awq":
            return _integer_format(bits or 4, group_size, is_symmetric=quantization.get("zero_point") is False)
        case "bitsandbytes" if quantization.get("load_in_4bit"):
            return "nf4" if quantization.get("bnb_4bit_quant_type", "fp4") == "nf4" else None
        case "bitsandbytes" if quantization.get("load_in_8bit"):
            return "q8_0"
        case "compressed-tensors":
            return _format_of_compressed_tensors(quantization)
    return None


def _integer_format(bits: object, group_size: object, *, is_symmetric: bool) -> str | None:
    if not isinstance(bits, int) or not 1 <= bits <= 8:
        return None
    if bits > 4:
        return "q8_0" if is_symmetric or bits < 8 else "int8_g32"
    if group_size in (None, -1) or (isinstance(group_size, int) and group_size > 0 and group_size % 128 == 0):
        return "int4_g128"
    if not isinstance(group_size, int) or group_size <= 0 or group_size % 32:
        return None
    return "q4_0" if is_symmetric else "q4_1"


def _format_of_compressed_tensors(quantization: Mapping[str, Any]) -> str | None:
    groups = quantization.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    weights = first.get("weights") if isinstance(first, Mapping) else None
    if not isinstance(weights, Mapping):
        return None
    if quantization.get("format") == "mxfp4-pack-quantized":
        return "mxfp4"
    if weights.get("type") == "float":
        return "fp8_g128" if weights.get("num_bits") == 8 and "mx" not in str(quantization.get("format")) else None
    is_symmetric = weights.get("symmetric", True) is True
    return _integer_format(weights.get("num_bits"), weights.get("group_size"), is_symmetric=is_symmetric)
