"""Throughput of decode and prefill on this machine, compared with transformers in the same run."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any, Literal

import torch

from cutaway.bench.hardware import (
    DEFAULT_SEQ_LENS,
    TORCH_DTYPES,
    device_name,
    measure_copy_bandwidth,
    measure_matmul_flops,
    synchronize,
)
from cutaway.config.transformer import Config
from cutaway.errors import InputError
from cutaway.generate import Engine, EngineConfig, Request, SamplingParams
from cutaway.generate.quantization_eval import QuantizationReport, evaluate_quantization
from cutaway.model import Transformer
from cutaway.size import SizeEstimate, size
from cutaway.size.measured_hardware import load_measured_hardware

InferencePhase = Literal["decode", "prefill"]
NUM_ROUNDS = 8
"""Number of timed rounds per implementation."""
WARMUP_STEPS = 4
"""Number of untimed decode steps before the first round. The first steps compile, capture graphs or allocate memory."""
DTYPE_NAMES = {kind: name for name, kind in TORCH_DTYPES.items()}
ProgressCallback = Callable[[int, int], None]


@dataclass(frozen=True)
class Timing:
    """Timing of cutaway or of the baseline. `seconds` is the time per decode step, or per prefill, in each round."""

    seconds: list[float]
    num_tokens: int
    """Number of tokens per decode step, or per prefill."""
    min_seconds: float
    """Seconds that a decode step or prefill would take at the machine's measured bandwidth or FLOP/s."""

    @property
    def median_seconds(self) -> float:
        return median(self.seconds)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.median_seconds

    @property
    def fraction_of_limit(self) -> float:
        return self.min_seconds / self.median_seconds

    def to_dict(self) -> dict[str, float]:
        low, high = quartiles(self.seconds)
        spread = {"median_seconds": self.median_seconds, "lower_quartile": low, "upper_quartile": high}
        return spread | {"tokens_per_second": self.tokens_per_second, "fraction_of_limit": self.fraction_of_limit}


@dataclass(frozen=True, kw_only=True)
class ThroughputResult:
    """Conditions, workload and timings of a call of `measure_throughput`."""

    phase: InferencePhase
    device: str
    dtype: str
    weight_bits: int | None
    batch_size: int
    context: int
    num_parameters: int
    min_bytes: int
    """Minimum number of bytes that a decode step, or a prefill, must read and write."""
    flops: int
    hardware_limit: float
    """Copy bandwidth in bytes per second for decode; matmul FLOP/s for prefill."""
    cutaway: Timing
    baseline: Timing | None = None
    quantization_loss: QuantizationReport | None = None
    """Loss of quality by quantizing the weights. None if they are not quantized."""
    notes: list[str] = field(default_factory=list)

    @property
    def speedups(self) -> list[float]:
        """Speedup over the baseline in each round. Empty without a baseline."""
        if self.baseline is None:
            return []
        return [b / a for a, b in zip(self.cutaway.seconds, self.baseline.seconds, strict=True)]

    def to_dict(self) -> dict[str, object]:
        baseline, speedup = self.baseline and self.baseline.to_dict(), None
        if self.speedups:
            low, high = quartiles(self.speedups)
            speedup = {"median": median(self.speedups), "lower_quartile": low, "upper_quartile": high}
        return asdict(self) | {"cutaway": self.cutaway.to_dict(), "baseline": baseline, "speedup": speedup}


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Lower and upper quartile."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, high


