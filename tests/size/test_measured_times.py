"""Times measured on one H200 lie between the lower bound and the upper end of the predicted ranges (`bench/`)."""

from typing import NamedTuple

import pytest

import cutaway as ct
from cutaway.size import SizeEstimate, custom_hardware
from cutaway.size.engine_kernels import has_engine_decode, has_engine_prefill
from cutaway.size.roofline import RooflineBound

COPY_BANDWIDTH, MATMUL_FLOPS = 4.2e12, 778e12
"""Bandwidth of a copy and FLOP/s of a bf16 product of two 8,192 × 8,192 matrices on the same GPU."""


class Measurement(NamedTuple):
    """Median time of a prefill step to the first token, or of a decode step, of the engine."""

    source: str
    workload: str
    batch_size: int
    context: int
    milliseconds: float
    dtype: str = "bf16"


MEASUREMENTS = [
    # bench/prefill_gpu.py, random prompts
    Measurement("llama-3-8b", "prefill", 32, 1024, 777),
    Measurement("llama-3-8b", "prefill", 32, 1024, 787),
    Measurement("llama-3-8b", "prefill", 1, 8000, 230),
    Measurement("llama-3-8b", "prefill", 1, 8000, 239),
    Measurement("llama-3-8b", "prefill", 1, 128, 6.4),
    Measurement("llama-3-8b", "prefill", 1, 128, 7.2),
    # bench/decode_gpu.py
    Measurement("llama-3-8b", "decode", 1, 200, 3.96),
    Measurement("llama-3-8b", "decode", 1, 200, 4.00),
    Measurement("llama-3-8b", "decode", 32, 1024, 5.65),
    Measurement("llama-3-8b", "decode", 1, 200, 2.44, "int8"),
    Measurement("llama-3-8b", "decode", 1, 200, 2.06, "int4"),
    # bench/decode_moe_gpu.py, random weights, prompts of 128 tokens
    Measurement("qwen3-30b-a3b", "decode", 1, 200, 2.67),
    Measurement("qwen3-30b-a3b", "decode", 32, 200, 14.2),
    Measurement("gpt-oss-20b", "decode", 1, 200, 2.44),
    Measurement("gpt-oss-20b", "decode", 32, 200, 10.4),
    Measurement("deepseek-v2-lite", "decode", 1, 200, 2.08),
    Measurement("deepseek-v2-lite", "decode", 32, 200, 8.68),
]


def bound_of(size: SizeEstimate, workload: str) -> RooflineBound:
    bound = size.prefill_time if workload == "prefill" else size.decode_time
    assert bound is not None
    return bound


@pytest.mark.parametrize("measured", MEASUREMENTS, ids=lambda m: "-".join(map(str, m)))
def test_range_contains_the_measurement(measured: Measurement) -> None:
    seconds = measured.milliseconds / 1000
    options = {"batch_size": measured.batch_size, "context": measured.context, "dtype": measured.dtype}
    bound = bound_of(ct.size(measured.source, hardware="h200", **options), measured.workload)
    assert bound.engine_seconds is not None
    low, high = bound.engine_seconds
    assert bound.min_seconds <= low <= seconds <= high
    assert high <= bound.expected_seconds_high
    assert high / low < 4  # narrow enough to be of use
    device = custom_hardware(bandwidth=COPY_BANDWIDTH, flops=MATMUL_FLOPS)
    assert bound_of(ct.size(measured.source, hardware=device, **options), measured.workload).min_seconds <= seconds


def test_decode_of_a_batch_reads_the_expected_number_of_experts() -> None:
    """128 experts of which 8 are selected: with 32 rows 1 − (1 − 8/128)³² = 87 % of them are read."""
    one, many = (ct.size("qwen3-30b-a3b", batch_size=batch, context=1) for batch in (1, 32))
    experts = 48 * 128 * 3 * 2048 * 768 * 2
    cache = one.kv_cache.total_bytes + one.decode_pass.logits_bytes
    difference = (
        many.decode_workload(32).expected_bytes - one.decode_workload(1).expected_bytes - 31 * (cache + 2 * 2048)
    )
    assert difference == pytest.approx(experts * (1 - (1 - 8 / 128) ** 32 - 8 / 128), rel=1e-4)


def test_output_matrix_is_read_quantized() -> None:
    """As with the engine's `weight_bits`, also where the output matrix is the embedding table."""
    for source in ("llama-3-8b", "gemma-2-2b"):
        config = ct.config(source)
        assert config.vocab_size is not None
        matrix = config.vocab_size * config.d_model
        size = ct.size(source, dtype="int8", context=1)
        not_read = 0 if config.head.tied else 2 * (matrix - config.d_model)  # the embedding table, without one row
        other = size.kv_cache.total_bytes + size.decode_pass.logits_bytes
        read = size.decode_workload(1).min_bytes - other
        assert size.checkpoint.total_bytes - read == not_read + matrix - 2 * config.vocab_size


@pytest.mark.parametrize(
    ("source", "options", "workloads"),
    [
        ("llama-3-8b", {}, {"prefill", "decode"}),
        ("llama-3-8b", {"hardware": "mi300x"}, set()),
        ("llama-3-8b", {"batch_size": 65}, {"prefill"}),
        ("llama-3-8b", {"world_size": 2, "parallel": "tp"}, set()),
        ("deepseek-v2-lite", {}, {"decode"}),
        ("gpt-oss-20b", {}, {"decode"}),
        ("gpt-oss-20b", {"dtype": "int4"}, set()),
        ("olmo-2-7b", {}, set()),  # QK-norm over all heads
        ("t5-base", {}, set()),
    ],
)
def test_range_of_the_engine_is_given_for_its_kernels(
    source: str, options: dict[str, object], workloads: set[str]
) -> None:
    size = ct.size(source, **{"hardware": "h200", "context": 128} | options)  # type: ignore[arg-type]
    assert {name for name in ("prefill", "decode") if bound_of(size, name).engine_seconds is not None} == workloads


@pytest.mark.gpu  # imports Triton
@pytest.mark.parametrize("name", [name for name in ct.presets() if ct.config(name).form == "decoder"])
def test_models_with_engine_kernels_equal_those_of_the_engine(name: str) -> None:
    from cutaway.generate.fast.gpu_decode_model import FastBlock, build_gpu_decode_model, can_pack_prefill

    config = ct.config(name)
    model = ct.build(config, device="meta")
    packs_prefill = can_pack_prefill(model)
    blocks = list(build_gpu_decode_model(model).stacks["decoder"].blocks)
    is_fast = all(
        isinstance(block, FastBlock) and block.fast_attention is not None and block.fast_ffn is not None
        for block in blocks
    )
    assert has_engine_decode(config) == is_fast
    assert not has_engine_prefill(config) or packs_prefill
