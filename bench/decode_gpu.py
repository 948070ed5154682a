"""Decode compared with gpt-fast and transformers on one GPU, in one run: Llama-3-8B with random weights, bf16.

    python bench/decode_gpu.py [--gpt-fast DIR] [--part steps|packed|gpt-fast|transformers|engine]… [--json FILE]

DIR contains gpt-fast's model.py and generate.py, which run unchanged. Times are host times of whole steps including
sampling, averaged over many steps; the limit is the bytes that a step reads divided by the copy bandwidth of the
same run. The part engine runs 64 requests of different lengths; the shares of prefill and decode are those of the
whole time in which the GPU ran these steps, measured with CUDA events.
"""

import argparse
import gc
import importlib
import random
import statistics
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import torch
from report import Row, add_json_option, print_row, save_rows

import cutaway as ct
from cutaway.bench.hardware import measure_copy_bandwidth
from cutaway.generate import Engine, EngineConfig, SamplingParams
from cutaway.quantization.block_formats import BLOCK_FORMATS, pack_weights
from cutaway.quantization.cuda_weights import pack_for_cuda
from cutaway.quantization.quantized_tensor import CUDAQuantizedTensor

MODEL_NAME = "llama-3-8b"
SAMPLING: dict[str, Any] = {"temperature": 0.8, "top_k": 200}
"""Default sampling parameters of gpt-fast's generate.py."""
NUM_STEPS = 128
PARTS = ("steps", "packed", "gpt-fast", "transformers", "engine")


def free_gpu_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def median_step_ms(run: Callable[[int], None], repeats: int = 3) -> float:
    """Median milliseconds per step over several runs of NUM_STEPS steps."""
    run(16)
    seconds = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run(NUM_STEPS)
        torch.cuda.synchronize()
        seconds.append((time.perf_counter() - start) / NUM_STEPS)
    return statistics.median(seconds) * 1e3


def bench_cutaway_steps(
    model: Any, batch_size: int, context: int, weight_bits: int | None, bandwidth: float, block_format: str = ""
) -> Row:
    """Time Engine.step, with asynchronous scheduling. Each repeat starts with new requests of `context` tokens."""
    config = model.config
    max_model_len = context + 2 * NUM_STEPS + 64
    engine = Engine(
        EngineConfig(
            model,
            max_num_seqs=batch_size,
            max_model_len=max_model_len,
            cache_implementation="paged",
            prefill_chunk_size=2048,
            weight_bits=weight_bits,
            compile=True,
        )
    )
    prompts = [[random.randrange(config.vocab_size) for _ in range(context)] for _ in range(batch_size)]
    seconds = []
    for _ in range(4):
        params = SamplingParams(max_new_tokens=2 * NUM_STEPS + 63, **SAMPLING)
        requests = [engine.submit(prompt, params, seed=row) for row, prompt in enumerate(prompts)]
        while engine.num_decoding < batch_size:
            engine.step()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(NUM_STEPS):
            engine.step()
        torch.cuda.synchronize()
        seconds.append((time.perf_counter() - start) / NUM_STEPS)
        if engine.num_decoding < batch_size:
            errors = {str(request.error) for request in requests if request.error is not None}
            raise RuntimeError(f"only {engine.num_decoding} of {batch_size} requests decoded in all steps: {errors}")
        for request in requests:
            request.abort()
        engine.run()
    step_ms = statistics.median(seconds[1:]) * 1e3
    embedding_bytes = model.decoder.embed.token.weight.nbytes
    weight_bytes = (sum(p.nbytes for p in model.parameters()) - embedding_bytes) * (weight_bits or 16) / 16
    cache_bytes = batch_size * (context + NUM_STEPS / 2) * 32 * 2 * 8 * 128 * 2
    limit_ms = (weight_bytes + cache_bytes) / bandwidth * 1e3
    engine.close()
    weights = block_format or ("bf16" if weight_bits is None else f"{weight_bits} bits")
    row = step_row("cutaway", weights, batch_size, context, step_ms)
    return print_row(row | {"limit_ms": limit_ms, "share_of_limit": limit_ms / step_ms})


def step_row(implementation: str, weights: str, batch_size: int, context: int, step_ms: float) -> Row:
    """The fields that all rows of decode steps have."""
    workload = {"case": "decode step", "weights": weights, "batch_size": batch_size, "context": context}
    return {"implementation": implementation, **workload, "step_ms": step_ms}