def measure_throughput(
    model: Transformer,
    phase: InferencePhase,
    *,
    baseline_dir: Path | None = None,
    batch_size: int = 1,
    context: int | None = None,
    num_steps: int = 64,
    weight_bits: int | None = None,
    compiled: bool = False,
    progress: ProgressCallback = lambda done, total: None,
) -> ThroughputResult:
    """Measure the throughput of decode or prefill, in rounds that run cutaway and the baseline one after the other.

    Other load on the machine thus slows both implementations. Their order changes from round to round. `baseline_dir`
    is a directory from which transformers loads the same model.
    """
    check_is_decoder(model)
    device, dtype = model.device, DTYPE_NAMES.get(model.dtype)
    if dtype is None:
        supported = ", ".join(TORCH_DTYPES)
        raise InputError(f"the model's dtype is {model.dtype}, which is not supported; use one of {supported}")
    is_decode = phase == "decode"
    steps, warmup_steps = (max(1, num_steps // NUM_ROUNDS), WARMUP_STEPS) if is_decode else (1, 1)
    num_new_tokens = warmup_steps + NUM_ROUNDS * steps + 2 if is_decode else 2
    # The first rows already decode while the other rows are prefilled, so they need more tokens.
    num_new_tokens += batch_size * (2 + (context or DEFAULT_SEQ_LENS["cuda"]) // 256)
    context = context or _default_context(model.config, device, num_new_tokens)
    prompts = torch.randint(model.config.vocab_size, (batch_size, context), generator=torch.Generator().manual_seed(0))
    engine_config = EngineConfig(
        model.eval(),
        max_num_seqs=batch_size,
        max_model_len=context + num_new_tokens,
        weight_bits=weight_bits,
        compile=compiled or device.type == "cuda",
    )
    runners = [(_build_decode_runner if is_decode else _build_prefill_runner)(Engine(engine_config), prompts)]
    if baseline_dir is not None:
        runners.append(_build_transformers_runner(baseline_dir, phase, prompts.to(device), model.dtype))
    hardware_limit = measure_copy_bandwidth(device) if is_decode else measure_matmul_flops(device, model.dtype)
    seconds_per_step: list[list[float]] = [[] for _ in runners]
    for runner in runners:
        runner(warmup_steps)
    synchronize(device)
    for round_index in range(NUM_ROUNDS):
        progress(round_index, NUM_ROUNDS)
        order = range(len(runners)) if round_index % 2 == 0 else reversed(range(len(runners)))
        for i in order:
            start = perf_counter()
            runners[i](steps)
            synchronize(device)
            seconds_per_step[i].append((perf_counter() - start) / steps)
    mean_context = context + (NUM_ROUNDS * steps // 2 if is_decode else 0)
    timings, workloads = [], []
    # The baseline does not quantize the weights.
    for seconds, bits in zip(seconds_per_step, (weight_bits, None), strict=False):
        estimate = estimate_inference_size(model.config, dtype, bits, batch_size, mean_context)
        workload = estimate.decode_workload(batch_size) if is_decode else estimate.prefill_workload
        min_seconds = (workload.min_bytes if is_decode else workload.flops) / hardware_limit
        workloads.append(workload)
        timings.append(Timing(seconds, batch_size if is_decode else batch_size * context, min_seconds))
    return ThroughputResult(
        phase=phase,
        device=device_name(device),
        dtype=dtype,
        weight_bits=weight_bits,
        batch_size=batch_size,
        context=context,
        num_parameters=estimate.num_parameters,
        min_bytes=workloads[0].min_bytes,
        flops=workloads[0].flops,
        hardware_limit=hardware_limit,
        cutaway=timings[0],
        baseline=timings[1] if len(timings) > 1 else None,
        quantization_loss=None if weight_bits is None else evaluate_quantization(model, weight_bits),
    )


def check_is_decoder(model: Transformer) -> None:
    """Raise InputError if the model is not decoder-only."""
    if "decoder" not in model.stacks or len(model.stacks) == 2:
        raise InputError(
            "the model is not decoder-only, so it cannot be measured; use one that is, e.g. cutaway bench decode"
            " smollm2-135m"
        )


def _default_context(config: Config, device: torch.device, num_reserved_tokens: int) -> int:
    """Default number of tokens per prompt, but at most the model's context length minus `num_reserved_tokens`."""
    default = DEFAULT_SEQ_LENS.get(device.type, 128)
    return max(1, min(default, config.context - num_reserved_tokens)) if config.context else default


def estimate_inference_size(
    config: Config, dtype: str, weight_bits: int | None, batch_size: int, context: int
) -> SizeEstimate:
    """Return the size estimate for the dtype with `weight_bits` bits, or for `dtype` if `weight_bits` is None."""
    dtype_of_bits = {16: "bf16", 8: "int8", 4: "int4"}
    return size(config, dtype=dtype_of_bits.get(weight_bits or 0, dtype), batch_size=batch_size, context=context)


def _build_decode_runner(engine: Engine, prompts: torch.Tensor) -> Callable[[int], None]:
    """Prefill the prompts. Return a function that runs a given number of decode steps."""
    params = SamplingParams(max_new_tokens=engine.config.num_slots - prompts.shape[1], ignore_eos=True)
    requests = [engine.submit(row, params, seed=0) for row in prompts.tolist()]
    while engine.num_decoding < len(requests):
        engine.step()
        _raise_request_errors(requests)

    def run_steps(count: int) -> None:
        for _ in range(count):
            engine.step()
        _raise_request_errors(requests)

    return run_steps


def _build_prefill_runner(engine: Engine, prompts: torch.Tensor) -> Callable[[int], None]:
    """Return a function that prefills all prompts a given number of times, and samples one token each time."""

    def prefill(count: int) -> None:
        params = SamplingParams(max_new_tokens=1, ignore_eos=True)
        for _ in range(count):
            requests = [engine.submit(row, params, seed=0) for row in prompts.tolist()]
            engine.run()
            _raise_request_errors(requests)

    return prefill


def _raise_request_errors(requests: Sequence[Request]) -> None:
    for request in requests:
        if request.error is not None:
            raise request.error


def _build_transformers_runner(
    directory: Path, phase: InferencePhase, prompts: torch.Tensor, dtype: torch.dtype
) -> Callable[[int], None]:
    """Return a function that runs a given number of decode steps or prefills with transformers' model.

    Tokens are chosen in a plain greedy loop, which is faster than transformers' `generate`.
    """
    logging.disable(logging.WARNING)  # warnings about optional dependencies
    try:
        transformers: Any = import_module("transformers")
        transformers.logging.disable_progress_bar()
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, use_safetensors=True)
    finally:
        logging.disable(logging.NOTSET)
    model = model.to(prompts.device).eval()

    token, cache = prompts, None

    @torch.inference_mode()
    def run_prefill(count: int) -> None:
        nonlocal token, cache
        for _ in range(count):
            out = model(input_ids=prompts, use_cache=True, logits_to_keep=1)
            token, cache = out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values

    @torch.inference_mode()
    def run_steps(count: int) -> None:
        nonlocal token
        for _ in range(count):
            token = model(input_ids=token, past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1, keepdim=True)

    if phase == "prefill":
        return run_prefill
    run_prefill(1)
    return run_steps


@cache
def get_copy_bandwidth(device: torch.device) -> float | None:
    """Return the copy bandwidth in bytes per second: from `cutaway bench`, or measured now, or None on failure."""
    try:
        measured = load_measured_hardware()
    except InputError:  # invalid file; `cutaway size --gpu local` reports it
        measured = None
    if measured is not None and measured.device == device_name(device):
        return measured.bandwidth
    try:
        return measure_copy_bandwidth(device)
    except (RuntimeError, MemoryError):
        return None
