"""What decoding and reading reach on this machine, beside transformers in the same run."""

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
from cutaway.size.roofline import Workload, prefill_workload

InferencePhase = Literal["decode", "prefill"]
NUM_ROUNDS = 8
"""Turns that each side takes."""
WARMUP_STEPS = 4
"""Steps that are not counted: the first compile, capture or allocate."""
DTYPE_NAMES = {kind: name for name, kind in TORCH_DTYPES.items()}
ProgressCallback = Callable[[int, int], None]


@dataclass(frozen=True)
class Timing:
    """One implementation: seconds of a step (or of reading the prompts), a figure for each turn."""

    seconds: list[float]
    num_tokens: int
    """That come of one step, or are read."""
    min_seconds: float
    """Seconds that the machine needs at its measured limit."""

    @property
    def median_seconds(self) -> float:
        return median(self.seconds)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.median_seconds

    @property
    def fraction_of_limit(self) -> float:
        return self.min_seconds / self.median_seconds

    def to_dict(self) -> dict[str, Any]:
        low, high = quartiles(self.seconds)
        spread = {"median_seconds": self.median_seconds, "lower_quartile": low, "upper_quartile": high}
        return spread | {"tokens_per_second": self.tokens_per_second, "fraction_of_limit": self.fraction_of_limit}


@dataclass(frozen=True, kw_only=True)
class ThroughputResult:
    """What one run of `measure_throughput` found."""

    phase: InferencePhase
    device: str
    dtype: str
    weight_bits: int | None
    batch_size: int
    context: int
    num_parameters: int
    min_bytes: int
    """That a step, or reading, must move at least."""
    flops: int
    hardware_limit: float
    """Bytes a second of a bare copy, for decoding; FLOPs a second of a bare product, for reading."""
    cutaway: Timing
    baseline: Timing | None = None
    quantization_loss: QuantizationReport | None = None
    """What fewer bits cost in quality."""
    notes: list[str] = field(default_factory=list)

    @property
    def speedups(self) -> list[float]:
        """How many times as fast as the baseline, round by round."""
        return (
            []
            if self.baseline is None
            else [b / a for a, b in zip(self.cutaway.seconds, self.baseline.seconds, strict=True)]
        )

    def to_dict(self) -> dict[str, Any]:
        told = asdict(self) | {
            "cutaway": self.cutaway.to_dict(),
            "baseline": self.baseline and self.baseline.to_dict(),
            "speedup": None,
        }
        if self.speedups:
            low, high = quartiles(self.speedups)
            told["speedup"] = {"median": median(self.speedups), "lower_quartile": low, "upper_quartile": high}
        return told