def pack_model(model: Any, block_format: str) -> None:
    """Quantize all matrices of a model, as those of a quantized checkpoint that stay packed."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            blocks = pack_weights(module.weight.data, BLOCK_FORMATS[block_format])
            weight = pack_for_cuda(blocks, BLOCK_FORMATS[block_format])
            packed = CUDAQuantizedTensor(weight, BLOCK_FORMATS[block_format], module.weight.dtype)
            module.weight = torch.nn.Parameter(packed, requires_grad=False)
    free_gpu_memory()


def bench_packed_steps(block_format: str, bandwidth: float) -> list[Row]:
    """Decode with packed weights of a block format, and the memory that they take beside 16 bits."""
    free_gpu_memory()
    before = torch.cuda.memory_allocated()
    model = ct.build(MODEL_NAME, device="cuda", dtype=torch.bfloat16, seed=0)
    plain_bytes = torch.cuda.memory_allocated() - before
    pack_model(model, block_format)
    memory = {
        "case": "memory of the weights",
        "weights": block_format,
        "memory_gb": (torch.cuda.memory_allocated() - before) / 1e9,
        "bf16_memory_gb": plain_bytes / 1e9,
    }
    rows = [print_row(memory)]
    for batch_size in (1, 16):
        rows.append(bench_cutaway_steps(model, batch_size, 128, None, bandwidth, block_format))
    return rows


def bench_gpt_fast_steps(folder: str, batch_size: int, context: int) -> Row:
    sys.path.insert(0, folder)
    sys.modules.setdefault("tokenizer", types.ModuleType("tokenizer")).get_tokenizer = None  # type: ignore[attr-defined]
    gpt_fast: Any = importlib.import_module("generate")  # from `folder`
    gpt_fast_model = importlib.import_module("model")

    with torch.device("cuda"):
        model = gpt_fast_model.Transformer.from_name(MODEL_NAME).to(torch.bfloat16).eval()
        model.setup_caches(batch_size, context + 5 * NUM_STEPS)
    compiled = torch.compile(gpt_fast.decode_one_token, mode="reduce-overhead", fullgraph=True)
    gpt_fast.decode_one_token = compiled
    token = torch.zeros(batch_size, 1, dtype=torch.int, device="cuda")
    position = torch.tensor([context], device="cuda")

    @torch.no_grad()
    def run(steps: int) -> None:
        gpt_fast.decode_n_tokens(model, token, position.clone(), steps, **SAMPLING)

    start = time.perf_counter()
    run(4)
    torch.cuda.synchronize()
    first_seconds = time.perf_counter() - start
    row = step_row("gpt-fast", "bf16", batch_size, context, median_step_ms(run))
    return print_row(row | {"compilation_seconds": first_seconds})


def build_transformers_model(config: Any) -> Any:
    transformers: Any = importlib.import_module("transformers")  # Any: its types are incomplete

    shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    hf_config = transformers.LlamaConfig(vocab_size=config.vocab_size, num_key_value_heads=8, rope_theta=5e5, **shape)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(hf_config).eval()
    torch.set_default_dtype(torch.float32)
    return model


def random_requests(count: int, vocab: int, seed: int = 0) -> list[tuple[list[int], int]]:
    rng = random.Random(seed)
    sizes = [(rng.randint(16, 1024), rng.randint(16, 512)) for _ in range(count)]
    return [
        ([rng.randrange(10, vocab) for _ in range(prompt_len)], max_new_tokens) for prompt_len, max_new_tokens in sizes
    ]


class PhaseTimer:
    """GPU time of the prefill and the decode steps of an engine, from CUDA events around them."""

    def __init__(self, engine: Engine) -> None:
        self.events: dict[str, list[tuple[Any, Any]]] = {"prefill": [], "decode": []}
        runner = engine.model_runner
        for name, phase in (("prefill", "prefill"), ("sample_after_prefill", "prefill"), ("decode", "decode")):
            setattr(runner, name, self._timed(getattr(runner, name), phase))

    def _timed(self, run: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            result = run(*args, **kwargs)
            end.record()
            self.events[phase].append((start, end))
            return result

        return timed

    def shares(self, seconds: float) -> dict[str, float]:
        """Share of each phase in `seconds`."""
        torch.cuda.synchronize()
        milliseconds = {
            phase: sum(start.elapsed_time(end) for start, end in pairs) for phase, pairs in self.events.items()
        }
        return {f"{phase}_share": each / 1e3 / seconds for phase, each in milliseconds.items()}


def bench_cutaway_throughput(model: Any, request_specs: list[tuple[list[int], int]]) -> Row:
    engine = Engine(
        EngineConfig(
            model,
            max_num_seqs=64,
            max_model_len=1536,
            cache_implementation="paged",
            prefill_chunk_size=2048,
            compile=True,
        )
    )
    for row, (prompt, _) in enumerate(random_requests(64, 128_000, seed=1)):  # warm up every batch size
        engine.submit(prompt, SamplingParams(max_new_tokens=2 + row), seed=0)
    engine.run()
    timer = PhaseTimer(engine)
    torch.cuda.synchronize()
    start = time.perf_counter()
    requests = [
        engine.submit(prompt, SamplingParams(max_new_tokens=max_new_tokens), seed=0)
        for prompt, max_new_tokens in request_specs
    ]
    engine.run()
    seconds = time.perf_counter() - start
    num_tokens = sum(len(request.result().tokens) for request in requests)
    engine.close()
    return print_row(throughput_row("cutaway", len(request_specs), num_tokens, seconds) | timer.shares(seconds))


def throughput_row(implementation: str, num_requests: int, num_tokens: int, seconds: float) -> Row:
    """The fields that all rows of the part engine have."""
    workload = {"case": "requests of different lengths", "num_requests": num_requests}
    speed = {"seconds": seconds, "num_tokens": num_tokens, "tokens_per_second": num_tokens / seconds}
    return {"implementation": implementation, **workload, **speed}


@torch.no_grad()
def bench_transformers_throughput(model: Any, request_specs: list[tuple[list[int], int]]) -> Row:
    """Measure transformers on one padded static batch, which runs until the longest completion is done."""
    max_prompt_len = max(len(prompt) for prompt, _ in request_specs)
    max_new_tokens = max(num_new for _, num_new in request_specs)
    tokens = torch.zeros(len(request_specs), max_prompt_len, dtype=torch.long, device="cuda")
    mask = torch.zeros_like(tokens)
    for row, (prompt, _) in enumerate(request_specs):
        tokens[row, max_prompt_len - len(prompt) :] = torch.tensor(prompt, device="cuda")
        mask[row, max_prompt_len - len(prompt) :] = 1
    kwargs = {"attention_mask": mask, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    model.generate(tokens, max_new_tokens=4, **kwargs)
    torch.cuda.synchronize()
    start = time.perf_counter()
    model.generate(tokens, max_new_tokens=max_new_tokens, **kwargs)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    num_tokens = sum(num_new for _, num_new in request_specs)
    return print_row(throughput_row("transformers", len(request_specs), num_tokens, seconds))


@torch.no_grad()
def bench_transformers_steps(model: Any, batch_size: int, context: int) -> Row:
    tokens = torch.randint(10, 1000, (batch_size, context), device="cuda")
    kwargs = {"do_sample": True, "pad_token_id": 0, "eos_token_id": None, **SAMPLING}

    def run(steps: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        model.generate(tokens, max_new_tokens=steps, **kwargs)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    run(4)
    step_ms = (run(72) - run(8)) / 64 * 1e3
    return print_row(step_row("transformers", "bf16", batch_size, context, step_ms))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpt-fast", metavar="DIR")
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument(
        "--format", action="append", choices=("Q8_0", "Q4_1", "Q4_K", "Q6_K"), help="of the part packed"
    )
    add_json_option(parser)
    return parser


def main() -> None:
    arguments = build_parser().parse_args()
    selected = arguments.part or PARTS
    random.seed(0)
    rows: list[Row] = []
    bandwidth = measure_copy_bandwidth(torch.device("cuda"))
    print(torch.cuda.get_device_name())
    rows.append(print_row({"case": "copy", "terabytes_per_second": bandwidth / 1e12}))
    model: Any = None
    if "steps" in selected or "engine" in selected:
        model = ct.build(MODEL_NAME, device="cuda", dtype=torch.bfloat16, seed=0)
    if "steps" in selected:
        for batch_size, context, weight_bits in (
            (1, 128, None),
            (1, 1024, None),
            (32, 1024, None),
            (1, 128, 8),
            (1, 128, 4),
        ):
            rows.append(bench_cutaway_steps(model, batch_size, context, weight_bits, bandwidth))
            free_gpu_memory()
    request_specs = random_requests(64, 128_000)
    if "engine" in selected:
        rows.append(bench_cutaway_throughput(model, request_specs))
    model = None
    free_gpu_memory()
    if "packed" in selected:
        for block_format in arguments.format or ("Q8_0", "Q4_1", "Q4_K", "Q6_K"):
            rows += bench_packed_steps(block_format, bandwidth)
    if "transformers" in selected or "engine" in selected:
        transformers_model = build_transformers_model(ct.config(MODEL_NAME))
        if "engine" in selected:
            rows.append(bench_transformers_throughput(transformers_model, request_specs))
        if "transformers" in selected:
            rows += [
                bench_transformers_steps(transformers_model, 1, 128),
                bench_transformers_steps(transformers_model, 32, 1024),
            ]
        del transformers_model
        free_gpu_memory()
    if "gpt-fast" in selected and arguments.gpt_fast:
        for batch_size, context in ((1, 128), (32, 1024)):
            rows.append(bench_gpt_fast_steps(arguments.gpt_fast, batch_size, context))
            torch._dynamo.reset()
            free_gpu_memory()
    save_rows(arguments.json, rows, device="cuda")


if __name__ == "__main__":
    main()