def quartiles(values: Sequence[float]) -> tuple[float, float]:
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
    """Take turns with the baseline, in changing order, so that a busy machine slows both. `baseline_dir` is a directory
    that transformers opens: the same model."""
    check_is_decoder(model)
    device, dtype = model.device, DTYPE_NAMES.get(model.dtype)
    if dtype is None:
        raise InputError(
            f"the model is in {model.dtype}, in which nothing is measured; choose {', '.join(TORCH_DTYPES)}"
        )
    per_turn = max(1, num_steps // NUM_ROUNDS)
    grown = WARMUP_STEPS + NUM_ROUNDS * per_turn + 2 if phase == "decode" else 2
    grown += batch_size * (
        2 + (context or DEFAULT_SEQ_LENS["cuda"]) // 256
    )  # the first rows step while the others are still read
    context = context or _default_context(model.config, device, grown)
    prompts = torch.randint(model.config.vocab_size, (batch_size, context), generator=torch.Generator().manual_seed(0))
    begin_ours = _build_decode_runner if phase == "decode" else _build_prefill_runner
    engine = Engine(
        EngineConfig(
            model.eval(),
            max_num_seqs=batch_size,
            max_model_len=context + grown,
            weight_bits=weight_bits,
            compile=compiled or device.type == "cuda",
        )
    )
    sides = [begin_ours(engine, prompts)]
    if baseline_dir is not None:
        sides.append(_build_transformers_runner(baseline_dir, phase, prompts.to(device), model.dtype))
    limit = measure_copy_bandwidth(device) if phase == "decode" else measure_matmul_flops(device, model.dtype)
    taken: list[list[float]] = [[] for _ in sides]
    each = per_turn if phase == "decode" else 1
    for side in sides:
        side(WARMUP_STEPS if phase == "decode" else 1)
    synchronize(device)
    for turn in range(NUM_ROUNDS):
        progress(turn, NUM_ROUNDS)
        order = range(len(sides)) if turn % 2 == 0 else reversed(range(len(sides)))
        for which in order:
            start = perf_counter()
            sides[which](each)
            synchronize(device)
            taken[which].append((perf_counter() - start) / each)
    length = context + (NUM_ROUNDS * per_turn // 2 if phase == "decode" else 0)
    told = estimate_inference_size(model.config, dtype, weight_bits, batch_size, length)
    wide = estimate_inference_size(
        model.config, dtype, None, batch_size, length
    )  # the baseline has the weights as they are
    todo, theirs = (
        each.decode_workload(batch_size) if phase == "decode" else _prefill_workload_of(each) for each in (told, wide)
    )
    least = [(each.min_bytes if phase == "decode" else each.flops) / limit for each in (todo, theirs)]
    tokens = batch_size if phase == "decode" else batch_size * context
    made = [Timing(seconds, tokens, bound) for seconds, bound in zip(taken, least, strict=False)]
    return ThroughputResult(
        phase=phase,
        device=device_name(device),
        dtype=dtype,
        weight_bits=weight_bits,
        batch_size=batch_size,
        context=context,
        num_parameters=told.num_parameters,
        min_bytes=todo.min_bytes,
        flops=todo.flops,
        hardware_limit=limit,
        cutaway=made[0],
        baseline=made[1] if len(made) > 1 else None,
        quantization_loss=None if weight_bits is None else evaluate_quantization(model, weight_bits),
    )


def check_is_decoder(model: Transformer) -> None:
    if "decoder" not in model.stacks or len(model.stacks) == 2:
        raise InputError("only decoders are measured; name one, as in cutaway bench decode smollm2-135m")


def _default_context(config: Config, device: torch.device, num_reserved_tokens: int) -> int:
    """As long as usual, or as the model has room for."""
    usual = DEFAULT_SEQ_LENS.get(device.type, 128)
    return max(1, min(usual, config.context - num_reserved_tokens)) if config.context else usual


def estimate_inference_size(
    config: Config, dtype: str, weight_bits: int | None, batch_size: int, context: int
) -> SizeEstimate:
    narrow = {16: "bf16", 8: "int8", 4: "int4"}
    return size(config, dtype=narrow.get(weight_bits or 0, dtype), batch_size=batch_size, context=context)


def _prefill_workload_of(estimate: SizeEstimate) -> Workload:
    batch_size = estimate.batch_size_per_device
    return prefill_workload(
        estimate.rank_config,
        estimate.options.precision,
        estimate.prefill_flops.scale(batch_size),
        num_tokens=batch_size * estimate.options.context,
        kv_cache_bytes=estimate.kv_cache.total_bytes,
        num_kernel_launches=estimate.prefill_pass.num_ops,
        dp_size=1,
    )


# ---------------------------------------------------------------------------------------- the two sides


def _build_decode_runner(engine: Engine, prompts: torch.Tensor) -> Callable[[int], None]:
    """An engine that has read its prompts; each call takes so many steps."""
    params = SamplingParams(max_new_tokens=engine.config.num_slots - prompts.shape[1], ignore_eos=True)
    requests = [engine.submit(row, params, seed=0) for row in prompts.tolist()]
    while engine.num_decoding < len(requests):
        engine.step()
        _raise_request_errors(requests)

    def steps(count: int) -> None:
        for _ in range(count):
            engine.step()
        _raise_request_errors(requests)

    return steps


def _build_prefill_runner(engine: Engine, prompts: torch.Tensor) -> Callable[[int], None]:
    """Each call reads all prompts up to their first answered token."""

    def read(count: int) -> None:
        for _ in range(count):
            requests = [
                engine.submit(row, SamplingParams(max_new_tokens=1, ignore_eos=True), seed=0)
                for row in prompts.tolist()
            ]
            engine.run()
            _raise_request_errors(requests)

    return read


def _raise_request_errors(requests: Sequence[Request]) -> None:
    for request in requests:
        if request.error is not None:
            raise request.error


def _build_transformers_runner(
    directory: Path, phase: InferencePhase, prompts: torch.Tensor, dtype: torch.dtype
) -> Callable[[int], None]:
    """transformers' model of the same weights in a bare greedy loop, which is quicker than its own `generate`."""
    logging.disable(logging.WARNING)  # what its optional parts say about this machine
    try:
        transformers: Any = import_module("transformers")
        transformers.logging.disable_progress_bar()
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, use_safetensors=True)
    finally:
        logging.disable(logging.NOTSET)
    model = model.to(prompts.device).eval()

    @torch.inference_mode()
    def read() -> tuple[Any, torch.Tensor]:
        out = model(input_ids=prompts, use_cache=True, logits_to_keep=1)
        return out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)

    def readings(count: int) -> None:
        for _ in range(count):
            read()

    if phase == "prefill":
        return readings
    state = read()

    @torch.inference_mode()
    def steps(count: int) -> None:
        nonlocal state
        cache, token = state
        for _ in range(count):
            token = model(input_ids=token, past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1, keepdim=True)
        state = (cache, token)

    return steps


# ---------------------------------------------------------------------------------------- for `cutaway generate`


@cache
def get_copy_bandwidth(device: torch.device) -> float | None:
    """Bytes a second of a bare copy: as kept by `cutaway bench` for this machine, or measured now if there is room."""
    try:
        kept = load_measured_hardware()
    except InputError:  # damaged, of which `cutaway size --gpu local` complains
        kept = None
    if kept is not None and kept.device == device_name(device):
        return kept.bandwidth
    try:
        return measure_copy_bandwidth(device)
    except (RuntimeError, MemoryError):
        return None
